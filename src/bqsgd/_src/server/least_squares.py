"""The server's side of least squares: a linear model from noisy second moments and class sums.

The server solves (A + lambda I) W = B, where A are the moments with negative eigenvalues set to zero, and B the class
sums. The ridge lambda is 0.7 sigma sqrt(n), about a third of the largest eigenvalue of an n x n symmetric matrix
of noise with standard deviation sigma per entry. It follows from the plan, so there is nothing to tune and no learning
rate.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_finite
from bqsgd._src.persample.moments import CLASS_WEIGHT, triangle

RIDGE = 0.7
"""lambda / (sigma sqrt(n)), chosen on held-out samples of CIFAR-10 (docs/training.md)."""
_SMALLEST = 1e-9
"""The ridge without noise, as a fraction of the mean eigenvalue; it keeps the system solvable."""


def solve(problem: LeastSquares, mean: npt.ArrayLike, *, noise_variance: float) -> npt.NDArray[np.float64]:
    """The model's flat parameters, from the clients' mean and the variance of the noise in each of its coordinates."""
    values = np.asarray(mean, dtype=np.float64)
    if values.shape != (problem.dimension,):
        raise InvalidParameter(f"the mean must have {problem.dimension} coordinates, got shape {values.shape}")
    check_finite(values, "the mean holds NaN or infinity; the model was not changed")
    rows, columns = triangle(problem.features)
    moments = np.empty((problem.features, problem.features))
    moments[rows, columns] = moments[columns, rows] = values[: len(rows)]
    sums = values[len(rows) :].reshape(problem.classes, problem.features)
    eigenvalues, directions = np.linalg.eigh(moments)
    eigenvalues = np.maximum(eigenvalues, 0)  # true second moments have none below 0; the noise does
    ridge = max(RIDGE * math.sqrt(noise_variance * problem.features), _SMALLEST * float(eigenvalues.mean()))
    damped = eigenvalues + ridge
    inverse = np.divide(1.0, damped, out=np.zeros_like(damped), where=damped > 0)
    weights = (sums @ directions * inverse) @ directions.T
    return np.concatenate([weights.reshape(-1) / CLASS_WEIGHT, np.zeros(problem.classes if problem.offset else 0)])
