"""The convergence bound of Theorem 1, and its trade-off curves: fix epsilon and vary the bits, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bqsgd._src.errors import Infeasible
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import NominalSetting, closed_form, nominal_epsilon, privacy_level, strict_mechanism
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.planner.plan import Budget


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A learning problem for Theorem 1.

    dimension: of the model, not d_P. clients: how many equal clients the trade-off curves are drawn for.
    learning_rate: eta. initial_gap: F(theta_0) - F*, and gradient_variance: sigma^2 (Assumption 1); both are assumed,
    not measured.
    """

    setting: NominalSetting
    dimension: int
    clip: float
    rounds: int
    clients: int
    learning_rate: float
    initial_gap: float
    gradient_variance: float

    def __post_init__(self) -> None:
        check_int("clients", self.clients, 1, 2**20)
        check_int("dimension", self.dimension, 1, 2**53)
        check_int("rounds", self.rounds, 1, 2**53)
        for name in ("clip", "learning_rate", "initial_gap", "gradient_variance"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One budget of a curve: the real-valued optimum, and the integers (None where the budget is infeasible).

    variance_floor is 1 / (4 R^2), the error that privacy alone costs; more bits reduce what lies above it.
    """

    bits: int
    epsilon: float
    levels_real: float
    trials_real: float
    variance_real: float
    variance_floor: float
    levels: int | None = None
    trials: int | None = None
    variance: float | None = None
    nominal_epsilon: float | None = None
    sgd_error: float | None = None
    quantisation_error: float | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points that share one constraint: `fixed` is "epsilon" or "bits", `value` what it is fixed at."""

    fixed: str
    value: float
    points: tuple[Point, ...]


def trade_off_curves(
    problem: Problem, *, fixed: str, epsilons: Sequence[float], bits: Sequence[int]
) -> tuple[Curve, ...]:
    """A curve for each nominal epsilon, over the bits, if `fixed` is "epsilon"; for "bits" the other way round."""
    points = [[_point(problem, bits=b, epsilon=epsilon) for b in bits] for epsilon in epsilons]
    if fixed == "epsilon":
        return tuple(Curve(fixed=fixed, value=e, points=tuple(row)) for e, row in zip(epsilons, points, strict=True))
    columns = zip(*points, strict=True)
    return tuple(Curve(fixed=fixed, value=b, points=column) for b, column in zip(bits, columns, strict=True))


def _point(problem: Problem, *, bits: int, epsilon: float) -> Point:
    """Plan one budget (strict integers beside the real optimum) and evaluate Theorem 1's bound for it.

    On the real optimum V = 1 / (4 R^2) + 1 / (6 s^2) (Eq. 22). The bound is on the mean of ||grad F(theta_t)||^2 over T
    rounds, 2 [F(theta_0) - F*] / (T eta) + sigma^2 / L + d C^2 V. Its first two terms are the error of distributed SGD.
    The number of clients cancels, because all have the same weight and mechanism.
    """
    setting = problem.setting
    budget = Budget(bits=bits, epsilon=epsilon, delta=setting.delta)
    levels, trials = closed_form(budget, setting)
    floor = 1 / (4 * privacy_level(epsilon, setting) ** 2)
    real = Point(
        bits=bits,
        epsilon=epsilon,
        levels_real=levels,
        trials_real=trials,
        variance_real=floor + 1 / (6 * levels**2),
        variance_floor=floor,
    )
    try:
        mechanism = strict_mechanism(budget, setting)
    except Infeasible:
        # A gap in the curve. The real-valued optimum exists even where no integers fit.
        return real
    variance = noise_variance(mechanism)
    descent = 2 * problem.initial_gap / (problem.rounds * problem.learning_rate)
    sgd_error = descent + problem.gradient_variance / setting.batch_size
    quantisation_error = problem.dimension * problem.clip**2 * variance
    return replace(
        real,
        levels=mechanism.levels,
        trials=mechanism.trials,
        variance=variance,
        nominal_epsilon=nominal_epsilon(mechanism, setting),
        sgd_error=sgd_error,
        quantisation_error=quantisation_error,
        bound=sgd_error + quantisation_error,
    )
