"""Compiled CPU loops over per-sample gradients: norms, and sums of clipped gradients in whole grid steps.

A sample is treated alike wherever it stands and whatever stands beside it; a sum is of whole numbers, so the number of
threads changes no bit. Each runs on as many threads as torch uses.

Samples may lie one after another, as torch keeps them (the loops of `contiguous`), or beside each other, as the lanes
have them (the loops of `beside`). Both give the same bits, so nothing depends on which of the two it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bqsgd.persample._kernels import beside, contiguous, tiles
from bqsgd.persample._kernels.grid import Grid, held_to
from bqsgd.persample._kernels.threads import FEW as FEW
from bqsgd.persample._kernels.threads import in_threads as in_threads
from bqsgd.persample._kernels.threads import recycled, recycled_zeros
from bqsgd.persample._kernels.threads import scratch as scratch
from bqsgd.persample._kernels.tiles import BLOCK_SAMPLES, ROUNDING
from bqsgd.persample._kernels.vectors import LANES

AT_ONCE = LANES
"""Samples whose gradients `Pairs` makes at once."""


def usable(values: Tensor) -> bool:
    """Whether the kernels take this tensor; everything else goes through torch."""
    return values.device.type == "cpu" and values.dtype == torch.float32


def samples_last(values: Tensor) -> tuple[np.ndarray, int]:
    """(samples, ...) float values as one flat array and a stride: entry i of sample b is flat[i * stride + b].

    A copy unless the samples of an entry lie beside each other already; those of another device are copied too.
    """
    moved = values.detach().cpu().flatten(1).t()
    entries, samples = moved.shape
    if moved.stride(1) == 1 and moved.stride(0) >= samples and entries > 1:
        stride = moved.stride(0)
        return torch.as_strided(moved, ((entries - 1) * stride + samples,), (1,)).numpy(), stride
    if usable(values) and moved.numel():
        moved = in_lanes(values.flatten(1), samples).t()
    return moved.contiguous().numpy().reshape(-1), samples


def samples_first(values: Tensor) -> tuple[np.ndarray, int] | None:
    """The same where the entries of a sample lie beside each other: entry i of sample b is flat[b * stride + i].

    None for all others, and for what the kernels do not take.
    """
    if not usable(values):
        return None
    moved = values.detach().flatten(1)
    samples, entries = moved.shape
    stride = moved.stride(0) if samples > 1 else entries
    if not moved.numel() or (entries > 1 and moved.stride(1) != 1) or stride < entries:
        return None
    return torch.as_strided(moved, ((samples - 1) * stride + entries,), (1,)).numpy(), stride


@njit(nogil=True, cache=True)
def _transpose(values: np.ndarray, samples: int, size: int, start: int, stop: int, out: np.ndarray) -> None:
    """Entries start * 16 .. stop * 16 of (samples, size) -> (size, samples and zeros), a square of 16 at a time."""
    flat, wide = out.reshape(-1), out.shape[1]
    for column in range(start, stop):
        for row in range(0, wide, LANES):
            if row + LANES <= samples and column * LANES + LANES <= size:  # loops of known length
                for i in range(LANES):
                    for j in range(LANES):
                        flat[(column * LANES + i) * wide + row + j] = values[(row + j) * size + column * LANES + i]
            else:
                for i in range(min(LANES, size - column * LANES)):
                    for j in range(min(LANES, wide - row)):
                        at = (row + j) * size + column * LANES + i
                        held = values[at] if row + j < samples else np.float32(0)
                        flat[(column * LANES + i) * wide + row + j] = held


def in_lanes(values: Tensor, rows: int) -> Tensor:
    """(rows, ...) with those of `values` first and zeros after them, the samples of an entry beside each other."""
    flat, size = values.detach().contiguous().view(-1).numpy(), values[0].numel()
    out, samples = np.empty((size, rows), np.float32), len(values)
    each, blocks = samples * LANES, -(-size // LANES)
    in_threads(lambda start, stop: _transpose(flat, samples, size, start, stop, out), blocks, each=each)
    return torch.from_numpy(out).view(*values.shape[1:], rows).movedim(-1, 0)


@njit(nogil=True, cache=True)
def _wide_squares(values: np.ndarray, stride: int, size: int, bound: float, out: np.ndarray) -> None:
    """Sums of squares of float64 numbers, one coordinate after another."""
    out[:] = 0
    for at in range(size):
        own = values[at * stride : at * stride + out.size]
        for sample in range(out.size):
            value = min(abs(np.float64(own[sample])), bound)
            out[sample] += value * value


def _both_norms(values: Tensor, bound: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """Largest magnitudes and sums of squares of (batch, ...) float32 values, clamped to +-bound first."""
    size, rows = values[0].numel() if len(values) else 0, samples_first(values)
    if rows is not None:
        return contiguous.row_norms(*rows, len(values), size, bound)
    return beside.lane_norms(*samples_last(values), len(values), size, bound)


def squared_norms(values: Tensor, bound: float | None = None) -> Tensor:
    """(batch,) float64 sums of squares of (batch, coordinates), clamped to +-bound where one is given."""
    reach = np.inf if bound is None else float(bound)
    if values.dtype == torch.float32:
        return torch.from_numpy(_both_norms(values, reach)[1])
    (flat, stride), out = samples_last(values), np.empty(len(values))
    _wide_squares(flat, stride, values.shape[1], reach, out)
    return torch.from_numpy(out)


def largest(values: Tensor) -> Tensor:
    """(batch,) float64 max-norms of (batch, ...); NaN stays NaN."""
    if not usable(values):
        return values.flatten(1).abs().amax(dim=1).double()
    return torch.from_numpy(_both_norms(values)[0].astype(np.float64))


def norms(values: Tensor) -> tuple[Tensor, Tensor]:
    """`largest` and `squared_norms` of (batch, coordinates); one pass over float32 values on the CPU finds both."""
    if not usable(values):
        return largest(values), squared_norms(values)
    most, squares = _both_norms(values)
    return torch.from_numpy(most.astype(np.float64)), torch.from_numpy(squares)


@njit(nogil=True, cache=True)
def _triangle_squares(
    values: np.ndarray, stride: int, size: int, start: int, stop: int, after: np.ndarray, out: np.ndarray
) -> None:
    """sum over i <= j of (x_i x_j)^2 in float64, from the last coordinate to the first; `after` is scratch."""
    out[start:stop], after[start:stop] = 0, 0
    for at in range(size - 1, -1, -1):
        own = values[at * stride : at * stride + stop]
        for sample in range(start, stop):
            square = np.float64(own[sample]) * np.float64(own[sample])
            after[sample] += square
            out[sample] += square * after[sample]


def triangle_squares(values: Tensor) -> Tensor:
    """(batch,) float64 squared norms of the products x_i x_j, i <= j, of (batch, coordinates)."""
    (flat, stride), out, after = samples_last(values), np.empty(len(values)), np.empty(len(values))
    size = values.shape[1]
    in_threads(lambda start, stop: _triangle_squares(flat, stride, size, start, stop, after, out), len(out))
    return torch.from_numpy(out)


@njit(nogil=True, cache=True)
def _sums(values: np.ndarray, stride: int, terms: int, samples: int, start: int, stop: int, out: np.ndarray) -> None:
    for row in range(start, stop):
        sums = out[row]
        sums[:] = 0
        for term in range(terms):
            at = (row * terms + term) * stride
            own = values[at : at + samples]
            for sample in range(samples):
                sums[sample] += own[sample]


def row_sums(values: Tensor) -> Tensor:
    """(batch, rows, n) -> (batch, rows): sums over the last axis, one term after another."""
    if values.shape[-1] == 1:
        return values[..., 0]
    if not usable(values):
        return values.sum(dim=-1)
    (flat, stride), (batch, rows, terms) = samples_last(values), values.shape
    out = np.empty((rows, batch), np.float32)
    in_threads(lambda start, stop: _sums(flat, stride, terms, batch, start, stop, out), rows, each=terms * batch)
    return torch.from_numpy(out).t()


@njit(nogil=True, cache=True)
def _add_wide_steps(
    values: np.ndarray, stride: int, factors: np.ndarray, start: int, stop: int, out: np.ndarray
) -> None:
    """out[i] += the sum over all samples of the steps of their entry i, of float64 numbers."""
    for at in range(start, stop):
        total = 0.0
        for sample in range(len(factors)):
            reach = np.float64(factors[sample, 1])
            held = min(max(np.float64(values[at * stride + sample]), -reach), reach) * np.float64(factors[sample, 0])
            total += (held + ROUNDING) - ROUNDING
        out[at] += total


def _factors(grid: Grid, weights: Tensor, bound: float | None) -> np.ndarray:
    """(batch, 2) float32: what turns each sample's values into steps, and what they are clamped to before."""
    found = np.empty((len(weights), 2), np.float32)
    found[:, 0], found[:, 1] = weights.numpy() / grid.step, held_to(bound)
    return found


def add_steps(values: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
    """out += sum_b of weights_b values_b in whole grid steps; values_b is clamped to +-bound first, if given.

    Weights in steps and bounds are rounded to float32. A product of two float32 is rounded once, to whole steps.
    """
    factors, target, rows = _factors(grid, weights, bound), out.numpy(), samples_first(values)
    samples, size = len(factors), len(target)
    if rows is not None:
        fixed = factors.reshape(-1), bound is not None, *rows, samples
        pieces = -(-size // contiguous.SUM_PIECE)
        in_threads(
            lambda start, stop: contiguous.run_row_sums(*fixed, *_coordinates(start, stop, size), target),
            pieces,
            each=samples * contiguous.SUM_PIECE,
        )
        return
    flat, stride = samples_last(values)
    if values.dtype == torch.float32:
        scales, bounds = np.ascontiguousarray(factors.T)
        lanes = scales, bounds, bound is not None, flat, stride
        in_threads(lambda start, stop: beside.add_lane_steps(*lanes, start, stop, target), size, each=samples)
    else:
        in_threads(lambda start, stop: _add_wide_steps(flat, stride, factors, start, stop, target), size, each=samples)


def _coordinates(start: int, stop: int, size: int) -> tuple[int, int]:
    """The coordinates of the pieces start..stop."""
    return start * contiguous.SUM_PIECE, min(size, stop * contiguous.SUM_PIECE)


def in_steps(values: Tensor, grid: Grid, weights: Tensor, *, bound: float | None) -> Tensor:
    """(rows, coordinates) float64: what `add_steps` adds for each row."""
    factors = torch.from_numpy(_factors(grid, weights, bound)).double()
    held = values.cpu().double().clamp(-factors[:, 1:], factors[:, 1:])
    return (held * factors[:, :1]).round_()


@njit(nogil=True, cache=True)
def _move(few: np.ndarray, total: np.ndarray, start: int, stop: int) -> None:
    for at in range(start, stop):
        total[at] += np.float64(few[at])
        few[at] = 0


class Steps:
    """The sum of clipped gradients in whole steps, held over many calls of `add`.

    Steps are added up in int32, which is half of the memory to go through, and moved to float64 before 256 samples
    could overflow it.
    """

    def __init__(self, dimension: int) -> None:
        self._few: np.ndarray | None = None  # only where gradients come as they are
        self._total = recycled_zeros(dimension, np.float64)
        self._added: dict[tuple[int, int], int] = {}

    def add(self, values: Tensor, weights: Tensor, grid: Grid, *, bound: float | None, at: int) -> None:
        """Add what `add_steps` adds for (batch, coordinates) values, to the coordinates from `at` on."""
        size, rows = values.shape[1], samples_first(values)
        if rows is None:
            add_steps(values, grid, weights, torch.from_numpy(self._total[at : at + size]), bound=bound)
            return
        factors, pieces = _factors(grid, weights, bound).reshape(-1), -(-size // contiguous.SUM_PIECE)
        for first in range(0, len(values), BLOCK_SAMPLES):
            samples = first, min(len(values), first + BLOCK_SAMPLES)
            few = self._room(at, at + size, samples[1] - samples[0])

            def piece(start: int, stop: int, few: np.ndarray = few, samples: tuple[int, int] = samples) -> None:
                low, high = _coordinates(start, stop, size)
                flat, stride = rows
                contiguous.add_rows(factors, bound is not None, flat, low, stride, *samples, few, at + low, high - low)

            in_threads(piece, pieces, each=(samples[1] - samples[0]) * contiguous.SUM_PIECE)

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
                _move(few, self._total, low + start, low + stop)

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
    return values.detach().cpu().contiguous().numpy()


DIRECT_ROWS = 32
"""Up to so many rows, the inputs of samples that lie one after another are read as they lie; for more rows they are
copied to panels, which every strip of rows then reads in order."""


def outer_steps(
    a: Tensor,
    e: Tensor,
    grid: Grid,
    weights: Tensor,
    out: Tensor,
    *,
    bound: float | None,
    largest_inputs: Tensor | None = None,
) -> None:
    """out[o, i] += sum_b of w_b clamp(e_bo a_bi, -C, C), in whole grid steps, of (batch, i) activations and (batch, o)
    errors.

    clamp(e a, C) = e clamp(a, C / |e|): two vector instructions instead of four, the thresholds being made once a
    sample and row. Each sample's activations are scaled by a power of two to below 1, so that nothing overflows.

    largest_inputs: `largest(a)`, for a caller that has it.
    """
    inputs, rows, target = samples_first(a), e.shape[1], out.numpy()
    powers = _powers(largest(a) if largest_inputs is None else largest_inputs)
    factors, reach = (weights / grid.step).numpy(), held_to(bound)
    if inputs is not None and rows <= DIRECT_ROWS:
        _outer_as_it_lies(*inputs, e, powers, factors, reach, target)
        return
    (batch, columns), (errors, error_stride) = a.shape, samples_last(e)
    lanes = scratch("lanes", -(-columns // tiles.OUTER_WIDTH), batch, tiles.OUTER_WIDTH)
    pack = tiles.pack_lanes if inputs is None else contiguous.pack_panels
    given = samples_last(a) if inputs is None else inputs
    in_threads(lambda start, stop: pack(*given, columns, powers, start, stop, lanes), len(lanes))

    def strips(start: int, stop: int) -> None:
        scalars = scratch("scalars", stop - start, batch, 2 if bound else 1, tiles.OUTER_ROWS)
        tiles.pack_scalars(errors, error_stride, rows, powers, factors, reach, start, scalars)
        tiles.run_outer(scalars, lanes, 0, stop - start, target[start * tiles.OUTER_ROWS : stop * tiles.OUTER_ROWS])

    in_threads(strips, -(-rows // tiles.OUTER_ROWS))


def _powers(largest: Tensor) -> np.ndarray:
    """The power of two that brings each sample's largest magnitude to 1/2 .. 1.

    At most 2^127, the largest in float32: then float32 scales to the same bits as float64 does. What is smaller than
    2^-127 comes to 2^-22 at least, which is as good.
    """
    powers: np.ndarray = np.ldexp(1.0, np.minimum(127, -np.frexp(largest.numpy())[1]))
    return powers


def _outer_as_it_lies(
    x: np.ndarray, stride: int, e: Tensor, powers: np.ndarray, factors: np.ndarray, reach: float, target: np.ndarray
) -> None:
    samples, rows = e.shape
    errors, parts = e.detach().cpu(), 1 if reach == np.inf else 2
    tiles_of_rows, panels = contiguous.tile_count(rows), -(-target.shape[1] // contiguous.PANEL)
    scalars = np.empty(samples * (tiles_of_rows + parts * rows), np.float32)
    contiguous.pack_row_scalars(errors.numpy(), powers, factors, reach, scalars)
    in_threads(
        lambda start, stop: contiguous.run_row_steps(scalars, parts, x, stride, samples, start, stop, target),
        panels,
        each=samples * rows * contiguous.PANEL,
    )


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
    (left, right), out = (_array(values) for values in (a, e)), np.empty(len(a))
    if e.shape[1] <= SWEPT_ROWS:
        in_threads(
            lambda start, stop: contiguous.run_clamped_squares(left, right, float(bound), start, stop, out),
            len(out),
            each=a.shape[1] * e.shape[1],
        )
        return torch.from_numpy(out)

    def sweep(start: int, stop: int) -> None:
        up, down = (np.sort(np.abs(values[start:stop]), axis=1) for values in (left, right))
        _clamped_outer_squares(up, down, bound, 0, stop - start, out[start:stop])

    in_threads(sweep, len(left))
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Side:
    """One factor of the products: row r at position p is entry group * `group` + rows[r] + steps[p] of a sample.

    values (batch, ...) has its entry i at places[i] of `size` entries, zeros elsewhere.
    """

    values: Tensor
    places: np.ndarray
    size: int
    rows: np.ndarray
    steps: np.ndarray
    group: int = 0

    def of(self, part: slice) -> Side:
        return replace(self, values=self.values[part])


@dataclass(frozen=True)
class Pairs:
    """Gradients that are sums over positions of products of the errors' rows and the inputs' rows."""

    errors: Side
    inputs: Side
    groups: int = 1

    def gradients(self, part: slice) -> Tensor:
        """(samples, coordinates) of the samples `part`, ordered by group, row of the errors, row of the inputs."""
        e, a = self.errors.of(part), self.inputs.of(part)
        (left, left_stride), (right, right_stride) = samples_last(e.values), samples_last(a.values)
        batch, height, width = len(e.values), len(e.rows), len(a.rows)
        blocks = -(-batch // LANES)
        out = recycled((self.groups * height * width, blocks * LANES))
        rows = np.pad(e.rows, (0, -height % tiles.PAIR_ROWS), mode="edge")
        columns = np.pad(a.rows, (0, -width % tiles.PAIR_COLUMNS), mode="edge")
        fixed = (left, left_stride, e.places, rows, e.steps, e.group, right, right_stride, a.places, a.size)
        rest = (columns, a.steps, a.group, self.groups, height, width, batch)
        in_threads(lambda start, stop: tiles.run_pairs(*fixed, *rest, start, stop, out), blocks)
        return torch.from_numpy(out).t()[:batch]
