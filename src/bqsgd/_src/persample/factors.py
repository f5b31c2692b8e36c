"""Per-sample gradients of some parameters, in whatever form is cheapest, and the reductions the clips need.

Everything here treats the samples one by one: a reduction of sample b runs the same operations in the same order
whatever the other samples are, how many they are and where b stands. What torch computes here is exact (maxima, copies)
or one IEEE operation an entry; sums are compiled loops, or of whole grid steps, which are exact in any order.

The gradient of a weight matrix is a sum over positions of an outer product, g_b = sum_p e_bp a_bp^T, with a the inputs
of the layer (patches of a convolution) and e the errors at its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, fx

from bqsgd._src.persample import program as programs
from bqsgd._src.persample._kernels import loops as kernels
from bqsgd._src.persample._kernels.contiguous import Rows
from bqsgd._src.persample._kernels.grid import Grid
from bqsgd._src.persample._kernels.loops import Steps, rows_first
from bqsgd._src.persample._kernels.pairs import Pairs, Side
from bqsgd._src.persample.clips import Layer, Place
from bqsgd._src.runtime.vectors import LANES

SCRATCH_BYTES = 64 << 20
"""Per-sample gradients held at once where they must be built."""


class Factor(Protocol):
    """The gradients g_b of some parameters for a batch of samples b.

    Every reduction but `max_norms` assumes finite gradients: `clipped_steps` first drops the samples whose largest
    magnitude is not.
    """

    def take(self, index: Tensor) -> Factor:
        """The same for the samples `index` alone."""

    def total(self) -> Tensor:
        """(coordinates,) float64 sum of the gradients as they are."""

    def max_norms(self) -> Tensor:
        """(batch,) float64 max|g_b|, read no lower than it is in any later sum by more than a share of 2^-23; infinite
        or NaN where a partial sum on the way to it overflows."""

    def squared_norms(self, bound: float | None = None) -> Tensor:
        """(batch,) float64 sums of squares, of g_b clamped to +-bound where one is given."""

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        """Add sum_b of weights_b g_b in whole grid steps to the coordinates from `at` on; g_b is clamped to +-bound
        first, if given."""


class Piece(NamedTuple):
    """The gradients of a run of neighbouring parameters, numbered as in `model.parameters()`."""

    parameters: slice
    factor: Factor


Placed = tuple["Factor", Place]
"""The gradients of tensors that are clipped together, or of some of them, and their place."""


def parts_of(pieces: Sequence[Piece], places: Sequence[Place]) -> list[Placed]:
    """The pieces where their parameters lie, in parts where these are clipped one by one; empty ones are left out."""
    parts: list[Placed] = []
    for piece in pieces:
        own = places[piece.parameters]
        start, stop = own[0].span.start, own[-1].span.stop
        if all(place.layer is own[0].layer for place in own):
            parts.append((piece.factor, Place(slice(start, stop), own[0].layer)))
            continue
        assert isinstance(piece.factor, (Dense, Scattered))
        for number, place in enumerate(own):
            span = slice(place.span.start - start, place.span.stop - start)
            parts.append((piece.factor.part(number, span), place))
    return [part for part in parts if part[1].span.start < part[1].span.stop]


def by_layer(parts: Sequence[Placed]) -> Iterator[tuple[Layer, list[Placed]]]:
    """The parts that are clipped together, which stand beside each other."""
    for layer, group in groupby(parts, key=lambda part: part[1].layer):
        yield layer, list(group)


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """values[index] of ascending indices, without a copy where they are the first ones."""
    count = len(index)
    return values[:count] if count and int(index[-1]) == count - 1 else values[index]


def micro_batch(coordinates: int) -> int:
    """Samples whose gradients of so many float32 coordinates fit in the scratch; at least one."""
    return max(1, SCRATCH_BYTES // (4 * max(1, coordinates)))


class Explicit:
    """Gradients as they are, wherever they lie."""

    values: Any
    """(batch, coordinates), as a tensor or as the places of several."""

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """Largest magnitudes and sums of squares, in one go over the values."""
        return kernels.norms(self.values)

    def max_norms(self) -> Tensor:
        return self.norms[0]

    def squared_norms(self, bound: float | None = None) -> Tensor:
        return self.norms[1] if bound is None else kernels.squared_norms(self.values, bound)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        total.add(self.values, weights, grid, bound=bound, at=at)


@dataclass(frozen=True, eq=False)
class Dense(Explicit):
    """The coordinates of a sample beside each other: `values` is (batch, coordinates)."""

    values: Tensor

    def take(self, index: Tensor) -> Dense:
        return Dense(rows_of(self.values, index))

    def part(self, number: int, span: slice) -> Dense:
        """The gradients of one of its parameters, by number and by coordinates."""
        return Dense(self.values[:, span])

    def total(self) -> Tensor:
        return self.values.double().sum(dim=0)


@dataclass(frozen=True, eq=False)
class Scattered(Explicit):
    """Contiguous float32 tensors of every sample, one for each parameter, anywhere in memory."""

    samples: Sequence[Sequence[Tensor]]

    @cached_property
    def values(self) -> Rows:
        return kernels.scattered(self.samples)

    def take(self, index: Tensor) -> Scattered:
        return Scattered([self.samples[place] for place in index.tolist()])

    def part(self, number: int, span: slice) -> Scattered:
        """The gradients of one of its parameters, by number and by coordinates."""
        return Scattered([[tensors[number]] for tensors in self.samples])

    def total(self) -> Tensor:
        each = [torch.cat([tensor.flatten() for tensor in tensors]).double() for tensors in self.samples]
        return torch.stack(each).sum(dim=0)


class Built:
    """Reductions of gradients that are built a few samples at a time; those that all fit in the scratch are built once.

    Norms and sums read the same gradients, bit for bit: a norm of anything else would not bound what is summed where
    the positions cancel.
    """

    batch: int
    coordinates: int
    _built: Dense | None = None

    def gradients(self, part: slice) -> Dense:
        """Those of some samples."""
        raise NotImplementedError

    def _parts(self) -> Iterator[tuple[slice, Dense]]:
        size = micro_batch(self.coordinates)
        if size >= self.batch:
            self._built = self._built or self.gradients(slice(0, self.batch))
            yield slice(0, self.batch), self._built
            return
        size = max(1, size - size % LANES) if size >= LANES else size
        for start in range(0, self.batch, size):
            part = slice(start, min(self.batch, start + size))
            yield part, self.gradients(part)

    def total(self) -> Tensor:
        return torch.stack([part.total() for _, part in self._parts()]).sum(dim=0)

    @cached_property
    def _norms(self) -> list[Tensor]:
        """Largest magnitudes and sums of squares: both from gradients that are built once."""
        return [torch.cat(each) for each in zip(*(part.norms for _, part in self._parts()), strict=True)]

    def max_norms(self) -> Tensor:
        return self._norms[0]  # a partial sum that overflows stays infinite or becomes NaN

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if bound is None:
            return self._norms[1]
        return torch.cat([part.squared_norms(bound) for _, part in self._parts()])

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        for index, part in self._parts():
            part.add_steps(grid, weights[index], total, at=at, bound=bound)


class Summed(Built):
    """Sums over positions, built for 16 samples at once. Coordinates are ordered (group, output, input)."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs, self.batch = pairs, len(pairs.errors.values)
        self.coordinates = pairs.groups * len(pairs.errors.rows) * len(pairs.inputs.rows)

    def take(self, index: Tensor) -> Summed:
        pairs = self._pairs
        e, a = (replace(side, values=rows_of(side.values, index)) for side in (pairs.errors, pairs.inputs))
        return Summed(Pairs(e, a, pairs.groups))

    def gradients(self, part: slice) -> Dense:
        return Dense(self._pairs.gradients(part))


def linear_over_positions(a: Tensor, e: Tensor) -> Summed:
    """Of a (batch, positions, inputs) and e (batch, positions, outputs)."""

    def side(values: Tensor) -> Side:
        _, positions, size = values.shape
        every = np.arange(positions * size)
        return Side(values, every, len(every), np.arange(size), np.arange(positions) * size)

    return Summed(Pairs(side(e), side(a)))


def convolution(a: Tensor, e: Tensor, geometry: programs.Geometry) -> Summed:
    """Of the inputs a (batch, channels, *space) and the errors e (batch, outputs, *positions) of a convolution.

    A patch lies in a flat padded sample at the base of its position plus the offset of each of its inputs.
    """
    space, padded = a.shape[1:], [a.shape[1], *geometry.padded(a.shape[2:])]
    before = [0, *list(reversed(geometry.padding))[1::2]]
    steps = [int(np.prod(padded[axis + 1 :])) for axis in range(len(padded))]
    places, base, taps = (np.zeros(1, dtype=np.int64) for _ in range(3))
    for size, first, step in zip(space, before, steps, strict=True):
        places = (places[:, None] + (np.arange(size) + first) * step).reshape(-1)
    for axis, step in enumerate(steps[1:]):
        base = (base[:, None] + np.arange(e.shape[2 + axis]) * geometry.stride[axis] * step).reshape(-1)
        taps = (taps[:, None] + np.arange(geometry.kernel[axis]) * geometry.dilation[axis] * step).reshape(-1)
    channels, outputs, positions = a.shape[1] // geometry.groups, e.shape[1] // geometry.groups, len(base)
    offsets = (np.arange(channels)[:, None] * steps[0] + taps).reshape(-1)
    every, rows = np.arange(e[0].numel()), np.arange(outputs) * positions
    return Summed(
        Pairs(
            Side(e, every, len(every), rows, np.arange(positions), outputs * positions),
            Side(a, places, int(np.prod(padded)), offsets, base, channels * steps[0]),
            geometry.groups,
        )
    )


class Outer(Built):
    """One position: g_b = e_b a_b^T of a (batch, inputs) and e (batch, outputs), which need not be built."""

    def __init__(self, a: Tensor, e: Tensor) -> None:
        self.a, self.e, self.batch = rows_first(a), rows_first(e), len(a)
        self.coordinates = a.shape[1] * e.shape[1]

    def take(self, index: Tensor) -> Outer:
        return Outer(rows_of(self.a, index), rows_of(self.e, index))

    def gradients(self, part: slice) -> Dense:
        return Dense((self.e[part, :, None] * self.a[part, None]).flatten(1))  # one product an entry

    def total(self) -> Tensor:
        return (self.e.double().t() @ self.a.double()).flatten()

    @cached_property
    def _both(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Largest magnitudes and sums of squares, of the inputs and of the errors of each sample."""
        return kernels.norms(self.a), kernels.norms(self.e)

    def max_norms(self) -> Tensor:
        return self._both[0][0] * self._both[1][0]

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if bound is None:
            return self._both[0][1] * self._both[1][1]
        return kernels.clamped_outer_squares(self.a, self.e, bound)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        if not kernels.usable(self.a):
            super().add_steps(grid, weights, total, at=at, bound=bound)
            return
        matrix = total.exact(at, self.coordinates).view(self.e.shape[1], self.a.shape[1])
        kernels.outer_steps(self.a, self.e, grid, weights, matrix, bound=bound, most=self._both[0][0])


class TableRows:
    """Row `row[n]` of the table of sample `sample[n]` has the gradient `values[n]`; each (sample, row) occurs once."""

    def __init__(self, sample: Tensor, row: Tensor, values: Tensor, *, batch: int, rows: int) -> None:
        self.sample, self.row, self.values = sample, row, values
        self.batch, self.rows, self.coordinates = batch, rows, rows * values.shape[1]

    @classmethod
    def of_lookups(cls, index: Tensor, errors: Tensor, *, rows: int, padding: int | None) -> TableRows:
        """From (batch, positions) indices and (batch, positions, width) errors; repeated look-ups are added up, one
        position after another."""
        sample, row, values = kernels.added_lookups(index, errors, rows, padding)
        return cls(sample, row, values, batch=len(index), rows=rows)

    def gradients(self, part: slice) -> Dense:
        """Those of some samples, as whole tables."""
        chosen = (self.sample >= part.start) & (self.sample < part.stop)
        tables = self.values.new_zeros(part.stop - part.start, self.rows, self.values.shape[1])
        tables[self.sample[chosen] - part.start, self.row[chosen]] = self.values[chosen]
        return Dense(tables.flatten(1))

    def take(self, index: Tensor) -> TableRows:
        place = torch.full((self.batch,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        sample = place[self.sample]
        kept = sample >= 0
        return TableRows(sample[kept], self.row[kept], self.values[kept], batch=len(index), rows=self.rows)

    def total(self) -> Tensor:
        table = self.values.new_zeros(self.rows, self.values.shape[1], dtype=torch.float64)
        return table.index_add_(0, self.row, self.values.double()).flatten()

    def max_norms(self) -> Tensor:
        each = kernels.largest(self.values)
        return each.new_zeros(self.batch).scatter_reduce_(0, self.sample, each, "amax")

    def squared_norms(self, bound: float | None = None) -> Tensor:
        total = np.zeros(self.batch)
        np.add.at(total, self.sample.cpu().numpy(), kernels.squared_norms(self.values, bound).numpy())
        return torch.from_numpy(total)

    def add_steps(self, grid: Grid, weights: Tensor, total: Steps, *, at: int, bound: float | None) -> None:
        table = total.exact(at, self.coordinates).view(self.rows, -1)
        kernels.table_steps(self.values, self.row, grid, weights[self.sample.cpu()], table, bound=bound)


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
            e, a = (working(_joined(found[side::2])) for side in (0, 1))
            return Outer(a[:, 0], e[:, 0]) if a.shape[1] == 1 else linear_over_positions(a, e)
        case programs.Convolution(geometry=geometry):
            return convolution(working(found[0][:, 0]), working(found[1][:, 0]), geometry)
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
