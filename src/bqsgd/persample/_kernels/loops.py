"""Compiled CPU loops over per-sample gradients: norms, and sums of clipped gradients in whole grid steps.

A sample is treated alike wherever it stands and whatever stands beside it; a sum is of whole numbers, so the number of
threads changes no bit. Each runs on as many threads as torch uses.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bqsgd.persample._kernels import tiles
from bqsgd.persample._kernels.grid import Grid, held_to

BLOCK_FLOATS = 1 << 16
"""Operands a block of samples may hold: a quarter of a megabyte, well inside a core's own cache."""


PIECES = 4
"""Parts a thread's work is cut into; any thread may take any part."""


def in_threads(work: Callable[[int, int], None], items: int) -> None:
    """Call work(start, stop) over disjoint parts of range(items), on as many threads as torch has.

    Each thread takes the next of several pieces when it is done, so that a core kept busy by torch's own waiting
    threads holds nobody up.
    """
    threads = max(1, min(torch.get_num_threads(), items))
    count = min(items, threads * PIECES if threads > 1 else 1)
    edges = [items * i // count for i in range(count + 1)] if items else [0, 0]
    following = itertools.count()
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            while (piece := next(following)) < count:
                work(edges[piece], edges[piece + 1])
        except BaseException as error:  # raised again below, in the calling thread
            failures.append(error)

    others = [threading.Thread(target=guarded) for _ in range(1, threads)]
    for other in others:
        other.start()
    guarded()
    for other in others:
        other.join()
    if failures:
        raise failures[0]


def usable(values: Tensor) -> bool:
    """Whether the kernels take this tensor; everything else goes through torch."""
    return values.device.type == "cpu" and values.dtype == torch.float32


@njit(nogil=True, cache=True)
def _squares(values: np.ndarray, bound: float, start: int, stop: int, out: np.ndarray) -> None:
    """Sums of squares in float64, in 16 parts so that they vectorise; the order is that of the coordinates alone."""
    size = values.shape[1]
    whole = size - size % 16
    parts = np.empty(16)
    for sample in range(start, stop):
        parts[:] = 0.0
        for first in range(0, whole, 16):
            for lane in range(16):
                value = min(abs(np.float64(values[sample, first + lane])), bound)
                parts[lane] += value * value
        total = 0.0
        for lane in range(16):
            total += parts[lane]
        for at in range(whole, size):
            value = min(abs(np.float64(values[sample, at])), bound)
            total += value * value
        out[sample] = total


def squared_norms(values: Tensor, bound: float | None = None) -> Tensor:
    """(batch,) float64 sums of squares of (batch, coordinates), clamped to +-bound where one is given."""
    array, out = _array(values), np.empty(len(values))
    in_threads(lambda start, stop: _squares(array, np.inf if bound is None else bound, start, stop, out), len(out))
    return torch.from_numpy(out)


@njit(nogil=True, cache=True)
def _sums(values: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
    size = values.shape[1]
    whole = size - size % 16
    parts = np.empty(16, np.float32)
    for row in range(start, stop):
        parts[:] = 0
        for first in range(0, whole, 16):
            for lane in range(16):
                parts[lane] += values[row, first + lane]
        total = np.float32(0)
        for lane in range(16):
            total += parts[lane]
        for at in range(whole, size):
            total += values[row, at]
        out[row] = total


def row_sums(values: Tensor) -> Tensor:
    """(..., n) -> (...): sums over the last axis, in an order that follows from n alone."""
    if not usable(values):
        return values.sum(dim=-1)
    array = _array(values).reshape(-1, values.shape[-1])
    out = np.empty(len(array), np.float32)
    in_threads(lambda start, stop: _sums(array, start, stop, out), len(out))
    return torch.from_numpy(out).view(values.shape[:-1])


STRETCH = 2048
"""Coordinates whose sums stay in the nearest cache while the samples pass by."""


@njit(nogil=True, cache=True)
def _add_steps(values: np.ndarray, weights: np.ndarray, reach: float, start: int, stop: int, out: np.ndarray) -> None:
    for first in range(start, stop, STRETCH):
        last = min(stop, first + STRETCH)
        for sample in range(len(values)):
            weight = weights[sample]
            for at in range(first, last):
                out[at] += np.rint(min(max(np.float64(values[sample, at]), -reach), reach) * weight)


def add_steps(values: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
    """out += sum_b of weights_b values_b in whole grid steps; values_b is clamped to +-bound first, if given."""
    array, scaled, target = _array(values), (weights / grid.step).numpy(), out.numpy()
    reach = held_to(bound)
    in_threads(lambda start, stop: _add_steps(array, scaled, reach, start, stop, target), len(target))


def in_steps(values: Tensor, grid: Grid, weights: Tensor, *, bound: float | None) -> Tensor:
    """(rows, coordinates) float64: what `add_steps` adds for each row."""
    held = values.cpu().double()
    held = held.clamp(-held_to(bound), held_to(bound))
    return (held * (weights / grid.step)[:, None]).round_()


def _array(values: Tensor) -> np.ndarray:
    """The values where the loops can read them; those of another device are copied to the CPU."""
    return values.detach().cpu().contiguous().numpy()


def outer_steps(a: Tensor, e: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
    """out[o, i] = sum_b of w_b clamp(e_bo a_bi, -C, C), in whole grid steps, of (batch, i) activations and (batch, o)
    errors.

    clamp(e a, C) = e clamp(a, C / |e|): two vector instructions instead of four, the thresholds being made once a
    sample and row. Each sample's activations are scaled by a power of two to below 1, so that nothing overflows.
    """
    inputs, errors, target = a.contiguous().numpy(), e.contiguous().numpy(), out.numpy()
    scales = np.ldexp(1.0, -np.frexp(np.abs(inputs).max(axis=1).astype(np.float64))[1])
    factors, reach = (weights / grid.step).numpy(), held_to(bound)
    lanes = np.empty((-(-inputs.shape[1] // tiles.OUTER_WIDTH), len(inputs), tiles.OUTER_WIDTH), np.float32)
    in_threads(lambda start, stop: tiles.pack_lanes(inputs, scales, start, stop, lanes), len(inputs))

    def strips(start: int, stop: int) -> None:
        rows = slice(start * tiles.OUTER_ROWS, stop * tiles.OUTER_ROWS)
        scalars = np.zeros((stop - start, len(errors), 2 if bound else 1, tiles.OUTER_ROWS), np.float32)
        tiles.pack_scalars(np.ascontiguousarray(errors[:, rows]), scales, factors, reach, scalars)
        tiles.run_outer(scalars, lanes, 0, stop - start, target[rows])

    in_threads(strips, -(-errors.shape[1] // tiles.OUTER_ROWS))


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
    """(batch,) float64 squared norms of clamp(e_bo a_bi, -C, C) in O(n log n): sort both sides, then sweep once."""
    left, right = (np.sort(_array(values.abs()), axis=1) for values in (a, e))
    out = np.empty(len(left))
    in_threads(lambda start, stop: _clamped_outer_squares(left, right, bound, start, stop, out), len(left))
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Windows:
    """Gradients that are sums over positions of scalar x lane, the scalars read through a window that slides.

    Row r of a group at position p is scalars[b, group * group_stride + base[p] + offsets[r]]; its lanes are
    lanes[b, p, group].
    """

    scalars: Tensor
    base: np.ndarray
    offsets: np.ndarray
    lanes: Tensor
    group_stride: int = 0

    @property
    def _tiles(self) -> tuple[int, int, int, int]:
        """Groups, panels of lanes, rows with those that fill up a tile, lanes of a panel."""
        groups, size = self.lanes.shape[2:]
        width = tiles.NARROW if size <= tiles.NARROW else tiles.WIDE
        return groups, -(-size // width), -(-len(self.offsets) // tiles.ROWS) * tiles.ROWS, width

    @property
    def size(self) -> int:
        """Coordinates of a gradient with those that fill up its tiles."""
        return int(np.prod(self._tiles))

    def gradients(self, part: slice) -> Tensor:
        """(samples, coordinates) of the samples `part`, in the order of the tiles and with zeros where a tile is filled
        up; `places` tells where each lies."""
        groups, _, padded, width = self._tiles
        rows, (_, positions, _, size) = len(self.offsets), self.lanes.shape
        offsets = np.pad(self.offsets, (0, padded - rows), mode="edge")
        scalars, lanes = self.scalars[part].contiguous().numpy(), self.lanes[part].numpy()
        block = max(1, BLOCK_FLOATS // (scalars.shape[1] + positions * groups * size))
        found = np.empty((len(lanes), self.size), np.float32)
        windows = (scalars, self.group_stride, self.base, offsets, rows, lanes, width, block)
        flat, stride = found.reshape(-1), found.shape[1]
        in_threads(lambda start, stop: tiles.run_windows(*windows, start, stop, flat, stride), len(lanes))
        return torch.from_numpy(found)

    def places(self) -> Tensor:
        """(groups, rows, lanes a group): where each coordinate lies in the order of the tiles."""
        groups, panels, padded, width = self._tiles
        ordered = torch.arange(self.size).view(groups, panels, padded, width).transpose(1, 2).flatten(2)
        return ordered[:, : len(self.offsets), : self.lanes.shape[3]]
