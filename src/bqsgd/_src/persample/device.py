"""Clipped gradients on the device of the model: whole steps are added there, and only their sum comes to the processor.

The processor's road (`factors`) adds up norms in float64 with loops of ours. A device may have no float64, and its
loops are not ours, so here nothing rests on its floating point: what a sample adds is a vector of whole numbers, and
that they lie within the clip's bounds is checked in whole numbers, sample by sample. A sample whose steps are out of
bounds counts as zero. Floating point only has to be good enough that this does not happen to honest samples, for which
norms carry a margin. Claim 9 of `docs/accounting.md`; `check_device` tries the arithmetic of a device first.

All of it is done sample by sample, by operations on single entries and by exact sums; no value decides what is run, so
the processor never waits for the device before the sum is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import program as programs
from bqsgd._src.persample._kernels.grid import STEPS, held_to
from bqsgd._src.persample.clips import BatchMean, Clip, Layer, Place
from bqsgd._src.persample.factors import Dense, Factor, Piece, by_layer, parts_of
from bqsgd._src.subset import BLOCK, Subset

forced = False
"""Take this road on the processor too; for tests and `benchmarks.device`."""
LARGEST = 2.0**60
"""Squares of larger entries could overflow float32: such a gradient is dropped whole."""
MARGIN = 2.0**-11
"""What is added to a sum of squares, as a share of it. Three sums of at most 2^10 terms each, whose additions err by at
most 2^-23 in any order, are off by less than 2^-11.4."""
_LEVELS = 3
_BLOCK = 1 << 18
"""Steps of at most 2^22 whose squares add up in int64 without overflow: 2^18 times 2^44 is below 2^63."""
_UNIT = 1 << 16
"""In which sums of squares are counted, rounded up for every block: those of 2^12 full blocks stay below 2^63, and what
rounding adds, 2^-26 of a bound's square in each block, is less than what `MARGIN` leaves."""


def on_device(device: torch.device) -> bool:
    """Whether the gradients of a model on this device are clipped there."""
    return device.type != "cpu" or forced


def name_of(device: torch.device) -> str:
    """What a guarantee calls a device: its name, if torch knows it."""
    if device.type != "cpu":
        name = getattr(torch.get_device_module(device), "get_device_name", None)
        if name is not None:
            return str(name(device))
    return str(device.type)


@dataclass(frozen=True, eq=False)
class DeviceNorms:
    """Norms of (batch, coordinates) gradients as (batch,) float32 tensors: a largest magnitude is exact, a sum of
    squares is never below the true one."""

    values: Tensor
    largest: Tensor

    def max_norms(self) -> Tensor:
        return self.largest

    def squared_norms(self, bound: float | None = None) -> Tensor:
        values = self.values if bound is None else self.values.clamp(-bound, bound)
        sums = values.square()
        each = max(1, math.ceil(sums.shape[1] ** (1 / _LEVELS)))
        for _ in range(_LEVELS):
            filled = torch.nn.functional.pad(sums, (0, -sums.shape[1] % each))
            sums = filled.reshape(len(filled), -1, each).sum(dim=2)
        return sums.sum(dim=1) * (1 + MARGIN)


class DeviceSteps:
    """The sum of clipped gradients in whole steps, on a device.

    subset: the coordinates that are kept; None for all.
    """

    def __init__(self, clip: Clip, places: Sequence[Place], device: torch.device, subset: Subset | None = None) -> None:
        self._clip, self._places, self._subset = clip, places, subset
        # The last entry counts samples that were dropped, so that one copy brings both to the processor. A clip of the
        # mean adds gradients as they are.
        kind = torch.float32 if isinstance(clip, BatchMean) else torch.int64
        self._total = torch.zeros(places[-1].span.stop + 1, dtype=kind, device=device)

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add the clipped gradients of some samples; those that are not finite or out of bounds count as zero."""
        used = parts_of([self._kept(piece) for piece in pieces], self._places)
        if not used:
            return
        values, places = [_values(factor) for factor, _ in used], [place for _, place in used]
        if isinstance(self._clip, BatchMean):
            counted = _finite(values)
            clipped = Clipped([torch.where(counted[:, None], each, 0) for each in values], counted)
        else:
            clipped = steps_on_device(values, places)
        for steps, place in zip(clipped.steps, places, strict=True):
            self._total[place.span] += steps.sum(dim=0)
        self._total[-1] += (~clipped.counted).sum()

    def _kept(self, piece: Piece) -> Piece:
        values = _values(piece.factor).to(torch.float32)
        return Piece(
            piece.parameters,
            Dense(values if self._subset is None else _kept(values, self._subset, piece.parameters)),
        )

    def total(self) -> tuple[Tensor, int]:
        """(dimension,) float64 sum on the processor, and how many samples were dropped."""
        total = self._total.cpu()
        return total[:-1].double(), int(total[-1])


class Clipped(NamedTuple):
    """steps: int32 of each part, zero where a sample is not counted. counted: (batch,) which samples are."""

    steps: list[Tensor]
    counted: Tensor


def steps_on_device(values: Sequence[Tensor], places: Sequence[Place]) -> Clipped:
    """The clipped gradients of a batch of samples in whole steps, each part (batch, coordinates) of float32."""
    steps: list[Tensor] = []
    finite = counted = _finite(values)
    for layer, parts in by_layer([(Dense(each), place) for each, place in zip(values, places, strict=True)]):
        own = _scaled([_values(factor) for factor, _ in parts], layer, finite)
        counted, steps = counted & _inside(own, layer), steps + own
    return Clipped([torch.where(counted[:, None], each, 0) for each in steps], counted)


def _values(factor: Factor) -> Tensor:
    """On a device gradients are as they are."""
    assert isinstance(factor, Dense)
    return factor.values


def _scaled(parts: Sequence[Tensor], layer: Layer, finite: Tensor) -> list[Tensor]:
    """Steps of the parts of a layer, each entry at most the bound of its grid."""
    weights = layer.weights([DeviceNorms(values, _largest(values)) for values in parts])
    bound, step, steps = layer.clip.clamp, layer.grid.step, []
    for values in parts:
        held = values if bound is None else values.clamp(-held_to(bound), held_to(bound))
        scaled = held / step if weights is None else held * (weights / step)[:, None]
        most = math.floor(layer.grid.bound / step)
        whole = torch.where(finite[:, None], scaled, 0).round().clamp(-most, most)
        steps.append(whole.to(torch.int32).clamp(-most, most))  # NaN and what a device makes of it are clamped as well
    return steps


def _inside(steps: Sequence[Tensor], layer: Layer) -> Tensor:
    """(batch,) whether the Euclidean norm of a sample's steps is within the clip's, in whole numbers."""
    if layer.clip.euclidean is None:
        return torch.ones(len(steps[0]), dtype=torch.bool, device=steps[0].device)
    squares = torch.stack([_squares(each) for each in steps]).sum(dim=0)
    most = math.floor((Fraction(layer.clip.euclidean) / Fraction(layer.grid.step)) ** 2 / _UNIT)
    return squares <= min(most, 2**63 - 1)


def _largest(values: Tensor) -> Tensor:
    return values.abs().amax(dim=1)


def _finite(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([_largest(values) <= LARGEST for values in parts]).all(dim=0)


def _squares(steps: Tensor) -> Tensor:
    """(batch,) int64 sums of squares in units of 2^16, never below the true ones."""
    blocks = [(block.long().square().sum(dim=1) + (_UNIT - 1)) // _UNIT for block in torch.split(steps, _BLOCK, dim=1)]
    return blocks[0] if len(blocks) == 1 else torch.stack(blocks).sum(dim=0)


# What a pass returns, as gradients (samples, coordinates) of float32.


def dense(output: Any, values: Sequence[Tensor]) -> Piece:
    """The gradients of an output of a pass, from the values of its nodes with the samples first.

    Those of a table are its rows, one look-up of every sample after another: the same operations in the same order for
    every sample.
    """
    match output.factored:
        case None:
            flat = [value.reshape(len(value), -1).to(torch.float32) for value in values]
            return Piece(output.parameters, Dense(flat[0] if len(flat) == 1 else torch.cat(flat, 1)))
        case programs.Table(rows=rows, padding=padding):
            index, errors = values[0].flatten(1), values[1].reshape(len(values[1]), -1, values[1].shape[-1])
            return Piece(output.parameters, Dense(_looked_up(index, errors.to(torch.float32), rows, padding)))
        case gradient:
            raise NotImplementedError(type(gradient).__name__)


def _looked_up(index: Tensor, errors: Tensor, rows: int, padding: int) -> Tensor:
    samples, positions, width = errors.shape
    table = errors.new_zeros(samples, rows, width)
    inside = (index >= 0) & (index < rows)
    # A row that the table does not have is NaN in a row of this sample's, which then counts as zero.
    errors = torch.where(inside[..., None], errors, math.nan)
    errors = torch.where((index == padding)[..., None], 0, errors)
    places = torch.where(inside, index, 0)[..., None].expand(-1, -1, width)
    for position in range(positions):
        here = slice(position, position + 1)
        table.scatter_(1, places[:, here], table.gather(1, places[:, here]) + errors[:, here])
    return table.flatten(1)


# The kept coordinates of a message that carries a subset of them.


def _kept(values: Tensor, subset: Subset, parameters: slice) -> Tensor:
    starts, first = subset.subsets.starts, parameters.start
    parts = []
    for number in range(parameters.start, parameters.stop):
        rows, columns = subset.subsets.matrices[number]
        part = values[:, starts[number] - starts[first] : starts[number + 1] - starts[first]]
        span = subset.span(number, number + 1)
        if subset.subsets.rotated and span.start < span.stop:
            signs = torch.from_numpy(subset.signs[number]).to(values.device)
            part = _rotated(part.reshape(-1, columns), signs).reshape(len(values), rows * columns)
        places = torch.from_numpy(subset.places[span] - starts[number]).to(values.device)
        parts.append(part[:, places])
    return torch.cat(parts, 1)


def _rotated(rows: Tensor, signs: Tensor) -> Tensor:
    """What `subset.rotate_rows` does to rows, up to the last bits."""
    columns = rows.shape[1]
    block = min(BLOCK, 1 << (columns.bit_length() - 1))
    whole = columns - columns % block
    rows = rows * signs
    rows = torch.cat([_transformed(rows[:, :whole].reshape(-1, block)).reshape(-1, whole), rows[:, whole:]], 1)
    if columns % block:
        rows = torch.cat([rows[:, :-block], _transformed(rows[:, -block:])], 1)
    return rows


def _transformed(blocks: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of every row, in additions of single entries."""
    size, apart = blocks.shape[1], blocks.shape[1] // 2
    while apart:
        left, right = blocks.reshape(-1, size // (2 * apart), 2, apart).unbind(2)
        blocks = torch.stack([left + right, left - right], 2).reshape(-1, size)
        apart //= 2
    return blocks * (1 / math.sqrt(size))


# The whole-number arithmetic of a device, which claim 9 rests on.


@lru_cache(maxsize=64)
def check_device(device: torch.device) -> None:
    """Try what a device does with whole numbers, before anything is spent.

    Raises:
        InvalidParameter: a sum, a bound or a comparison is not what it must be.
    """
    rng = np.random.default_rng(0)
    most = int(STEPS)
    steps = rng.integers(-most, most + 1, size=(33, 1025))
    steps[2:, 1:] //= rng.integers(1, 2000, size=(31, 1))
    steps[:, 0], steps[0], steps[1] = most, most, -most
    there = torch.from_numpy(steps.astype(np.int32)).to(device)
    counted = torch.arange(33, device=device) % 3 > 0
    squares = -(-(steps**2).sum(axis=1) // _UNIT)
    results = {
        "sums": (there.sum(dim=0), steps.sum(axis=0)),
        "large sums": (there.sum(dim=0) + 2**52 + 1, steps.sum(axis=0) + 2**52 + 1),
        "squares": (_squares(there), squares),
        "choices": (torch.where(counted[:, None], there, 0), np.where(np.arange(33)[:, None] % 3 > 0, steps, 0)),
        "bounds": (there.clamp(-1000, 999), steps.clip(-1000, 999)),
        "comparisons": (_squares(there) <= int(squares[5]), squares <= squares[5]),
        "counts": ((~counted).sum(), np.asarray(11)),
    }
    sizes = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [-3.0, 2.0], [2.0**61, 1.0]], device=device)
    results["magnitudes"] = _finite([sizes]), np.array([False, False, True, False])
    for what, (values, exact) in results.items():
        if not np.array_equal(values.cpu().numpy(), exact):
            raise InvalidParameter(
                f"whole-number arithmetic of {name_of(device)} is not exact ({what}), so what one sample adds cannot "
                "be bounded there: train on the processor, with model.cpu()"
            )
