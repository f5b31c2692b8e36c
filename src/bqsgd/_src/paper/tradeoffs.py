"""The convergence bound of Theorem 1, and its trade-off curves: fix epsilon and vary the bits, or the reverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import NominalSetting, closed_form, nominal_epsilon, privacy_level, strict_mechanism
from bqsgd._src.params import Mechanism, check_int, check_positive
from bqsgd._src.planner.plan import Budget


@dataclass(frozen=True, kw_only=True)
class ConvergenceBound:
    """Upper bound on the mean of ||grad F(theta_t)||^2 over T rounds, by source (Theorem 1, Convergence)."""

    descent_error: float
    sampling_error: float
    quantisation_error: float

    @property
    def sgd_error(self) -> float:
        """Error of distributed SGD: the first two terms, what would remain without BQ."""
        return self.descent_error + self.sampling_error

    @property
    def total(self) -> float:
        """The bound itself."""
        return self.sgd_error + self.quantisation_error


def convergence_bound(
    clients: Sequence[tuple[float, Mechanism]],
    *,
    dimension: int,
    clip: float,
    batch_size: int,
    rounds: int,
    learning_rate: float,
    smoothness: float,
    initial_gap: float,
    gradient_variance: float,
) -> ConvergenceBound:
    """The bound of Theorem 1 for N clients, each given by its weight p_i and its mechanism (s_i, m_i).

    2 [F(theta_0) - F*] / (T eta)  +  N sigma^2 sum p_i^2 / L  +  N d C^2 sum p_i^2 V(m_i, 1/2, s_i).

    Key: initial_gap F(theta_0) - F*, learning_rate eta <= 1/nu with smoothness nu (Assumption 2), gradient_variance
    sigma^2 (Assumption 1). We take over the paper's assumptions: clipping adds no bias, V uses the uniform prior of
    Eq. 14. `dimension` is the model's, not d_P.

    Raises InvalidParameter if eta > 1/nu, a weight is not positive, or the weights do not add up to 1.
    """
    weights = [check_positive("weight", weight) for weight, _ in clients]
    if not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
        raise InvalidParameter(f"the weights of the clients must add up to 1, got {math.fsum(weights)}")
    check_int("dimension", dimension, 1, 2**53)
    check_int("batch_size", batch_size, 1, 2**53)
    check_int("rounds", rounds, 1, 2**53)
    eta, nu = check_positive("learning_rate", learning_rate), check_positive("smoothness", smoothness)
    if eta * nu > 1 + 1e-12:
        raise InvalidParameter(f"learning_rate must be at most 1/smoothness = {1 / nu:.6g} for Theorem 1, got {eta}")
    noise = math.fsum(weight**2 * noise_variance(mechanism) for weight, mechanism in clients)
    squares = math.fsum(weight**2 for weight in weights)
    return ConvergenceBound(
        descent_error=2 * check_positive("initial_gap", initial_gap) / (rounds * eta),
        sampling_error=len(clients) * check_positive("gradient_variance", gradient_variance) * squares / batch_size,
        quantisation_error=len(clients) * dimension * check_positive("clip", clip) ** 2 * noise,
    )


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


def curves_over_bits(problem: Problem, *, epsilons: Sequence[float], bits: Sequence[int]) -> tuple[Curve, ...]:
    """Fix each nominal epsilon and vary the bits."""
    _check_any(epsilons=epsilons, bits=bits)
    return tuple(
        Curve(fixed="epsilon", value=epsilon, points=tuple(_point(problem, bits=b, epsilon=epsilon) for b in bits))
        for epsilon in epsilons
    )


def curves_over_epsilon(problem: Problem, *, epsilons: Sequence[float], bits: Sequence[int]) -> tuple[Curve, ...]:
    """Fix each number of bits and vary the nominal epsilon."""
    _check_any(epsilons=epsilons, bits=bits)
    return tuple(
        Curve(fixed="bits", value=b, points=tuple(_point(problem, bits=b, epsilon=epsilon) for epsilon in epsilons))
        for b in bits
    )


def _point(problem: Problem, *, bits: int, epsilon: float) -> Point:
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
        [(1 / problem.clients, mechanism)] * problem.clients,
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
