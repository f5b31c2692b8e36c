"""Per-sample gradients of one parameter tensor, in whatever form is cheapest, and the reductions the clips need.

Everything here treats the samples one by one: a reduction of sample b runs the same operations in the same order
whatever the other samples are, how many they are and where b stands. What torch computes here is exact (maxima, copies)
or one IEEE operation an entry; sums are the compiled loops of `kernels`, or of whole grid steps, which are exact in any
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bqsgd.persample._kernels import loops as kernels
from bqsgd.persample.grid import Grid

SCRATCH_BYTES = 64 << 20
"""Per-sample gradients held at once where they must be built."""


class Factor(Protocol):
    """The gradients g_b of one parameter tensor for a batch of samples b.

    Every reduction assumes finite gradients: `clipping` first drops the samples whose `bounds` are too large.
    """

    def bounds(self) -> Tensor:
        """(batch,) float64 upper bounds of max|g_b| and of every partial sum on the way to it; NaN stays NaN."""

    def take(self, index: Tensor) -> Factor:
        """The same for the samples `index` alone."""

    def kept(self, index: Tensor) -> Factor:
        """The same as `take`, in the form that is cheapest to keep for later."""

    def joined(self, others: Sequence[Any]) -> Factor:
        """The samples of this factor and then those of the others, which are of the same kind."""

    def materialise(self, index: slice | Tensor) -> Tensor:
        """(samples, coordinates) gradients of a few samples."""

    def max_norms(self) -> Tensor:
        """(batch,) float64 max|g_b|, read no lower than it is in any later sum by more than a share of 2^-23."""

    def squared_norms(self, bound: float | None = None) -> Tensor:
        """(batch,) float64 sums of squares, of g_b clamped to +-bound where one is given."""

    def steps(self, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
        """out = sum_b of weights_b g_b in whole grid steps, flat; g_b is clamped to +-bound first, if given."""


def rows_of(values: Tensor, index: Tensor) -> Tensor:
    """values[index] of ascending indices, without a copy where they are the first ones."""
    count = len(index)
    return values[:count] if count and int(index[-1]) == count - 1 else values[index]


def max_norm(values: Tensor) -> Tensor:
    """(batch,) float64 max-norm of each sample; NaN stays NaN."""
    return values.flatten(1).abs().amax(dim=1).double()  # eight times as fast as vector_norm(ord=inf)


@dataclass(frozen=True)
class Dense:
    """Gradients as they are: `values` is (batch, coordinates). For biases and other small tensors.

    With an `order`, coordinate j is column order[j]; columns that it leaves out hold zeros.
    """

    values: Tensor
    order: Tensor | None = None

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> Dense:
        return Dense(rows_of(self.values, index), self.order)

    def kept(self, index: Tensor) -> Dense:
        return self.take(index)

    def joined(self, others: Sequence[Any]) -> Dense:
        return Dense(torch.cat([self.values, *(other.values for other in others)]), self.order)

    def materialise(self, index: slice | Tensor) -> Tensor:
        return self.values[index] if self.order is None else self.values[index][:, self.order]

    def max_norms(self) -> Tensor:
        return max_norm(self.values)

    def squared_norms(self, bound: float | None = None) -> Tensor:
        return kernels.squared_norms(self.values, bound)

    def steps(self, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
        total = out.zero_() if self.order is None else out.new_zeros(self.values.shape[1])
        kernels.add_steps(self.values, grid, weights, total, bound=bound)
        if self.order is not None:
            torch.index_select(total, 0, self.order, out=out)


class Built:
    """Reductions through gradients that are built a few samples at a time: correct for every factor.

    A factor inherits these and overrides what its mathematics can do without building. Gradients that all fit in the
    scratch are built once.
    """

    batch: int
    coordinates: int
    _built: Dense | None = None

    def bounds(self) -> Tensor:
        raise NotImplementedError

    def take(self, index: Tensor) -> Factor:
        raise NotImplementedError

    def joined(self, others: Sequence[Any]) -> Factor:
        raise NotImplementedError

    def kept(self, index: Tensor) -> Factor:
        return self.take(index)

    def materialise(self, index: slice | Tensor) -> Tensor:
        raise NotImplementedError

    def _parts(self) -> Iterator[tuple[slice, Dense]]:
        size = micro_batch(self.coordinates)
        if size >= self.batch:
            if self._built is None:
                self._built = self._gradients(slice(0, self.batch))
            yield slice(0, self.batch), self._built
            return
        for start in range(0, self.batch, size):
            part = slice(start, min(self.batch, start + size))
            yield part, self._gradients(part)

    def _gradients(self, part: slice) -> Dense:
        """Each sample's gradient built by itself."""
        return Dense(torch.cat([self.materialise(torch.tensor([b])) for b in range(part.start, part.stop)]))

    def max_norms(self) -> Tensor:
        return torch.cat([part.max_norms() for _, part in self._parts()])

    def squared_norms(self, bound: float | None = None) -> Tensor:
        return torch.cat([part.squared_norms(bound) for _, part in self._parts()])

    def steps(self, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
        more = None
        for index, part in self._parts():
            part.steps(grid, weights[index], out if more is None else more, bound=bound)
            if more is None:
                more = torch.empty_like(out) if index.stop < self.batch else out
            else:
                out += more  # whole numbers: exact


def micro_batch(coordinates: int) -> int:
    """Samples whose gradients of so many float32 coordinates fit in the scratch; at least one."""
    return max(1, SCRATCH_BYTES // (4 * max(1, coordinates)))


class Summed(Built):
    """A parameter used more than once in a forward: a sample's gradient is the sum over the uses, clipped only then."""

    def __init__(self, uses: list[Factor], *, batch: int, coordinates: int) -> None:
        self.uses, self.batch, self.coordinates = uses, batch, coordinates

    def bounds(self) -> Tensor:
        total = torch.zeros(self.batch, dtype=torch.float64)
        for use in self.uses:
            total = total + use.bounds().cpu()
        return total

    def take(self, index: Tensor) -> Summed:
        return Summed([use.take(index) for use in self.uses], batch=len(index), coordinates=self.coordinates)

    def joined(self, others: Sequence[Any]) -> Summed:
        uses = [use.joined([other.uses[n] for other in others]) for n, use in enumerate(self.uses)]
        batch = self.batch + sum(other.batch for other in others)
        return Summed(uses, batch=batch, coordinates=self.coordinates)

    def materialise(self, index: slice | Tensor) -> Tensor:
        total = self.uses[0].materialise(index).clone()
        for use in self.uses[1:]:
            total += use.materialise(index)
        return total
