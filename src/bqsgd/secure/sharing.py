"""Shamir's secret sharing of 16-byte seeds, over the integers modulo 2^130 - 5.

Why not a library's: pycryptodome's `Shamir` draws its coefficients from a source of its own, so that a seeded run could
not give the same bytes twice. It also works in GF(2^128) bit by bit in Python, which is slow with dozens of clients
(`benchmarks/secure.py` measures both). Python's integers do this arithmetic in a few lines.

A secret is a seed; keys are derived from it (`masks`). 16 bytes are as strong as the X25519 keys made from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from bqsgd.errors import BadShares, InvalidParameter
from bqsgd.noise import NoiseSource

PRIME = 2**130 - 5
SECRET_BYTES = 16
SHARE_BYTES = 17
_COEFFICIENT_WORDS = 4
"""256 random bits modulo the prime: within 2^-126 of uniform."""


def split(secret: bytes, points: Sequence[int], *, threshold: int, rng: NoiseSource) -> list[bytes]:
    """One share for each point (a number from 1); any `threshold` of them give the secret, fewer nothing.

    >>> from bqsgd.noise import seeded_rng
    >>> shares = split(bytes(range(16)), [1, 2, 5], threshold=2, rng=seeded_rng(seed=1))
    >>> combine({1: shares[0], 5: shares[2]}, threshold=2) == bytes(range(16))
    True
    """
    if len(secret) != SECRET_BYTES:
        raise InvalidParameter(f"a secret has {SECRET_BYTES} bytes, got {len(secret)}")
    if not 1 <= threshold <= len(points) or len(set(points)) != len(points) or min(points) < 1:
        raise InvalidParameter(f"{threshold} of {len(points)} shares, at different points from 1, cannot be made")
    drawn = rng.words(_COEFFICIENT_WORDS * (threshold - 1)).tobytes()
    size = 8 * _COEFFICIENT_WORDS
    coefficients = [int.from_bytes(drawn[i : i + size], "little") % PRIME for i in range(0, len(drawn), size)]
    constant = int.from_bytes(secret, "little")
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * point % PRIME
        shares.append(((value + constant) % PRIME).to_bytes(SHARE_BYTES, "little"))
    return shares


def combine(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret from `threshold` shares by their points (the lowest ones, if there are more).

    Raises:
        BadShares: too few, or they are not shares of one 16-byte secret.
    """
    if len(shares) < threshold:
        raise BadShares(f"{len(shares)} shares do not open a secret that needs {threshold}")
    points = tuple(sorted(shares)[:threshold])
    total = 0
    for point, weight in zip(points, _weights(points), strict=True):
        total += weight * int.from_bytes(shares[point], "little")
    value = total % PRIME
    if value >> (8 * SECRET_BYTES):
        raise BadShares("the shares do not belong together")
    return value.to_bytes(SECRET_BYTES, "little")


@lru_cache(maxsize=256)
def _weights(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's weights at 0."""
    weights = []
    for point in points:
        over = under = 1
        for other in points:
            if other != point:
                over = over * other % PRIME
                under = under * (other - point) % PRIME
        weights.append(over * pow(under, -1, PRIME) % PRIME)
    return tuple(weights)
