"""The mean of clipped per-sample gradients of an ordinary model: the input of the mechanism."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter, NonFiniteInput
from bqsgd.params import check_int
from bqsgd.persample.clipping import Slot, clipped_sum
from bqsgd.persample.clips import BatchMean, Clamp, Clip, Dual
from bqsgd.persample.factors import Dense
from bqsgd.persample.functional import LossFunction, per_sample_gradients


class ClippedGradients(NamedTuple):
    """What one batch gives.

    mean: flat float32 sum of the clipped per-sample gradients over the public batch size, in the order of
        `model.parameters()` (those that require a gradient).
    dropped: samples whose gradient held NaN or infinity. They count as zero in `mean`. The number depends on the data:
        keep it on the client.
    """

    mean: Tensor
    dropped: int


def clipped_gradients(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, Tensor], *, clip: Clip, batch_size: int
) -> ClippedGradients:
    """Eq. (7): (1/L) sum over the batch of the clipped gradient of each sample, with L the *public* batch size.

    Args:
        model: an ordinary module whose forward treats the samples of a batch apart. Left as it was: no attribute, hook
            or `.grad` remains, and the parameters are not touched.
        loss_fn: (outputs, targets) -> one loss a sample, e.g. `nn.CrossEntropyLoss(reduction="none")`.
        batch: (inputs, targets), the batch dimension first. May be empty (a Poisson batch): the mean is then zero.
        clip: `Scale`, `Clamp`, `L2`, `Dual` or `BatchMean`; `clip.sensitivity(batch_size=L)` belongs to the result.
        batch_size: L, fixed in advance; not the number of samples that happen to be in the batch.

    Raises:
        InvalidParameter: a layer mixes samples (BatchNorm), the loss is reduced, or an argument is out of place.
    """
    inputs, targets = _check_batch(batch)
    check_int("batch_size", batch_size, 1, 2**53)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidParameter("model has no parameter that requires a gradient")
    bounds = _bounds(clip, len(parameters))
    sizes = [parameter.numel() for parameter in parameters]
    mean = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    dropped = 0
    if len(inputs):
        part = torch.empty_like(mean)
        outs = part.split(sizes)
        for gradients in per_sample_gradients(model, loss_fn, inputs, targets):
            slots = [Slot(Dense(g), out, bound) for g, out, bound in zip(gradients, outs, bounds, strict=True)]
            dropped += clipped_sum(slots, clip, batch_size=batch_size)
            mean += part
    mean = mean.float()
    if isinstance(clip, BatchMean):
        if not bool(torch.isfinite(mean).all()):
            raise NonFiniteInput("the sum of the unclipped gradients overflows float32; lower the loss scale")
        mean.clamp_(-clip.bound, clip.bound)
    return ClippedGradients(mean, dropped)


def _check_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
        raise InvalidParameter(f"batch must be a pair of tensors (inputs, targets), got {type(batch).__name__}")
    inputs, targets = batch
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
        raise InvalidParameter(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} must have the same batch dimension first"
        )
    return inputs, targets


def _bounds(clip: Clip, count: int) -> tuple[float, ...]:
    """One coordinate bound a parameter tensor; infinity where the clip has none."""
    match clip:
        case Clamp():
            return clip.bounds(count)
        case Dual():
            return (clip.bound,) * count
        case _:
            return (float("inf"),) * count
