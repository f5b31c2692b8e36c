"""Compiled loops that pack and unpack codes. The first bit of a stream is the lowest bit of the first byte.

Compiled code does not check indices, so every loop must stay inside its arrays for any input bytes: callers check the
lengths, and the loops that read get a padded copy of the bytes (`padded`). Words of more than 62 bits take several
limbs of 31 bits (`unpack_long`); that is slower, and only eight code counts need it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.params import Codes
from bqsgd._src.runtime.compiling import njit

Bytes = npt.NDArray[np.uint8]
jit = njit(cache=True, nogil=True)
inline = njit(cache=True, nogil=True, inline="always")
_U8, _U64 = np.uint8, np.uint64
_LIMB = _U64((1 << 31) - 1)


def readonly(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only view. Numba compiles a kernel for each kind of array; with this there is only one kind."""
    view = array.view()
    view.setflags(write=False)
    return view


def digit_table(base: int, digits: int) -> npt.NDArray[np.uint64]:
    """The numbers by which `unpack_mixed` divides: (base^half, multiplier, shift, base^0, ..., base^digits).

    A word is divided once by base^half. Each half is below 2^31 and gives its digits by v // base =
    (v * multiplier) >> shift, which is exact for v < 2^31 with shift = 31 + bits(base - 1) and
    multiplier = ceil(2^shift / base): the error v * (multiplier * base - 2^shift) / (base * 2^shift) stays below
    1 / base, and v * multiplier stays below 2^63.
    """
    half = (digits + 1) // 2
    shift = 31 + (base - 1).bit_length()
    powers = [base**i for i in range(digits + 1)] if base > 1 else [1, 1]
    return np.array([base**half, -(-(1 << shift) // base), shift, *powers], dtype=np.uint64)


def padded(data: npt.NDArray[np.uint8]) -> Bytes:
    """A copy with eight zero bytes after it, which `read` may load: every `unpack` loop needs one."""
    copy = np.zeros(data.size + 8, np.uint8)
    copy[: data.size] = data
    return copy


@inline
def read(data: Bytes, bit: int, width: int) -> np.uint64:
    """Bits [bit, bit + width) as a number, for width <= 57. It loads eight bytes, so the data must be padded."""
    first, value = _U64(bit >> 3), _U64(0)
    for i in range(8):  # LLVM turns these into one load of eight bytes
        value |= _U64(data[first + _U64(i)]) << _U64(8 * i)
    return (value >> _U64(bit & 7)) & ((_U64(1) << _U64(width)) - _U64(1))


@inline
def store_full(out: Bytes, at: int, held: np.uint64, fill: int) -> tuple[int, np.uint64, int]:
    """Store 32 of the `fill` bits in `held` if there are that many; returns what is then `at`, `held` and `fill`."""
    if fill >= 32:
        # Unsigned indices: with signed ones Numba tests each for being negative, and the four stores do not become one.
        first = _U64(at)
        for i in range(4):
            out[first + _U64(i)] = _U8((held >> _U64(8 * i)) & _U64(255))
        return at + 4, held >> _U64(32), fill - 32
    return at, held, fill


@inline
def flush(out: Bytes, at: int, held: np.uint64, fill: int) -> None:
    """Store the last `fill` bits, and zeros up to the end of the last byte."""
    while fill > 0:
        out[at] = _U8(held & _U64(255))
        held >>= _U64(8)
        at += 1
        fill -= 8


@jit
def pack_plain(codes: Codes, out: Bytes, width: int) -> int:
    """Write each code with `width` bits; returns the largest code. The caller must refuse codes of more bits."""
    held, fill, at, top = _U64(0), 0, 0, _U64(0)
    for i in range(codes.size):
        code = _U64(codes[i])
        top = max(top, code)
        held |= code << _U64(fill)
        at, held, fill = store_full(out, at, held, fill + width)
    flush(out, at, held, fill)
    return int(top)


@jit
def unpack_plain(data: Bytes, codes: Codes, width: int) -> tuple[int, bool]:
    """Read codes of `width` bits; returns the largest, and whether a bit after the last code is set."""
    kind = codes.dtype.type
    top = kind(0)
    for i in range(codes.size):
        code = kind(read(data, i * width, width))
        top = max(top, code)
        codes[i] = code
    # Fewer than eight bits are left in the last byte, and the padding after it is zero.
    return int(top), read(data, codes.size * width, 8) != 0


@jit
def pack_mixed(codes: Codes, out: Bytes, low: int, base: int, digits: int, word_bits: int) -> int:
    """Write groups of `digits` codes: a word of high digits (the first code lowest), then `low` bits per code."""
    held, fill, at, top = _U64(0), 0, 0, _U64(0)
    mask = _U64((1 << low) - 1)
    # Words are held in limbs of 31 bits: up to 31 bits wait in `held`, which has 64.
    limbs = np.zeros((word_bits + 30) // 31, np.uint64)
    for start in range(0, codes.size, digits):
        stop = min(start + digits, codes.size)
        if limbs.size <= 2:  # the word fits into 64 bits, which is much faster
            word = _U64(0)
            for i in range(stop - 1, start - 1, -1):
                word = word * _U64(base) + (_U64(codes[i]) >> _U64(low))
            for j in range(limbs.size):
                limbs[j] = word & _LIMB
                word >>= _U64(31)
        else:
            limbs[:] = _U64(0)
            for i in range(stop - 1, start - 1, -1):
                carry = _U64(codes[i]) >> _U64(low)
                for j in range(limbs.size):
                    carry += limbs[j] * _U64(base)
                    limbs[j] = carry & _LIMB
                    carry >>= _U64(31)
        for j in range(limbs.size):
            held |= limbs[j] << _U64(fill)
            at, held, fill = store_full(out, at, held, fill + min(31, word_bits - 31 * j))
        for i in range(start, stop):
            code = _U64(codes[i])
            top = max(top, code)
            held |= (code & mask) << _U64(fill)
            at, held, fill = store_full(out, at, held, fill + low)
    flush(out, at, held, fill)
    return int(top)


@jit
def unpack_mixed(
    data: Bytes,
    codes: Codes,
    low: int,
    base: int,
    digits: int,
    word_bits: int,
    table: npt.NDArray[np.uint64],
) -> tuple[int, bool]:
    """Read what `pack_mixed` wrote; returns the largest code, and whether anything after the last code is set.

    A full word of base^digits or more, which no writer produces, is reported as the code base << low: out of range.
    """
    kind = codes.dtype.type
    half, multiplier, shift = table[0], table[1], table[2]
    middle, piece_bits = (digits + 1) // 2, min(word_bits, 31)
    top, bit = _U64(0), 0
    for start in range(0, codes.size, digits):
        count = min(digits, codes.size - start)
        # In two pieces: a word of 62 bits that begins within a byte is spread over nine.
        word = read(data, bit, piece_bits) | (read(data, bit + piece_bits, word_bits - piece_bits) << _U64(31))
        bit += word_bits
        if word >= table[3 + count]:
            if count == digits:
                return base << low, False
            return 0, True
        lower = word % half
        upper = word // half
        for i in range(count):
            if i == middle:
                lower = upper
            quotient = (lower * multiplier) >> shift
            code = ((lower - quotient * _U64(base)) << _U64(low)) | read(data, bit, low)
            lower = quotient
            bit += low
            top = max(top, code)
            codes[start + i] = kind(code)
    return int(top), read(data, bit, 8) != 0


@jit
def count(codes: Codes, counts: npt.NDArray[np.int64]) -> int:
    """Add each code to its count; returns the largest code. Codes without a count are skipped."""
    top = codes.dtype.type(0)
    for code in codes:
        top = max(top, code)
        if code < counts.size:
            counts[code] += 1
    return int(top)


@jit
def join(bins: npt.NDArray[np.integer], low: npt.NDArray[np.uint32], first: int, low_bits: int, codes: Codes) -> int:
    """Write (first + bin) 2^low_bits + low for each bin; returns the largest. `low` is empty if low_bits is 0."""
    kind = codes.dtype.type
    top = _U64(0)
    for i in range(codes.size):
        code = (_U64(bins[i]) + _U64(first)) << _U64(low_bits)
        if low_bits > 0:
            code |= _U64(low[i])
        top = max(top, code)
        codes[i] = kind(code)
    return int(top)


@jit
def unpack_long(data: Bytes, codes: Codes, low: int, base: int, digits: int, word_bits: int) -> tuple[int, bool]:
    """As `unpack_mixed`, for words of any length, by long division."""
    kind = codes.dtype.type
    limbs = np.zeros((word_bits + 30) // 31, np.uint64)
    top, bit = _U64(0), 0
    for start in range(0, codes.size, digits):
        count = min(digits, codes.size - start)
        for j in range(limbs.size):
            limbs[j] = read(data, bit + 31 * j, min(31, word_bits - 31 * j))
        bit += word_bits
        for i in range(count):
            remainder = _U64(0)
            for j in range(limbs.size - 1, -1, -1):
                value = (remainder << _U64(31)) | limbs[j]
                limbs[j] = value // _U64(base)
                remainder = value - limbs[j] * _U64(base)
            code = (remainder << _U64(low)) | read(data, bit, low)
            bit += low
            top = max(top, code)
            codes[start + i] = kind(code)
        if limbs.any():
            if count == digits:
                return base << low, False
            return 0, True
    return int(top), read(data, bit, 8) != 0
