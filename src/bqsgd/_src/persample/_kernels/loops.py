"""Norms of per-sample gradients, and sums of clipped gradients in whole grid steps, of tensors.

A sample is treated alike wherever it stands and whatever stands beside it; a sum is of whole numbers, so the number of
threads changes no bit. Each runs on as many threads as torch uses. float32 tensors on the CPU go through the compiled
loops of `contiguous`, which read one sample after another; tensors that lie otherwise are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bqsgd._src.persample._kernels import contiguous
from bqsgd._src.persample._kernels.contiguous import BLOCK_SAMPLES, PANEL, STRIP, Rows, blocks_of
from bqsgd._src.persample._kernels.grid import Grid, held_to
from bqsgd._src.persample._kernels.pairs import lanes_of, transpose
from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads, recycled, recycled_zeros


def usable(values: Tensor) -> bool:
    """Whether the kernels take this tensor; everything else goes through torch."""
    return values.device.type == "cpu" and values.dtype == torch.float32


def rows_first(values: Tensor) -> Tensor:
    """The same values with the entries of a sample beside each other; a copy unless they are."""
    lanes = lanes_of(values) if usable(values) else None
    if lanes is None:
        return values.contiguous()
    (samples, size), out = values.flatten(1).shape, torch.empty(values.shape)
    transpose(*lanes, size, samples, out.view(samples, size).numpy())
    return out


def _strided(values: Tensor) -> tuple[np.ndarray, int]:
    """(samples, ...) float32 values as one flat array and a stride: entry i of sample b is flat[b * stride + i]."""
    moved = values.detach().flatten(1)
    samples, entries = moved.shape
    if (entries > 1 and moved.stride(1) != 1) or (samples > 1 and moved.stride(0) < entries):
        moved = rows_first(moved)
    stride = moved.stride(0) if samples > 1 else entries
    return torch.as_strided(moved, ((samples - 1) * stride + entries if moved.numel() else 0,), (1,)).numpy(), stride


def _rows(values: Tensor) -> Rows:
    """Where the samples of a (samples, ...) float32 tensor lie."""
    (flat, stride), sizes = _strided(values), (values[:1].numel(),)
    return Rows(flat, np.arange(len(values))[None] * stride, blocks_of(sizes), sizes)


def scattered(samples: Sequence[Sequence[Tensor]]) -> Rows:
    """Where contiguous float32 tensors of several samples lie; they must be kept as long as this is used."""
    sizes = tuple(tensor.numel() for tensor in samples[0])
    held = [[tensor for tensor in tensors if tensor.numel()] for tensors in samples]
    addresses = np.array([[tensor.data_ptr() for tensor in tensors] for tensors in held], np.int64).T
    tensor, sample = np.unravel_index(addresses.argmin(), addresses.shape)
    first = held[sample][tensor].detach()
    starts = np.zeros((len(sizes), len(samples)), np.int64)
    starts[np.array(sizes) > 0] = (addresses - first.data_ptr()) // 4
    return Rows(first.view(-1).numpy(), starts, blocks_of(sizes), sizes)


def norms(values: Tensor | Rows, bound: float | None = None) -> tuple[Tensor, Tensor]:
    """(batch,) float64 largest magnitudes, NaN if one is NaN, and sums of squares of (batch, ...) values, the latter
    clamped to +-bound where one is given. One pass over float32 values on the CPU finds both."""
    reach = np.inf if bound is None else float(bound)
    if isinstance(values, Rows) or usable(values):
        most, squares = contiguous.row_norms(values if isinstance(values, Rows) else _rows(values), reach)
        return torch.from_numpy(most.astype(np.float64)), torch.from_numpy(squares)
    sizes = values.detach().cpu().flatten(1).double().abs()
    # A running sum adds one coordinate after another, whatever the shape.
    return sizes.amax(dim=1), sizes.clamp(max=reach).square_().cumsum(dim=1)[:, -1]


def largest(values: Tensor) -> Tensor:
    """(batch,) float64 max-norms of (batch, ...); NaN stays NaN."""
    return norms(values)[0]


def squared_norms(values: Tensor | Rows, bound: float | None = None) -> Tensor:
    """(batch,) float64 sums of squares of (batch, ...), clamped to +-bound where one is given."""
    return norms(values, bound)[1]


@njit(nogil=True, cache=True)
def _triangle_squares(x: np.ndarray, stride: int, size: int, start: int, stop: int, out: np.ndarray) -> None:
    for sample in range(start, stop):
        total, after = 0.0, 0.0
        for at in range(sample * stride + size - 1, sample * stride - 1, -1):
            square = np.float64(x[at]) * np.float64(x[at])
            after += square
            total += square * after
        out[sample] = total


def triangle_squares(values: Tensor) -> Tensor:
    """(batch,) float64 sums over i <= j of (x_i x_j)^2 of (batch, coordinates), from the last i to the first."""
    fixed, out = (*_strided(values), values.shape[1]), np.empty(len(values))
    in_threads(lambda start, stop: _triangle_squares(*fixed, start, stop, out), len(out), each=values.shape[1])
    return torch.from_numpy(out)


def _factors(grid: Grid, weights: Tensor, bound: float | None) -> np.ndarray:
    """(batch, 2) float32: what turns each sample's values into steps, and what they are clamped to before."""
    found = np.empty((len(weights), 2), np.float32)
    found[:, 0], found[:, 1] = weights.numpy() / grid.step, held_to(bound)
    return found


def in_steps(values: Tensor, grid: Grid, weights: Tensor, *, bound: float | None) -> Tensor:
    """(rows, coordinates) float64: what `Steps.add` adds for each row."""
    factors = torch.from_numpy(_factors(grid, weights, bound)).double()
    held = values.cpu().double().clamp(-factors[:, 1:], factors[:, 1:])
    return (held * factors[:, :1]).round_()


class Steps:
    """The sum of clipped gradients in whole steps, held over many calls of `add`.

    Steps are added up in int32, which is half of the memory to go through, and moved to float64 before 256 samples
    could overflow it.
    """

    def __init__(self, dimension: int) -> None:
        self._few: np.ndarray | None = None  # only where gradients come as they are
        self._total = recycled_zeros(dimension, np.float64)
        self._added: dict[tuple[int, int], int] = {}

    def add(self, values: Tensor | Rows, weights: Tensor, grid: Grid, *, bound: float | None, at: int) -> None:
        """Add sum_b of weights_b values_b in whole grid steps, of (batch, coordinates), to the coordinates from `at`
        on; values_b is clamped to +-bound first, if given.

        Weights in steps and bounds are rounded to float32. A product of two float32 is rounded once, to whole steps.
        """
        if isinstance(values, Tensor) and not usable(values):
            steps = in_steps(values, grid, weights, bound=bound).sum(dim=0)  # exact in any order
            self.exact(at, len(steps)).add_(steps)
            return
        rows, factors = values if isinstance(values, Rows) else _rows(values), _factors(grid, weights, bound)
        for first in range(0, len(weights), BLOCK_SAMPLES):
            last = min(len(weights), first + BLOCK_SAMPLES)
            few = self._room(at, at + sum(rows.sizes), last - first)
            contiguous.add_rows(factors.reshape(-1), rows, first, last, few, at)

    def _room(self, low: int, high: int, samples: int) -> np.ndarray:
        """Where to add so many samples to the coordinates low..high; what is there is moved to float64 first if a
        coordinate could have more than int32 holds."""
        if self._few is None:
            self._few = recycled_zeros(len(self._total), np.int32)
        before = sum(count for (start, stop), count in self._added.items() if start < high and low < stop)
        if before + samples > BLOCK_SAMPLES:
            self._settle(self._few)
        self._added[low, high] = self._added.get((low, high), 0) + samples
        return self._few

    def _settle(self, few: np.ndarray) -> None:
        for low, high in self._added:  # where two overlap, the second finds zeros

            def move(start: int, stop: int, low: int = low) -> None:
                self._total[low + start : low + stop] += few[low + start : low + stop]
                few[low + start : low + stop] = 0

            in_threads(move, high - low, each=1)
        self._added.clear()

    def exact(self, at: int, size: int) -> Tensor:
        """The float64 part of `size` coordinates from `at` on, for loops that add to it themselves."""
        return torch.from_numpy(self._total[at : at + size])

    def total(self) -> Tensor:
        """(dimension,) float64: the sum so far, in memory that later calls of `add` change."""
        if self._few is not None:
            self._settle(self._few)
        return torch.from_numpy(self._total)


def _array(values: Tensor) -> np.ndarray:
    """The values where the loops can read them; those of another device are copied to the CPU."""
    return rows_first(values.detach().cpu()).numpy()


def outer_steps(
    a: Tensor, e: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None, most: Tensor
) -> None:
    """out[o, i] += sum_b of w_b clamp(e_bo a_bi, -C, C), in whole grid steps, of (batch, i) activations and (batch, o)
    errors; most is `largest(a)`.

    clamp(e a, C) = e clamp(a, C / |e|): two vector instructions instead of four, the thresholds being made once a
    sample and row. Each sample's activations are scaled by a power of two to below 1, so that nothing overflows.
    """
    powers, inputs, target = _powers(most), _strided(a), out.numpy()
    batch, strips, panels = len(a), -(-e.shape[1] // STRIP), -(-a.shape[1] // PANEL)
    scalars = recycled((strips, batch, 1 if bound is None else 2, STRIP))
    factors = weights / grid.step * (most > 0)  # inputs of zero bound no error: its scalar could be infinite
    fixed = _array(e), powers, factors.numpy(), held_to(bound)
    in_threads(lambda start, stop: contiguous.pack_scalars(*fixed, start, stop, scalars), strips, each=batch * STRIP)
    given = scalars, *inputs, powers
    in_threads(lambda start, stop: contiguous.run_outer(*given, start, stop, target), panels, each=e.numel() * PANEL)


def _powers(largest: Tensor) -> np.ndarray:
    """The power of two that brings each sample's largest magnitude to 1/2 .. 1.

    At most 2^127, the largest in float32: then float32 scales to the same bits as float64 does. What is smaller than
    2^-127 comes to 2^-22 at least, which is as good.
    """
    powers: np.ndarray = np.ldexp(1.0, np.minimum(127, -np.frexp(largest.numpy())[1]))
    return powers


SWEPT_ROWS = 64
"""Rows of errors that take less time one by one than sorting the inputs does."""


@njit(nogil=True, cache=True)
def _clamped_outer_squares(a: np.ndarray, e: np.ndarray, bound: float, start: int, stop: int, out: np.ndarray) -> None:
    """sum over o, i of min(|e_o| |a_i|, C)^2 from both sorted: |a| up, |e| down, so the frontier only moves up."""
    for sample in range(start, stop):
        small, count, total = 0.0, 0, 0.0
        for row in range(e.shape[1] - 1, -1, -1):
            factor = np.float64(e[sample, row])
            while count < a.shape[1] and factor * a[sample, count] <= bound:
                small += np.float64(a[sample, count]) ** 2
                count += 1
            total += factor * factor * small + (a.shape[1] - count) * bound * bound
        out[sample] = total


def clamped_outer_squares(a: Tensor, e: Tensor, bound: float) -> Tensor:
    """(batch,) float64 squared norms of clamp(e_bo a_bi, -C, C): row by row for few rows, and for many in O(n log n):
    sort both sides, then sweep once."""
    left, right, out = _array(a), _array(e), np.empty(len(a))

    def one_by_one(start: int, stop: int) -> None:
        size = left.shape[1]
        contiguous.run_clamped_squares(left.reshape(-1), size, size, right, float(bound), start, stop, out)

    def sweep(start: int, stop: int) -> None:
        up, down = (np.sort(np.abs(values[start:stop]), axis=1) for values in (left, right))
        _clamped_outer_squares(up, down, bound, 0, stop - start, out[start:stop])

    few = e.shape[1] <= SWEPT_ROWS and usable(a)
    in_threads(one_by_one if few else sweep, len(out), each=a.shape[1] * e.shape[1])
    return torch.from_numpy(out)


@njit(nogil=True, cache=True)
def _added_lookups(index: np.ndarray, errors: np.ndarray, rows: int, padding: int, values: np.ndarray) -> np.ndarray:
    """Fill `values` and return (2, entries): the sample and the row of each entry."""
    (samples, positions), owner = index.shape, np.empty((2, index.size), np.int64)
    place, count = np.full(rows, -1), 0
    for sample in range(samples):
        first = count
        for position in range(positions):
            row = index[sample, position]
            inside = 0 <= row < rows
            if inside and row == padding:
                continue
            # A row that the table does not have would be one of the next sample's: it is NaN in a row of this one's.
            row = row if inside else 0
            if place[row] < first:
                place[row], owner[0, count], owner[1, count], values[count] = count, sample, row, 0
                count += 1
            own, error = values[place[row]], errors[sample, position]
            for entry in range(own.size):
                own[entry] += error[entry] if inside else np.nan
    return owner[:, :count]


def added_lookups(index: Tensor, errors: Tensor, rows: int, padding: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """(samples, rows, values) of every row that a sample has looked up, from (batch, positions) indices and (batch,
    positions, width) errors; those of repeated look-ups are added, one position after another."""
    left, right = index.cpu().contiguous().numpy(), _array(errors)
    values = np.empty((left.size, right.shape[2]), right.dtype)
    sample, row = torch.from_numpy(_added_lookups(left, right, rows, -1 if padding is None else padding, values))
    return sample, row, torch.from_numpy(values[: len(row)])


@njit(nogil=True, cache=True)
def _table_steps(values: np.ndarray, row: np.ndarray, factors: np.ndarray, out: np.ndarray) -> None:
    for entry in range(row.size):
        own, factor, high = out[row[entry]], np.float64(factors[entry, 0]), np.float64(factors[entry, 1])
        for at in range(own.size):
            held = min(max(np.float64(values[entry, at]), -high), high)
            own[at] += (held * factor + contiguous.ROUNDING) - contiguous.ROUNDING


def table_steps(values: Tensor, row: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
    """out[row[n]] += weights_n values_n in whole grid steps, clamped to +-bound first; exact in any order."""
    _table_steps(_array(values), row.numpy(), _factors(grid, weights, bound), out.numpy())
