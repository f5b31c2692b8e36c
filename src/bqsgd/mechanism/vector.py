"""Flat float vectors as the mechanism reads them: NumPy arrays and CPU tensors, never copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput

Vector = npt.NDArray[Any]
"""A flat float32 or float64 array (which of the two is checked by `as_vector`)."""


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
    view.flags.writeable = False  # one kernel signature whatever the caller's array allows
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
