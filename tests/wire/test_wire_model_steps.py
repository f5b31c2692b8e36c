"""Aggregates of rounds: what was written is read, everything hostile is refused before it is used."""

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter, ModelMessageError
from bqsgd._src.secure.masks import MAX_WIDTH
from bqsgd._src.wire.model_message import model_bytes, read_model, write_model
from bqsgd._src.wire.model_steps import (
    LEAST_WIDTH,
    MOST_STEPS,
    MOST_WIDTH,
    STEPS_HEADER_BYTES,
    Aggregate,
    StepKind,
    part_bytes,
    read_aggregate,
    read_steps,
    state_digest,
    write_steps,
)

MODEL = np.linspace(-1, 1, 500, dtype=np.float32)
MEMORY = np.linspace(0, 5, 500)
KEPT = 167


def sums(width, *, seed=1, messages=4):
    numbers = np.random.default_rng(seed).integers(0, 1 << width, KEPT).astype(np.uint32)
    return Aggregate(messages=messages, width=width, numbers=numbers)


def estimates(seed=1):
    values = np.random.default_rng(seed).normal(size=KEPT)
    return Aggregate.estimate(values, messages=5, variance=0.25)


def written(*aggregates, kind=StepKind.SUMS, round=7):
    parts = [aggregate.part() for aggregate in aggregates]
    return write_steps(parts, kind=kind, one_in=3, model=MODEL, memory=MEMORY, round=round)


def read(message, kind=StepKind.SUMS):
    """Everything that a reader looks at, as `Descent` does."""
    steps = read_steps(memoryview(message).cast("B"), kind=kind, one_in=3, dimension=500)
    found = [read_aggregate(part, kept=KEPT) for part in steps.parts]
    if steps.digest != state_digest(MODEL, MEMORY):
        raise ModelMessageError("another model")
    return steps, found


def resealed(message, changes):
    """The message with some bytes changed and a checksum that is right."""
    message = bytearray(message)
    for offset, value in changes.items():
        message[offset : offset + len(value)] = value
    content = bytes(message[: STEPS_HEADER_BYTES - 8]) + bytes(message[STEPS_HEADER_BYTES:])
    struct.pack_into("<Q", message, STEPS_HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(content))
    return bytes(message)


def test_widths_are_those_of_secure_sums():
    assert (LEAST_WIDTH, MOST_WIDTH) == (2, MAX_WIDTH)


def test_sums_of_any_width_come_back_and_take_their_bits():
    """The width may differ from round to round; a round without a step takes eight bytes."""
    aggregates = [sums(width, seed=width) for width in range(LEAST_WIDTH, MOST_WIDTH + 1)]
    message = written(*aggregates, Aggregate(messages=0), round=30)
    assert len(message) == STEPS_HEADER_BYTES + 8 + sum(8 + (KEPT * one.width + 7) // 8 for one in aggregates)
    steps, found = read(message)
    assert steps.round == 30
    for one, other in zip(aggregates, found, strict=False):
        assert (one.messages, one.width) == (other.messages, other.width)
        np.testing.assert_array_equal(one.numbers, other.numbers)
        assert part_bytes(KEPT, width=one.width) == len(one.part())
    assert found[-1].messages == 0
    assert found[-1].numbers is None


def test_estimates_come_back_in_float32():
    message = written(estimates(), kind=StepKind.ESTIMATES)
    assert len(message) == STEPS_HEADER_BYTES + part_bytes(KEPT, width=None) == STEPS_HEADER_BYTES + 16 + 4 * KEPT
    _, (found,) = read(message, StepKind.ESTIMATES)
    assert found.numbers.tobytes() == estimates().numbers.tobytes()
    assert (found.messages, found.variance) == (5, 0.25)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_is_noticed(position, flip):
    message = bytearray(written(sums(9), sums(5)))
    message[position % len(message)] ^= flip
    with pytest.raises(ModelMessageError):
        read(message)


@given(st.binary(max_size=120))
def test_random_bytes_are_refused(raw):
    for content in (raw, b"BQST" + raw, resealed(b"BQST\1\0\1\0" + raw + bytes(60), {})):
        with pytest.raises(ModelMessageError):
            read(content)


@pytest.mark.parametrize(
    ("offset", "value", "says"),
    [
        (4, b"\x02\x00", "expected steps of version 1"),
        (6, b"\x02\x00", "expected steps of version 1"),
        (8, struct.pack("<Q", 2**63), "a round below 2.63"),
        (8, struct.pack("<Q", 0), "a round below 2.63"),
        (16, struct.pack("<Q", 2**62), "coordinates"),
        (24, struct.pack("<I", 0), "1 to 64 steps"),
        (24, struct.pack("<I", MOST_STEPS + 1), "1 to 64 steps"),
        (24, struct.pack("<I", 2), "ends before its last step"),
        (28, struct.pack("<I", 1), "one in 3"),
        (32, struct.pack("<Q", 12345), "another model"),
        (48, struct.pack("<I", 0), "at least one message"),
        (52, struct.pack("<I", 1), "2 to 21 bits"),
        (52, struct.pack("<I", 22), "2 to 21 bits"),
        (52, struct.pack("<I", 32), "2 to 21 bits"),
        (52, struct.pack("<I", 10), "take"),
        (48, bytes(8), "take"),
        (-1, b"\xff", "cannot be read"),
    ],
)
def test_what_a_lying_server_may_write(offset, value, says):
    message = written(sums(9))
    with pytest.raises(ModelMessageError, match=says):
        read(resealed(message, {offset % len(message): value}))


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (56, struct.pack("<d", float("nan"))),
        (56, struct.pack("<d", float("inf"))),
        (56, struct.pack("<d", -1.0)),
        (64, struct.pack("<f", float("nan"))),
        (64, struct.pack("<f", float("-inf"))),
    ],
)
def test_estimates_that_are_not_finite(offset, value):
    with pytest.raises(ModelMessageError, match="must be finite"):
        read(resealed(written(estimates(), kind=StepKind.ESTIMATES), {offset: value}), StepKind.ESTIMATES)


def test_what_cannot_be_written():
    with pytest.raises(InvalidParameter):
        written()
    with pytest.raises(InvalidParameter):
        written(*[sums(9)] * (MOST_STEPS + 1), round=100)
    with pytest.raises(InvalidParameter):
        written(sums(9), sums(9), round=1)


class TestTheOptimizersMemory:
    """Whole models with what the optimizer remembers."""

    def test_comes_back(self):
        message = write_model(MODEL, round=5, memory=MEMORY)
        assert len(message) == model_bytes(500, memory=500) == 32 + 4 * 500 + 8 * 500
        received = read_model(message, dimension=500, memory=500)
        assert received.model.tobytes() == MODEL.tobytes()
        assert received.memory.tobytes() == MEMORY.tobytes()

    def test_may_be_left_out(self):
        assert read_model(write_model(MODEL, round=5), dimension=500, memory=500).memory is None
        assert write_model(MODEL, round=5, memory=np.empty(0)) == write_model(MODEL, round=5)

    def test_is_refused_where_it_is_not_expected_or_has_another_length(self):
        message = write_model(MODEL, round=5, memory=MEMORY)
        for memory in (0, 499, 1001):
            with pytest.raises(ModelMessageError):
                read_model(message, dimension=500, memory=memory)

    def test_is_refused_unless_finite(self):
        for value in (np.nan, np.inf):
            message = bytearray(write_model(MODEL, round=5, memory=MEMORY))
            struct.pack_into("<d", message, len(message) - 8, value)
            struct.pack_into("<Q", message, 24, xxhash.xxh3_64_intdigest(bytes(message[:24] + message[32:])))
            with pytest.raises(ModelMessageError, match="NaN or infinity"):
                read_model(message, dimension=500, memory=500)


def test_golden_bytes():
    model, memory = np.array([1.75, -0.75], np.float32), np.array([0.25, -2.0])
    sums = Aggregate(messages=4, width=9, numbers=np.array([1, 511], np.uint16))
    message = write_steps(
        [sums.part(), Aggregate(messages=0).part()], kind=StepKind.SUMS, one_in=1, model=model, memory=memory, round=7
    )
    assert message.hex() == (
        "42515354010001000700000000000000020000000000000002000000010000004bdf9ee5947273d5"
        "d036a5d6d7ea0ccd040000000900000001fe030000000000000000"
    )
    estimate = Aggregate.estimate(np.array([0.5]), messages=5, variance=0.25)
    message = write_steps(
        [estimate.part()], kind=StepKind.ESTIMATES, one_in=2, model=model, memory=np.empty(0), round=1
    )
    assert message.hex() == (
        "42515354010002000100000000000000020000000000000001000000020000003ef6d6d5c9b1d09d"
        "b3897be2ee9625910500000020000000000000000000d03f0000003f"
    )
    assert write_model(model, round=7, memory=memory).hex() == (
        "4251534d0100020007000000000000000200000000000000d4bf7885f6f7fe6c0000e03f000040bf"
        "000000000000d03f00000000000000c0"
    )
