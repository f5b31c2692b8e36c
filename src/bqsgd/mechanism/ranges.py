"""Vectors and the encoder's range: what the mechanism can read, and two ways into |x_j| <= C_j.

Vectors are flat NumPy arrays or CPU tensors, never copied. Scaling (paper Eq. 6) and the element-wise clamp are exact
in the vector's own dtype: where C has no float32 of its own, the bound is the float32 just below it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import Range, check_range

Vector = npt.NDArray[Any]
"""A flat float32 or float64 array (`as_vector` checks that it is one of the two)."""


def as_vector(values: Any, name: str = "values") -> Vector:
    """A read-only view of a flat float32 or float64 array or CPU tensor; anything that would need a copy is refused.

    Tensors are read through DLPack, so that no tensor library is imported here.

    Raises:
        InvalidParameter: another type, dtype, number of dimensions, memory layout or device, or no coordinate at all.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidParameter(f"{name} must not be a masked array: its mask would be lost; fill it first")
    array = values if isinstance(values, np.ndarray) else _from_tensor(values, name)
    if array.dtype not in (np.float32, np.float64) or not array.dtype.isnative:
        raise InvalidParameter(f"{name} must be float32 or float64 in native byte order, got {array.dtype}")
    if array.ndim != 1 or array.size == 0:
        raise InvalidParameter(f"{name} must be 1-D with at least one coordinate, got shape {array.shape}; flatten it")
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise InvalidParameter(f"{name} must be contiguous and aligned, got strides {array.strides}; copy it first")
    view = array.view(np.ndarray)
    view.flags.writeable = False  # one kernel signature, whether or not the caller's array is writeable
    return view


def _from_tensor(values: Any, name: str) -> npt.NDArray[Any]:
    if not hasattr(values, "__dlpack__"):
        raise InvalidParameter(f"{name} must be a NumPy array or a CPU tensor, got {type(values).__name__}")
    if hasattr(values, "is_neg") and values.is_neg():
        raise InvalidParameter(f"{name} is a lazily negated tensor: its memory holds other signs; resolve_neg() it")
    try:
        return np.from_dlpack(values.detach() if hasattr(values, "detach") else values)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidParameter(f"{name} cannot be read in place ({error}); move it to the CPU as float32") from error


def check_finite(vector: Vector, name: str = "values") -> None:
    """Raise NonFiniteInput naming the first NaN or infinity."""
    finite = np.isfinite(vector)
    if not finite.all():
        j = int(np.argmin(finite))
        raise NonFiniteInput(f"{name}[{j}] is {vector[j]}: NaN and infinity are refused, drop or repair them first")


def scale(values: Any, range: Range) -> Vector:
    """Shrink the whole vector until its largest |x_j| / C_j is 1 (paper Eq. 6): x / max(1, max_j |x_j| / C_j).

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.
        InvalidParameter: the range is so small that |x_j| / C_j overflows.

    >>> scale(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -0.5]
    """
    vector = as_vector(values)
    check_finite(vector)
    range = check_range(range, vector.size)
    with np.errstate(over="ignore"):
        excess = float(np.max(np.abs(vector.astype(np.float64)) / range))
    if not excess > 1:
        return vector.copy()
    if not math.isfinite(excess):
        raise InvalidParameter("the largest |x_j| / C_j overflows: the range is too small for these values")
    shrunk = (vector / np.float64(excess)).astype(vector.dtype)
    return _project(shrunk, range)


def clamp(values: Any, range: Range) -> Vector:
    """Project every coordinate on its own onto [-C_j, C_j].

    Raises:
        NonFiniteInput: a coordinate is NaN or infinite.

    >>> clamp(np.array([3.0, -1.0]), 1.5).tolist()
    [1.5, -1.0]
    """
    vector = as_vector(values)
    check_finite(vector)
    return _project(vector, check_range(range, vector.size))


def _project(vector: Vector, range: Range) -> Vector:
    exact = np.asarray(range, dtype=np.float64)
    nearest = exact.astype(vector.dtype)
    # Compared in float64: beside a float32 array NumPy would round a Python float to float32 first.
    above = nearest.astype(np.float64) > exact
    bound = np.where(above, np.nextafter(nearest, np.zeros_like(nearest)), nearest)
    return np.clip(vector, -bound, bound)
