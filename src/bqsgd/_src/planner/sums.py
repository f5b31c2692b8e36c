"""The plan of a secure sum: one grid, one total of trials and one modulus for all clients.

n clients send rounded values on a grid of s levels, and their noises add up to M trials, whatever n is. The mean over
clients then has variance (M + n rho) / (4 n^2 s^2) in squared ranges, where rho <= 1 comes from the rounding. The
budget needs M in proportion to s^2. So more levels only reduce the part of the rounding, n / M, and they cost bits. The
plan takes the fewest bits at which rounding adds at most a tenth to the variance, then the most levels that fit them.

The sum of codes lies in 0 .. 2 n s + K, where K >= M counts the trials in the sum. A larger modulus never wraps: it is
the widest that a run uses, and `server.widths` then follows the sums that were released. With a window the modulus is
fixed and smaller: it has room for means up to a fraction g of the range and the noise around them. A sum beyond it
wraps around. That costs accuracy but no privacy, because the reduction is a function of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.planner.search import (
    EpsilonFigure,
    epsilon_figures,
    least_trials,
    most_levels,
    shortfall,
    trials_per_square,
)
from bqsgd._src.release import Terms, Trust
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.masks import MAX_WIDTH
from bqsgd._src.secure.noise_shares import NoiseParts
from bqsgd._src.secure.roster import Roster

_ROUNDING = 10
"""Trials per client at which the rounding adds at most a tenth to the variance."""
_ENOUGH = 400
"""Trials in the sum at which the noise costs hardly more than Gaussian noise of the same variance (with 50: 7 %)."""
_MAX_TRIALS = 2**20
_RARE = 1e-9
"""The most often that a coordinate within the window may wrap."""


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """What the clients of a secure sum run.

    levels: s, of every client's grid. trials: M, which the honest clients of a sum add together. width: the sum is
    taken modulo 2^width, or less if the width adapts. window: the fraction of the range that the modulus has room for;
    None if the width is that of a modulus that never wraps, and adapts to the sums.
    """

    rule: Thresholds
    levels: int
    trials: int
    width: int
    window: float | None = None

    def __post_init__(self) -> None:
        check_int("levels", self.levels, 1, 2**20)
        check_int("width", self.width, 2, MAX_WIDTH)
        if self.window is not None and not 0 < check_positive("window", self.window) <= 1:
            raise InvalidParameter(f"window must be a fraction of the range, above 0 and at most 1, got {self.window}")
        if self.width < width_of(self.rule, self.levels, self.trials, window=self.window):
            raise InvalidParameter(
                f"a width of {self.width} bits is too few for {self.levels} levels and {self.trials} trials"
            )

    @property
    def mechanism(self) -> Mechanism:
        """Levels and trials of the sum, as the ledger counts them."""
        return Mechanism(levels=self.levels, trials=self.trials)

    def agreement(self, roster: Roster, *, run: str, dimension: int, seeded: bool) -> Agreement:
        """What the clients of these sums agree on."""
        return Agreement(
            roster=roster,
            run=run,
            rule=self.rule,
            dimension=dimension,
            width=self.width,
            trials=self.trials,
            seeded=seeded,
        )

    @property
    def adapts(self) -> bool:
        """Whether the width follows the sums that were released."""
        return self.window is None

    @property
    def least_width(self) -> int:
        """The bits of the modulus that has room for the noise alone; what an adapting width approaches."""
        return self.width if self.window is not None else width_of(self.rule, self.levels, self.trials, window=0.0)

    @cached_property
    def noise(self) -> NoiseParts:
        """How many trials each client adds."""
        return NoiseParts(total=self.trials, rule=self.rule)

    @property
    def wrap_probability(self) -> float:
        """An upper bound on the chance that a coordinate within the window wraps in a round (Hoeffding)."""
        if self.window is None:
            return 0.0
        n, room = self.rule.clients, 2.0 ** (self.width - 1) - 1
        beyond = max(0.0, room - self.window * n * self.levels)
        return min(1.0, 2 * math.exp(-2 * beyond**2 / (_most_in_sum(self.rule, self.trials) + n)))

    def variance(self, survivors: int | None = None) -> float:
        """The variance of the noise in a coordinate of the survivors' mean (default: of all), in squared ranges."""
        count = self.rule.clients if survivors is None else survivors
        return self.noise.in_sum(count) / (4 * (count * self.levels) ** 2)

    @property
    def rounding(self) -> float:
        """The most that the clients' rounding adds to the variance of the mean over all, in squared ranges."""
        return 1 / (4 * self.rule.clients * self.levels**2)

    def mean(
        self, lanes: npt.NDArray[np.unsignedinteger[Any]], *, survivors: int, width: int | None = None
    ) -> npt.NDArray[np.float64]:
        """The mean of the survivors' values, in ranges, from the sum of their codes modulo 2^width (the plan's)."""
        twice = 2 * survivors * self.levels + self.noise.in_sum(survivors)
        modulus = 1 << (self.width if width is None else width)
        # Read the residues as a window of integers around the centre of the codes, where a sum most likely lies.
        lowest = -((modulus - twice) // 2)
        codes = lowest + (lanes.astype(np.int64) - lowest) % modulus
        return (codes - twice / 2) / (survivors * self.levels)


def _most_in_sum(rule: Thresholds, trials: int) -> int:
    """K: the most trials of all survivors together, colluders included."""
    noise = NoiseParts(total=trials, rule=rule)
    return max(map(noise.in_sum, range(rule.fewest, rule.clients + 1)))


def width_of(rule: Thresholds, levels: int, trials: int, *, window: float | None = None) -> int:
    """The bits of the smallest modulus for these levels and trials.

    Raises:
        Infeasible: they would be more than MAX_WIDTH.
    """
    most_trials = _most_in_sum(rule, trials)
    # Room for the sum of all clients, which never wraps: K is the most over all numbers of survivors.
    needed = (2 * rule.clients * levels + most_trials).bit_length()
    if window is not None:
        # Hoeffding's inequality for all trials and roundings: a sum is further away with a chance of at most _RARE.
        around = math.sqrt((most_trials + rule.clients) * math.log(2 / _RARE) / 2)
        needed = min(needed, (2 * math.ceil(window * rule.clients * levels + around) + 1).bit_length())
    if needed > MAX_WIDTH:
        raise Infeasible(
            f"a sum over {rule.clients} clients with {levels} levels and {trials} trials needs {needed} bits, but at "
            f"most {MAX_WIDTH} are possible: use fewer levels or fewer clients"
        )
    return max(2, needed)  # the least width that masks have


def in_sums(terms: Terms, *rules: Thresholds) -> Terms:
    """The terms of the same client if the server sees only sums.

    rules: of the sum over all clients; or of the largest and the smallest group if there is a sum for each group.
    """
    group = min(rule.clients for rule in rules) if len(rules) > 1 else 0
    failure = max(rule.failure for rule in rules)
    return replace(terms, trust=Trust.SUMS_ONLY, colluders=rules[0].colluders, failure=failure, group=group)


def variance_of_groups(plans: Sequence[SumPlan], survivors: Sequence[int] | None = None) -> float:
    """The variance of the noise in a coordinate of the mean over all clients, from a sum over each group.

    survivors: of each group; None for all of its clients.
    """
    counts = [plan.rule.clients for plan in plans] if survivors is None else survivors
    total = sum(counts)
    return sum((n / total) ** 2 * plan.variance(n) for plan, n in zip(plans, counts, strict=True))


def plan_sum(
    budget: PrivacyBudget,
    terms: Terms,
    rule: Thresholds,
    *,
    rounds: int,
    window: float | None = None,
    width: int | None = None,
    fill: bool = True,
) -> SumPlan:
    """The plan with the least error of the sum that keeps every client's proven total epsilon within the budget.

    terms: of a client, as `in_sums` returns them. width: the bits of the modulus; None to choose them. fill: take as
    many levels as the modulus has room for. Otherwise no more than the noise needs: the range is then much larger than
    what it has to hold, and the room for it is not used after the first rounds.

    Raises:
        Infeasible: no plan meets the budget; the message names the nearest epsilon that one can.
    """
    proven, _ = epsilon_figures(budget.delta, terms, rounds=rounds)
    ratio = max(trials_per_square(budget, terms, rounds=rounds), 1e-9)

    def bits(levels: int, trials: float) -> float:
        try:
            return width_of(rule, levels, min(_MAX_TRIALS, math.ceil(trials)), window=window)
        except Infeasible:
            return math.inf

    wanted = max(1, math.ceil(math.sqrt(max(_ROUNDING * rule.clients, _ENOUGH) / ratio)))
    if width is None:
        chosen = min(float(MAX_WIDTH), bits(wanted, ratio * wanted**2))
    else:
        chosen = check_int("width", width, 2, MAX_WIDTH)
    cap = 2**20 - 1 if fill else min(wanted, 2**20 - 1)
    fitting = most_levels(lambda s: bits(s, ratio * s**2) <= chosen and ratio * s**2 <= _MAX_TRIALS, 1, cap=cap)
    levels = max(1, fitting)  # The accountant may need fewer trials than the guess, so try one level in any case.
    while levels >= 1:
        trials = least_trials(proven, levels, ratio * levels**2, budget.epsilon, cap=_MAX_TRIALS)
        if trials is not None and bits(levels, trials) <= chosen:
            return SumPlan(rule=rule, levels=levels, trials=trials, width=int(chosen), window=window)
        levels -= 1
    raise _infeasible(proven, budget, bits, ratio, width=int(chosen))


def _infeasible(
    proven: EpsilonFigure,
    budget: PrivacyBudget,
    bits: Callable[[int, float], float],
    ratio: float,
    *,
    width: int,
) -> Infeasible:
    """The error that says which epsilon the modulus can reach, and how many bits the budget needs."""
    most = 1
    while most < _MAX_TRIALS and bits(1, 2 * most) <= width:
        most *= 2
    trials = least_trials(proven, 1, ratio, budget.epsilon, cap=_MAX_TRIALS)
    needed = math.inf if trials is None else bits(1, trials)
    return Infeasible(shortfall(f"a sum in {width} bits reaches", budget, least=proven(1, most), needed=needed))
