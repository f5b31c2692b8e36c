"""The paper's own privacy figures and its planner, as published: *nominal epsilon*. None of them is a guarantee.

Lemma 1 averages over a prior on the gradient, replaces the dimension by a data-dependent d_P, and multiplies an
epsilon in the hundreds by the sampling rate; docs/paper.md has the arithmetic. We compute these figures to reproduce
the paper and to show them beside the proven epsilon of `bqsgd._src.privacy.accountant`.

The planner (Line 7 of Algorithm 1) finds the least error within a bit budget and a nominal epsilon. Its privacy
constraint is Eq. 18, Remark 1's 6.4 d s L / (D^2 sqrt(m) delta), which never lies below Lemma 1 with the exact P_max.

Letters: d dimension, s levels, m trials, L batch_size, D dataset_size, T rounds; logarithms are natural unless base 2.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.laws import Binomial
from bqsgd._src.params import Mechanism, check_delta, check_int, check_positive
from bqsgd._src.planner.plan import MAX_BITS, Budget
from bqsgd._src.privacy.guarantee import rounded_up

_CAVEAT = "as published; not a guarantee"
_REMARK_1_FACTOR = 6.4
"""8 P_max sqrt(m) under the normal approximation is 16 / sqrt(2 pi) = 6.383; the paper rounds it up to 6.4."""


@dataclass(frozen=True, kw_only=True)
class NominalSetting:
    """What a nominal epsilon depends on besides (s, m): d, L, D and the delta of one round.

    `dimension` is the number put into Lemma 1. The paper's footnote uses d_P = ||gradient||_1 / C (3,000 for LeNet-5,
    which has 61,706 parameters).
    """

    dimension: int
    batch_size: int
    dataset_size: int
    delta: float

    def __post_init__(self) -> None:
        check_int("dimension", self.dimension, 1, 2**53)
        check_int("dataset_size", self.dataset_size, 1, 2**53)
        check_int("batch_size", self.batch_size, 1, self.dataset_size)
        check_delta("delta", self.delta)

    @property
    def load(self) -> float:
        """d L / (D^2 delta), so that Lemma 1 reads epsilon = 8 s P_max * load."""
        return self.dimension * self.batch_size / (self.dataset_size**2 * self.delta)


def peak_probability(trials: int) -> float:
    """P_max = max_k P_k of Bin(m, 1/2), the central binomial probability (Lemma 1).

    >>> peak_probability(4)
    0.375
    """
    return float(Binomial(trials).pmf.max())


def nominal_epsilon(mechanism: Mechanism, setting: NominalSetting, *, exact_peak: bool = False) -> float:
    """Nominal epsilon of one round, as published; not a guarantee.

    The default is Remark 1, the form of Eqs. 18 to 20: 6.4 d s L / (D^2 sqrt(m) delta). It raises InvalidParameter for
    trials = 0, where it has no value. With `exact_peak` it is Lemma 1, 8 d s L P_max / (D^2 delta), which is finite
    even for trials = 0, although the paper itself shows that quantisation alone is not private.

    >>> setting = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-4)
    >>> round(nominal_epsilon(Mechanism(levels=2, trials=251), setting), 3)
    3.447
    """
    if exact_peak:
        return 8 * mechanism.levels * peak_probability(mechanism.trials) * setting.load
    if mechanism.trials == 0:
        raise InvalidParameter("trials must be at least 1 for Remark 1 (no noise has no nominal epsilon), got 0")
    return _REMARK_1_FACTOR * mechanism.levels * setting.load / math.sqrt(mechanism.trials)


def privacy_level(epsilon: float, setting: NominalSetting) -> float:
    """R = delta epsilon D^2 / (6.4 d L) (below Eq. 20): the privacy constraint (Eq. 18) reads s = R sqrt(m)."""
    return check_positive("epsilon", epsilon) / (_REMARK_1_FACTOR * setting.load)


def theorem_1_epsilon(epsilon: float, *, delta: float, rounds: int) -> float:
    """Total after T rounds as Theorem 1 prints it: sqrt(2 T log(1/delta)) epsilon, at delta T * delta."""
    return math.sqrt(2) * theorem_1_epsilon_in_text(epsilon, delta=delta, rounds=rounds)


def theorem_1_epsilon_in_text(epsilon: float, *, delta: float, rounds: int) -> float:
    """Total as the text after Theorem 1 prints it: sqrt(T log(1/delta)) epsilon, at delta T * delta."""
    check_int("rounds", rounds, 1, 2**53)
    return math.sqrt(rounds * -math.log(check_delta("delta", delta))) * check_positive("epsilon", epsilon)


def strong_composition(epsilon: float, *, delta: float, rounds: int, delta_slack: float) -> tuple[float, float]:
    """Lemma 2 in full (Eq. 21): T uses of an (epsilon, delta) mechanism are (epsilon_T, T delta + delta') private with

    epsilon_T = sqrt(-2 T ln delta') epsilon + T epsilon (e^epsilon - 1). Theorem 1 keeps the first term only.

    Returns (epsilon_T, T delta + delta'); epsilon_T is infinite where e^epsilon overflows.
    """
    check_int("rounds", rounds, 1, 2**53)
    check_positive("epsilon", epsilon)
    slack = check_delta("delta_slack", delta_slack)
    # e^709 is the largest power that a float can hold.
    growth = math.expm1(epsilon) if epsilon < 700 else math.inf
    total = math.sqrt(-2 * rounds * math.log(slack)) * epsilon + rounds * epsilon * growth
    return total, rounds * check_delta("delta", delta) + slack


@dataclass(frozen=True, kw_only=True)
class NominalPrivacy:
    """All of the paper's privacy figures for T rounds of one mechanism; as published, not a guarantee.

    epsilon_total is Theorem 1's (sqrt(2 T log 1/delta)), epsilon_total_in_text that of the text after it (without the
    2), strong_* is Lemma 2 in full with delta' = delta.
    """

    setting: NominalSetting
    rounds: int
    epsilon_per_round: float
    epsilon_per_round_exact_peak: float
    epsilon_total: float
    epsilon_total_in_text: float
    delta_total: float
    strong_epsilon: float
    strong_delta: float

    @classmethod
    def of(cls, mechanism: Mechanism, setting: NominalSetting, *, rounds: int) -> NominalPrivacy:
        """Compute every figure; trials = 0 raises, because Remark 1 has no value there."""
        epsilon = nominal_epsilon(mechanism, setting)
        strong = strong_composition(epsilon, delta=setting.delta, rounds=rounds, delta_slack=setting.delta)
        return cls(
            setting=setting,
            rounds=rounds,
            epsilon_per_round=epsilon,
            epsilon_per_round_exact_peak=nominal_epsilon(mechanism, setting, exact_peak=True),
            epsilon_total=theorem_1_epsilon(epsilon, delta=setting.delta, rounds=rounds),
            epsilon_total_in_text=theorem_1_epsilon_in_text(epsilon, delta=setting.delta, rounds=rounds),
            delta_total=rounds * setting.delta,
            strong_epsilon=strong[0],
            strong_delta=strong[1],
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the caveat beside the figures."""
        return {**asdict(self), "caveat": _CAVEAT}


def closed_form(budget: Budget, setting: NominalSetting) -> tuple[float, float]:
    """The real-valued optimum (s, m) of Eqs. 16 to 18: Eqs. 19 and 20.

    s = R sqrt(R^2 + 2^b - 1) - R^2 and m = s^2 / R^2 = 2^b - 1 - 2 s, with R from `privacy_level`.
    """
    top = 2**budget.bits - 1
    level = privacy_level(budget.epsilon, setting)
    # The same s without the cancellation of two nearly equal terms when R is large.
    levels = top / (1 + math.sqrt(1 + top / level**2))
    return levels, top - 2 * levels


def strict_mechanism(budget: Budget, setting: NominalSetting) -> Mechanism:
    """The integers of smallest V with 2s + m + 1 <= 2^b and nominal epsilon <= budget, solved exactly.

    For each s the error grows with m, so only the smallest m that meets the privacy constraint matters; all s are
    tried. Of equal errors the one with fewer codes wins. Raises Infeasible with the nearest feasible budgets.
    """
    top = 2**budget.bits - 1
    levels = np.arange(1, top // 2 + 1, dtype=np.int64)
    wanted = (levels / privacy_level(budget.epsilon, setting)) ** 2
    levels, wanted = levels[wanted < top], wanted[wanted < top]
    trials = np.maximum(np.ceil(wanted).astype(np.int64), 1)
    # The quotient above may be off by an ulp at a whole number; the published formula itself decides.

    def meets(count: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.asarray(_REMARK_1_FACTOR * levels * setting.load / np.sqrt(count) <= budget.epsilon)

    trials = np.where((trials > 1) & meets(np.maximum(trials - 1, 1)), trials - 1, trials)
    trials = np.where(meets(trials), trials, trials + 1)
    fits = 2 * levels + trials <= top
    if not fits.any():
        raise Infeasible(_nearest_feasible(budget, setting))
    levels, trials = levels[fits], trials[fits]
    error = (3 * trials + 2) / (12 * levels**2)
    # Floats only narrow the choice; exact fractions decide between errors that differ by rounding alone.
    ties = np.flatnonzero(error <= error.min() * (1 + 1e-12))
    tied = [Mechanism(levels=int(levels[i]), trials=int(trials[i])) for i in ties]
    return min(tied, key=lambda one: (Fraction(3 * one.trials + 2, 12 * one.levels**2), one.code_count))


def nearest_mechanism(budget: Budget, setting: NominalSetting) -> Mechanism:
    """What the paper's tables do: s rounded to the nearest integer, every remaining code for noise, m = 2^b - 1 - 2s.

    The bits are kept; the nominal epsilon of the result may exceed the budget.
    """
    top = 2**budget.bits - 1
    levels = round(closed_form(budget, setting)[0])
    if not 1 <= levels <= (top - 1) // 2:
        raise Infeasible(
            f"the nearest integer to s = {closed_form(budget, setting)[0]:.3g} leaves no valid mechanism; "
            + _nearest_feasible(budget, setting)
        )
    return Mechanism(levels=levels, trials=top - 2 * levels)


def least_epsilon(bits: int, setting: NominalSetting) -> float:
    """The smallest nominal epsilon b bits can reach: s = 1 and every other code for noise, m = 2^b - 3."""
    return nominal_epsilon(Mechanism(levels=1, trials=2**bits - 3), setting)


def _nearest_feasible(budget: Budget, setting: NominalSetting) -> str:
    least = least_epsilon(budget.bits, setting)
    enough = next((b for b in range(budget.bits, MAX_BITS + 1) if least_epsilon(b, setting) <= budget.epsilon), None)
    needs = f"more than {MAX_BITS} bits" if enough is None else f"{enough} bits"
    delta = setting.delta * least / budget.epsilon
    trade = f"; or keep both and allow delta >= {rounded_up(delta, 3)}" if delta < 1 else ""
    return (
        f"{budget.bits} bits reach epsilon >= {rounded_up(least, 3)}; epsilon {budget.epsilon} needs {needs}{trade} "
        "(nominal epsilon of one round, as published; not a guarantee)"
    )
