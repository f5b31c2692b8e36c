"""The mean of clipped per-sample gradients of an ordinary model: the input of the mechanism."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.persample._kernels.grid import MOST_COORDINATES, MOST_SAMPLES, SHRINK, Grid
from bqsgd.persample._kernels.loops import in_lanes, usable
from bqsgd.persample.capture import NoRule, capture, capture_row_wise, loss_errors, working
from bqsgd.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Scale
from bqsgd.persample.factors import Dense, Factor, micro_batch
from bqsgd.persample.functional import LossFunction, check_losses, per_sample_gradients
from bqsgd.persample.rows import (
    Chunk,
    Numbers,
    check_numbers,
    loss_rows_for,
    packed_rows_for,
    pass_rows_for,
    passes,
    plan_chunks,
)
from bqsgd.persample.rowwise import NotRowWise
from bqsgd.persample.rules import refuse_mixing

GROUP_SAMPLES = 1024
"""Samples whose layers' inputs and errors are held at once."""


class SlowGradientsWarning(UserWarning):
    """A model without fast rules: the result is the same, the step slower."""


class ClippedGradients(NamedTuple):
    """What one batch gives.

    mean: flat float64 sum of the clipped per-sample gradients over the public batch size, in the order of
        `model.parameters()` (those that require a gradient).
    dropped: samples whose gradient held NaN or infinity, or could overflow. They count as zero in `mean`. The number
        depends on the data: keep it on the client.
    """

    mean: Tensor
    dropped: int


def clipped_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    indices: Numbers | None,
    clip: Clip,
    batch_size: int,
) -> ClippedGradients:
    """Eq. (7): (1/L) sum over the batch of the clipped gradient of each sample, with L the *public* batch size.

    What a sample adds is, to the last bit, a function of the sample, its index, the model and the settings, and the sum
    is exact: one sample more or less moves the mean by that sample's own clipped gradient and nothing else.

    Args:
        model: an ordinary module whose forward treats the samples of a batch apart. Left as it was: no attribute, hook
            or `.grad` remains, and the parameters are not touched.
        loss_fn: (outputs, targets) -> one loss per sample, e.g. `nn.CrossEntropyLoss(reduction="none")`.
        batch: (inputs, targets), the batch dimension first. May be empty (a Poisson batch): the mean is then zero.
        indices: the number of each sample in the client's data, the same in every batch it is drawn for. It decides the
            row in which the sample goes through a model that is not made of row-wise operations, and through the loss.
            None packs the samples as they come; the claim then rests on the assumption that the kernels of this machine
            give a row the same result in every place of a batch of one shape. `check_samples_apart(packed=True)` tries
            it, nothing proves it.
        clip: `Scale`, `Clamp`, `L2`, `Dual` or `BatchMean`; `clip.sensitivity(batch_size=L)` belongs to the result.
        batch_size: L, fixed in advance; not the number of samples that happen to be in the batch.

    Raises:
        InvalidParameter: a layer mixes samples (BatchNorm), the loss is reduced, or an argument is out of place.
    """
    if not isinstance(clip, Clip):
        raise InvalidParameter(f"clip must be Scale, Clamp, L2, Dual or BatchMean, got {clip!r}")
    inputs, targets = _check_batch(batch)
    check_int("batch_size", batch_size, 1, 2**53)
    check_int("samples in the batch", len(inputs), 0, MOST_SAMPLES)
    refuse_mixing(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise InvalidParameter("model has no parameter that requires a gradient")
    if isinstance(clip, BatchMean):
        return _batch_mean(parameters, model, loss_fn, inputs, targets, clip, batch_size)
    found = places(clip, [parameter.numel() for parameter in parameters])
    dimension, dropped = check_int("trainable coordinates", found[-1].span.stop, 1, MOST_COORDINATES), 0
    steps: Tensor | None = None
    for factors in _groups(parameters, model, loss_fn, inputs, targets, indices, batch_size):
        with torch.no_grad():
            part = torch.empty(dimension, dtype=torch.float64)
            dropped += clipped_steps(factors, found, clip, part)
            steps = part if steps is None else steps.add_(part)  # whole numbers: exact
    mean = torch.zeros(dimension, dtype=torch.float64) if steps is None else steps
    for place in found:
        mean[place.span].div_(batch_size / place.grid.step)  # the divisor is exact, the quotient rounded once
    return ClippedGradients(mean.to(parameters[0].device), dropped)


def _groups(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    indices: Numbers | None,
    batch_size: int,
) -> Iterator[list[Factor | None]]:
    """The per-sample gradients of each parameter, some hundred samples at a time."""
    gathered: list[list[Factor | None]] = []
    samples = 0
    for count, factors in _passes(parameters, model, loss_fn, inputs, targets, indices, batch_size):
        gathered.append(factors)
        samples += count
        if samples >= GROUP_SAMPLES:
            yield _joined(gathered)
            gathered, samples = [], 0
    if gathered:
        yield _joined(gathered)


def _passes(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    indices: Numbers | None,
    batch_size: int,
) -> Iterator[tuple[int, list[Factor | None]]]:
    """How many samples went through the model in one pass, and their gradients: by row-wise operations, else in rows of
    their own, else by `torch.func`. The first pass decides for all."""
    numbers = None if indices is None else check_numbers(indices, len(inputs))
    batch = (parameters, model, loss_fn, inputs, targets, numbers, batch_size)
    roads = [_row_wise, _in_own_rows, _by_torch_func]
    while roads:
        found = roads.pop(0)(*batch)
        try:
            first = next(found, None)
        except NotRowWise:
            continue
        except NoRule as reason:
            warnings.warn(
                f"{reason}: per-sample gradients of this model go through torch.func, which is slower",
                SlowGradientsWarning,
                stacklevel=5,
            )
            roads = [_by_torch_func]
            continue
        try:
            if first is not None:
                yield first
            yield from found
        except (NotRowWise, NoRule) as reason:
            raise InvalidParameter(f"the model does not run the same operations in every pass: {reason}") from reason
        return


def _row_wise(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    numbers: npt.NDArray[np.int64] | None,
    batch_size: int,
) -> Iterator[tuple[int, list[Factor | None]]]:
    rows = packed_rows_for(batch_size)
    for chunk in plan_chunks(len(inputs), None, rows):
        start, live = int(chunk.members[0]), len(chunk.members)  # rows as they come: neighbours
        x, y = inputs[start : start + live], targets[start : start + live]
        if not usable(x):
            raise NotRowWise("the compiled loops take float32 on the CPU")
        own = None if numbers is None else numbers[start : start + live]
        errors_at = partial(errors_of_losses, loss_fn, y, own)
        factors = capture_row_wise(model, in_lanes(x, rows), parameters, errors_at, live=live)
        yield GROUP_SAMPLES, _kept(factors, chunk)


def _in_own_rows(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    numbers: npt.NDArray[np.int64] | None,
    batch_size: int,
) -> Iterator[tuple[int, list[Factor | None]]]:
    rows = pass_rows_for(batch_size, packed=numbers is None)
    for chunk, x, y in passes(inputs, targets, plan_chunks(len(inputs), numbers, rows), rows):
        yield len(chunk.rows), _kept(capture(model, loss_fn, x, y, parameters), chunk)


def _by_torch_func(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    numbers: npt.NDArray[np.int64] | None,
    batch_size: int,
) -> Iterator[tuple[int, list[Factor | None]]]:
    most = micro_batch(sum(parameter.numel() for parameter in parameters))
    rows = min(pass_rows_for(batch_size, packed=numbers is None), most)
    chunks = plan_chunks(len(inputs), numbers, rows)
    laid_out = passes(inputs, targets, chunks, rows)
    gradients = per_sample_gradients(model, loss_fn, ((x, y) for _, x, y in laid_out))
    for chunk, each in zip(chunks, gradients, strict=True):
        yield GROUP_SAMPLES, [Dense(working(gradient)).take(chunk.rows) for gradient in each]


def errors_of_losses(
    loss_fn: LossFunction, targets: Tensor, numbers: npt.NDArray[np.int64] | None, outputs: Tensor
) -> Tensor:
    """The errors at the outputs of the first len(targets) rows, zeros for the others.

    A loss is any function, so each sample has a row of its own here, which follows from its number.
    """
    found = torch.zeros_like(outputs)
    rows = loss_rows_for(outputs[0].numel())
    chunks = plan_chunks(len(targets), numbers, rows)
    for chunk, z, y in passes(outputs[: len(targets)], targets, chunks, rows):
        found[chunk.members] = loss_errors(loss_fn, z, y)[chunk.rows]
    return found


def _kept(factors: list[Factor | None], chunk: Chunk) -> list[Factor | None]:
    with torch.no_grad():
        return [None if factor is None else factor.kept(chunk.rows) for factor in factors]


def _joined(gathered: list[list[Factor | None]]) -> list[Factor | None]:
    if len(gathered) == 1:
        return gathered[0]
    with torch.no_grad():
        return [
            None if first is None else first.joined([chunk[n] for chunk in gathered[1:]])
            for n, first in enumerate(gathered[0])
        ]


def _batch_mean(
    parameters: list[nn.Parameter],
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Tensor,
    targets: Tensor,
    clip: BatchMean,
    batch_size: int,
) -> ClippedGradients:
    """The mean of unclipped gradients, clamped: one record can move it across the whole range whatever is rounded."""
    mean = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=parameters[0].device)
    dropped = 0
    if not _mean_of_all(mean, parameters, model, loss_fn, inputs, targets, batch_size):
        for factors in _groups(parameters, model, loss_fn, inputs, targets, None, batch_size):
            with torch.no_grad():
                finite = provably_finite([factor for factor in factors if factor is not None])
                dropped += int((~finite).sum())
                for sample in finite.nonzero().flatten():
                    start = 0
                    for parameter, factor in zip(parameters, factors, strict=True):
                        if factor is not None:
                            own = factor.materialise(sample.reshape(1))[0]
                            mean[start : start + parameter.numel()] += own.double() / batch_size
                        start += parameter.numel()
    return ClippedGradients(mean.clamp_(-clip.bound, clip.bound), dropped)


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


def _check_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and all(isinstance(t, Tensor) for t in batch)):
        raise InvalidParameter(f"batch must be a pair of tensors (inputs, targets), got {type(batch).__name__}")
    inputs, targets = batch
    if inputs.dim() == 0 or targets.dim() == 0 or len(inputs) != len(targets):
        raise InvalidParameter(
            f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)} must have the same batch dimension first"
        )
    return inputs, targets


LARGEST = 2.0**126
"""A gradient whose bound is beyond this may overflow float32 on the way: it is dropped whole."""


@dataclass(frozen=True)
class Place:
    """One parameter tensor: its place in the flat sum, and the grid of its coordinates."""

    span: slice
    grid: Grid


def places(clip: Clip, sizes: Sequence[int]) -> list[Place]:
    """Where each parameter tensor lies and what its coordinates are bounded by after the clip."""
    match clip:
        case Clamp():
            bounds = clip.bounds(len(sizes))
        case Dual(norm=norm, bound=bound):
            bounds = (min(norm, bound),) * len(sizes)
        case L2(norm=bound) | Scale(bound=bound) | BatchMean(bound=bound):
            bounds = (bound,) * len(sizes)
    found, start = [], 0
    for size, bound in zip(sizes, bounds, strict=True):
        found.append(Place(slice(start, start + size), Grid(bound)))
        start += size
    return found


def provably_finite(factors: Sequence[Factor]) -> Tensor:
    """(batch,) which samples have a gradient that cannot overflow in any parameter; NaN and infinity show as False."""
    return torch.stack([factor.bounds().cpu() <= LARGEST for factor in factors]).all(dim=0)


def clipped_steps(factors: Sequence[Factor | None], places: Sequence[Place], clip: Clip, steps: Tensor) -> int:
    """Fill `steps` with sum_b clip(g_b) in whole steps of each place's grid; return how many samples were dropped.

    All of it sample by sample: what a sample adds is a function of its own gradient. A parameter without a factor gets
    zeros.
    """
    used = [(factor, place) for factor, place in zip(factors, places, strict=True) if factor is not None]
    if len(used) < len(places):
        steps.zero_()
    if not used:
        return 0
    finite = provably_finite([factor for factor, _ in used])
    dropped = int((~finite).sum())
    if dropped == len(finite):
        steps.zero_()
        return dropped
    if dropped:  # taken out, not weighted by zero: 0 * inf is NaN
        index = finite.nonzero().flatten()
        used = [(factor.take(index), place) for factor, place in used]
    coordinates = places[-1].span.stop
    weights = _weights([factor for factor, _ in used], clip, places[0].grid, coordinates, len(finite) - dropped)
    for factor, place in used:
        bound = clip.bound if isinstance(clip, Dual) else place.grid.bound if isinstance(clip, Clamp) else None
        factor.steps(place.grid, weights, steps[place.span], bound=bound)
    return dropped


def _weights(factors: Sequence[Factor], clip: Clip, grid: Grid, coordinates: int, batch: int) -> Tensor:
    """(batch,) float64 factor of each sample, at most 1; sums over parameters one after another, as IEEE has them."""
    ones = torch.ones(batch, dtype=torch.float64)
    match clip:
        case Clamp() | BatchMean():
            return ones
        case Scale(bound=bound):
            norms = torch.stack([factor.max_norms().cpu() for factor in factors]).amax(dim=0)
            reach = bound * (1 - SHRINK)
        case L2(norm=norm):
            norms = _norms(factors, None)
            reach = grid.norm_reach(norm, coordinates)
        case Dual(norm=norm, bound=bound):
            norms = _norms(factors, bound)
            reach = grid.norm_reach(norm, coordinates)
    return torch.where(norms <= reach, ones, reach / norms)


def _norms(factors: Sequence[Factor], bound: float | None) -> Tensor:
    total = factors[0].squared_norms(bound)
    for factor in factors[1:]:
        total = total + factor.squared_norms(bound)
    return total.sqrt()
