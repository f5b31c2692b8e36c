"""Noise in parts, so that a sum has the noise that it needs and no more, whichever clients are missing.

The proof is Claim 12, steps 2 and 3, in docs/accounting.md.

A sum needs M trials from its honest clients. With d clients missing and t that may collude, n - d - t clients must
contribute them, M / (n - d - t) each. Nobody knows d beforehand, so a client draws enough for d = f, in parts: a base
for d = 0, and further parts that are needed only if clients are missing. Each further part has a seed. Once the list of
survivors is fixed, the clients reveal the seeds of the parts that are not needed, and the server subtracts these parts.
The seeds form a chain, seed of part j + 1 = HKDF(seed of part j): a seed reveals its part and all later ones, and
nothing about earlier ones. The chain ends with the self seed, so one seed opens a survivor's own mask and the noise
that is not needed. If a survivor leaves before it reveals that seed, the others open its self seed alone, and all of
its noise stays in the sum.

In the order of the survivors, the first t + r keep b + 1 trials and the others b, where M = b (n - d - t) + r and r >
0; if r = 0, all keep b. Rounding is always up: whichever t clients collude, the honest ones keep at least M together.
With t = 0 the sum has exactly M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from bqsgd._src.mechanism.encoder import encode
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Codes, Mechanism, Range, check_int
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.masks import Lanes, derive, lane_type

PIECE = 64
"""Trials drawn at a time. With up to 64 trials the encoder's noise is exactly Bin(m, 1/2) (`noise`), and so is the
number of ones among random bits. So the pieces add up to exactly the binomial of their total."""


@dataclass(frozen=True, kw_only=True)
class NoiseParts:
    """How many of the trials M = `total` each client contributes, by the number of survivors. M = 0 means no noise."""

    total: int
    rule: Thresholds

    def __post_init__(self) -> None:
        check_int("total", self.total, 0, 2**20)

    def kept(self, survivors: int, rank: int) -> int:
        """Trials that the survivor of this rank (from 0, in the order of client numbers) leaves in the sum.

        >>> from bqsgd._src.secure.graph import thresholds
        >>> parts = NoiseParts(total=100, rule=thresholds(clients=10, dropouts=2, colluders=0))
        >>> [parts.kept(10, rank) for rank in range(10)], sum(parts.kept(8, rank) for rank in range(8))
        ([10, 10, 10, 10, 10, 10, 10, 10, 10, 10], 100)
        """
        per_client, extra = divmod(self.total, survivors - self.rule.colluders)
        return per_client + 1 if extra and rank < self.rule.colluders + extra else per_client

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """All numbers of trials that a client may have to leave in a sum, ascending: base, base + part 0, ..."""
        sizes = range(self.rule.fewest, self.rule.clients + 1)
        return tuple(sorted({self.kept(size, rank) for size in sizes for rank in (0, size - 1)}))

    @property
    def parts(self) -> int:
        """Parts in addition to the base, each with a seed."""
        return len(self.cuts) - 1

    @property
    def drawn(self) -> int:
        """Trials that a client draws in all: what it leaves in the sum if f clients are missing."""
        return self.cuts[-1]

    def first_unneeded(self, survivors: int, rank: int) -> int:
        """The first part that the survivor of this rank reveals; `parts` if all of its parts are needed."""
        return self.cuts.index(self.kept(survivors, rank))

    def in_sum(self, survivors: int) -> int:
        """Trials of all survivors together, colluders included: the sum of `kept` over all ranks."""
        per_client, extra = divmod(self.total, survivors - self.rule.colluders)
        return survivors * per_client + (self.rule.colluders + extra if extra else 0)

    def chain(self, part: int, seed: bytes, run: bytes, *, client: int, round: int) -> list[bytes]:
        """The seeds from `seed`, that of part `part`, to the last one, which is the self seed. run: the run's digest.

        Later seeds become public. Client and round are hashed too, so that a guess can be compared with one chain only.
        """
        seeds = [seed]
        for _ in range(part, self.parts):
            seeds.append(derive(seeds[-1], "noise-chain", run, client, round)[: len(seed)])
        return seeds

    def add_parts(self, part: int, seeds: Sequence[bytes], total: Lanes, run: bytes, *, subtract: bool = False) -> None:
        """Add part `part` and all later ones to `total` (or subtract them), in place; `seeds` is their `chain`."""
        for index, part_seed in enumerate(seeds[:-1], start=part):
            # Not `seeded`: the key is secret until the client reveals it, and then the noise is taken out of the sum.
            rng = NoiseSource(derive(part_seed, "noise", run, index), seeded=False)
            add_binomial(total, self.cuts[index + 1] - self.cuts[index], rng, subtract=subtract)


def add_binomial(total: Lanes, trials: int, rng: NoiseSource, *, subtract: bool = False) -> None:
    """Add an exact Bin(trials, 1/2) to every lane of `total` (or subtract it), in place, by counting random bits."""
    for first in range(0, trials, PIECE):
        piece = min(PIECE, trials - first)
        # The smallest integers that hold the piece, so that no random bytes are wasted.
        size = next(size for size in (1, 2, 4, 8) if 8 * size >= piece)
        words = rng.words(-(-total.size * size // 8))
        bits = words.view(f"<u{size}")[: total.size]
        bits &= bits.dtype.type((1 << piece) - 1)
        drawn = np.bitwise_count(bits).astype(total.dtype, copy=False)
        (np.subtract if subtract else np.add)(total, drawn, out=total)


def encode_base(
    values: Any, levels: int, base: int, *, width: int, range: Range, rng: NoiseSource, clamp: bool = False
) -> Codes:
    """s + rounded value + Bin(base, 1/2) for every coordinate: the codes of a client before its further noise parts.

    Raises:
        NonFiniteInput, OutOfRange, InvalidParameter: as `mechanism.encoder.encode`.
    """
    first = Mechanism(levels=levels, trials=min(PIECE, base))
    codes = encode(values, first, range=range, rng=rng, clamp=clamp).astype(lane_type(width))
    add_binomial(codes, base - first.trials, rng)
    return codes
