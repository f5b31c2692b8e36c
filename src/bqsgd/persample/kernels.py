"""Fused CPU kernels for weight gradients: sums of clamped per-sample gradients, and their norms, without a
(batch, out, in) tensor. Each runs on as many threads as torch uses.
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

from bqsgd.persample import tiles
from bqsgd.persample.vectors import LANES

BLOCK_FLOATS = 1 << 16
"""Operands a block of samples may hold: a quarter of a megabyte, well inside a core's own cache."""


PIECES = 4
"""Parts a thread's work is cut into where any thread may take any part."""


def shares(items: int) -> int:
    """Threads worth using for so many items."""
    return max(1, min(torch.get_num_threads(), items))


def in_threads(work: Callable[[int, int, int], None], items: int, *, pieces: int = 1) -> None:
    """Call work(thread, start, stop) over disjoint parts of range(items), on as many threads as torch has.

    With several `pieces` a thread, each takes the next piece when it is done, so that a core kept busy by torch's own
    waiting threads holds nobody up. Only for work whose result does not depend on who does it: a thread that adds up
    its own partial sum must have one piece, or the last bits would change from run to run.
    """
    threads = shares(items)
    count = min(items, threads * pieces)
    edges = [items * i // count for i in range(count + 1)] if items else [0, 0]
    following = itertools.count()
    failures: list[BaseException] = []

    def guarded(thread: int) -> None:
        try:
            if pieces == 1:
                work(thread, edges[thread], edges[thread + 1])
                return
            while (piece := next(following)) < count:
                work(thread, edges[piece], edges[piece + 1])
        except BaseException as error:  # raised again below, in the calling thread
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(thread,)) for thread in range(1, threads)]
    for other in others:
        other.start()
    guarded(0)
    for other in others:
        other.join()
    if failures:
        raise failures[0]


def usable(values: Tensor) -> bool:
    """Whether the kernels take this tensor; everything else goes through torch."""
    return values.device.type == "cpu" and values.dtype == torch.float32


def pack_lanes(values: Tensor, width: int) -> Tensor:
    """(batch, positions, groups, n) -> (groups, panels, batch, positions, width), the last panel filled with zeros."""
    batch, positions, groups, size = values.shape
    whole, rest = divmod(size, width)
    packed = values.new_empty(groups, whole + bool(rest), batch, positions, width)
    if whole:
        panels = values[..., : whole * width].reshape(batch, positions, groups, whole, width)
        packed[:, :whole].permute(2, 3, 0, 1, 4).copy_(panels)
    if rest:
        packed[:, whole, ..., :rest] = values[..., whole * width :].permute(2, 0, 1, 3)
        packed[:, whole, ..., rest:] = 0
    return packed


def inside(bound: float) -> np.float32:
    """The largest float32 not above `bound`."""
    value = np.float32(bound)
    return value if value <= bound else np.nextafter(value, np.float32(0))


def clamped_outer_sum(a: Tensor, e: Tensor, bound: float, weights: Tensor, out: Tensor) -> None:
    """out[o, i] = sum_b w_b clamp(e_bo a_bi, -C, C) for (batch, i) activations and (batch, o) errors.

    clamp(e a, C) = e clamp(a, C / |e|): the thresholds are made once a sample and row, a hair inside C / |e|, so that
    rounding never takes a product beyond C.
    """
    errors, factors, target = e.numpy(), weights.float().numpy(), out.numpy()
    lanes = pack_lanes(a[:, None, None, :], tiles.OUTER_WIDTH)[0, :, :, 0].numpy()

    def strips(_: int, start: int, stop: int) -> None:
        rows = slice(start * tiles.OUTER_ROWS, stop * tiles.OUTER_ROWS)
        scalars = np.zeros((stop - start, len(errors), 2, tiles.OUTER_ROWS), np.float32)
        tiles.pack_scalars(np.ascontiguousarray(errors[:, rows]), factors, bound, scalars)
        tiles.run_outer(scalars, lanes, 0, stop - start, target[rows])

    in_threads(strips, -(-errors.shape[1] // tiles.OUTER_ROWS), pieces=PIECES)


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
    left, right = np.sort(a.abs().numpy(), axis=1), np.sort(e.abs().numpy(), axis=1)
    out = np.empty(len(left))
    in_threads(
        lambda _, start, stop: _clamped_outer_squares(left, right, bound, start, stop, out), len(left), pieces=PIECES
    )
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

    def clamped_sum(self, bound: float, weights: Tensor) -> Tensor:
        """(groups, rows, lanes a group): sum_b w_b clamp(g_b, -C, C)."""
        batch, _, groups, size = self.lanes.shape
        strips, panels = -(-len(self.offsets) // tiles.ROWS), -(-size // self._width)
        sums = torch.zeros(shares(batch), groups * panels * strips * tiles.ROWS * self._width)
        self._run(0, bound, weights.float().contiguous().numpy(), lambda share: sums[share].numpy())
        total = sums[0] if len(sums) == 1 else sums.sum(dim=0)
        ordered = total.view(groups, panels, strips * tiles.ROWS, self._width).transpose(1, 2).flatten(2)
        return ordered[:, : len(self.offsets), :size]

    def norms(self, *, squared: bool, bound: float = float("inf")) -> Tensor:
        """(batch,) sums of squares of clamp(g_b, -C, C) in float64, or max|g_b|."""
        partial = torch.zeros(len(self.lanes), LANES, dtype=torch.float64)
        flat = partial.numpy().reshape(-1)
        self._run(2 if squared else 1, bound, np.empty(0, np.float32), lambda _: flat)
        return partial.sum(dim=1) if squared else partial.amax(dim=1).float()

    @property
    def _width(self) -> int:
        return tiles.NARROW if self.lanes.shape[3] <= tiles.NARROW else tiles.WIDE

    def _run(self, mode: int, bound: float, weights: np.ndarray, result: Callable[[int], np.ndarray]) -> None:
        rows, (batch, positions, groups, size) = len(self.offsets), self.lanes.shape
        offsets = np.pad(self.offsets, (0, -rows % tiles.ROWS), mode="edge")
        scalars, lanes, width, limit = self.scalars.contiguous().numpy(), self.lanes.numpy(), self._width, inside(bound)
        block = max(1, BLOCK_FLOATS // (scalars.shape[1] + positions * groups * size))
        windows = (scalars, self.group_stride, self.base, offsets, rows, lanes, width, block, limit, weights)
        pieces = PIECES if mode else 1  # every sample has a norm of its own; sums are a thread's own
        in_threads(
            lambda share, start, stop: tiles.run_windows(mode, *windows, start, stop, result(share)),
            batch,
            pieces=pieces,
        )
