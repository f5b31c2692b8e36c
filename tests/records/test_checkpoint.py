"""The model as one vector and on disk: round trips, and everything hostile refused."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.models import dimension_of, load_vector, to_vector
from bqsgd._src.records.checkpoint import FILE_NAME, CheckpointError, load_checkpoint, save_checkpoint, take

MODEL = np.linspace(-1, 1, 5, dtype=np.float32)


def test_vector_round_trip_skips_frozen_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    frozen = model[0].bias.clone()
    assert dimension_of(model) == 10
    load_vector(model, np.arange(10, dtype=np.float32))
    np.testing.assert_array_equal(to_vector(model), np.arange(10))
    assert model[1].weight.tolist() == [[6.0, 7.0, 8.0]]
    assert torch.equal(model[0].bias, frozen)
    with pytest.raises(InvalidParameter, match="10 coordinates"):
        load_vector(model, np.zeros(9))
    with pytest.raises(NonFiniteInput, match="learning rate"):
        load_vector(model, np.full(10, np.inf))
    with pytest.raises(InvalidParameter, match="float32"):
        to_vector(torch.nn.Linear(1, 1).double())


def test_checkpoint_round_trip_and_replacement(tmp_path):
    assert load_checkpoint(tmp_path) is None
    for round_ in (1, 2):
        save_checkpoint(tmp_path, {"model": MODEL * round_}, {"round": round_})
    arrays, state = load_checkpoint(tmp_path)
    np.testing.assert_array_equal(take(arrays, "model", MODEL), MODEL * 2)
    assert state == {"round": 2}
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"junk",
        struct.pack("<Q", 2**60) + b"{}",
        save({"model": MODEL}),
        save({"model": MODEL}, metadata={"format": "bqsgd.checkpoint.v1", "state": "["}),
        save({"model": MODEL}, metadata={"format": "bqsgd.checkpoint.v1", "state": json.dumps([1])}),
        save({"model": MODEL}, metadata={"format": "other", "state": "{}"}),
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94",  # a pickle is not looked into
    ],
)
def test_hostile_checkpoints_are_refused(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path)


def test_arrays_of_another_kind_are_refused():
    for other in (MODEL[:4], MODEL.astype(np.float64), np.full(5, np.nan, np.float32)):
        with pytest.raises(CheckpointError, match="model"):
            take({"model": other}, "model", MODEL)
    with pytest.raises(CheckpointError, match="got none"):
        take({}, "model", MODEL)
