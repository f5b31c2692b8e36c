"""Proposition 1: the law of the error r = decoded value - value, for inputs that are uniform over a quantiser step.

Key: m trials, q success probability, s levels, C clip, P_k = Pr[Bin(m, q) = k]. The density and V average over that
uniform prior; `worst_case_variance` holds for every input. None of them is a privacy statement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism, check_positive


def _check_q(q: float) -> float:
    if not 0 < q < 1:
        raise InvalidParameter(f"q must be above 0 and below 1, got {q}")
    return float(q)


def noise_density(
    error: npt.ArrayLike, mechanism: Mechanism, *, clip: float, q: float = 0.5
) -> npt.NDArray[np.float64]:
    """The density f_r of Proposition 1 at `error`, 0 outside [-(1 + mq) C/s, (1 + m - mq) C/s].

    On [(k - mq) C/s, (k + 1 - mq) C/s], k = -1, ..., m:
    f_r(r) = (s/C) [(k + 1 - mq) P_k + (mq - k) P_(k+1)] + (s/C)^2 (P_(k+1) - P_k) r.
    It is the binomial law with each atom spread to a triangle of one step either side.
    """
    per_step = mechanism.levels / check_positive("clip", clip)
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
    """E[r] = 0: the decoded value is unbiased for every input, clip, levels, trials and q."""
    return 0.0


def noise_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """V(m, q, s) = m q (1 - q) / s^2 + 1 / (6 s^2), so that E||r||^2 = d C^2 V under the uniform prior.

    >>> noise_variance(Mechanism(levels=1, trials=4))  # 4/4 + 1/6
    1.1666666666666667
    """
    q, s = _check_q(q), mechanism.levels
    return mechanism.trials * q * (1 - q) / s**2 + 1 / (6 * s**2)


def worst_case_variance(mechanism: Mechanism, *, q: float = 0.5) -> float:
    """m q (1 - q) / s^2 + 1 / (4 s^2), in units of C^2: reached where x lies halfway between two quantiser points.

    >>> worst_case_variance(Mechanism(levels=1, trials=4))
    1.25
    """
    q, s = _check_q(q), mechanism.levels
    return mechanism.trials * q * (1 - q) / s**2 + 1 / (4 * s**2)
