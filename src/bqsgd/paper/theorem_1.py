"""Theorem 1 apart from privacy: what T rounds cost in bits, and the bound on the gradient norm they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bqsgd.errors import InvalidParameter
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Mechanism, check_int, check_positive


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
class Share:
    """One client's weight p_i in the aggregate and the mechanism it runs."""

    weight: float
    mechanism: Mechanism

    def __post_init__(self) -> None:
        check_positive("weight", self.weight)


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
    shares: Sequence[Share],
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
    """The bound of Theorem 1 for N clients with their own weight p_i and (s_i, m_i).

    2 [F(theta_0) - F*] / (T eta)  +  N sigma^2 sum p_i^2 / L  +  N d C^2 sum p_i^2 V(m_i, 1/2, s_i).

    Key: initial_gap F(theta_0) - F*, learning_rate eta <= 1/nu with smoothness nu (Assumption 2), gradient_variance
    sigma^2 (Assumption 1). The weights must add up to 1. The paper's assumptions hold: clipping adds no bias, V uses
    the uniform prior of Eq. 14. `dimension` is the model's, not d_P.

    Raises InvalidParameter when eta > 1/nu or the weights do not add up to 1.
    """
    if not shares:
        raise InvalidParameter("shares must name at least one client, got none")
    weight = math.fsum(share.weight for share in shares)
    if not math.isclose(weight, 1, rel_tol=1e-9):
        raise InvalidParameter(f"the weights of the shares must add up to 1, got {weight}")
    check_int("dimension", dimension, 1, 2**53)
    check_int("batch_size", batch_size, 1, 2**53)
    check_int("rounds", rounds, 1, 2**53)
    eta, nu = check_positive("learning_rate", learning_rate), check_positive("smoothness", smoothness)
    if eta * nu > 1 + 1e-12:
        raise InvalidParameter(f"learning_rate must be at most 1/smoothness = {1 / nu:.6g} for Theorem 1, got {eta}")
    clients = len(shares)
    noise = math.fsum(share.weight**2 * noise_variance(share.mechanism) for share in shares)
    squares = math.fsum(share.weight**2 for share in shares)
    return ConvergenceBound(
        descent_error=2 * check_positive("initial_gap", initial_gap) / (rounds * eta),
        sampling_error=clients * check_positive("gradient_variance", gradient_variance) * squares / batch_size,
        quantisation_error=clients * dimension * check_positive("clip", clip) ** 2 * noise,
    )
