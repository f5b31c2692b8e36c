"""Fixed-width coding: about log2(code_count) bits per coordinate, and a length that does not depend on the codes.

If ceil(log2 K) is at most 0.9 % above log2 K, codes are packed with that many bits each; with 8 or 16 bits the payload
is the codes themselves. Otherwise a code is split into hi * 2^k + lo, and n digits hi of base H = ceil(K / 2^k) share
one word of w bits. The layout follows from K alone (`layout`), so that a frame need not state it. A vector of codes has
exactly one byte string, because leftover bits must be zero.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import BadPayload, CodeOutOfRange, InvalidParameter
from bqsgd._src.laws import MAX_TRIALS
from bqsgd._src.params import MAX_LEVELS, Codes, check_int, code_dtype
from bqsgd._src.wire import _bits

MAX_CODE_COUNT = 2 * MAX_LEVELS + MAX_TRIALS + 1
WORD_BITS = 62
"""Longest word of digits. Each half of it then has at most 31 bits, which one multiplication can divide exactly."""
_LONG_WORD_BITS = 124
LONG_WORDS = frozenset({61, 65, 121, 122, 129, 241, 242, 481})
"""The code counts up to MAX_CODE_COUNT for which no word of WORD_BITS comes within 1 % of log2 K."""

Payload = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A group of `digits` codes is one word of `word_bits`, followed by `low_bits` raw bits for each code.

    Plain bit packing has base 1: no word, digits = 1, and low_bits is the width of a code.
    """

    low_bits: int
    base: int
    digits: int
    word_bits: int

    @property
    def group_bits(self) -> int:
        """Bits of a full group."""
        return self.word_bits + self.digits * self.low_bits

    def payload_bytes(self, dimension: int) -> int:
        """Bytes of `dimension` codes, exact for every dimension. An incomplete last group has a whole word."""
        groups, remaining = divmod(dimension, self.digits)
        last = self.word_bits + remaining * self.low_bits if remaining else 0
        return (groups * self.group_bits + last + 7) // 8


@lru_cache(maxsize=1024)
def layout(code_count: int) -> Layout:
    """The layout of codes 0 to K - 1 with the fewest bits per code; among equals the smaller group, then more raw bits.

    The layout is part of the wire format. All comparisons are between integers, so that every implementation finds the
    same one.

    >>> layout(256)
    Layout(low_bits=8, base=1, digits=1, word_bits=0)
    >>> layout(3)  # 29 ternary digits in 46 bits: 1.586 bits per code, log2(3) = 1.585
    Layout(low_bits=0, base=3, digits=29, word_bits=46)
    """
    check_int("code_count", code_count, 2, MAX_CODE_COUNT)
    width = (code_count - 1).bit_length()
    # ceil(log2 K) <= 1.009 log2 K  <=>  2^(1000 ceil(log2 K)) <= K^1009: exact in integers.
    if 1 << (1000 * width) <= code_count**1009:
        return Layout(low_bits=width, base=1, digits=1, word_bits=0)
    longest = _LONG_WORD_BITS if code_count in LONG_WORDS else WORD_BITS
    best = Layout(low_bits=width, base=1, digits=1, word_bits=0)
    for low_bits in range(width - 1, -1, -1):
        base = -(-code_count >> low_bits)
        digits, power = 1, base
        while (word_bits := (power - 1).bit_length()) <= longest and base ** -(-digits // 2) <= 1 << (longest // 2):
            candidate = Layout(low_bits=low_bits, base=base, digits=digits, word_bits=word_bits)
            # Bits per code of both, multiplied by both numbers of digits: a comparison of fractions in integers.
            ours, theirs = candidate.group_bits * best.digits, best.group_bits * digits
            if ours < theirs or (ours == theirs and digits < best.digits):
                best = candidate
            digits, power = digits + 1, power * base
    return best


class FixedWidth:
    """Packs and unpacks codes 0 to code_count - 1.

    A long vector can be packed piece by piece. Every multiple of `block_codes` codes ends on a byte boundary, and the
    codes [start, stop) lie in the bytes [payload_bytes(start), payload_bytes(stop)).

    >>> coder = FixedWidth(256)
    >>> coder.payload_bytes(1000), coder.block_codes
    (1000, 1)
    """

    def __init__(self, code_count: int) -> None:
        self.layout = layout(code_count)
        self.code_count = int(code_count)
        self.dtype = code_dtype(code_count)
        group = self.layout.group_bits
        self.block_codes = self.layout.digits * (8 // math.gcd(8, group))
        """Every multiple of this many codes ends on a byte boundary."""
        self.direct = self.layout.base == 1 and self.layout.low_bits == 8 * self.dtype.itemsize
        """Whether the payload is the little-endian codes themselves, so that an encoder may write them in place."""
        short = self.layout.word_bits <= WORD_BITS
        self._table = _bits.digit_table(self.layout.base, self.layout.digits if short else 1)

    def payload_bytes(self, dimension: int) -> int:
        """Bytes of `dimension` codes."""
        return self.layout.payload_bytes(dimension)

    def pack(self, codes: Codes, out: Payload) -> None:
        """Write the codes into `out`, which has payload_bytes(len(codes)) bytes; all of them are written.

        Raises:
            CodeOutOfRange: a code is not below code_count; the content of `out` is then undefined.
        """
        if codes.ndim != 1 or codes.dtype != self.dtype:
            raise InvalidParameter(f"codes must be 1-D of dtype {self.dtype}, got {codes.ndim}-D of {codes.dtype}")
        if out.dtype != np.uint8 or out.ndim != 1 or out.size != self.payload_bytes(codes.size):
            raise InvalidParameter(
                f"out must be {self.payload_bytes(codes.size)} bytes (uint8), got {out.size} of {out.dtype}"
            )
        codes, shape = np.ascontiguousarray(codes), self.layout
        if self.direct:
            top = int(codes.max(initial=0))
            out[:] = codes.astype(codes.dtype.newbyteorder("<"), copy=False).view(np.uint8)
        elif shape.base == 1:
            top = _bits.pack_plain(codes, out, shape.low_bits)
        else:
            top = _bits.pack_mixed(codes, out, shape.low_bits, shape.base, shape.digits, shape.word_bits)
        if top >= self.code_count:
            raise CodeOutOfRange(f"codes must be below {self.code_count}, got {top}")

    def unpack(self, payload: Payload, dimension: int) -> Codes:
        """The codes of a payload, checked. If `direct`, a view of the payload.

        Raises:
            BadPayload: the payload does not have payload_bytes(dimension) bytes, or leftover bits are not zero.
            CodeOutOfRange: a code is not below code_count.
        """
        # Before np.empty below: otherwise a short payload that claims a large dimension would allocate much memory.
        if payload.size != self.payload_bytes(dimension):
            size = self.payload_bytes(dimension)
            raise BadPayload(f"{dimension} codes below {self.code_count} take {size} bytes, got {payload.size}")
        shape, spare = self.layout, False
        if self.direct:
            codes: Codes = payload.view(self.dtype.newbyteorder("<"))
            if sys.byteorder != "little" or not codes.flags.aligned:
                codes = codes.astype(self.dtype)
            top = int(codes.max(initial=0))
        else:
            codes = np.empty(dimension, self.dtype)
            payload = _bits.padded(payload)
            radix = (shape.low_bits, shape.base, shape.digits, shape.word_bits)
            if shape.base == 1:
                top, spare = _bits.unpack_plain(payload, codes, shape.low_bits)
            elif shape.word_bits <= WORD_BITS:
                top, spare = _bits.unpack_mixed(payload, codes, *radix, self._table)
            else:
                top, spare = _bits.unpack_long(payload, codes, *radix)
        if top >= self.code_count:
            raise CodeOutOfRange(f"codes must be below {self.code_count}, got {top}")
        if spare:
            raise BadPayload("the bits after the last code must be zero")
        return codes
