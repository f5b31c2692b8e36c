"""Kernels for words of more than 62 bits, held as limbs of 31 bits: slower, needed by eight code counts only."""

from __future__ import annotations

import numpy as np

from bqsgd.wire.bits import Bytes, Codes, flush, jit, put32, read

_U64 = np.uint64
_LIMB = _U64((1 << 31) - 1)


@jit
def pack_long(codes: Codes, out: Bytes, low: int, base: int, digits: int, word_bits: int) -> int:
    """As `bits.pack_mixed`, for any length of word."""
    held, fill, at, top = _U64(0), 0, 0, _U64(0)
    mask = _U64((1 << low) - 1)
    limbs = np.zeros((word_bits + 30) // 31, np.uint64)
    for start in range(0, codes.size, digits):
        stop = min(start + digits, codes.size)
        limbs[:] = _U64(0)
        for i in range(stop - 1, start - 1, -1):
            code = _U64(codes[i])
            top = max(top, code)
            carry = code >> _U64(low)
            for j in range(limbs.size):
                carry += limbs[j] * _U64(base)
                limbs[j] = carry & _LIMB
                carry >>= _U64(31)
        for j in range(limbs.size + stop - start):
            if j < limbs.size:
                held |= limbs[j] << _U64(fill)
                fill += min(31, word_bits - 31 * j)
            else:
                held |= (_U64(codes[start + j - limbs.size]) & mask) << _U64(fill)
                fill += low
            if fill >= 32:
                put32(out, at, held)
                held >>= _U64(32)
                at += 4
                fill -= 32
    flush(out, at, held, fill)
    return int(top)


@jit
def unpack_long(data: Bytes, codes: Codes, low: int, base: int, digits: int, word_bits: int) -> tuple[int, bool]:
    """As `bits.unpack_mixed`, for any length of word, by long division."""
    kind = codes.dtype.type
    limbs = np.zeros((word_bits + 30) // 31, np.uint64)
    top, bit = _U64(0), 0
    for start in range(0, codes.size, digits):
        count = min(digits, codes.size - start)
        for j in range(limbs.size):
            limbs[j] = read(data, bit + 31 * j, min(31, word_bits - 31 * j))
        bit += word_bits
        for i in range(count):
            rest = _U64(0)
            for j in range(limbs.size - 1, -1, -1):
                value = (rest << _U64(31)) | limbs[j]
                limbs[j] = value // _U64(base)
                rest = value - limbs[j] * _U64(base)
            code = (rest << _U64(low)) | read(data, bit, low)
            bit += low
            top = max(top, code)
            codes[start + i] = kind(code)
        if limbs.any():
            if count == digits:
                return base << low, False
            return 0, True
    return int(top), read(data, bit, data.size * 8 - bit) != 0
