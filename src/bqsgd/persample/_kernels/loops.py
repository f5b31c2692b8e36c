"""Compiled CPU loops over per-sample gradients: norms, and sums of clipped gradients in whole grid steps.

A sample is treated alike wherever it stands and whatever stands beside it; a sum is of whole numbers, so the number of
threads changes no bit. Each runs on as many threads as torch uses.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bqsgd.persample._kernels import tiles
from bqsgd.persample._kernels.grid import Grid, held_to
from bqsgd.persample._kernels.vectors import LANES

AT_ONCE = LANES
"""Samples whose gradients `Pairs` makes at once."""
PIECES = 4
"""Parts a thread's work is cut into; any thread may take any part."""
FEW = 1 << 19
"""Numbers that one thread has gone through by the time that another has begun."""


def in_threads(work: Callable[[int, int], None], items: int, *, each: int = FEW) -> None:
    """Call work(start, stop) over disjoint parts of range(items), on as many threads as torch has.

    Each thread takes the next of several pieces when it is done, so that a core kept busy by torch's own waiting
    threads holds nobody up.

    each: how many numbers an item is made of, where little is done to each: a few are not worth a second thread.
    """
    threads = max(1, min(torch.get_num_threads(), items)) if items * each >= FEW else 1
    count = min(items, threads * PIECES if threads > 1 else 1)
    edges = [items * i // count for i in range(count + 1)] if items else [0, 0]
    following = itertools.count()

    def take() -> None:
        while (piece := next(following)) < count:
            work(edges[piece], edges[piece + 1])

    if threads == 1:
        take()
        return
    others = [_helpers(os.getpid(), torch.get_num_threads()).submit(take) for _ in range(1, threads)]
    try:
        take()
    finally:
        for other in others:
            if not other.cancel():  # one that has not begun finds no piece left
                other.result()


@lru_cache(maxsize=1)
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay, with the memory they keep. A forked process has none of its parent's and makes its own."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix=f"bqsgd-{process}")


_kept = threading.local()


def scratch(name: str, *shape: int) -> np.ndarray:
    """float32 memory for one use at a time, kept by each thread: the system takes its time to hand out so much anew."""
    size = int(np.prod(shape))
    if getattr(_kept, name, np.empty(0)).size < size:
        setattr(_kept, name, np.empty(size, np.float32))
    found: np.ndarray = getattr(_kept, name)[:size].reshape(shape)
    return found


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


BESIDE = 128
"""Samples a loop takes at a time."""


@njit(nogil=True, cache=True)
def _squares(values: np.ndarray, stride: int, size: int, bound: float, start: int, stop: int, out: np.ndarray) -> None:
    """Sums of squares in float64, one coordinate after another."""
    for first in range(start, stop, BESIDE):
        sums = out[first : min(stop, first + BESIDE)]
        sums[:] = 0
        for at in range(size):
            own = values[at * stride + first : at * stride + first + sums.size]
            for sample in range(sums.size):
                value = min(abs(np.float64(own[sample])), bound)
                sums[sample] += value * value


def squared_norms(values: Tensor, bound: float | None = None) -> Tensor:
    """(batch,) float64 sums of squares of (batch, coordinates), clamped to +-bound where one is given."""
    (flat, stride), out = samples_last(values), np.empty(len(values))
    size, reach = values.shape[1], np.inf if bound is None else bound
    in_threads(lambda start, stop: _squares(flat, stride, size, reach, start, stop, out), len(out), each=size)
    return torch.from_numpy(out)


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
def _largest(values: np.ndarray, stride: int, size: int, start: int, stop: int, out: np.ndarray) -> None:
    """Largest magnitudes; NaN is above all."""
    for first in range(start, stop, BESIDE):
        found = out[first : min(stop, first + BESIDE)]
        found[:] = 0
        for at in range(size):
            own = values[at * stride + first : at * stride + first + found.size]
            for sample in range(found.size):
                value, held = abs(own[sample]), found[sample]
                found[sample] = value if (value > held) | (value != value) else held


def largest(values: Tensor) -> Tensor:
    """(batch,) float64 max-norms of (batch, ...); NaN stays NaN."""
    if not usable(values):
        return values.flatten(1).abs().amax(dim=1).double()
    (flat, stride), out = samples_last(values), np.empty(len(values), np.float32)
    size = values[0].numel() if len(values) else 0
    in_threads(lambda start, stop: _largest(flat, stride, size, start, stop, out), len(out), each=size)
    return torch.from_numpy(out.astype(np.float64))


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


_WHOLE = 1.5 * 2.0**52
"""Adding and taking away this rounds a float64 below 2^51 to the nearest whole number."""


@njit(nogil=True, cache=True)
def _add_steps(
    values: np.ndarray, stride: int, weights: np.ndarray, reach: float, start: int, stop: int, out: np.ndarray
) -> None:
    samples = weights.size
    whole = samples - samples % 16
    parts = np.empty(16)
    for at in range(start, stop):
        own = values[at * stride : at * stride + samples]
        parts[:] = 0
        for first in range(0, whole, 16):
            for lane in range(16):
                held = min(max(np.float64(own[first + lane]), -reach), reach) * weights[first + lane]
                parts[lane] += (held + _WHOLE) - _WHOLE
        total = 0.0
        for lane in range(16):
            total += parts[lane]
        for sample in range(whole, samples):
            held = min(max(np.float64(own[sample]), -reach), reach) * weights[sample]
            total += (held + _WHOLE) - _WHOLE
        out[at] += total


def add_steps(values: Tensor, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
    """out += sum_b of weights_b values_b in whole grid steps; values_b is clamped to +-bound first, if given."""
    (flat, stride), scaled, target = samples_last(values), (weights / grid.step).numpy(), out.numpy()
    reach = held_to(bound)
    each = len(scaled)
    in_threads(lambda start, stop: _add_steps(flat, stride, scaled, reach, start, stop, target), len(target), each=each)


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
    (inputs, input_stride), (errors, error_stride) = samples_last(a), samples_last(e)
    (batch, columns), rows, target = a.shape, e.shape[1], out.numpy()
    scales = np.ldexp(1.0, -np.frexp(largest(a).numpy())[1])
    factors, reach = (weights / grid.step).numpy(), held_to(bound)
    lanes = scratch("lanes", -(-columns // tiles.OUTER_WIDTH), batch, tiles.OUTER_WIDTH)
    in_threads(
        lambda start, stop: tiles.pack_lanes(inputs, input_stride, columns, scales, start, stop, lanes), len(lanes)
    )

    def strips(start: int, stop: int) -> None:
        scalars = scratch("scalars", stop - start, batch, 2 if bound else 1, tiles.OUTER_ROWS)
        tiles.pack_scalars(errors, error_stride, rows, scales, factors, reach, start, scalars)
        tiles.run_outer(scalars, lanes, 0, stop - start, target[start * tiles.OUTER_ROWS : stop * tiles.OUTER_ROWS])

    in_threads(strips, -(-rows // tiles.OUTER_ROWS))


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
        out = np.empty((self.groups * height * width, blocks * LANES), np.float32)
        rows = np.pad(e.rows, (0, -height % tiles.PAIR_ROWS), mode="edge")
        columns = np.pad(a.rows, (0, -width % tiles.PAIR_COLUMNS), mode="edge")
        fixed = (left, left_stride, e.places, rows, e.steps, e.group, right, right_stride, a.places, a.size)
        rest = (columns, a.steps, a.group, self.groups, height, width, batch)
        in_threads(lambda start, stop: tiles.run_pairs(*fixed, *rest, start, stop, out), blocks)
        return torch.from_numpy(out).t()[:batch]
