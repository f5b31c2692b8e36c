"""The plan of a secure sum: one grid, one total of trials and one modulus for all clients.

n clients send rounded values on a grid of s levels, and their noises add up to M trials, however many they are. The
mean over clients then has variance (M + n rho) / (4 n^2 s^2) in squared ranges, rho <= 1 the share of rounding. The
budget asks for M in proportion to s^2, so what more levels gain is the rounding's share n / M, and what they cost is
bits. The plan takes the fewest bits at which rounding adds at most a tenth to the variance, then the most levels that
fit them.

The sum of codes lies in 0 .. 2 n s + K, where K >= M counts the trials in the sum. A modulus above that never wraps. A
window is narrower: it holds means up to a share g of the range and the noise around them. Whoever goes beyond it wraps
around, which costs accuracy and no privacy: reduction is a function of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import AccountingError, Infeasible, InvalidParameter
from bqsgd.params import Mechanism, check_int, check_positive
from bqsgd.planner.plan import Budget, ClientSetting
from bqsgd.planner.search import check_time, least_trials, shift_per_round
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import as_given, rounded_up
from bqsgd.release import Trust
from bqsgd.secure.graph import Thresholds
from bqsgd.secure.masks import MAX_WIDTH
from bqsgd.secure.noise_shares import NoiseParts

_ROUNDING = 10
"""Trials a client at which the rounding of all clients adds at most a tenth to the variance."""
_ENOUGH = 400
"""Trials in the sum at which the noise costs hardly more than Gaussian noise of its variance (with 50: 7 %)."""
_MAX_TRIALS = 2**20
_RARE = 1e-9
"""A window is made so wide that a coordinate within it wraps no more often."""


@dataclass(frozen=True, kw_only=True)
class SumPlan:
    """What the clients of a secure sum run.

    levels: s, of every client's grid. trials: M, what the honest clients of a sum bring together. width: the sum is
    taken modulo 2^width. window: the share of the range that the modulus has room for, None where it never wraps.
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
            raise InvalidParameter(f"window must be a share of the range, above 0 and at most 1, got {self.window}")
        if self.width < width_of(self.rule, self.levels, self.trials, window=self.window):
            raise InvalidParameter(f"{self.width} bits are too few for levels {self.levels}, trials {self.trials}")

    @property
    def mechanism(self) -> Mechanism:
        """Levels and trials of the sum, as the ledger counts them."""
        return Mechanism(levels=self.levels, trials=self.trials)

    @cached_property
    def noise(self) -> NoiseParts:
        """Who brings how many trials."""
        return NoiseParts(total=self.trials, rule=self.rule)

    @property
    def wrap_probability(self) -> float:
        """An upper bound on the chance that a coordinate wraps in a round; with a window, of one within it."""
        if self.window is None:
            return 0.0
        n, room = self.rule.clients, 2.0 ** (self.width - 1) - 1
        beyond = max(0.0, room - self.window * n * self.levels)
        return min(1.0, 2 * math.exp(-2 * beyond**2 / (_most_in_sum(self.rule, self.trials) + n)))

    def variance(self, survivors: int | None = None) -> float:
        """Of the noise in a coordinate of the mean over the survivors (default: all), in squared ranges of a client."""
        count = self.rule.clients if survivors is None else survivors
        return self.noise.in_sum(count) / (4 * (count * self.levels) ** 2)

    @property
    def rounding(self) -> float:
        """The most that the clients' rounding adds to the variance of the mean of all, in squared ranges."""
        return 1 / (4 * self.rule.clients * self.levels**2)

    def mean(self, lanes: npt.NDArray[np.unsignedinteger[Any]], *, survivors: int) -> npt.NDArray[np.float64]:
        """The mean of the survivors' values from the sum of their codes modulo 2^width, in ranges of a client."""
        twice = 2 * survivors * self.levels + self.noise.in_sum(survivors)
        modulus = 1 << self.width
        lowest = -((modulus - twice) // 2)  # the centre of the codes is in the middle of the modulus
        codes = lowest + (lanes.astype(np.int64) - lowest) % modulus
        return (codes - twice / 2) / (survivors * self.levels)


def _most_in_sum(rule: Thresholds, trials: int) -> int:
    """K: trials of all survivors, colluders included, at the most (`NoiseParts.kept`)."""

    def inside(survivors: int) -> int:
        each, rest = divmod(trials, survivors - rule.colluders)
        return survivors * each + (rule.colluders + rest if rest else 0)

    return max(map(inside, range(rule.fewest, rule.clients + 1)))


def width_of(rule: Thresholds, levels: int, trials: int, *, window: float | None = None) -> int:
    """Bits of the smallest modulus for these levels and trials.

    Raises:
        Infeasible: more than MAX_WIDTH bits.
    """
    inside = _most_in_sum(rule, trials)
    never = (2 * rule.clients * levels + inside).bit_length()
    needed = never
    if window is not None:
        around = math.sqrt((inside + rule.clients) * math.log(2 / _RARE) / 2)  # Hoeffding, of trials and roundings
        needed = min(never, (2 * math.ceil(window * rule.clients * levels + around) + 1).bit_length())
    if needed > MAX_WIDTH:
        raise Infeasible(
            f"a sum over {rule.clients} clients with levels {levels} and {trials} trials needs {needed} bits, at most "
            f"{MAX_WIDTH} are possible: use fewer levels or fewer clients"
        )
    return max(2, needed)


def in_sums(setting: ClientSetting, rule: Thresholds) -> ClientSetting:
    """The same client where the server sees only sums."""
    return replace(setting, trust=Trust.SUMS_ONLY, colluders=rule.colluders, failure=rule.failure)


def plan_sum(
    budget: Budget,
    setting: ClientSetting,
    rule: Thresholds,
    *,
    rounds: int,
    window: float | None = None,
    width: int | None = None,
) -> SumPlan:
    """The plan of least error of the sum whose proven total epsilon of each client is within the budget.

    setting: of a client, as `in_sums` gives it. width: fixes the modulus; without it the plan chooses.

    Raises:
        Infeasible: no plan meets the budget; the message names the nearest that one can.
    """

    @cache
    def proven(levels: int, trials: int) -> float:
        check_time()
        release = setting.release(Mechanism(levels=levels, trials=trials))
        with suppress(AccountingError):  # no route applies: nothing is proven
            return Accountant().compose(release, rounds).epsilon(budget.delta)
        return math.inf

    probe = setting.release(Mechanism(levels=1, trials=1))
    shift = shift_per_round(budget, rate=probe.sampling.rate, rounds=rounds)
    ratio = max(4 * probe.shift_l2**2 / shift**2, 1e-9)
    """A guess of M / s^2: what Gaussian noise would need."""

    def bits(levels: int, trials: float) -> float:
        try:
            return width_of(rule, levels, min(_MAX_TRIALS, math.ceil(trials)), window=window)
        except Infeasible:
            return math.inf

    if width is None:
        wanted = max(1, math.ceil(math.sqrt(max(_ROUNDING * rule.clients, _ENOUGH) / ratio)))
        chosen = min(float(MAX_WIDTH), bits(wanted, ratio * wanted**2))
    else:
        chosen = check_int("width", width, 2, MAX_WIDTH)
    levels = _largest(lambda s: bits(s, ratio * s**2) <= chosen and ratio * s**2 <= _MAX_TRIALS)
    while levels >= 1:
        trials = least_trials(proven, levels, ratio * levels**2, budget.epsilon, cap=_MAX_TRIALS)
        if trials is not None and bits(levels, trials) <= chosen:
            return SumPlan(rule=rule, levels=levels, trials=trials, width=int(chosen), window=window)
        levels -= 1
    raise _infeasible(proven, budget, bits, ratio, width=int(chosen))


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest s >= 1 that holds, by bisection; 1 where not even that does, to be tried all the same."""
    low, high = 1, 2
    while high < 2**20 and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _infeasible(
    proven: Callable[[int, int], float],
    budget: Budget,
    bits: Callable[[int, float], float],
    ratio: float,
    *,
    width: int,
) -> Infeasible:
    """What the modulus can reach, and what the budget needs."""
    most = 1
    while most < _MAX_TRIALS and bits(1, 2 * most) <= width:
        most *= 2
    least = proven(1, most)
    reach = f"no less than epsilon {rounded_up(least, 3)}" if math.isfinite(least) else "no finite epsilon"
    trials = least_trials(proven, 1, ratio, budget.epsilon, cap=_MAX_TRIALS)
    needed = math.inf if trials is None else bits(1, trials)
    needs = f"; epsilon {as_given(budget.epsilon)} needs {needed:.0f} bits" if math.isfinite(needed) else ""
    return Infeasible(
        f"a sum in {width} bits reaches {reach}{needs} (proven total at delta {budget.delta:g}; epsilon "
        f"{as_given(budget.epsilon)} was asked for): use a larger batch, fewer rounds or a wider range"
    )
