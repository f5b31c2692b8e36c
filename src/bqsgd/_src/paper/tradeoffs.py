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


def convergence_bound(
    problem: Problem, clients: Sequence[tuple[float, Mechanism]], *, smoothness: float | None = None
) -> ConvergenceBound:
    """The bound of Theorem 1 for N clients, each given by its weight p_i and its mechanism (s_i, m_i).

    2 [F(theta_0) - F*] / (T eta)  +  N sigma^2 sum p_i^2 / L  +  N d C^2 sum p_i^2 V(m_i, 1/2, s_i).

    smoothness: nu (Assumption 2). Without it we take eta <= 1/nu to hold. We take over the paper's other assumptions:
    clipping adds no bias, V uses the uniform prior of Eq. 14.

    Raises InvalidParameter if eta > 1/nu, a weight is not positive, or the weights do not add up to 1.
    """
    weights = [check_positive("weight", weight) for weight, _ in clients]
    if not math.isclose(math.fsum(weights), 1, rel_tol=1e-9):
        raise InvalidParameter(f"the weights of the clients must add up to 1, got {math.fsum(weights)}")
    eta = problem.learning_rate
    # The slack accepts eta = 1/nu when the product is rounded up.
    if smoothness is not None and eta * check_positive("smoothness", smoothness) > 1 + 1e-12:
        raise InvalidParameter(
            f"learning_rate must be at most 1/smoothness = {1 / smoothness:.6g} for Theorem 1, got {eta}"
        )
    noise = math.fsum(weight**2 * noise_variance(mechanism) for weight, mechanism in clients)
    squares = math.fsum(weight**2 for weight in weights)
    return ConvergenceBound(
        descent_error=2 * problem.initial_gap / (problem.rounds * eta),
        sampling_error=len(clients) * problem.gradient_variance * squares / problem.setting.batch_size,
        quantisation_error=len(clients) * problem.dimension * problem.clip**2 * noise,
    )


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
    return tuple(
        Curve(fixed="epsilon", value=epsilon, points=tuple(_point(problem, bits=b, epsilon=epsilon) for b in bits))
        for epsilon in epsilons
    )


def curves_over_epsilon(problem: Problem, *, epsilons: Sequence[float], bits: Sequence[int]) -> tuple[Curve, ...]:
    """Fix each number of bits and vary the nominal epsilon."""
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
        # A gap in the curve. The real-valued optimum exists even where no integers fit.
        return real
    bound = convergence_bound(problem, [(1 / problem.clients, mechanism)] * problem.clients)
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
