"""Fused CPU kernels for weight gradients: sums of clamped per-sample gradients, and their norms, without a
(batch, out, in) tensor. Each runs on as many threads as torch uses.
"""

from __future__ import annotations

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


def shares(items: int) -> int:
    """Threads worth using for so many items."""
    return max(1, min(torch.get_num_threads(), items))


def in_threads(work: Callable[[int, int, int], None], items: int) -> None:
    """Call work(share, start, stop) over disjoint shares of range(items), as many as torch has threads."""
    threads = shares(items)
    edges = [items * i // threads for i in range(threads + 1)]
    failures: list[BaseException] = []

    def guarded(share: int) -> None:
        try:
            work(share, edges[share], edges[share + 1])
        except BaseException as error:  # raised again below, in the calling thread
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(share,)) for share in range(1, threads)]
    for thread in others:
        thread.start()
    guarded(0)
    for thread in others:
        thread.join()
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
    strips = -(-e.shape[1] // tiles.OUTER_ROWS)
    scalars = np.zeros((strips, len(e), 2, tiles.OUTER_ROWS), np.float32)
    tiles.pack_scalars(e.numpy(), weights.float().numpy(), bound, scalars)
    lanes, target = pack_lanes(a[:, None, None, :], tiles.OUTER_WIDTH)[0, :, :, 0].numpy(), out.numpy()
    in_threads(lambda _, start, stop: tiles.run_outer(scalars, lanes, start, stop, target), strips)


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
    in_threads(lambda _, start, stop: _clamped_outer_squares(left, right, bound, start, stop, out), len(left))
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
        in_threads(lambda share, start, stop: tiles.run_windows(mode, *windows, start, stop, result(share)), batch)
