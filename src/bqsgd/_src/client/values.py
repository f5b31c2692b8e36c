"""The clipped update of a whole client: several local steps, made on a copy of the model, and one clip at the end.

Once a round is recorded there is an update whatever the data are: where the steps cannot be made it is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd._src.models import dimension_of, to_vector, trainable
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.persample.clips import Clip
from bqsgd._src.runtime.interrupts import StopNow

Values = npt.NDArray[np.floating]


def client_values(
    model: nn.Module,
    mean_loss: Callable[[nn.Module], Tensor | None],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
) -> Values:
    """The clipped update after several local steps; zero when the steps cannot be made.

    The steps are made on a copy: whatever they and the forward leave there (parameters, frozen ones too, buffers,
    attributes) goes with it, and nothing of it is released but the clipped update.
    """
    try:
        own = copy.deepcopy(model)
        return _local_update(own, mean_loss, steps=steps, learning_rate=learning_rate, clip=clip)
    except StopNow:
        raise
    except BaseException:  # a SystemExit that a record raises is no reason to end, either
        return np.zeros(dimension_of(model), np.float32)


def _local_update(
    model: nn.Module,
    mean_loss: Callable[[nn.Module], Tensor | None],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
) -> npt.NDArray[np.float32]:
    """The clipped difference (received model - model after `steps` steps of SGD): a step for the server to subtract.

    mean_loss: draws a batch and gives its mean loss with the model it is given, None for an empty one.
    """
    check_int("steps", steps, 1, 2**31)
    check_positive("learning_rate", learning_rate)
    received = to_vector(model)
    parameters = trainable(model)
    for _ in range(steps):
        loss = mean_loss(model)
        if loss is None:
            continue
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=learning_rate)
    with np.errstate(over="ignore", invalid="ignore"):
        return clip_update(received - to_vector(model), clip)


def clip_update(update: npt.NDArray[np.float32], clip: Clip) -> npt.NDArray[np.float32]:
    """One vector within the clip's bounds, whatever it was; zero if it was not finite.

    >>> from bqsgd._src.persample.clips import L2
    >>> clip_update(np.array([3.0, -4.0], dtype=np.float32), L2(norm=1.0)).round(2).tolist()
    [0.6000000238418579, -0.800000011920929]
    """
    values = np.asarray(update, dtype=np.float64)
    if not bool(np.isfinite(values).all()):
        values = np.zeros_like(values)  # an error would tell the server something of the data, without noise
    return clip.clipped(values).astype(np.float32)
