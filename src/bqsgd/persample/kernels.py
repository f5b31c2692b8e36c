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

BLOCK_FLOATS = 1 << 16
"""Operands a block of samples may hold: a quarter of a megabyte, well inside a core's own cache."""


def in_threads(work: Callable[[int, int], None], items: int) -> None:
    """Call work(start, stop) over disjoint shares of range(items), as many as torch has threads."""
    threads = max(1, min(torch.get_num_threads(), items))
    edges = [items * i // threads for i in range(threads + 1)]
    failures: list[BaseException] = []

    def guarded(start: int, stop: int) -> None:
        try:
            work(start, stop)
        except BaseException as error:  # raised again below, in the calling thread
            failures.append(error)

    others = [threading.Thread(target=guarded, args=(edges[i], edges[i + 1])) for i in range(1, threads)]
    for thread in others:
        thread.start()
    guarded(edges[0], edges[1])
    for thread in others:
        thread.join()
    if failures:
        raise failures[0]


def usable(values: Tensor) -> bool:
    """Whether the kernels take this tensor; everything else goes through torch."""
    return values.device.type == "cpu" and values.dtype == torch.float32


def pack_lanes(values: Tensor, width: int) -> Tensor:
    """(batch, positions, n) -> (panels, batch, positions, width), the last panel filled up with zeros."""
    batch, positions, size = values.shape
    whole, rest = divmod(size, width)
    packed = values.new_empty(whole + bool(rest), batch, positions, width)
    if whole:
        packed[:whole].permute(1, 2, 0, 3).copy_(values[:, :, : whole * width].unflatten(2, (whole, width)))
    if rest:
        packed[whole, :, :, :rest] = values[:, :, whole * width :]
        packed[whole, :, :, rest:] = 0
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
    batch, width = e.shape
    strips = -(-width // tiles.OUTER_ROWS)
    scalars = e.new_zeros(batch, 3, strips * tiles.OUTER_ROWS)
    scalars[:, 0, :width] = e * weights[:, None]
    scalars[:, 1, :width] = bound * (1 - 2.0**-22) / e.abs()
    torch.neg(scalars[:, 1], out=scalars[:, 2])
    packed = scalars.unflatten(2, (strips, tiles.OUTER_ROWS)).permute(2, 0, 1, 3).contiguous().numpy().reshape(-1)
    lanes = pack_lanes(a[:, None, :], tiles.OUTER_WIDTH).numpy()
    flat, target, items = lanes.reshape(-1), out.numpy(), len(lanes) * strips
    in_threads(lambda start, stop: tiles.run_outer(packed, flat, batch, start, stop, target), items)


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
    in_threads(lambda start, stop: _clamped_outer_squares(left, right, bound, start, stop, out), len(left))
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Windows:
    """A sum over positions p of scalar x lane: row r of sample b reads scalars[b, group * group_stride + base[p] + r's offset].

    lanes: (batch, positions, groups, lanes a group).
    """

    scalars: Tensor
    base: np.ndarray
    offsets: np.ndarray
    lanes: Tensor
    group_stride: int = 0

    def _operands(self) -> tuple[tuple[np.ndarray, tuple[int, ...], np.ndarray, np.ndarray, np.ndarray], int]:
        batch, positions, groups, size = self.lanes.shape
        width = tiles.NARROW if size <= tiles.NARROW else tiles.WIDE
        packed = torch.stack([pack_lanes(self.lanes[:, :, group], width) for group in range(groups)])
        panels = packed.shape[1]
        offsets = np.pad(self.offsets, (0, -len(self.offsets) % tiles.ROWS), mode="edge")
        scalars = self.scalars.contiguous()
        block = max(1, BLOCK_FLOATS // (scalars.shape[1] + groups * panels * positions * width))
        shape = (batch, block, scalars.shape[1], self.group_stride, panels, width)
        return (scalars.numpy().reshape(-1), shape, self.base, offsets, packed.numpy().reshape(-1)), groups * panels

    def clamped_sum(self, bound: float, weights: Tensor) -> Tensor:
        """(groups, rows, lanes a group): sum_b w_b clamp(g_b, -C, C)."""
        operands, panels = self._operands()
        strips, width, groups, size = len(operands[3]) // tiles.ROWS, operands[1][5], *self.lanes.shape[2:]
        sums = torch.zeros(panels * strips, tiles.ROWS, width)
        flat, each = sums.numpy().reshape(-1), weights.float().contiguous().numpy()
        in_threads(
            lambda start, stop: tiles.run_sums(*operands, inside(bound), each, start, stop, flat), panels * strips
        )
        ordered = sums.view(groups, -1, strips * tiles.ROWS, width).transpose(1, 2).flatten(2)
        return ordered[:, : len(self.offsets), :size]

    def norms(self, *, squared: bool, bound: float = float("inf")) -> Tensor:
        """(batch,) sums of squares of clamp(g_b, -C, C) in float64, or max|g_b|."""
        operands, _ = self._operands()
        batch, rows = len(self.lanes), len(self.offsets)
        partial = torch.zeros(batch, tiles.LANES)
        flat, limit = partial.numpy().reshape(-1), inside(bound)
        in_threads(lambda start, stop: tiles.run_norms(*operands, limit, squared, rows, start, stop, flat), batch)
        return partial.double().sum(dim=1) if squared else partial.amax(dim=1)
