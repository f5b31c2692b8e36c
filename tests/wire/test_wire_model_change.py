"""Changes of the model: both sides hold the same bits, nothing is lost over rounds, everything hostile is refused."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter, ModelMessageError, ModelNotHeld, NonFiniteInput
from bqsgd._src.wire.model_change import (
    BLOCK,
    CHANGE_HEADER_BYTES,
    FEWEST_BITS,
    MOST_BITS,
    change_bytes,
    make_change,
    receive_model,
    write_changes,
)
from bqsgd._src.wire.model_message import ModelMessage, write_model

START = np.linspace(-1, 1, 2500, dtype=np.float32)
HELD = ModelMessage(round=6, model=START)


def steps(count, *, bits, seed=1):
    """Some changes in a row, and the models they lead to."""
    rng, model, changes = np.random.default_rng(seed), START, []
    for _ in range(count):
        change, model = make_change(model, model + rng.normal(0, 1e-3, model.size), bits=bits)
        changes.append(change)
    return changes, model


@pytest.mark.parametrize("bits", range(FEWEST_BITS, MOST_BITS + 1))
@pytest.mark.parametrize("count", [1, 3])
def test_the_reader_holds_the_writers_bits(bits, count):
    changes, model = steps(count, bits=bits)
    message = write_changes(changes, model=model, round=6 + count)
    assert len(message) == CHANGE_HEADER_BYTES + count * change_bytes(START.size, bits=bits)
    received = receive_model(message, dimension=START.size, held=HELD)
    assert received.round == 6 + count
    assert received.model.tobytes() == model.tobytes()


def test_at_most_eight_bits_a_coordinate():
    for size in (450, 2500, 61_706, 1_000_000):
        assert 8 * (CHANGE_HEADER_BYTES + change_bytes(size, bits=MOST_BITS)) <= 8 * size


def test_what_rounding_leaves_out_comes_with_the_next_change():
    """Aiming at one model again and again leads to it, though a change of 2 bits knows three values."""
    wanted = START.astype(np.float64) + np.random.default_rng(2).normal(0, 1e-2, START.size)
    model = START
    for _ in range(60):
        _, model = make_change(model, wanted, bits=2)
    assert np.abs(model - wanted).max() < 1e-6


def test_a_whole_model_is_read_as_before():
    received = receive_model(write_model(START, round=3), dimension=START.size, held=HELD)
    assert received.round == 3
    assert received.model.tobytes() == START.tobytes()


def test_a_model_that_is_not_held_is_asked_for():
    changes, model = steps(2, bits=7)
    message = write_changes(changes, model=model, round=8)
    other = ModelMessage(round=6, model=START + np.float32(1))
    for held in (None, ModelMessage(round=5, model=START), ModelMessage(round=7, model=START), other):
        with pytest.raises(ModelNotHeld):
            receive_model(message, dimension=START.size, held=held)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, flip):
    changes, model = steps(1, bits=3)
    message = bytearray(write_changes(changes, model=model, round=7))
    message[position % len(message)] ^= flip
    with pytest.raises(ModelMessageError):
        receive_model(message, dimension=START.size, held=HELD)


@given(st.binary(max_size=120))
def test_random_bytes_are_refused(raw):
    for content in (raw, b"BQSC" + raw):
        with pytest.raises(ModelMessageError):
            receive_model(content, dimension=5, held=ModelMessage(round=6, model=START[:5]))


def lying(changes, model, *, round=7, **fields):
    """A message whose checksum is right and whose content is the server's choice."""
    message = bytearray(write_changes(changes, model=model, round=7))
    for offset, value in fields.pop("bytes", {}).items():
        message[offset : offset + len(value)] = value
    struct.pack_into("<Q", message, CHANGE_HEADER_BYTES - 8, 0)
    state = xxhash.xxh3_64(bytes(message[: CHANGE_HEADER_BYTES - 8]))
    state.update(bytes(message[CHANGE_HEADER_BYTES:]))
    struct.pack_into("<Q", message, CHANGE_HEADER_BYTES - 8, state.intdigest())
    return bytes(message)


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (4, b"\x02\x00", "expected changes of version 1"),
        (6, b"\x08\x00", "expected changes of version 1"),
        (6, b"\x01\x00", "expected changes of version 1"),
        (8, struct.pack("<Q", 2**63), "a round below 2.63"),
        (8, struct.pack("<Q", 0), "a round below 2.63"),
        (16, struct.pack("<Q", 2**62), "coordinates"),
        (24, struct.pack("<I", 0), "1 to 16 changes"),
        (24, struct.pack("<I", 17), "1 to 16 changes"),
        (24, struct.pack("<I", 2), "take"),
        (28, struct.pack("<I", 512), "expected changes of version 1"),
        (32, struct.pack("<Q", 12345), "another model"),
        (CHANGE_HEADER_BYTES, struct.pack("<f", float("nan")), "scale"),
        (CHANGE_HEADER_BYTES, struct.pack("<f", float("inf")), "scale"),
        (CHANGE_HEADER_BYTES, struct.pack("<f", -1.0), "scale"),
        (CHANGE_HEADER_BYTES, struct.pack("<f", 3e38), "NaN or infinity"),
        (CHANGE_HEADER_BYTES + 12, b"\xff" * 8, "codes"),
    ],
)
def test_what_a_lying_server_may_write(offset, value, says):
    changes, model = steps(1, bits=7)
    with pytest.raises(ModelMessageError, match=says):
        receive_model(lying(changes, model, bytes={offset: value}), dimension=START.size, held=HELD)


def test_what_cannot_be_written():
    with pytest.raises(NonFiniteInput):
        make_change(START, np.full(START.size, np.nan), bits=7)
    with pytest.raises(NonFiniteInput):
        make_change(START, np.full(START.size, 1e300), bits=7)
    for bits in (1, 8):
        with pytest.raises(InvalidParameter):
            make_change(START, START.astype(np.float64), bits=bits)
    (three,), model = steps(1, bits=3)
    (four,), _ = steps(1, bits=4)
    with pytest.raises(InvalidParameter):
        write_changes([three, four], model=model, round=9)
    with pytest.raises(InvalidParameter):
        write_changes([], model=model, round=9)


def test_golden_bytes():
    change, after = make_change(np.array([1.0, -0.5], np.float32), np.array([1.75, -0.75]), bits=3)
    assert after.tolist() == [1.75, -0.75]
    golden = (
        "42515343 0100 0300 0700000000000000 0200000000000000 01000000 00040000 3ef6d6d5c9b1d09d 529c491365525db7"
        " 0000803e 1400000000000000"
    )
    assert write_changes([change], model=after, round=7).hex() == golden.replace(" ", "")
    assert BLOCK == 1024
