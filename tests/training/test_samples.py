"""Samples in another form than the first: whatever a collate_fn makes of one, it adds no more than one sample may."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bqsgd.persample.clips import Dual
from bqsgd.training.client import Client
from bqsgd.training.least_squares import objective_of
from bqsgd.training.samples import reader_of
from bqsgd.training.settings import Config

CLIP = Dual(norm=0.5, bound=0.1)
LOSS = nn.CrossEntropyLoss(reduction="none")


def rows(value, inputs=1, targets=None):
    return torch.full((inputs, 3), float(value)), torch.zeros(inputs if targets is None else targets, dtype=torch.int64)


def pair(samples):
    return tuple(torch.cat(column) for column in zip(*samples, strict=True))


def named(samples):
    return dict(zip("xy", pair(samples), strict=True))


def untouched(samples):
    return samples[0]


class Shares(list):
    """None cannot be read: a null record."""

    def __getitem__(self, number):
        found = super().__getitem__(number)
        if found is None:
            raise OSError("no such file")
        return found


def model():
    made = nn.Linear(3, 2)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def config(method):
    return Config.of(
        clients=1, method=method, rounds=1, rate=1.0, batch_size=4, range=0.1, levels=50, trials=100, seed=1
    )


@pytest.mark.parametrize(
    ("method", "collate", "forward"),
    [
        ("least-squares", pair, None),
        ("sgd", pair, None),
        ("sgd", named, lambda model, batch: (model(batch["x"]), batch["y"])),
    ],
    ids=["moments", "gradients", "gradients of a dict"],
)
def test_a_sample_that_collates_to_many_rows_moves_the_mean_by_no_more_than_one(method, collate, forward):
    """Before, it counted once a row, or the rows of the samples behind it counted as those of others."""
    objective = objective_of(config(method), model(), LOSS, forward)

    def mean(record):
        share = Shares([rows(1), record, *(rows(-1, 7) for _ in range(10))])
        reader = reader_of(DataLoader(share, collate_fn=collate))
        objective.check(reader.first(), clip=CLIP, batch_size=1)
        return objective.mean(reader.read(range(len(share))), clip=CLIP, batch_size=1)[0]

    moved, stated = mean(rows(1, 7)) - mean(None), CLIP.sensitivity(batch_size=1, range=1.0)
    assert np.linalg.norm(moved) <= stated.l2
    assert np.abs(moved).max() <= stated.linf


@pytest.mark.parametrize("method", ["least-squares", "sgd"])
@pytest.mark.parametrize(
    "record",
    [
        rows(1, 7),
        rows(1, 0),
        rows(1, 2, 1),
        rows(1, 1, 2),
        (torch.ones(3), torch.tensor(0)),
        (torch.ones(1, 3).to_sparse(), torch.tensor([0])),
        (torch.empty(1, 3, device="meta"), torch.tensor([0])),
        (torch.ones(1, 3), "a word"),
        (torch.ones(1, 3), SimpleNamespace(shape=[1])),
        (),
    ],
    ids=["7 rows", "no rows", "2 inputs", "2 targets", "no row", "sparse", "no values", "word", "unhashable", "empty"],
)
def test_a_sample_of_another_form_counts_as_zero_and_a_frame_comes(method, record):
    def frame(record):
        share = DataLoader(Shares([rows(1), record, rows(-1)]), collate_fn=untouched)
        client = Client(client=0, model=model(), loss=LOSS, samples=share, config=config(method), ledger=None)
        return client.update(np.zeros(8, np.float32), 0)

    assert frame(record) == frame(None)
