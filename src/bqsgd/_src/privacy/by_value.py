"""Mechanisms whose law depends on the value: Poisson binomial (PBM) and randomised quantisation (RQM), accounted.

They add no noise to a value: the value chooses the law of the integer. So Claim 1, which needs one law that is shifted,
says nothing about them. What serves instead is Claim 15 of docs/accounting.md: their laws are affine in each
probability that a value sets, so the worst values are at the ends of the cells on which they are affine. The neighbours
are any two values of one client in [-1, 1], in every coordinate (replace one).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise, permutations
from typing import Any

import numpy as np
from scipy.stats import binom

from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.params import check_delta, check_int
from bqsgd._src.privacy import _rounds
from bqsgd._src.privacy._pairs import Atoms, Floats, Pair, charged, envelope
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Relation, Trust, Unit

METHOD = "proven upper bound (loss distribution of the worst values, replace one)"
_POINTS = 1 << 15
"""Grid points from loss 0 to the largest loss of one coordinate."""
_BLOCKS = 16
"""In a sum, the others' trials are cut into so many blocks by how many are at the upper probability."""
_FLOATS = 1e-11
"""More than twice the relative error of a probability computed here; charged to delta for every coordinate."""


@dataclass(frozen=True, kw_only=True)
class PoissonBinomial:
    """PBM (Chen, Ozgur and Kairouz 2022): x in [-1, 1] becomes Bin(trials, 1/2 + theta x); theta is at most 1/4.

    clients: how many add up their integers; 1 if each integer is seen. All but the one whose value is hidden may be
    anything, known to the server or not: their draws still count.
    """

    trials: int
    theta: float
    clients: int = 1

    def __post_init__(self) -> None:
        check_int("trials", self.trials, 1, 1 << 14)
        check_int("clients", self.clients, 1, 1 << 14)
        if not 0 < self.theta <= 0.25:
            raise InvalidParameter(f"theta must be above 0 and at most 1/4, got {self.theta}")
        check_int("trials times clients", self.trials * self.clients, 1, 1 << 16)

    @property
    def error(self) -> float:
        """The largest standard deviation of the estimate of the sum of the values, one coordinate."""
        return math.sqrt(self.clients / self.trials) / (2 * self.theta)

    def worst_laws(self) -> list[tuple[Floats, Floats]]:
        """Pairs of laws of one coordinate whose envelope dominates any two values of one client, in both orders."""
        high, low = 0.5 + self.theta, 0.5 - self.theta
        others, pairs = (self.clients - 1) * self.trials, []
        blocks = min(_BLOCKS, others + 1)
        cuts = [round((others + 1) * j / blocks) for j in range(blocks + 1)]
        for first, stop in pairwise(cuts):
            # first .. stop - 1 of the others' trials are at `high`: at least `first` are, and others - stop + 1 at
            # `low`. The few that remain are left out, which only loses noise.
            noise = np.convolve(_binomial(first, high), _binomial(others - stop + 1, low))
            up, down = (np.convolve(_binomial(self.trials, p), noise) for p in (high, low))
            pairs += [(up, down), (down, up)]
        return pairs


@dataclass(frozen=True, kw_only=True)
class RandomizedQuantization:
    """RQM (Youn, Hu, Ziani and Abernethy 2023): each inner level is kept with probability `keep`, then x is rounded.

    `levels` levels lie evenly from -(1 + margin) to 1 + margin; the two outermost are always kept. x in [-1, 1] is
    rounded at random and without bias to one of its two neighbours among those that are kept.
    """

    levels: int
    margin: float
    keep: float

    def __post_init__(self) -> None:
        check_int("levels", self.levels, 2, 128)
        if not 0 < self.margin <= 100:
            raise InvalidParameter(f"margin must be above 0 and at most 100, got {self.margin}")
        if not 0 < self.keep < 1:
            raise InvalidParameter(f"keep must be above 0 and below 1, got {self.keep}")

    @property
    def places(self) -> Floats:
        """The values that the levels stand for."""
        return np.linspace(-(1 + self.margin), 1 + self.margin, self.levels)

    def law(self, x: float) -> Floats:
        """The probability of each level for the value x."""
        places, last = self.places, self.levels - 1
        cell = min(int(np.searchsorted(places, x, side="right")) - 1, last - 1)
        below, above = np.arange(cell + 1), np.arange(cell + 1, self.levels)
        lower = np.where(below > 0, self.keep, 1.0) * (1 - self.keep) ** (cell - below)
        upper = np.where(above < last, self.keep, 1.0) * (1 - self.keep) ** (above - cell - 1)
        both = np.outer(lower, upper)
        up = (x - places[below])[:, None] / (places[above][None, :] - places[below][:, None])
        return np.concatenate([(both * (1 - up)).sum(axis=1), (both * up).sum(axis=0)])

    @property
    def error(self) -> float:
        """The largest standard deviation of the level that is sent, over values on a fine grid."""
        places = self.places
        return max(math.sqrt(float(self.law(x) @ (places - x) ** 2)) for x in np.linspace(-1, 1, 201))

    def worst_laws(self) -> list[tuple[Floats, Floats]]:
        """Pairs of laws of one coordinate whose envelope dominates any two values."""
        corners = [-1.0, *(float(place) for place in self.places if -1 < place < 1), 1.0]
        return list(permutations((self.law(x) for x in corners), 2))


def _binomial(trials: int, p: float) -> Floats:
    return np.asarray(binom.pmf(np.arange(trials + 1), trials, p)) if trials else np.ones(1)


def _atoms(p: Floats, q: Floats) -> Atoms:
    both = (p > 0) & (q > 0)
    loss = np.log(p[both] / q[both])
    order = np.argsort(loss, kind="stable")
    return Atoms(
        loss=loss[order],
        p=p[both][order],
        q=q[both][order],
        p_only=float(p[q == 0].sum()),
        q_only=float(q[p == 0].sum()),
    )


@lru_cache(maxsize=64)
def coordinate_pair(mechanism: PoissonBinomial | RandomizedQuantization) -> Pair:
    """The pair that dominates one coordinate of any two values of one client (Claim 15)."""
    atoms = [_atoms(p, q) for p, q in mechanism.worst_laws()]
    top = max(max(-float(one.loss[0]), float(one.loss[-1])) for one in atoms)
    if not top > 0:
        raise AccountingError(f"{mechanism} has no outcome that depends on the value")
    pairs = (charged(one.on_grid(top * (1 + 1e-15) / _POINTS), _FLOATS) for one in atoms)
    return reduce(envelope, pairs)


def composed(mechanism: PoissonBinomial | RandomizedQuantization, *, dimension: int, rounds: int) -> Any:
    """The loss distribution of so many rounds of messages of `dimension` coordinates, every client in every round."""
    check_int("dimension", dimension, 1, 1 << 20)
    check_int("rounds", rounds, 1, 1 << 20)
    # dp-accounting tries orders that overflow, and skips them.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return _rounds._composed([(coordinate_pair(mechanism), dimension * rounds)])


def guarantee(
    mechanism: PoissonBinomial | RandomizedQuantization, *, dimension: int, rounds: int, delta: float
) -> Guarantee:
    """What a client is guaranteed that sends such messages in every round, with every value in [-1, 1].

    A sum of randomised quantisations is not accounted as one: the noise of the others depends on their values in too
    many ways to list. The figure for one message holds for sums too, since they follow from the messages.
    """
    check_delta("delta", delta)
    law = composed(mechanism, dimension=dimension, rounds=rounds)
    epsilon = float(law.get_epsilon_for_delta(delta))
    summed = isinstance(mechanism, PoissonBinomial) and mechanism.clients > 1
    return Guarantee(
        epsilon=math.inf if math.isnan(epsilon) else epsilon,
        delta=delta,
        relation=Relation.REPLACE,
        unit=Unit.CLIENT,
        trust=Trust.SUMS_ONLY if summed else Trust.EACH_CLIENT,
        sampling=f"no sampling, {rounds} rounds",
        method=METHOD,
        delta_floor=float(law.get_delta_for_epsilon(math.inf)),
    )
