"""Where every random draw of a run comes from: the operating system, or one seed by (purpose, client, round).

A seeded draw depends on nothing but its own key, never on what was drawn before it, so that a resumed run and another
engine draw the same. Seeded noise carries no privacy claim; the initial model and the shares of data are public or
decide nothing private, so their seed may be known.
"""

from __future__ import annotations

import hashlib
import struct
from enum import StrEnum

from bqsgd.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd.params import check_int


class Purpose(StrEnum):
    """What a draw is for; different purposes never share a keystream."""

    MODEL = "model"
    SHARES = "shares"
    BATCH = "batch"
    NOISE = "noise"


def derive(seed: int, purpose: Purpose, *, client: int = 0, round: int = 0) -> int:
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
        return seeded_rng(seed=derive(self.seed, purpose, client=self.client, round=round))
