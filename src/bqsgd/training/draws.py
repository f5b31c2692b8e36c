"""Where every random draw of a run comes from: the operating system, or one seed by (purpose, client, round).

A seeded draw depends on nothing but its own key, never on what was drawn before it, so that a resumed run and another
engine draw the same. Seeded noise carries no privacy claim; the initial model and the shares of data are public or
decide nothing private, so their seed may be known.

Batches are drawn here too, from the cryptographic generator: amplification by sampling needs a draw that the server
cannot predict.
"""

from __future__ import annotations

import hashlib
import struct
from enum import StrEnum
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from bqsgd.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd.params import check_int
from bqsgd.release import Scheme


class Purpose(StrEnum):
    """What a draw is for; different purposes never share a keystream."""

    MODEL = "model"
    SHARES = "shares"
    BATCH = "batch"
    NOISE = "noise"


def seed_for(seed: int, purpose: Purpose, *, client: int = 0, round: int = 0) -> int:
    """A 63-bit seed from SHA-256 over (seed, purpose, client, round)."""
    check_int("seed", seed, 0, 2**63 - 1)
    key = b"bqsgd.training.v1\x00" + str(purpose).encode() + struct.pack("<QQQ", seed, client, round)
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


class Sources:
    """The random sources of one client: `at(purpose, round)`.

    Without a seed all draws come from one generator keyed by the operating system when the client was made.
    """

    def __init__(self, *, seed: int | None, client: int) -> None:
        self.seed = None if seed is None else check_int("seed", seed, 0, 2**63 - 1)
        self.client = client
        self._private = privacy_rng() if seed is None else None

    @property
    def seeded(self) -> bool:
        """True when whoever knows the seed can remove the noise."""
        return self.seed is not None

    def at(self, purpose: Purpose, round: int) -> NoiseSource:
        """The source for one purpose in one round."""
        if self._private is not None:
            return self._private
        assert self.seed is not None
        return seeded_rng(seed=seed_for(self.seed, purpose, client=self.client, round=round))


Rows = npt.NDArray[np.int64]


def draw_batch(
    scheme: Scheme, *, batch_size: int, dataset_size: int, rng: NoiseSource, rate: float | None = None
) -> Rows:
    """Rows of this round's samples, ascending.

    Poisson: each sample independently with probability floor(2^64 q) / 2^64, q the rate, or L / D where none is given:
    at most the rate that is accounted. The batch may be empty or larger than L. Fixed size: L of D without replacement,
    every subset equally likely (the L smallest of D random words, drawn again in the one case in 2^38 that two words
    are equal and D is 10,000). No sampling: all.
    """
    check_int("dataset_size", dataset_size, 1, 2**40)
    if rate is None:
        check_int("batch_size", batch_size, 1, dataset_size)
    chance = Fraction(batch_size, dataset_size) if rate is None else Fraction(rate)
    if scheme is Scheme.NONE or (scheme is Scheme.POISSON and chance == 1):
        return np.arange(dataset_size)
    if scheme is Scheme.POISSON:
        return np.flatnonzero(rng.words(dataset_size) < np.uint64((chance.numerator << 64) // chance.denominator))
    while True:
        words = rng.words(dataset_size)
        if len(np.unique(words)) == dataset_size:  # ties would favour the earlier rows
            return np.sort(np.argpartition(words, batch_size - 1)[:batch_size])
