"""The paper's planner (Line 7 of Algorithm 1): least error within a bit budget and a nominal epsilon.

The privacy constraint is Eq. 18, Remark 1's 6.4 d s L / (D^2 sqrt(m) delta), which never lies below Lemma 1 with the
exact P_max. What it bounds is nominal: as published; not a guarantee.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import Infeasible, InvalidParameter
from bqsgd.mechanism.properties import noise_variance
from bqsgd.paper.nominal import REMARK_1_FACTOR, NominalPrivacy, NominalSetting, nominal_epsilon, privacy_level
from bqsgd.params import Mechanism
from bqsgd.planner.plan import MAX_BITS, Budget
from bqsgd.privacy.guarantee import rounded_up


class Rounding(StrEnum):
    """How the real-valued optimum becomes integers."""

    STRICT = "strict"
    NEAREST = "nearest"


@dataclass(frozen=True, kw_only=True)
class NominalPlan:
    """The mechanism that the paper's formulas choose, its error V (Eq. 14) and its nominal figures. No guarantee."""

    budget: Budget
    mechanism: Mechanism
    variance: float
    nominal: NominalPrivacy

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "budget": asdict(self.budget),
            "mechanism": self.mechanism.to_dict(),
            "variance": self.variance,
            "nominal": self.nominal.to_dict(),
        }


def make_nominal_plan(
    budget: Budget, setting: NominalSetting, *, rounds: int = 1, rounding: Rounding | str = Rounding.STRICT
) -> NominalPlan:
    """The paper's (s, m) for one client; budget.epsilon is the nominal epsilon of one round at setting.delta.

    Raises:
        Infeasible: no integers meet the budget; the message names the nearest that they can.
    """
    if budget.delta != setting.delta:
        raise InvalidParameter(f"budget and setting must have the same delta, got {budget.delta} and {setting.delta}")
    choose = strict_mechanism if Rounding(rounding) is Rounding.STRICT else nearest_mechanism
    mechanism = choose(budget, setting)
    return NominalPlan(
        budget=budget,
        mechanism=mechanism,
        variance=noise_variance(mechanism),
        nominal=NominalPrivacy.of(mechanism, setting, rounds=rounds),
    )


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
        return np.asarray(REMARK_1_FACTOR * levels * setting.load / np.sqrt(count) <= budget.epsilon)

    trials = np.where((trials > 1) & meets(np.maximum(trials - 1, 1)), trials - 1, trials)
    trials = np.where(meets(trials), trials, trials + 1)
    fits = 2 * levels + trials <= top
    if not fits.any():
        raise Infeasible(_nearest_feasible(budget, setting))
    levels, trials = levels[fits], trials[fits]
    error = (3 * trials + 2) / (12 * levels**2)
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
