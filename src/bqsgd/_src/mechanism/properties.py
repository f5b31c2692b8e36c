"""The law of the error r = decoded value - value: the paper's Proposition 1, and its counterpart for coarse codes.

Key: m trials, q success probability, s levels, R range, P_k = Pr[Bin(m, q) = k]. The density and V are averages over an
input that is uniform over a quantiser step; for coarse codes over [-R, R], since their error depends on the input.
`worst_case_variance` holds for every input. None of these figures is a privacy statement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.coarsening import mean_squared_error, worst_squared_error
from bqsgd._src.params import Mechanism, check_positive


def _check_q(q: float) -> float:
    if not 0 < q < 1:
        raise InvalidParameter(f"q must be above 0 and below 1, got {q}")
    return float(q)


def noise_density(
    error: npt.ArrayLike, mechanism: Mechanism, *, range: float, q: float = 0.5
) -> npt.NDArray[np.float64]:
    """The density f_r of Proposition 1 at `error`, 0 outside [-(1 + mq) R/s, (1 + m - mq) R/s].

    On [(k - mq) R/s, (k + 1 - mq) R/s], k = -1, ..., m:
    f_r(r) = (s/R) [(k + 1 - mq) P_k + (mq - k) P_(k+1)] + (s/R)^2 (P_(k+1) - P_k) r.
    It is the binomial law with each atom spread over a triangle of one step on either side.

    Raises:
        InvalidParameter: the mechanism is coarsened (its law depends on the input), or `error` is not finite.
    """
    if mechanism.coarsening is not None:
        raise InvalidParameter("Proposition 1 is the law before coarsening; give mechanism.fine, or see coarsening")
    from scipy import stats  # imported here because it is slow to import and no client needs it

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
    """E[r] = 0: the decoded value is unbiased for every input and all parameters (coarse codes: `saturation_bias`)."""
    return 0.0


def noise_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """V(m, q, s) = m q (1 - q) / s^2 + 1 / (6 s^2), so that E||r||^2 = d R^2 V for uniform inputs.

    Coarse codes: the mean squared error, bias included, for inputs uniform over [-R, R].

    >>> noise_variance(Mechanism(levels=1, trials=4))  # 4/4 + 1/6
    1.1666666666666667
    """
    q, s = _check_q(q), mechanism.levels
    if mechanism.coarsening is not None:
        _check_half(q)
        return mean_squared_error(mechanism)
    return mechanism.trials * q * (1 - q) / s**2 + 1 / (6 * s**2)


def worst_case_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """m q (1 - q) / s^2 + 1 / (4 s^2), in units of R^2: attained where x lies halfway between two quantiser points.

    Coarse codes: the largest mean squared error, bias included, over all inputs in [-R, R].

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
        raise InvalidParameter(f"q must be 1/2 for a mechanism with coarsening, got {q}")
