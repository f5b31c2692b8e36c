"""The law of the error r = decoded value - value: the paper's Proposition 1, and its counterpart for coarse codes.

Key: m trials, s levels, R range, P_k = Pr[Bin(m, 1/2) = k]; the paper's q is 1/2 (Remark 1). The density and V are
averages over an input that is uniform over a quantiser step; for coarse codes over [-R, R], since their error depends
on the input. The mean of r is 0 for every input (coarse codes: `coarsening.saturation_bias`), and
`coarsening.worst_squared_error` bounds its square for every input. None of these figures is a privacy statement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.coarsening import mean_squared_error
from bqsgd._src.params import Mechanism, check_positive


def noise_density(error: npt.ArrayLike, mechanism: Mechanism, *, range: float) -> npt.NDArray[np.float64]:
    """The density f_r of Proposition 1 at `error`, 0 outside [-(1 + m/2) R/s, (1 + m/2) R/s].

    On [(k - m/2) R/s, (k + 1 - m/2) R/s], k = -1, ..., m:
    f_r(r) = (s/R) [(k + 1 - m/2) P_k + (m/2 - k) P_(k+1)] + (s/R)^2 (P_(k+1) - P_k) r.
    It is the binomial law with each atom spread over a triangle of one step on either side.

    Raises:
        InvalidParameter: the mechanism is coarsened (its law depends on the input) or its noise is not binomial, or
            `error` is not finite.
    """
    if mechanism.coarsening is not None:
        raise InvalidParameter("Proposition 1 is the law before coarsening; give mechanism.fine, or see coarsening")
    if mechanism.noise is not None:
        raise InvalidParameter(f"Proposition 1 is the law of binomial noise, got {mechanism.noise}")
    from scipy import stats  # imported here because it is slow to import and no client needs it

    per_step = mechanism.levels / check_positive("range", range)
    mean = mechanism.trials / 2
    r = np.asarray(error, dtype=np.float64)
    if not np.isfinite(r).all():
        raise InvalidParameter("error must be finite")
    k = np.floor(r * per_step + mean)
    law: Any = stats.binom(mechanism.trials, 0.5)
    here, after = law.pmf(k), law.pmf(k + 1)
    value = per_step * ((k + 1 - mean) * here + (mean - k) * after) + per_step**2 * (after - here) * r
    # At the ends of the support the two terms cancel, and rounding may leave a tiny negative density.
    return np.asarray(np.maximum(value, 0.0), dtype=np.float64)


def noise_variance(mechanism: Mechanism) -> float:
    """V(m, 1/2, s) = m / (4 s^2) + 1 / (6 s^2) of Eq. 14, so that E||r||^2 = d R^2 V for uniform inputs.

    Coarse codes: the mean squared error, bias included, for inputs uniform over [-R, R].

    >>> noise_variance(Mechanism(levels=1, trials=4))  # 4/4 + 1/6
    1.1666666666666667
    """
    if mechanism.coarsening is not None:
        return mean_squared_error(mechanism)
    return mechanism.law.variance / mechanism.levels**2 + 1 / (6 * mechanism.levels**2)
