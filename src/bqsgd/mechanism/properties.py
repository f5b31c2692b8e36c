"""The law of the error r = decoded value - value: Proposition 1, and its counterpart for coarsened codes.

Key: m trials, q success probability, s levels, C range, P_k = Pr[Bin(m, q) = k]. The density and V average over inputs
uniform over a quantiser step (coarsened: over [-C, C], since there the error depends on where the input lies);
`worst_case_variance` holds for every input. None of them is a privacy statement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter
from bqsgd.mechanism.coarsening import mean_squared_error, worst_squared_error
from bqsgd.params import Mechanism, check_positive


def _check_q(q: float) -> float:
    if not 0 < q < 1:
        raise InvalidParameter(f"q must be above 0 and below 1, got {q}")
    return float(q)


def noise_density(
    error: npt.ArrayLike, mechanism: Mechanism, *, range: float, q: float = 0.5
) -> npt.NDArray[np.float64]:
    """The density f_r of Proposition 1 at `error`, 0 outside [-(1 + mq) C/s, (1 + m - mq) C/s].

    On [(k - mq) C/s, (k + 1 - mq) C/s], k = -1, ..., m:
    f_r(r) = (s/C) [(k + 1 - mq) P_k + (mq - k) P_(k+1)] + (s/C)^2 (P_(k+1) - P_k) r.
    It is the binomial law with each atom spread to a triangle of one step either side. Coarsened codes have another
    law, which depends on the input: they are refused.
    """
    if mechanism.coarsening is not None:
        raise InvalidParameter("Proposition 1 is the law before coarsening; give mechanism.fine, or see coarsening")
    from scipy import stats  # here: a client's process never needs it, and it is slow to import

    per_step = mechanism.levels / check_positive("range", range)
    trials, q = mechanism.trials, _check_q(q)
    r = np.asarray(error, dtype=np.float64)
    if not np.isfinite(r).all():
        raise InvalidParameter("error must be finite")
    k = np.floor(r * per_step + trials * q)
    law: Any = stats.binom(trials, q)
    here, after = law.pmf(k), law.pmf(k + 1)
    value = per_step * ((k + 1 - trials * q) * here + (trials * q - k) * after) + per_step**2 * (after - here) * r
    return np.asarray(np.maximum(value, 0.0), dtype=np.float64)


def noise_mean() -> float:
    """E[r] = 0: the decoded value is unbiased for every input and all parameters (coarsened: `saturation_bias`)."""
    return 0.0


def noise_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """V(m, q, s) = m q (1 - q) / s^2 + 1 / (6 s^2), so that E||r||^2 = d C^2 V under the uniform prior.

    Coarsened: the mean squared error, bias included, for inputs uniform over [-C, C] (`coarsening`).

    >>> noise_variance(Mechanism(levels=1, trials=4))  # 4/4 + 1/6
    1.1666666666666667
    """
    q, s = _check_q(q), mechanism.levels
    if mechanism.coarsening is not None:
        _check_half(q)
        return mean_squared_error(mechanism)
    return mechanism.trials * q * (1 - q) / s**2 + 1 / (6 * s**2)


def worst_case_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """m q (1 - q) / s^2 + 1 / (4 s^2), in units of C^2: reached where x lies halfway between two quantiser points.

    Coarsened: the largest mean squared error, bias included, over all inputs in [-C, C] (`coarsening`).

    >>> worst_case_variance(Mechanism(levels=1, trials=4))
    1.25
    """
    q, s = _check_q(q), mechanism.levels
    if mechanism.coarsening is not None:
        _check_half(q)
        return worst_squared_error(mechanism)
    return mechanism.trials * q * (1 - q) / s**2 + 1 / (4 * s**2)


def _check_half(q: float) -> None:
    if q != 0.5:
        raise InvalidParameter(f"q must be 1/2 where codes are coarsened, got {q}")
