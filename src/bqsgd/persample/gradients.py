"""The mean of clipped per-sample gradients of an ordinary model: the input of the mechanism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.persample.capture import NoRule, capture
from bqsgd.persample.clipping import Slot, clipped_sum
from bqsgd.persample.clips import BatchMean, Clamp, Clip, Dual
from bqsgd.persample.factors import Dense, Factor
from bqsgd.persample.functional import LossFunction, check_losses, per_sample_gradients
from bqsgd.persample.rules import refuse_mixing


class SlowGradientsWarning(UserWarning):
    """A model without fast rules: the result is the same, the step slower."""


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
    if not isinstance(clip, Clip):
        raise InvalidParameter(f"clip must be Scale, Clamp, L2, Dual or BatchMean, got {clip!r}")
    inputs, targets = _check_batch(batch)
    check_int("batch_size", batch_size, 1, 2**53)
    refuse_mixing(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidParameter("model has no parameter that requires a gradient")
    bounds = _bounds(clip, len(parameters))
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    mean = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device)
    dropped = 0
    plain = isinstance(clip, BatchMean) and _mean_of_all(mean, parameters, model, loss_fn, inputs, targets, batch_size)
    if len(inputs) and not plain:
        try:
            factors = capture(model, loss_fn, inputs, targets, parameters)
        except NoRule as reason:
            warnings.warn(
                f"{reason}: per-sample gradients of this model go through torch.func, which is slower",
                SlowGradientsWarning,
                stacklevel=2,
            )
            dropped = _through_functional(mean, parameters, model, loss_fn, inputs, targets, clip, bounds, batch_size)
        else:
            with torch.no_grad():
                dropped = clipped_sum(_slots(mean, parameters, factors, bounds), clip, batch_size=batch_size)
    mean = mean.float()
    if isinstance(clip, BatchMean):
        if not all(math.isfinite(end) for end in mean.aminmax()):
            mean.zero_()  # the sum overflows float32. An error would depend on the data; zero is within the sensitivity
        mean.clamp_(-clip.bound, clip.bound)
    return ClippedGradients(mean, dropped)


def _mean_of_all(
    mean: Tensor,
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int,
) -> bool:
    """Fill `mean` by one ordinary backward; False, and zeros, if it is not finite: then samples must be told apart."""
    if not len(inputs):
        return True
    with torch.enable_grad():
        losses = check_losses(loss_fn(model(inputs), targets), len(inputs))
        if losses.grad_fn is None:
            raise InvalidParameter("the loss does not depend on a trainable parameter")
        found = torch.autograd.grad(losses, parameters, torch.full_like(losses, 1 / batch_size), allow_unused=True)
    start = 0
    for parameter, gradient in zip(parameters, found, strict=True):
        if gradient is not None:
            mean[start : start + parameter.numel()] = gradient.reshape(-1)
        start += parameter.numel()
    if all(math.isfinite(end) for end in mean.aminmax()):
        return True
    mean.zero_()
    return False


def _slots(
    flat: Tensor, parameters: list[nn.Parameter], factors: Sequence[Factor | None], bounds: Sequence[float]
) -> list[Slot]:
    """Each factor with its place in the flat sum; a parameter without a factor keeps its zeros."""
    slots, start = [], 0
    for parameter, factor, bound in zip(parameters, factors, bounds, strict=True):
        out = flat[start : start + parameter.numel()]
        start += parameter.numel()
        if factor is not None:
            slots.append(Slot(factor, out, bound))
    return slots


def _through_functional(
    mean: Tensor,
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    clip: Clip,
    bounds: Sequence[float],
    batch_size: int,
) -> int:
    """Add the clipped gradients to `mean`, a micro-batch at a time; returns the samples dropped."""
    part, dropped = torch.empty_like(mean), 0
    for gradients in per_sample_gradients(model, loss_fn, inputs, targets):
        with torch.no_grad():
            factors = [Dense(gradient.to(mean.dtype)) for gradient in gradients]
            dropped += clipped_sum(_slots(part, parameters, factors, bounds), clip, batch_size=batch_size)
            mean += part
    return dropped


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
