"""Per-sample gradients of one parameter tensor, in whatever form is cheapest, and the reductions the clips need.

Everything here treats the samples one by one: a reduction of sample b runs the same operations in the same order
whatever the other samples are, how many they are and where b stands. What torch computes here is exact (maxima, copies)
or one IEEE operation an entry; sums are compiled loops, or of whole grid steps, which are exact in any order.

The gradient of a weight matrix is a sum over positions of an outer product, g_b = sum_p e_bp a_bp^T, with a the inputs
of the layer (patches of a convolution) and e the errors at its output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from bqsgd.persample import program as programs
from bqsgd.persample._kernels import loops as kernels
from bqsgd.persample._kernels.grid import Grid
from bqsgd.persample._kernels.loops import Steps, rows_first
from bqsgd.persample._kernels.pairs import Pairs, Side
from bqsgd.persample._kernels.vectors import LANES

SCRATCH_BYTES = 64 << 20
"""Per-sample gradients held at once where they must be built."""


class Factor(Protocol):
    """The gradients g_b of one parameter tensor for a batch of samples b.

    Every reduction assumes finite gradients: `clipped_steps` first drops the samples whose `bounds` are too large.
    """

    def bounds(self) -> Tensor:
        """(batch,) float64 upper bounds of max|g_b|, infinite or NaN where a partial sum on the way to it overflows."""

    def take(self, index: Tensor) -> Factor:
        """The same for the samples `index` alone."""

    def materialise(self, index: slice | Tensor) -> Tensor:
        """(samples, coordinates) gradients of a few samples."""

    def total(self) -> Tensor:
        """(coordinates,) float64 sum of the gradients as they are."""

    def max_norms(self) -> Tensor:
        """(batch,) float64 max|g_b|, read no lower than it is in any later sum by more than a share of 2^-23."""

    def squared_norms(self, bound: float | None = None) -> Tensor:
        """(batch,) float64 sums of squares, of g_b clamped to +-bound where one is given."""

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        """Add sum_b of weights_b g_b in whole grid steps to the coordinates from `at` on; g_b is clamped to +-bound
        first, if given."""


class Piece(NamedTuple):
    """The gradients of a run of neighbouring parameters, numbered as in `model.parameters()`."""

    parameters: slice
    factor: Factor


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """values[index] of ascending indices, without a copy where they are the first ones."""
    count = len(index)
    return values[:count] if count and int(index[-1]) == count - 1 else values[index]


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients as they are: `values` is (batch, coordinates), the coordinates of a sample beside each other."""

    values: Tensor

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Largest magnitudes and sums of squares, in one go over the values."""
        return kernels.norms(self.values)

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> Dense:
        return Dense(rows_of(self.values, index))

    def part(self, span: slice) -> Dense:
        """The gradients of some of the coordinates."""
        return Dense(self.values[:, span])

    def materialise(self, index: slice | Tensor) -> Tensor:
        return self.values[index]

    def total(self) -> Tensor:
        return self.values.double().sum(dim=0)

    def max_norms(self) -> Tensor:
        return self.norms[0]

    def squared_norms(self, bound: float | None = None) -> Tensor:
        return self.norms[1] if bound is None else kernels.squared_norms(self.values, bound)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        total.add(self.values, weights, grid, bound=bound, at=at)


class Built:
    """Reductions through gradients that are built a few samples at a time: correct for every factor.

    A factor inherits these and overrides what its mathematics can do without building. Gradients that all fit in the
    scratch are built once.
    """

    batch: int
    coordinates: int
    _built: Dense | None = None

    def take(self, index: Tensor) -> Factor:
        raise NotImplementedError

    def materialise(self, index: slice | Tensor) -> Tensor:
        raise NotImplementedError

    def _parts(self) -> Iterator[tuple[slice, Dense]]:
        size = micro_batch(self.coordinates)
        if size >= self.batch:
            if self._built is None:
                self._built = self._gradients(slice(0, self.batch))
            yield slice(0, self.batch), self._built
            return
        size = max(1, size - size % LANES) if size >= LANES else size
        for start in range(0, self.batch, size):
            part = slice(start, min(self.batch, start + size))
            yield part, self._gradients(part)

    def _gradients(self, part: slice) -> Dense:
        """Each sample's gradient built by itself."""
        return Dense(torch.cat([self.materialise(torch.tensor([b])) for b in range(part.start, part.stop)]))

    def total(self) -> Tensor:
        return torch.stack([part.total() for _, part in self._parts()]).sum(dim=0)

    @cached_property
    def _norms(self) -> list[Tensor]:
        """Largest magnitudes and sums of squares: both from gradients that are built once."""
        return [torch.cat(each) for each in zip(*(part.norms for _, part in self._parts()), strict=True)]

    def bounds(self) -> Tensor:
        return self.max_norms()  # a partial sum that overflows stays infinite or becomes NaN

    def max_norms(self) -> Tensor:
        return self._norms[0]

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if bound is None:
            return self._norms[1]
        return torch.cat([part.squared_norms(bound) for _, part in self._parts()])

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        for index, part in self._parts():
            part.add_steps(grid, weights[index], total, at=at, bound=bound)


def micro_batch(coordinates: int) -> int:
    """Samples whose gradients of so many float32 coordinates fit in the scratch; at least one."""
    return max(1, SCRATCH_BYTES // (4 * max(1, coordinates)))


class Outer(Built):
    """What a linear layer and a convolution share. Coordinates are ordered (group, output, input).

    Norms and sums read the same gradients, bit for bit: a norm of anything else would not bound what is summed where
    the positions cancel.
    """

    a: Tensor
    e: Tensor
    batch: int
    positions: int
    groups: int
    inputs: int
    outputs: int

    @property
    def coordinates(self) -> int:  # type: ignore[override]
        return self.groups * self.outputs * self.inputs

    def _pairs(self) -> Pairs:
        """The same for the CPU kernels."""
        raise NotImplementedError

    @cached_property
    def pairs(self) -> Pairs | None:
        """None where the kernels do not apply, or hold more than the scratch for as many samples as they take."""
        fits = kernels.usable(self.a) and kernels.usable(self.e) and micro_batch(self.coordinates) >= LANES
        return self._pairs() if fits else None

    def patches(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, inputs)."""
        raise NotImplementedError

    def errors(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, outputs)."""
        raise NotImplementedError

    def materialise(self, index: slice | Tensor) -> Tensor:
        return (self.errors(index).transpose(2, 3) @ self.patches(index)).flatten(1)

    def take(self, index: Tensor) -> Outer:
        raise NotImplementedError

    def _gradients(self, part: slice) -> Dense:
        return super()._gradients(part) if self.pairs is None else Dense(self.pairs.gradients(part))


class LinearWeight(Outer):
    """a (batch, positions, inputs) and e (batch, positions, outputs); one position unless it runs over sequences."""

    groups = 1

    def __init__(self, a: Tensor, e: Tensor) -> None:
        self.batch, self.positions, self.inputs, self.outputs = *a.shape, e.shape[2]
        # Everything but `Pairs`, which sums over positions, reads one sample after another.
        self.a, self.e = (rows_first(a), rows_first(e)) if self.positions == 1 else (a, e)

    def take(self, index: Tensor) -> LinearWeight:
        return LinearWeight(rows_of(self.a, index), rows_of(self.e, index))

    def patches(self, index: slice | Tensor) -> Tensor:
        return self.a[index].unsqueeze(1)

    def errors(self, index: slice | Tensor) -> Tensor:
        return self.e[index].unsqueeze(1)

    def _pairs(self) -> Pairs:
        def side(values: Tensor, size: int) -> Side:
            every, steps = np.arange(self.positions * size), np.arange(self.positions) * size
            return Side(values, every, len(every), np.arange(size), steps)

        return Pairs(side(self.e, self.outputs), side(self.a, self.inputs))

    def materialise(self, index: slice | Tensor) -> Tensor:
        if self.positions == 1:  # one product an entry
            return (self.e[index].transpose(1, 2) * self.a[index]).flatten(1)
        return super().materialise(index)

    def total(self) -> Tensor:
        return (self.e.double().flatten(0, 1).t() @ self.a.double().flatten(0, 1)).flatten()

    @cached_property
    def _input_norms(self) -> tuple[Tensor, Tensor]:
        """Largest magnitudes and sums of squares of the inputs of each sample, in one go over them."""
        return kernels.norms(self.a)

    @cached_property
    def _error_norms(self) -> tuple[Tensor, Tensor]:
        return kernels.norms(self.e)

    def max_norms(self) -> Tensor:
        return self._input_norms[0] * self._error_norms[0] if self.positions == 1 else super().max_norms()

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if self.positions > 1:
            return super().squared_norms(bound)
        if bound is None:
            return self._input_norms[1] * self._error_norms[1]
        return kernels.clamped_outer_squares(self.a[:, 0], self.e[:, 0], bound)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        if self.positions > 1 or not kernels.usable(self.a):
            super().add_steps(grid, weights, total, at=at, bound=bound)
            return
        matrix, most = total.exact(at, self.coordinates).view(self.outputs, self.inputs), self._input_norms[0]
        kernels.outer_steps(self.a[:, 0], self.e[:, 0], grid, weights, matrix, bound=bound, most=most)


class ConvWeight(Outer):
    """A convolution of inputs a (batch, channels, *space) with errors e (batch, outputs, *positions)."""

    def __init__(self, a: Tensor, e: Tensor, geometry: programs.Geometry) -> None:
        self.a, self.e, self.geometry, self.groups = a, e, geometry, geometry.groups
        self.batch, self.positions = len(a), int(np.prod(e.shape[2:]))
        channels, taps = a.shape[1] // self.groups, int(np.prod(geometry.kernel))
        self.inputs, self.outputs = channels * taps, e.shape[1] // self.groups

    def take(self, index: Tensor) -> ConvWeight:
        return ConvWeight(rows_of(self.a, index), rows_of(self.e, index), self.geometry)

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Where a patch lies in a flat padded sample: base of each position, offset of each input, a group's stride."""
        space = self.geometry.padded(self.a.shape[2:])
        steps = [int(np.prod(space[axis + 1 :])) for axis in range(len(space))]
        base, taps = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        for axis, step in enumerate(steps):
            every, away = self.geometry.stride[axis] * step, self.geometry.dilation[axis] * step
            base = (base[:, None] + np.arange(self.e.shape[2 + axis]) * every).reshape(-1)
            taps = (taps[:, None] + np.arange(self.geometry.kernel[axis]) * away).reshape(-1)
        channels, area = self.a.shape[1] // self.groups, int(np.prod(space))
        offsets = (np.arange(channels)[:, None] * area + taps).reshape(-1)
        return base, offsets, channels * area

    def patches(self, index: slice | Tensor) -> Tensor:
        base, offsets, group_stride = self.addresses
        where = np.arange(self.groups)[:, None, None] * group_stride + base[:, None] + offsets
        padded = F.pad(self.a[index], self.geometry.padding)
        return padded.flatten(1)[:, torch.from_numpy(where).to(self.a.device)]

    def errors(self, index: slice | Tensor) -> Tensor:
        return self.e[index].reshape(-1, self.groups, self.outputs, self.positions).transpose(2, 3)

    def _pairs(self) -> Pairs:
        base, offsets, group_stride = self.addresses
        space = self.a.shape[1:]
        padded = [space[0], *self.geometry.padded(space[1:])]
        before = [0, *list(reversed(self.geometry.padding))[1::2]]
        places = np.zeros(1, dtype=np.int64)
        for axis, size in enumerate(space):
            step = int(np.prod(padded[axis + 1 :]))
            places = (places[:, None] + (np.arange(size) + before[axis]) * step).reshape(-1)
        sizes = self.groups * self.outputs * self.positions, int(np.prod(padded))
        rows, steps = np.arange(self.outputs) * self.positions, np.arange(self.positions)
        return Pairs(
            Side(self.e, np.arange(sizes[0]), sizes[0], rows, steps, self.outputs * self.positions),
            Side(self.a, places, sizes[1], offsets, base, group_stride),
            self.groups,
        )


class TableRows(Built):
    """Row `row[n]` of the table of sample `sample[n]` has the gradient `values[n]`; each (sample, row) occurs once."""

    def __init__(self, sample: Tensor, row: Tensor, values: Tensor, *, batch: int, rows: int) -> None:
        self.sample, self.row, self.values = sample, row, values
        self.batch, self.rows, self.coordinates = batch, rows, rows * values.shape[1]

    @classmethod
    def of_lookups(cls, index: Tensor, errors: Tensor, *, rows: int, padding: int | None) -> TableRows:
        """From (batch, positions) indices and (batch, positions, width) errors; repeated look-ups are added up, one
        position after another."""
        batch, inside = len(index), (index >= 0) & (index < rows)
        # A row that the table does not have would be one of the next sample's: it is NaN in a row of this one's.
        errors = errors.where(inside[..., None], torch.nan)
        key = torch.arange(batch, device=index.device)[:, None] * rows + index.where(inside, 0)
        chosen = (index != padding) | ~inside
        unique, place = torch.unique(key[chosen], return_inverse=True)
        values = np.zeros((len(unique), errors.shape[2]), errors.cpu().numpy().dtype)
        np.add.at(values, place.cpu().numpy(), errors[chosen].cpu().numpy())  # in order, whatever else is added
        summed = torch.from_numpy(values).to(errors.device)
        return cls(unique // rows, unique % rows, summed, batch=batch, rows=rows)

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> TableRows:
        place = torch.full((self.batch,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        sample = place[self.sample]
        kept = sample >= 0
        return TableRows(sample[kept], self.row[kept], self.values[kept], batch=len(index), rows=self.rows)

    def materialise(self, index: slice | Tensor) -> Tensor:
        wanted = torch.arange(self.batch, device=self.sample.device)[index]
        part = self.take(wanted)
        dense = self.values.new_zeros(len(wanted), self.rows, self.values.shape[1])
        dense[part.sample, part.row] = part.values
        return dense.flatten(1)

    def max_norms(self) -> Tensor:
        each = kernels.largest(self.values)
        return each.new_zeros(self.batch).scatter_reduce_(0, self.sample, each, "amax")

    def squared_norms(self, bound: float | None = None) -> Tensor:
        total = np.zeros(self.batch)
        np.add.at(total, self.sample.cpu().numpy(), kernels.squared_norms(self.values, bound).numpy())
        return torch.from_numpy(total)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        rounded = kernels.in_steps(self.values, grid, weights[self.sample.cpu()], bound=bound)
        table = total.exact(at, self.coordinates).view(self.rows, -1)
        table.index_add_(0, self.row.cpu(), rounded)  # whole numbers: exact in any order


def nodes_of(gradient: programs.Gradient) -> tuple[fx.Node, ...]:
    """The tensors of a program from which the factor of a gradient is made."""
    match gradient:
        case programs.Product(pairs=pairs):
            return tuple(node for pair in pairs for node in pair)
        case programs.Convolution(a=a, e=e):
            return a, e
        case programs.Table(index=index, e=e):
            return index, e
        case _:
            return (gradient.node,)


def factor_of(gradient: programs.Gradient, values: Iterator[Tensor]) -> Factor:
    """The factor of a gradient from the values of its nodes, each with the samples first."""
    found = [next(values) for _ in nodes_of(gradient)]
    match gradient:
        case programs.Product():
            e, a = (_joined(found[side::2]) for side in (0, 1))
            return LinearWeight(working(a), working(e))
        case programs.Convolution(geometry=geometry):
            return ConvWeight(working(found[0][:, 0]), working(found[1][:, 0]), geometry)
        case programs.Table(rows=rows, padding=padding):
            errors = working(found[1]).reshape(len(found[1]), -1, found[1].shape[-1])
            return TableRows.of_lookups(found[0].flatten(1), errors, rows=rows, padding=padding)
        case _:
            return Dense(rows_first(working(found[0]).reshape(len(found[0]), -1)))  # a parameter may have no dimension


def _joined(uses: list[Tensor]) -> Tensor:
    """The positions of all uses of a parameter, (samples, positions, entries), in the layout that the uses have."""
    if len(uses) == 1:
        return uses[0]
    if uses[0].stride(0) == 1:  # over lanes the samples lie last
        return torch.cat([use.movedim(0, -1) for use in uses]).movedim(-1, 0)
    return torch.cat(uses, 1)


def working(values: Tensor) -> Tensor:
    """float64 as it is, everything narrower as float32."""
    return values if values.dtype == torch.float64 else values.float()
