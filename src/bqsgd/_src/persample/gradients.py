"""The mean of clipped per-sample gradients of an ordinary model: the input of the mechanism."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import device_of
from bqsgd._src.params import check_int
from bqsgd._src.persample._kernels.grid import MOST_COORDINATES, MOST_SAMPLES
from bqsgd._src.persample._kernels.loops import Steps
from bqsgd._src.persample.alone import AloneRoad
from bqsgd._src.persample.clips import BatchMean, Clip, Place, places
from bqsgd._src.persample.device import DeviceSteps, check_device, on_device
from bqsgd._src.persample.factors import Factor, Piece, by_layer, parts_of
from bqsgd._src.persample.kept import kept_parts
from bqsgd._src.persample.lanes import LanesRoad
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form, Forward, LossFunction, NotTraceable, Program, Whole, program_of
from bqsgd._src.persample.rows import NotRows, RowsRoad
from bqsgd._src.persample.rules import NotLanes
from bqsgd._src.runtime.generators import alone
from bqsgd._src.runtime.modes import Autocast, full_precision
from bqsgd._src.subset import Subset


class SlowGradientsWarning(UserWarning):
    """A model whose samples are run one at a time: the result is the same, the step slower."""


class ClippedGradients(NamedTuple):
    """What one batch gives.

    mean: flat float64 sum of the clipped per-sample gradients over the public batch size, in the order of
        `model.parameters()` (those that require a gradient).
    dropped: samples whose gradient held NaN or infinity or could overflow, or that made the program raise an error.
        They count as zero in `mean`. The number depends on the data: keep it on the client.
    """

    mean: Tensor
    dropped: int


def clipped_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    *,
    clip: Clip,
    batch_size: int,
    forward: Forward | None = None,
    packed: bool = False,
    subset: Subset | None = None,
    autocast: Autocast | None = None,
) -> ClippedGradients:
    """Eq. (7): (1/L) sum over the batch of the clipped gradient of each sample, with L the *public* batch size.

    What a sample adds is, to the last bit, a function of the sample, the model and the settings, and the sum is exact:
    one sample more or less moves the mean by that sample's own clipped gradient and nothing else.

    Args:
        model: an ordinary module. It sees one made-up sample when its program is traced, never a batch, and is left as
            it was: no attribute, hook or `.grad` remains.
        loss_fn: (outputs, targets) -> one loss per sample, e.g. `nn.CrossEntropyLoss(reduction="none")`.
        batch: (inputs..., targets), or any structure of tensors that `forward` takes, the sample dimension first in
            all of them. May be empty (a Poisson batch): the mean is then zero.
        clip: one of `bqsgd.clips`; `clip.sensitivity(batch_size=L)` belongs to the result.
        batch_size: L, fixed in advance; not the number of samples that happen to be in the batch.
        forward: (model, batch) -> (outputs, targets), where a batch is not (inputs..., targets).
        packed: run several samples in a pass of torch's kernels, if the model needs those at all. The claim then rests
            on the assumption that the kernels of this machine give a row the same result in every place of a pass.
        subset: the coordinates that are kept; the clip bounds the kept part of each sample, and the mean holds no
            other coordinates.
        autocast: the mode in which forward and loss run; by default that of `torch.autocast` around this call. The
            casts become a part of one sample's program. Clip and sum are not affected.

    The gradients are computed, clipped and added up on the device of the model, to which the batch is copied; the sum
    comes to the processor.

    Raises:
        InvalidParameter: a layer mixes samples (BatchNorm), the loss is reduced, or an argument is out of place.
    """
    if not isinstance(clip, Clip):
        raise InvalidParameter(f"clip must be one of bqsgd.clips, such as L2(1.0), got {clip!r}")
    device = device_of(model)
    leaves = [leaf.to(device) for leaf in _check_batch(batch)]
    check_int("batch_size", batch_size, 1, 2**53)
    check_int("samples in the batch", len(leaves[0]), 0, MOST_SAMPLES)
    autocast = Autocast.now(device.type) if autocast is None else autocast
    form, whole = Form.of(batch, device), Whole(model, loss_fn, forward, autocast)
    road = road_of(model, loss_fn, forward, form, batch_size=batch_size, packed=packed, autocast=autocast)
    sizes = [value.numel() for value in whole.tensors()[0].values()]
    if subset is not None and list(np.diff(subset.subsets.starts)) != sizes:
        raise InvalidParameter("the subset is one of another model's coordinates")
    found = places(clip, sizes if subset is None else subset.counts)
    check_int("trainable coordinates", found[-1].span.stop, 1, MOST_COORDINATES)
    with full_precision():
        passes = road.passes(whole, leaves)
        if on_device(device):
            return _on_device(passes, DeviceSteps(clip, found, device, subset), clip, batch_size, found)
        if subset is not None:
            double = any(value.dtype == torch.float64 for value in whole.tensors()[0].values())
            passes = _kept(passes, subset, double)
        return _on_processor(passes, found, clip, batch_size)


def _on_processor(
    passes: Iterator[tuple[int, int, list[Piece]]], found: Sequence[Place], clip: Clip, batch_size: int
) -> ClippedGradients:
    if isinstance(clip, BatchMean):
        return _batch_mean(passes, found, clip, batch_size)
    total, dropped = Steps(found[-1].span.stop), 0
    with torch.no_grad():
        for _, lost, pieces in passes:
            dropped += lost + clipped_steps(pieces, found, total)
    return ClippedGradients(_divided(total.total(), found, batch_size), dropped)


def _divided(steps: Tensor, found: Sequence[Place], batch_size: int) -> Tensor:
    for place in found:
        steps[place.span].div_(batch_size / place.layer.grid.step)  # the divisor is exact, the quotient rounded once
    return steps


def _on_device(
    passes: Iterator[tuple[int, int, list[Piece]]],
    total: DeviceSteps,
    clip: Clip,
    batch_size: int,
    found: Sequence[Place],
) -> ClippedGradients:
    """The same where the gradients lie; only the sum comes to the processor."""
    lost = 0
    with torch.no_grad():
        for _, lost_here, pieces in passes:
            lost += lost_here
            total.add(pieces)
    steps, dropped = total.total()
    if isinstance(clip, BatchMean):
        return ClippedGradients((steps / batch_size).clamp_(-clip.bound, clip.bound), lost + dropped)
    return ClippedGradients(_divided(steps, found, batch_size), lost + dropped)


def _kept(
    passes: Iterator[tuple[int, int, list[Piece]]], subset: Subset, double: bool
) -> Iterator[tuple[int, int, list[Piece]]]:
    """The passes with the kept coordinates alone. double: whether a parameter is float64."""
    for samples, lost, pieces in passes:
        kept = samples - lost if pieces else 0
        yield samples - kept, lost, []
        for count, piece in kept_parts(pieces, kept, subset, double):
            yield count, 0, [piece]


class Road(Protocol):
    """A way to run the program of one sample for every sample of a batch.

    draws: whether it draws random numbers.
    assumes: what keeping samples apart rests on besides its construction, in words; empty for nothing.
    """

    @property
    def draws(self) -> bool: ...

    @property
    def assumes(self) -> str: ...

    def passes(self, whole: Whole, leaves: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Piece]]]:
        """(samples, how many of them were lost, pieces of the others' gradients), some samples at a time."""


_roads: WeakKeyDictionary[Program | NotTraceable, dict[object, Road]] = WeakKeyDictionary()


def road_of(
    model: nn.Module,
    loss_fn: LossFunction,
    forward: Forward | None,
    form: Form,
    *,
    batch_size: int,
    packed: bool,
    autocast: Autocast | None = None,
) -> Road:
    """The fastest road for samples of this form, from the model and the settings alone: over lanes by our own loops;
    else in passes on torch's kernels; else one sample at a time by the user's code. Another device than the processor
    has no lanes, and several samples in a pass if its kernels keep them apart.

    Raises:
        InvalidParameter: model and loss do not take such samples.
    """
    autocast = autocast or Autocast(device_of(model).type)  # one word for "off", by which programs are kept
    with alone:  # torch traces in one thread at a time, and looks at the generators meanwhile
        device = device_of(model) if on_device(device_of(model)) else None
        if device is not None:
            check_device(device)
        try:
            program = program_of(model, loss_fn, forward, form, autocast, fused=device is None and not packed)
        except NotTraceable as reason:
            known = _roads.setdefault(reason, {})
            if "alone" not in known:
                known["alone"] = AloneRoad(Whole(model, loss_fn, forward, autocast), form)
                warnings.warn(
                    "samples of this model are run one at a time, which is slow, because torch cannot trace it "
                    f"({reason})",
                    SlowGradientsWarning,
                    stacklevel=3,
                )
            return known["alone"]
        known = _roads.setdefault(program, {})
        if device is not None:
            place = (batch_size, device)
            if place not in known:
                known[place] = _packed(program, Whole(model, loss_fn, forward), batch_size, device)
            return known[place]
        key: object = (batch_size, "rows") if packed else "passes"
        if "lanes" not in known and key not in known:
            try:
                known["lanes"] = LanesRoad(program)
            except NotLanes:
                whole = Whole(model, loss_fn, forward)
                known[key] = _packed(program, whole, batch_size) if packed else PassesRoad(program, whole)
        return known["lanes"] if "lanes" in known else known[key]


def _packed(program: Program, whole: Whole, batch_size: int, device: torch.device | None = None) -> Road:
    """device: whose gradients are clipped where they are; None for the processor."""
    try:
        return RowsRoad(program, whole, batch_size, device)
    except NotRows:
        return PassesRoad(program, whole, device)


def _batch_mean(
    passes: Iterator[tuple[int, int, list[Piece]]], places: Sequence[Place], clip: BatchMean, batch_size: int
) -> ClippedGradients:
    """The mean of unclipped gradients, clamped: one record can move it across the whole range whatever is rounded."""
    mean, dropped = torch.zeros(places[-1].span.stop, dtype=torch.float64), 0
    with torch.no_grad():
        for samples, _, pieces in passes:
            finite = provably_finite([piece.factor for piece in pieces]) if pieces else torch.zeros(0)
            dropped += samples - int(finite.sum())
            index = finite.nonzero().flatten()
            for piece in pieces if len(index) else []:
                span = slice(places[piece.parameters.start].span.start, places[piece.parameters.stop - 1].span.stop)
                mean[span] += piece.factor.take(index).total() / batch_size
    return ClippedGradients(mean.clamp_(-clip.bound, clip.bound), dropped)


def _check_batch(batch: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(batch)
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves):
        raise InvalidParameter("batch must be tensors with the sample dimension first: (inputs, targets), for example")
    if len({len(leaf) for leaf in leaves}) != 1:
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise InvalidParameter(f"the tensors of a batch must have the same sample dimension first, got {shapes}")
    return [leaf.detach() for leaf in leaves]


LARGEST = 2.0**126
"""A gradient whose bound is beyond this may overflow float32 on the way: it is dropped whole."""


def provably_finite(factors: Sequence[Factor]) -> Tensor:
    """(batch,) which samples have a gradient that cannot overflow in any parameter; NaN and infinity show as False."""
    return torch.stack([factor.max_norms() <= LARGEST for factor in factors]).all(dim=0)


def clipped_steps(pieces: Sequence[Piece], places: Sequence[Place], total: Steps) -> int:
    """Add sum_b clip(g_b) in whole steps of each place's grid; return how many samples were dropped.

    All of it sample by sample: what a sample adds is a function of its own gradient.
    """
    used = parts_of(pieces, places)
    if not used:  # all coordinates that a message carries belong to parameters that the loss does not use
        return 0
    finite = provably_finite([factor for factor, _ in used])
    dropped = int((~finite).sum())
    if dropped == len(finite):
        return dropped
    if dropped:  # taken out, not weighted by zero: 0 * inf is NaN
        index = finite.nonzero().flatten()
        used = [(factor.take(index), place) for factor, place in used]
    for layer, parts in by_layer(used):
        scales = layer.weights([_InNumPy(factor) for factor, _ in parts])
        weights = torch.ones(len(finite) - dropped, dtype=torch.float64) if scales is None else torch.from_numpy(scales)
        for factor, place in parts:
            factor.add_steps(layer.grid, weights, total, at=place.span.start, bound=layer.clip.clamp)
    return dropped


@dataclass(frozen=True, eq=False)
class _InNumPy:
    """The norms of a factor as arrays of NumPy's, with which the clips compute on the processor."""

    factor: Factor

    def max_norms(self) -> Any:
        return self.factor.max_norms().numpy()

    def squared_norms(self, bound: float | None = None) -> Any:
        return self.factor.squared_norms(bound).numpy()
