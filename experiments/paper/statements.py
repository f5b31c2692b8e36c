"""Statements of the paper that only its errata and the paper map need; no command computes them.

Letters: d dimension, s levels, m trials, L batch size, D data-set size, b bits, T rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import NominalSetting, privacy_level
from bqsgd._src.paper.tradeoffs import Problem
from bqsgd._src.params import Mechanism, check_int, check_positive


def peak_probability_normal(trials: int) -> float:
    """P_max under the normal approximation, 1 / sqrt(2 pi sigma^2) with sigma^2 = m/4 (Eq. 15).

    The paper states it for m > 10. It lies above the exact P_max for every m >= 1, so 6.4 / sqrt(m) never gives a
    smaller nominal epsilon than Lemma 1; it is therefore accepted from m = 1 on.
    """
    return 1 / math.sqrt(2 * math.pi * check_int("trials", trials, 1, 2**53) / 4)


def fewest_bits(epsilon: float, setting: NominalSetting) -> float:
    """Bits below which no (s, m) reaches a nominal epsilon: 2 log2(6.4 d L / D^2) - 2 log2(epsilon delta).

    From s >= 1 and m < 2^b in Eq. 18. Remark 2 prints the factors as 1/2 (see `fewest_bits_as_printed`); solving
    6.4 d L / (D^2 sqrt(m) delta) <= epsilon for m gives 2. It is negative when the budget is generous.

    >>> setting = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-4)
    >>> round(fewest_bits(1.72, setting), 2)
    7.98
    """
    return -2 * math.log2(privacy_level(epsilon, setting))


def fewest_bits_as_printed(epsilon: float, setting: NominalSetting) -> float:
    """Remark 2 as printed: (1/2) log2(6.4 d L / D^2) - (1/2) log2(epsilon delta), four times too small."""
    return -math.log2(privacy_level(epsilon, setting)) / 2


def communication_bits(*, rounds: int, dimension: int, bits: float) -> float:
    """Bits one client sends in T rounds: T d b (Theorem 1, Communication); frame headers are not counted.

    >>> communication_bits(rounds=10, dimension=100, bits=8)
    8000.0
    """
    check_int("rounds", rounds, 1, 2**53)
    check_int("dimension", dimension, 1, 2**53)
    return float(rounds * dimension * check_positive("bits", bits))


def communication_saving_bits(*, rounds: int, dimension: int, bits: float, float_bits: int = 32) -> float:
    """Bits saved against floats of `float_bits` (32 or 64): T d (b_init - b). Negative when the code is wider."""
    check_int("float_bits", float_bits, 1, 2**16)
    sent = communication_bits(rounds=rounds, dimension=dimension, bits=bits)
    return communication_bits(rounds=rounds, dimension=dimension, bits=float_bits) - sent


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
