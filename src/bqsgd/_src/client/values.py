"""The clipped update of a whole client: several local steps, made on a copy of the model, and one clip at the end.

Once a round is recorded there is an update whatever the data are. If the steps fail, it is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd._src.models import dimension_of, to_vector, trainable
from bqsgd._src.persample.clips import Clip
from bqsgd._src.runtime.interrupts import errors_dropped
from bqsgd._src.subset import Subset

Values = npt.NDArray[np.floating]


def client_values(
    model: nn.Module,
    mean_loss: Callable[[nn.Module], Tensor | None],
    *,
    steps: int,
    learning_rate: float,
    clip: Clip,
    subset: Subset | None = None,
) -> Values:
    """The clipped difference (received model - model after `steps` steps of SGD): a step for the server to subtract.

    The steps are made on a copy: whatever they and the forward leave there (parameters, frozen ones too, buffers,
    attributes) goes with it, and only the clipped update is released. The update is zero if the steps fail.

    subset: the coordinates of the update that are kept, and clipped; None for all.
    mean_loss: draws a batch and returns its mean loss with the model it is given, None for an empty batch.
    """
    with errors_dropped():
        working = copy.deepcopy(model)
        received, parameters = to_vector(working), trainable(working)
        for _ in range(steps):
            loss = mean_loss(working)
            if loss is None:
                continue
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(gradient, alpha=learning_rate)
        with np.errstate(over="ignore", invalid="ignore"):
            update = received - to_vector(working)
            return clip_update(
                update if subset is None else subset.keep(update),
                clip,
                [each.numel() for each in parameters] if subset is None else subset.counts,
            )
    return np.zeros(dimension_of(model) if subset is None else len(subset.places), np.float32)


def clip_update(update: npt.NDArray[np.floating], clip: Clip, sizes: Sequence[int] = ()) -> npt.NDArray[np.float64]:
    """One vector within the clip's bounds, whatever it was; zero if it was not finite.

    sizes: coordinates of each parameter tensor, for a clip that bounds each of them.

    It stays in float64: most bounds are no float32, and a coordinate at its bound could be rounded beyond it.

    >>> from bqsgd._src.persample.clips import L2
    >>> clip_update(np.array([3.0, -4.0], dtype=np.float32), L2(norm=1.0)).round(2).tolist()
    [0.6, -0.8]
    """
    # A copy: whoever holds the update may go on writing to it, and must not write to what was clipped.
    values = np.array(update, dtype=np.float64)
    if not bool(np.isfinite(values).all()):
        values = np.zeros_like(values)  # an error would tell the server something about the data, without noise
    return clip.clipped(values, sizes)
