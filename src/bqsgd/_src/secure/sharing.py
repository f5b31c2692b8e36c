"""Shamir's secret sharing over GF(2^8), for many secrets at once: byte b of a share belongs to byte b of the secret.

Why not a library: pycryptodome's `Shamir` draws its coefficients from its own source, so that a seeded run would not
give the same bytes twice, and it works bit by bit in Python (`benchmarks/secure.py` measures both). Here the eight
bytes of a 64-bit word are multiplied at a time, and all secrets of a key batch are split in one call.

A secret is a seed of 16 bytes, from which keys are derived (`masks`); that is as strong as the X25519 keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numba as nb
import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import BadShares, InvalidParameter
from bqsgd._src.noise import NoiseSource

SECRET_BYTES = 16
SHARE_BYTES = 16
MAX_POINT = 255
"""Points are the elements of GF(2^8) except 0, where the polynomial has the secret."""
_LOW, _ONES = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
_REDUCTION = np.uint64(0x1B)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_Words = npt.NDArray[np.uint64]


def split(secret: bytes, points: Sequence[int], *, threshold: int, rng: NoiseSource) -> list[bytes]:
    """One share for each point (1 to 255). Any `threshold` shares give the secret; fewer tell nothing about it.

    >>> from bqsgd._src.noise import seeded_rng
    >>> shares = split(bytes(range(16)), [1, 2, 5], threshold=2, rng=seeded_rng(seed=1))
    >>> combine({1: shares[0], 5: shares[2]}, threshold=2) == bytes(range(16))
    True
    """
    if not secret or len(secret) % 8:
        raise InvalidParameter(f"a secret must have a multiple of 8 bytes, got {len(secret)}")
    within = points and min(points) >= 1 and max(points) <= MAX_POINT
    if not within or not 1 <= threshold <= len(points) or len(set(points)) != len(points):
        raise InvalidParameter(
            f"need 1 to {len(points)} as threshold and different points from 1 to 255, got threshold {threshold}"
        )
    words = len(secret) // 8
    coefficients = np.empty((threshold, words), dtype=np.uint64)
    coefficients[0] = np.frombuffer(secret, dtype="<u8")
    coefficients[1:] = rng.words(words * (threshold - 1)).reshape(threshold - 1, words)
    shares = _evaluate(coefficients, np.array(points, dtype=np.uint64))
    return [share.tobytes() for share in shares]


def combine(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret from shares by their points; of more than `threshold` shares those at the lowest points are used.

    Wrong shares give a wrong secret: nothing here can tell.

    Raises:
        BadShares: too few shares, or shares of different lengths.
    """
    if len(shares) < threshold:
        raise BadShares(f"the secret needs {threshold} shares, got {len(shares)}")
    points = sorted(shares)[:threshold]
    size = len(shares[points[0]])
    if size % 8 or any(len(shares[point]) != size for point in points):
        raise BadShares("the shares do not belong together: they differ in length")
    values = np.frombuffer(b"".join(shares[point] for point in points), dtype="<u8").reshape(threshold, size // 8)
    return bytes(_at_zero(np.array(points, dtype=np.uint64), values).tobytes())


@nb.njit(cache=True, nogil=True)
def _scaled(words: _Words, factor: np.uint64, result: _Words, power: _Words) -> None:
    """result = factor * words in GF(2^8), modulo x^8 + x^4 + x^3 + x + 1, for each of the eight bytes of a word.

    `power` is scratch memory of the same length. Products with (factor & 1) take the place of branches on the factor.
    """
    for index in range(words.size):
        power[index] = words[index]
        result[index] = words[index] * (factor & _ONE)
    factor >>= _ONE
    while factor:
        for index in range(words.size):
            word = power[index]
            word = ((word & _LOW) << _ONE) ^ (((word >> _SEVEN) & _ONES) * _REDUCTION)
            power[index] = word
            result[index] ^= word * (factor & _ONE)
        factor >>= _ONE


@nb.njit(cache=True, nogil=True)
def _evaluate(coefficients: _Words, points: _Words) -> _Words:
    """The values of the polynomials at the points, by Horner's rule."""
    threshold, words = coefficients.shape
    shares = np.empty((points.size, words), dtype=np.uint64)
    scaled, power = np.empty(words, dtype=np.uint64), np.empty(words, dtype=np.uint64)
    for row in range(points.size):
        share = shares[row]
        share[:] = coefficients[threshold - 1]
        for degree in range(threshold - 2, -1, -1):
            _scaled(share, points[row], scaled, power)
            for index in range(words):
                share[index] = scaled[index] ^ coefficients[degree, index]
    return shares


@nb.njit(cache=True, nogil=True)
def _product(one: np.uint64, other: np.uint64) -> np.uint64:
    total = np.uint64(0)
    while other:
        total ^= one * (other & _ONE)
        one = ((one & np.uint64(0x7F)) << _ONE) ^ ((one >> _SEVEN) * _REDUCTION)
        other >>= _ONE
    return total


@nb.njit(cache=True, nogil=True)
def _at_zero(points: _Words, values: _Words) -> _Words:
    """Lagrange interpolation at 0. In GF(2^8) addition and subtraction are both exclusive or."""
    total = np.zeros(values.shape[1], dtype=np.uint64)
    scaled, power = np.empty_like(total), np.empty_like(total)
    for row in range(points.size):
        over, under = _ONE, _ONE
        for other in range(points.size):
            if other != row:
                over = _product(over, points[other])
                under = _product(under, points[other] ^ points[row])
        inverse = _ONE
        for _ in range(7):  # 1 / under = under^254 = under^2 under^4 ... under^128
            under = _product(under, under)
            inverse = _product(inverse, under)
        _scaled(values[row], _product(over, inverse), scaled, power)
        for index in range(total.size):
            total[index] ^= scaled[index]
    return total
