"""The server's model message: round trips, and everything hostile refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter, ModelMessageError, NonFiniteInput
from bqsgd._src.wire.model_message import MODEL_HEADER_BYTES, read_model, write_model

MODEL = np.linspace(-1, 1, 5, dtype=np.float32)


def test_a_model_comes_back_as_it_was_sent():
    message = write_model(MODEL, round=7)
    assert len(message) == MODEL_HEADER_BYTES + 20
    received = read_model(message, dimension=5)
    assert received.round == 7
    np.testing.assert_array_equal(received.model, MODEL)


@given(st.integers(0, MODEL_HEADER_BYTES + 19), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, flip):
    message = bytearray(write_model(MODEL, round=7))
    message[position] ^= flip
    with pytest.raises(ModelMessageError):
        read_model(message, dimension=5)


@given(st.binary(max_size=80))
def test_random_bytes_are_refused(raw):
    with pytest.raises(ModelMessageError):
        read_model(raw, dimension=5)


def test_lengths_and_dimensions():
    message = write_model(MODEL, round=7)
    for cut in (message[:-1], message + b"\x00", message[:MODEL_HEADER_BYTES]):
        with pytest.raises(ModelMessageError, match="5 coordinates take"):
            read_model(cut, dimension=5)
    with pytest.raises(ModelMessageError, match="model has 6"):
        read_model(message, dimension=6)
    with pytest.raises(NonFiniteInput):
        write_model(np.array([np.nan], np.float32), round=0)
    with pytest.raises(InvalidParameter):
        write_model(np.zeros(3), round=0)
