"""A proposal of batch size, rounds and clip for a budget that names none, from the search behind the frontier.

Let mu be the total shift that the budget allows (`total_shift`), n the samples of a client, q = L / n the sampling
rate. T steps that add up to one step of the clip norm carry noise of deviation (1 / (mu n)) sqrt(x / log(1 + x)) per
coordinate, x = mu^2 / (q^2 T). Once q^2 T is large enough, batch and rounds no longer matter: epsilon and the number of
samples alone set what is left. So the rounds are as many as the optimiser needs, and the batch is the smallest that
wastes at most a twentieth. A proposal is a starting point without a guarantee; the plan made from it has one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bqsgd.params import check_int
from bqsgd.planner.plan import Budget
from bqsgd.planner.search import shift_per_round, total_shift

_ROUNDS = 300
"""Twice as many made no difference; half as many cost about as much as a change of seed (docs/frontier.md)."""
_WASTE = 0.21
"""x at which sqrt(x / log(1 + x)) is 1.05."""
_FEWEST_ROUNDS = 50
_CLIP_NORM = 1.0
_RANGE_TO_NOISE = 2.0
"""The mean is encoded in +- this many deviations of a client's noise; wider or narrower made no difference."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings of a run with the L2 clip and Poisson batches.

    clip_norm is small enough to clip nearly every sample of most models; a smaller one with a larger learning rate is
    the same run. noise_to_clip is sqrt(d) times the noise in a client's mean, in clip norms: how much a single message
    says. It is below 1 at the frontier (docs/frontier.md).
    """

    batch_size: int
    rounds: int
    clip_norm: float
    range: float
    noise_to_clip: float

    @property
    def sensitivity(self) -> float:
        """The most that one sample moves the vector, and so any coordinate, as a fraction of the range."""
        return self.clip_norm / (self.batch_size * self.range)


def propose(
    budget: Budget, *, dimension: int, dataset_size: int, batch_size: int | None = None, rounds: int | None = None
) -> Proposal:
    """Propose for a client of `dataset_size` samples and a model of `dimension` parameters; what is given is kept."""
    check_int("dimension", dimension, 1, 2**53)
    check_int("dataset_size", dataset_size, 1, 2**53)
    mu = total_shift(budget)
    if rounds is None:
        fewest = _ROUNDS if batch_size is None else mu**2 / (_WASTE * (batch_size / dataset_size) ** 2)
        rounds = min(max(math.ceil(fewest), _FEWEST_ROUNDS), 10 * _ROUNDS)
    check_int("rounds", rounds, 1, 2**53)
    if batch_size is None:
        batch_size = min(dataset_size, max(1, math.ceil(dataset_size * mu / math.sqrt(_WASTE * rounds))))
    check_int("batch_size", batch_size, 1, dataset_size)
    noise = _CLIP_NORM / batch_size / shift_per_round(budget, rate=batch_size / dataset_size, rounds=rounds)
    return Proposal(
        batch_size=batch_size,
        rounds=rounds,
        clip_norm=_CLIP_NORM,
        range=float(f"{_RANGE_TO_NOISE * noise:.2g}"),
        noise_to_clip=math.sqrt(dimension) * noise / _CLIP_NORM,
    )
