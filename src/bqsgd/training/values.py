"""What a message carries, computed once its round is counted: from here on there is a vector whatever the data are.

A peer sees whether an answer comes and of what kind. After the spend neither may depend on the data: a sample whose
gradient is not finite, or that makes the model or the loss raise an error, counts as zero, and so does a client's whole
update. Only what follows from the model and the settings is refused, and that before the spend (`check_model`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.persample import clipped_gradients
from bqsgd.persample.clips import L2, Clamp, Clip
from bqsgd.persample.functional import LossFunction
from bqsgd.release import Unit
from bqsgd.training.local import local_update
from bqsgd.training.parameters import dimension_of, trainable

Values = npt.NDArray[np.float32]
_TRIAL_ROWS = 2
_GRID = 2.0**-30
"""Of the clip's bound: samples taken one at a time are cut to this grid and added as integers, which is exact."""


def check_model(model: nn.Module, loss: LossFunction, batch: tuple[Tensor, Tensor], *, clip: Clip, unit: Unit) -> None:
    """Run model and loss on rows of zeros shaped like `batch`: what raises here is no matter of the data.

    Nothing of the data is read but its shape, and nothing is left behind: buffers and torch's generator are put back.
    """
    x, y = (torch.zeros((_TRIAL_ROWS, *rows.shape[1:]), dtype=rows.dtype, device=rows.device) for rows in batch)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[]):
        if unit is Unit.CLIENT:
            torch.autograd.grad(loss(model(x), y).mean(), trainable(model), allow_unused=True)
        else:
            clipped_gradients(model, loss, (x, y), clip=clip, batch_size=1)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def sample_values(
    model: nn.Module, loss: LossFunction, batch: tuple[Tensor, Tensor], *, clip: Clip, batch_size: int
) -> tuple[Values, int]:
    """The mean of the clipped gradients over the public batch size, and how many samples count as zero.

    The number depends on the data: keep it on the client.
    """
    try:
        clipped = clipped_gradients(model, loss, batch, clip=clip, batch_size=batch_size)
        mean = clipped.mean.cpu().numpy()
        if bool(np.isfinite(mean).all()):
            return mean, clipped.dropped
    except Exception:
        pass  # one sample's doing: the others must count all the same, or it would move the mean by more than its share
    return _one_by_one(model, loss, batch, clip=clip, batch_size=batch_size)


def _one_by_one(
    model: nn.Module, loss: LossFunction, batch: tuple[Tensor, Tensor], *, clip: Clip, batch_size: int
) -> tuple[Values, int]:
    """The same mean from each sample alone. Cutting towards zero keeps every bound of the clip."""
    step = _reach(clip) * _GRID
    total, dropped = np.zeros(dimension_of(model), np.int64), 0
    for row in range(len(batch[0])):
        one = (batch[0][row : row + 1], batch[1][row : row + 1])
        try:
            alone = clipped_gradients(model, loss, one, clip=clip, batch_size=1)
            values = alone.mean.double().cpu().numpy()
            lost = alone.dropped or not bool(np.isfinite(values).all())
        except Exception:
            lost = 1
        if lost:
            dropped += 1
        else:
            total += np.trunc(values / step).astype(np.int64)
    return (total * (step / batch_size)).astype(np.float32), dropped


def client_values(
    model: nn.Module,
    loss: LossFunction,
    draw: Callable[[], tuple[Tensor, Tensor]],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
) -> Values:
    """The clipped update after several local steps; zero when the steps cannot be made."""
    try:
        return local_update(model, loss, draw, steps=steps, learning_rate=learning_rate, clip=clip)
    except Exception:
        return np.zeros(dimension_of(model), np.float32)


def _reach(clip: Clip) -> float:
    """The largest coordinate that the clip lets through."""
    match clip:
        case L2(norm=norm):
            return norm
        case Clamp(bound=tuple(bounds)):
            return max(bounds)
        case _:
            return float(clip.bound)  # type: ignore[arg-type]
