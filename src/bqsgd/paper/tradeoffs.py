"""The paper's trade-off between privacy, communication and convergence: fix epsilon and vary bits, or the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bqsgd.errors import Infeasible, InvalidParameter
from bqsgd.mechanism.properties import noise_variance
from bqsgd.paper.nominal import NominalSetting, nominal_epsilon, privacy_level
from bqsgd.paper.planner import closed_form, strict_mechanism
from bqsgd.paper.theorem_1 import Share, convergence_bound
from bqsgd.params import check_int, check_positive
from bqsgd.planner.plan import Budget


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The learning problem for which Theorem 1's bound is drawn: `clients` equal clients, all with the same plan.

    initial_gap and gradient_variance are assumed, not measured; eta <= 1/nu is taken to hold.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def curves_over_bits(problem: Problem, *, epsilons: Sequence[float], bits: Sequence[int]) -> tuple[Curve, ...]:
    """Fix each nominal epsilon and vary the bits."""
    _check_any(epsilons=epsilons, bits=bits)
    return tuple(
        Curve(fixed="epsilon", value=epsilon, points=tuple(point(problem, bits=b, epsilon=epsilon) for b in bits))
        for epsilon in epsilons
    )


def curves_over_epsilon(problem: Problem, *, epsilons: Sequence[float], bits: Sequence[int]) -> tuple[Curve, ...]:
    """Fix each number of bits and vary the nominal epsilon."""
    _check_any(epsilons=epsilons, bits=bits)
    return tuple(
        Curve(fixed="bits", value=b, points=tuple(point(problem, bits=b, epsilon=epsilon) for epsilon in epsilons))
        for b in bits
    )


def point(problem: Problem, *, bits: int, epsilon: float) -> Point:
    """Plan one budget (strict integers beside the real optimum) and evaluate Theorem 1's bound for it.

    On the real optimum V = 1 / (4 R^2) + 1 / (6 s^2) (Eq. 22).
    """
    budget = Budget(bits=bits, epsilon=epsilon, delta=problem.setting.delta)
    levels, trials = closed_form(budget, problem.setting)
    real = Point(
        bits=bits,
        epsilon=epsilon,
        levels_real=levels,
        trials_real=trials,
        variance_real=variance_on_constraint(epsilon, levels, problem.setting),
        variance_floor=1 / (4 * privacy_level(epsilon, problem.setting) ** 2),
    )
    try:
        mechanism = strict_mechanism(budget, problem.setting)
    except Infeasible:
        return real
    bound = convergence_bound(
        [Share(weight=1 / problem.clients, mechanism=mechanism)] * problem.clients,
        dimension=problem.dimension,
        clip=problem.clip,
        batch_size=problem.setting.batch_size,
        rounds=problem.rounds,
        learning_rate=problem.learning_rate,
        smoothness=1 / problem.learning_rate,
        initial_gap=problem.initial_gap,
        gradient_variance=problem.gradient_variance,
    )
    return replace(
        real,
        levels=mechanism.levels,
        trials=mechanism.trials,
        variance=noise_variance(mechanism),
        nominal_epsilon=nominal_epsilon(mechanism, problem.setting),
        sgd_error=bound.sgd_error,
        quantisation_error=bound.quantisation_error,
        bound=bound.total,
    )


def variance_on_constraint(epsilon: float, levels: float, setting: NominalSetting) -> float:
    """V where the privacy constraint is tight, 1 / (4 R^2) + 1 / (6 s^2) (Eq. 22)."""
    return 1 / (4 * privacy_level(epsilon, setting) ** 2) + 1 / (6 * check_positive("levels", levels) ** 2)


def _check_any(**sequences: Sequence[float]) -> None:
    for name, values in sequences.items():
        if not values:
            raise InvalidParameter(f"{name} must hold at least one value, got none")
