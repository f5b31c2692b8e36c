"""Fixed-width coding: rate for every code count, round trips, one byte string a code vector."""

from __future__ import annotations

import math

import numpy as np
import pytest
import wire_reference
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bqsgd._src.errors import BadPayload, CodeOutOfRange, InvalidParameter
from bqsgd._src.wire.fixed import LONG_WORDS, MAX_CODE_COUNT, WORD_BITS, FixedWidth, layout

CODE_COUNTS = [
    2,
    3,
    5,
    6,
    7,
    9,
    33,
    65,
    129,
    254,
    256,
    257,
    300,
    1025,
    16384,
    16385,
    40000,
    65535,
    65536,
    65537,
    2**20 + 1,
]
CODE_COUNTS += sorted(LONG_WORDS - set(CODE_COUNTS))
any_code_count = st.one_of(st.sampled_from(CODE_COUNTS), st.integers(2, MAX_CODE_COUNT))


def packed(codes: list[int], code_count: int) -> np.ndarray:
    coder = FixedWidth(code_count)
    out = np.full(coder.payload_bytes(len(codes)), 0xA5, np.uint8)
    coder.pack(np.array(codes, coder.dtype), out)
    return out


def best_rates(longest: int) -> np.ndarray:
    """Fewest bits a code with words up to `longest` bits, for every code count at once (float64 logarithms)."""
    bits_a_digit = np.log2(np.arange(2, MAX_CODE_COUNT + 1))
    digit_rate = np.full(bits_a_digit.size + 2, np.inf)
    for digits in range(1, longest + 1):
        word = np.ceil(digits * bits_a_digit * (1 - 1e-15))
        fits = (word <= longest) & (((digits + 1) // 2) * bits_a_digit <= longest // 2)
        digit_rate[2:][fits] = np.minimum(digit_rate[2:][fits], word[fits] / digits)
    rate, counts = np.full(bits_a_digit.size, np.inf), np.arange(2, MAX_CODE_COUNT + 1)
    for low_bits in range(22):
        rate = np.minimum(rate, low_bits + digit_rate[-(-counts >> low_bits)])  # base 1 costs inf
    width = np.ceil(bits_a_digit * (1 - 1e-15))
    return np.where(width <= 1.009 * bits_a_digit, width, rate)


def test_every_code_count_is_within_one_percent_over_64_kib() -> None:
    """All 3,145,728 code counts: the rate of the best layout, and the worst rounding up of the last group."""
    exact = np.log2(np.arange(2, MAX_CODE_COUNT + 1))
    slack = (WORD_BITS + 8) / (8 * 65536)  # a last word that is not full, then the last byte
    rate = best_rates(WORD_BITS)
    over = np.flatnonzero(rate / exact + slack > 1.01) + 2
    assert set(over.tolist()) == LONG_WORDS
    for code_count in LONG_WORDS:
        shape = layout(code_count)
        rate[code_count - 2] = shape.group_bits / shape.digits
        assert rate[code_count - 2] / math.log2(code_count) + 2 * slack <= 1.01
    # The vectorised search is the one the coder runs.
    for code_count in [*CODE_COUNTS, *np.random.default_rng(5).integers(2, MAX_CODE_COUNT, 400).tolist()]:
        assert layout(code_count).group_bits / layout(code_count).digits == pytest.approx(
            rate[code_count - 2], rel=1e-12
        )


@pytest.mark.parametrize("code_count", CODE_COUNTS)
def test_payload_bytes_over_64_kib(code_count: int) -> None:
    dimension = math.ceil(8 * 65536 / math.log2(code_count)) + 1
    assert 65536 <= FixedWidth(code_count).payload_bytes(dimension) <= 1.01 * dimension * math.log2(code_count) / 8


@given(count=any_code_count, dimension=st.integers(1, 200), seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_round_trip_and_the_plain_python_decoder_agree(count: int, dimension: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, count, dimension) if seed % 3 else np.full(dimension, count - 1)
    payload = packed(codes.tolist(), count)
    assert FixedWidth(count).unpack(payload, dimension).tolist() == codes.tolist()
    assert wire_reference.fixed_codes(payload.tobytes(), dimension, count) == codes.tolist()


@given(count=any_code_count, dimension=st.integers(1, 60), data=st.data())
@example(count=3, dimension=30, data=None)
@settings(max_examples=400)
def test_any_payload_is_refused_or_the_only_one_of_its_codes(
    count: int, dimension: int, data: st.DataObject | None
) -> None:
    coder = FixedWidth(count)
    size = coder.payload_bytes(dimension)
    payload = np.frombuffer(
        b"\x7f" * size if data is None else data.draw(st.binary(min_size=size, max_size=size)), np.uint8
    )
    try:
        codes = coder.unpack(payload, dimension)
    except (BadPayload, CodeOutOfRange):
        return
    assert packed(codes.tolist(), count).tobytes() == payload.tobytes()


@pytest.mark.parametrize("code_count", CODE_COUNTS)
def test_pieces_on_block_boundaries_are_the_whole(code_count: int) -> None:
    coder, rng = FixedWidth(code_count), np.random.default_rng(code_count)
    dimension = 5 * coder.block_codes + 3
    codes = rng.integers(0, code_count, dimension).astype(coder.dtype)
    whole = packed(codes.tolist(), code_count)
    pieces = np.empty_like(whole)
    for start in range(0, dimension, 2 * coder.block_codes):
        stop = min(start + 2 * coder.block_codes, dimension)
        coder.pack(codes[start:stop], pieces[coder.payload_bytes(start) : coder.payload_bytes(stop)])
    assert pieces.tobytes() == whole.tobytes()


@pytest.mark.parametrize("code_count", [c for c in CODE_COUNTS if c not in (256, 65536)])
def test_codes_out_of_range_are_refused_when_packed(code_count: int) -> None:
    coder = FixedWidth(code_count)
    codes = np.zeros(50, coder.dtype)
    codes[17] = code_count
    with pytest.raises(CodeOutOfRange, match=f"below {code_count}, got {code_count}"):
        coder.pack(codes, np.empty(coder.payload_bytes(50), np.uint8))


@pytest.mark.parametrize("code_count", [3, 254, 257, 16383, 65535, 65537])
def test_codes_out_of_range_are_refused_when_unpacked(code_count: int) -> None:
    coder = FixedWidth(code_count)
    payload = np.full(coder.payload_bytes(coder.block_codes), 255, np.uint8)
    with pytest.raises(CodeOutOfRange, match=f"below {code_count}"):
        coder.unpack(payload, coder.block_codes)


@pytest.mark.parametrize("code_count", [2, 3, 16384, 16385])
def test_bits_after_the_last_code_are_refused(code_count: int) -> None:
    payload = packed([1, 0], code_count)
    payload[-1] |= 0x80
    with pytest.raises(BadPayload):
        FixedWidth(code_count).unpack(payload, 2)


def test_wrong_lengths_and_types_are_refused() -> None:
    coder = FixedWidth(16384)
    payload = packed(list(range(16)), 16384)
    with pytest.raises(BadPayload, match="16 codes below 16384 take 28 bytes, got 27"):
        coder.unpack(payload[:-1], 16)
    with pytest.raises(InvalidParameter, match="28 bytes"):
        coder.pack(np.zeros(16, np.uint16), payload[:-1])
    with pytest.raises(InvalidParameter, match="dtype uint16"):
        coder.pack(np.zeros(16, np.uint8), payload)
    with pytest.raises(InvalidParameter, match="code_count"):
        FixedWidth(1)


def test_lengths_of_absurd_dimensions_are_exact_integers() -> None:
    assert FixedWidth(16384).payload_bytes(2**60) == 2**60 * 14 // 8
    assert FixedWidth(3).payload_bytes(29 * 2**60) == 46 * 2**60 // 8


def test_eight_bit_codes_are_read_in_place_even_unaligned_16_bit_ones_are_right() -> None:
    payload = np.arange(9, dtype=np.uint8)
    assert np.shares_memory(FixedWidth(256).unpack(payload, 9), payload)
    assert FixedWidth(65536).unpack(payload[1:], 4).tolist() == [0x0201, 0x0403, 0x0605, 0x0807]
