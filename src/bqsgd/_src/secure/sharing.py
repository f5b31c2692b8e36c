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
"""Points are the elements of GF(2^8) except 0, where the polynomial takes the value of the secret."""
_LOW, _ONES = np.uint64(0x7F7F7F7F7F7F7F7F), np.uint64(0x0101010101010101)
_REDUCTION = np.uint64(0x1B)
_ONE, _SEVEN = np.uint64(1), np.uint64(7)
_Words = npt.NDArray[np.uint64]


def split(secret: bytes, points: Sequence[int], *, threshold: int, rng: NoiseSource) -> list[bytes]:
    """One share for each point (1 to 255). Any `threshold` shares give the secret; fewer reveal nothing about it.

    >>> from bqsgd._src.noise import seeded_rng
    >>> shares = split(bytes(range(16)), [1, 2, 5], threshold=2, rng=seeded_rng(seed=1))
    >>> combine({1: shares[0], 5: shares[2]}, threshold=2) == bytes(range(16))
    True
    """
    if not secret or len(secret) % 8:
        raise InvalidParameter(f"a secret must have a multiple of 8 bytes, got {len(secret)}")
    if not set(points) <= set(range(1, MAX_POINT + 1)) or len(set(points)) != len(points):
        raise InvalidParameter(f"points must be different numbers from 1 to {MAX_POINT}, got {list(points)}")
    if not 1 <= threshold <= len(points):
        raise InvalidParameter(f"the threshold must be 1 to {len(points)}, one share per point, got {threshold}")
    words = len(secret) // 8
    coefficients = np.empty((threshold, words), dtype=np.uint64)
    coefficients[0] = np.frombuffer(secret, dtype="<u8")
    coefficients[1:] = rng.words(words * (threshold - 1)).reshape(threshold - 1, words)
    shares = _evaluate(coefficients, np.array(points, dtype=np.uint64))
    return [share.tobytes() for share in shares]


def combine(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret from shares by their points. If there are more than `threshold`, those at the lowest points are used.

    Wrong shares give a wrong secret without an error: the caller must check the result.

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


@nb.njit(cache=True, nogil=True, inline="always")
def _times(word: np.uint64, factor: np.uint64) -> np.uint64:
    """factor * word in GF(2^8), modulo x^8 + x^4 + x^3 + x + 1, for each of the eight bytes of a word.

    It always takes eight steps, with products instead of branches: the time does not depend on the secret, and the
    compiler can handle several words at once.
    """
    total = np.uint64(0)
    for bit in range(8):
        total ^= word * ((factor >> np.uint64(bit)) & _ONE)
        # Times x: shift every byte, and reduce those that had the highest bit set.
        word = ((word & _LOW) << _ONE) ^ (((word >> _SEVEN) & _ONES) * _REDUCTION)
    return total


@nb.njit(cache=True, nogil=True)
def _evaluate(coefficients: _Words, points: _Words) -> _Words:
    """The values of the polynomials at the points, by Horner's rule."""
    threshold, words = coefficients.shape
    shares = np.empty((points.size, words), dtype=np.uint64)
    for row in range(points.size):
        share = shares[row]
        share[:] = coefficients[threshold - 1]
        for degree in range(threshold - 2, -1, -1):
            for index in range(words):
                share[index] = _times(share[index], points[row]) ^ coefficients[degree, index]
    return shares


@nb.njit(cache=True, nogil=True)
def _at_zero(points: _Words, values: _Words) -> _Words:
    """Lagrange interpolation at 0. In GF(2^8) addition and subtraction are both exclusive or."""
    total = np.zeros(values.shape[1], dtype=np.uint64)
    for row in range(points.size):
        weight, under = _ONE, _ONE
        for other in range(points.size):
            if other != row:
                weight = _times(weight, points[other])
                under = _times(under, points[other] ^ points[row])
        # Divide by `under`: 1 / under = under^254 = under^2 under^4 ... under^128.
        for _ in range(7):
            under = _times(under, under)
            weight = _times(weight, under)
        for index in range(total.size):
            total[index] ^= _times(values[row, index], weight)
    return total
