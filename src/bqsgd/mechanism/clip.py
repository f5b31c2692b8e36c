"""The two clips of a flat vector to |x_j| <= C_j: scaling (paper Eq. 6) and the element-wise clamp.

Both are exact in the vector's own dtype: where C has no float32 of its own, the bound is the float32 just below it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bqsgd.errors import InvalidParameter
from bqsgd.mechanism.vector import Vector, as_vector, check_finite
from bqsgd.params import Clip, check_clip


def scale(values: Any, clip: Clip) -> Vector:
    """Shrink the whole vector until its largest |x_j| / C_j is 1 (paper Eq. 6): x / max(1, max_j |x_j| / C_j).

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.
        InvalidParameter: the clip is so small that |x_j| / C_j overflows.

    >>> scale(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -0.5]
    """
    vector = as_vector(values)
    check_finite(vector)
    clip = check_clip(clip, vector.size)
    with np.errstate(over="ignore"):
        excess = float(np.max(np.abs(vector.astype(np.float64)) / clip))
    if not excess > 1:
        return vector.copy()
    if not math.isfinite(excess):
        raise InvalidParameter("the largest |x_j| / C_j overflows: the clip is too small for these values")
    shrunk = (vector / np.float64(excess)).astype(vector.dtype)
    return _project(shrunk, clip)


def clamp(values: Any, clip: Clip) -> Vector:
    """Project every coordinate on its own onto [-C_j, C_j].

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.

    >>> clamp(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -1.0]
    """
    vector = as_vector(values)
    check_finite(vector)
    return _project(vector, check_clip(clip, vector.size))


def _project(vector: Vector, clip: Clip) -> Vector:
    exact = np.asarray(clip, dtype=np.float64)
    nearest = exact.astype(vector.dtype)
    # Compared in float64: beside a float32 array NumPy would round a Python float to float32 first.
    above = nearest.astype(np.float64) > exact
    bound = np.where(above, np.nextafter(nearest, np.zeros_like(nearest)), nearest)
    return np.clip(vector, -bound, bound)
