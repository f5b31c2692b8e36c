"""Gradients that are sums over positions, made for 16 samples at once with a sample in each lane; and transposition.

Every entry of a gradient is one fma after another over the positions, in order, on the lane of its sample: neither the
other samples nor the width of the processor's vectors changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads, recycled
from bqsgd._src.runtime.vectors import LANES, WHOLE, WIDE, ZERO, Emit, tile


@tile
def _turn_tile(emit: Emit, x: Any, x_at: Any, x_stride: Any, out: Any, out_at: Any, out_stride: Any) -> None:
    """out[j, i] = x[i, j] of a square of 16, in registers: blocks of 1, 2, 4 and 8 change places over the diagonal."""
    source, target, shuffle = emit.at(x, x_at), emit.at(out, out_at), emit.builder.shuffle_vector
    rows = [emit.load(emit.at(source, x_stride, n)) for n in range(LANES)]
    for apart in (1, 2, 4, 8):
        above = ir.Constant(WHOLE, [at if not at & apart else LANES + at - apart for at in range(LANES)])
        below = ir.Constant(WHOLE, [at + apart if not at & apart else LANES + at for at in range(LANES)])
        for n in (n for n in range(LANES) if not n & apart):
            pair = rows[n], rows[n + apart]
            rows[n], rows[n + apart] = shuffle(*pair, above), shuffle(*pair, below)
    for n, row in enumerate(rows):
        emit.store(row, emit.at(target, out_stride, n))


@njit(nogil=True, cache=True)
def _turn(x: Any, x_at: int, x_stride: int, rows: int, columns: int, out: Any, out_at: int, out_stride: int) -> None:
    """out[j, i] = x[i, j] of at most 16 rows and columns."""
    if rows == LANES and columns == LANES:
        _turn_tile(x, x_at, x_stride, out, out_at, out_stride)
    else:
        for column in range(columns):
            for row in range(rows):
                out[out_at + column * out_stride + row] = x[x_at + row * x_stride + column]


@njit(nogil=True, cache=True)
def _transpose(x: Any, stride: int, rows: int, columns: int, start: int, stop: int, out: Any) -> None:
    flat, wide = out.reshape(-1), out.shape[1]
    for column in range(start * LANES, min(columns, stop * LANES), LANES):
        for row in range(0, rows, LANES):
            used = min(LANES, rows - row), min(LANES, columns - column)
            _turn(x, row * stride + column, stride, *used, flat, column * wide + row, wide)


def transpose(x: np.ndarray, stride: int, rows: int, columns: int, out: np.ndarray) -> None:
    """out[j, i] = x[i * stride + j] for the first columns of `out`."""
    blocks, each = -(-columns // LANES), rows * LANES
    in_threads(lambda start, stop: _transpose(x, stride, rows, columns, start, stop, out), blocks, each=each)


def in_lanes(values: Tensor, rows: int) -> Tensor:
    """(rows, ...) with those of `values` first and zeros after them, the samples of an entry beside each other."""
    flat, size = values.detach().contiguous().view(-1).numpy(), values[0].numel()
    out, samples = np.empty((size, rows), np.float32), len(values)
    out[:, samples:] = 0
    transpose(flat, size, samples, size, out)
    return torch.from_numpy(out).view(*values.shape[1:], rows).movedim(-1, 0)


def lanes_of(values: Tensor) -> tuple[np.ndarray, int] | None:
    """A flat array and a stride where the samples of an entry lie beside each other: entry i of sample b is
    flat[i * stride + b]. None otherwise."""
    moved = values.detach().flatten(1).t()
    entries, samples = moved.shape
    if entries < 2 or samples < 2 or moved.stride(1) != 1 or moved.stride(0) < samples:
        return None
    return torch.as_strided(moved, ((entries - 1) * moved.stride(0) + samples,), (1,)).numpy(), moved.stride(0)


PAIR_ROWS, PAIR_COLUMNS = (4, 4) if WIDE else (3, 2)
"""A tile of gradients of 16 samples: 24 of 32 registers, or 12 of 16."""


@tile
def _pair_tile(
    emit: Emit, e: Any, rows: Any, row_at: Any, row_steps: Any, a: Any, columns: Any, column_at: Any, column_steps: Any,
    positions: Any, out: Any, out_at: Any,
) -> None:  # fmt: skip
    """out[r, c] = sum_p e[rows[row_at + r] + row_steps[p]] a[columns[column_at + c] + column_steps[p]] of 16 samples.

    A sample has a lane: the sum runs over the positions in order, by one fma each. Rows of `out` are 16 vectors apart.
    """
    builder, row, column = emit.builder, emit.at(rows, row_at), emit.at(columns, column_at)
    lefts = [emit.at(e, builder.load(emit.at(row, n)), LANES) for n in range(PAIR_ROWS)]
    rights = [emit.at(a, builder.load(emit.at(column, n)), LANES) for n in range(PAIR_COLUMNS)]
    sums = emit.registers(PAIR_ROWS, PAIR_COLUMNS)
    for register in chain(*sums):
        builder.store(ZERO, register)
    with emit.count(positions) as loop:
        down, along = (builder.load(emit.at(steps, loop.index)) for steps in (row_steps, column_steps))
        values = [emit.load(emit.at(pointer, along, LANES)) for pointer in rights]
        for pointer, registers in zip(lefts, sums, strict=True):
            factor = emit.load(emit.at(pointer, down, LANES))
            for value, register in zip(values, registers, strict=True):
                builder.store(emit.fma(factor, value, builder.load(register)), register)
    for r, registers in enumerate(sums):
        for c, register in enumerate(registers):
            emit.store(builder.load(register), emit.at(out, out_at), LANES * (LANES * r + c))


@njit(nogil=True, cache=True)
def _pack_block(x: Any, stride: int, low: int, used: int, places: Any, packed: Any) -> None:
    """Samples low .. low + used of x, at most 16, entry i at packed[places[i]]; what other lanes hold is not used."""
    for entry in range(places.size):
        at, to = entry * stride + low, places[entry] * LANES
        source, target = x[at : at + used], packed[to : to + used]
        if used == LANES:  # a loop of known length is one instruction
            for lane in range(LANES):
                target[lane] = source[lane]
        else:
            for lane in range(used):
                target[lane] = source[lane]


@njit(nogil=True, cache=True)
def _run_pairs(
    e: Any, e_stride: int, e_places: Any, e_size: int, rows: Any, row_steps: Any, row_group: int, height: int,
    a: Any, a_stride: int, a_places: Any, a_size: int, columns: Any, column_steps: Any, column_group: int, width: int,
    groups: int, start: int, stop: int, out: Any,
) -> None:  # fmt: skip
    """Blocks start..stop of 16 samples of out (samples, groups * height * width); rows and columns fill whole tiles."""
    samples, wide = out.shape
    target, left, right = out.reshape(-1), np.zeros(e_size * LANES, np.float32), np.zeros(a_size * LANES, np.float32)
    corner = np.empty(
        PAIR_ROWS * LANES * LANES, np.float32
    )  # 16 columns of a few rows, turned to the samples from here
    for block in range(start, stop):
        used = min(LANES, samples - block * LANES)
        _pack_block(e, e_stride, block * LANES, used, e_places, left)
        _pack_block(a, a_stride, block * LANES, used, a_places, right)
        for group in range(groups):
            from_row, from_column = left[group * row_group * LANES :], right[group * column_group * LANES :]
            for row in range(0, height, PAIR_ROWS):
                for first in range(0, width, LANES):
                    count = min(LANES, width - first)
                    for c in range(0, count, PAIR_COLUMNS):
                        _pair_tile(from_row, rows, row, row_steps, from_column, columns, first + c, column_steps, row_steps.size, corner, c * LANES)  # fmt: skip  # noqa: E501
                    for r in range(min(PAIR_ROWS, height - row)):
                        at = block * LANES * wide + (group * height + row + r) * width + first
                        _turn(corner, r * LANES * LANES, LANES, count, used, target, at, wide)


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

    def given(self, part: slice, tile: int) -> tuple[Any, ...]:
        """What the loop takes for the samples `part`, the rows repeated to whole tiles."""
        values, batch = self.values[part], len(self.values[part])
        lanes = lanes_of(values) or (in_lanes(values, batch).movedim(0, -1).numpy().reshape(-1), batch)
        rows = np.pad(self.rows, (0, -len(self.rows) % tile), mode="edge")
        return *lanes, self.places, self.size, rows, self.steps, self.group, len(self.rows)


@dataclass(frozen=True)
class Pairs:
    """Gradients that are sums over positions of products of the errors' rows and the inputs' rows."""

    errors: Side
    inputs: Side
    groups: int = 1

    def gradients(self, part: slice) -> Tensor:
        """(samples, coordinates) of the samples `part`, ordered by group, row of the errors, row of the inputs."""
        e, a = self.errors, self.inputs
        out = recycled((len(e.values[part]), self.groups * len(e.rows) * len(a.rows)))
        fixed = *e.given(part, PAIR_ROWS), *a.given(part, PAIR_COLUMNS), self.groups
        blocks = -(-len(out) // LANES)
        in_threads(lambda start, stop: _run_pairs(*fixed, start, stop, out), blocks)  # type: ignore[call-arg]
        return torch.from_numpy(out)
