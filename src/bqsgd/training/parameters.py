"""A model's trainable parameters as one flat float32 vector, in the order of `model.parameters()`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bqsgd.errors import InvalidParameter, NonFiniteInput

Vector = npt.NDArray[np.float32]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and sent; at least one, all float32 on the CPU."""
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise InvalidParameter("the model has no trainable parameters")
    for parameter in found:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise InvalidParameter(
                f"parameters must be float32 on the CPU, got {parameter.dtype} on {parameter.device}"
            )
    return found


def dimension_of(model: nn.Module) -> int:
    """Number of trainable coordinates, d."""
    return sum(parameter.numel() for parameter in trainable(model))


def to_vector(model: nn.Module) -> Vector:
    """A copy of the trainable parameters."""
    parts = [parameter.detach().reshape(-1).numpy() for parameter in trainable(model)]
    return np.concatenate(parts)


def load_vector(model: nn.Module, vector: npt.ArrayLike) -> None:
    """Copy `vector` into the model's trainable parameters; wrong length, NaN and infinity are refused."""
    array = np.asarray(vector, dtype=np.float32)
    parameters = trainable(model)
    dimension = sum(parameter.numel() for parameter in parameters)
    if array.shape != (dimension,):
        raise InvalidParameter(f"the model takes a vector of {dimension} coordinates, got shape {array.shape}")
    if not bool(np.isfinite(array).all()):
        raise NonFiniteInput("the model vector holds NaN or infinity; lower the learning rate and resume")
    start = 0
    with torch.no_grad():
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.copy_(torch.from_numpy(array[start:stop].copy()).view_as(parameter))
            start = stop
