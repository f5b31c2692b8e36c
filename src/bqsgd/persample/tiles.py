"""Register tiles of the fused kernels and the loops over them.

A tile is `rows` x `lanes` coordinates of a weight gradient. Its rows are read as scalars and broadcast, its lanes as
vectors of 16 float32; the accumulators stay in registers, so no (batch, out, in) tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from bqsgd.persample.vectors import LANES, WORD, ZERO, Emit


def outer_tile(rows: int, vectors: int) -> Callable[..., None]:
    """Tile of sum_b s_b clamp(v_b, -t_b, t_b) with s, t scalars of the row: one position a sample.

    scalars: (batch, 2, rows) holding s and t; lanes: (batch, 16 * vectors).
    """

    @intrinsic
    def tile(
        typing: Any, scalars: Any, scalar_at: Any, lanes: Any, lane_at: Any, batch: Any, out: Any
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            scalar = emit.pointer(kinds[0], arguments[0], arguments[1])
            lane = emit.pointer(kinds[2], arguments[2], arguments[3])
            target = emit.pointer(kinds[5], arguments[5], ir.Constant(WORD, 0))
            sums = emit.registers(rows, vectors)
            for register in chain(*sums):
                builder.store(ZERO, register)
            with cgutils.for_range(builder, arguments[4], intp=WORD) as loop:
                s = emit.at(scalar, builder.mul(loop.index, ir.Constant(WORD, 2 * rows)))
                v = emit.at(lane, builder.mul(loop.index, ir.Constant(WORD, LANES * vectors)))
                values = [emit.load(v, LANES * column) for column in range(vectors)]
                for row in range(rows):
                    factor, high = (emit.broadcast(builder.load(emit.at(s, part * rows + row))) for part in range(2))
                    low = builder.fsub(ZERO, high)
                    for column, register in enumerate(sums[row]):
                        held = emit.clamp(values[column], high, low)
                        builder.store(emit.fma(factor, held, builder.load(register)), register)
            for row in range(rows):
                for column, register in enumerate(sums[row]):
                    emit.store(builder.load(register), target, LANES * (row * vectors + column))
            return context.get_dummy_value()

        return types.void(scalars, scalar_at, lanes, lane_at, batch, out), generate

    return tile  # type: ignore[no-any-return]


ROWS, NARROW, WIDE = 8, 16, 32
"""A sequence tile is 8 rows by one or two vectors."""


def sequence_tile(mode: str) -> Callable[..., None]:
    """Tile of g_b = sum_p s_bp v_bp for each sample b of start..stop, reduced by `mode` before the next sample.

    Row r at position p reads scalars[scalar_at + b * stride + base[p] + offsets[offset_at + r]]: a convolution needs no
    unfolded copy of its input. Lanes: (batch, positions, width), width 16 or 32. Modes: "sum": result[tile] +=
    extra_b clamp(g_b); "max": result[b] = max(., |g_b|); "square": result[b] += (extra_row clamp(g_b))^2. The last two
    keep 16 partial results a sample in float64: a tile adds 128 or 256 squares in float32, a layer millions.
    """

    @intrinsic
    def tile(
        typing: Any,
        scalars: Any,
        scalar_at: Any,
        stride: Any,
        base: Any,
        offsets: Any,
        offset_at: Any,
        lanes: Any,
        lane_at: Any,
        width: Any,
        start: Any,
        stop: Any,
        bound: Any,
        extra: Any,
        result: Any,
        result_at: Any,
    ) -> tuple[Any, Callable[..., Any]]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds, zero = Emit(context, builder), signature.args, ir.Constant(WORD, 0)
            positions = context.make_array(kinds[3])(context, builder, arguments[3]).nitems
            pointers = {
                "scalar": emit.pointer(kinds[0], arguments[0], arguments[1]),
                "base": emit.pointer(kinds[3], arguments[3], zero),
                "offset": emit.pointer(kinds[4], arguments[4], arguments[5]),
                "lane": emit.pointer(kinds[6], arguments[6], arguments[7]),
                "extra": emit.pointer(kinds[12], arguments[12], zero),
                "result": emit.pointer(kinds[13], arguments[13], arguments[14]),
            }
            wide = builder.icmp_signed("==", arguments[8], ir.Constant(WORD, WIDE))
            with builder.if_else(wide) as (two, one):
                for branch, vectors in ((two, 2), (one, 1)):
                    with branch:
                        _sequence_body(
                            emit, mode, vectors, pointers, arguments[2], positions, arguments[9:11], arguments[11]
                        )
            return context.get_dummy_value()

        kinds = (scalars, scalar_at, stride, base, offsets, offset_at, lanes, lane_at, width, start, stop, bound)
        return types.void(*kinds, extra, result, result_at), generate

    return tile  # type: ignore[no-any-return]


def _sequence_body(
    emit: Emit, mode: str, vectors: int, pointers: dict[str, Any], stride: Any, positions: Any, span: Any, bound: Any
) -> None:
    builder, width = emit.builder, ir.Constant(WORD, LANES * vectors)
    high = emit.broadcast(bound)
    low = builder.fsub(ZERO, high)
    shifts = [builder.load(emit.at(pointers["offset"], row)) for row in range(ROWS)]
    sums = emit.registers(ROWS, vectors)
    with cgutils.for_range_slice(builder, span[0], span[1], ir.Constant(WORD, 1), intp=WORD) as (sample, _):
        for register in chain(*sums):
            builder.store(ZERO, register)
        own = emit.at(pointers["scalar"], builder.mul(sample, stride))
        mine = emit.at(pointers["lane"], builder.mul(sample, builder.mul(positions, width)))
        with cgutils.for_range(builder, positions, intp=WORD) as loop:
            here = emit.at(own, builder.load(emit.at(pointers["base"], loop.index)))
            lane = emit.at(mine, builder.mul(loop.index, width))
            values = [emit.load(lane, LANES * column) for column in range(vectors)]
            for row in range(ROWS):
                factor = emit.broadcast(builder.load(emit.at(here, shifts[row])))
                for column, register in enumerate(sums[row]):
                    builder.store(emit.fma(factor, values[column], builder.load(register)), register)
        gradient = [[builder.load(register) for register in row] for row in sums]
        result = pointers["result"]
        if mode == "sum":
            weight = emit.broadcast(builder.load(emit.at(pointers["extra"], sample)))
            for at, value in enumerate(chain(*gradient)):
                total = emit.fma(weight, emit.clamp(value, high, low), emit.load(result, LANES * at))
                emit.store(total, result, LANES * at)
        else:
            total = ZERO
            for row, row_values in enumerate(gradient):
                mask = emit.broadcast(builder.load(emit.at(pointers["extra"], row)))
                for value in row_values:
                    if mode == "max":
                        total = emit.maximum(emit.intrinsic("llvm.fabs.v16f32", value), total)
                    else:
                        held = builder.fmul(mask, emit.clamp(value, high, low))
                        total = emit.fma(held, held, total)
            parts = emit.at(result, builder.mul(sample, ir.Constant(WORD, LANES)))
            emit.reduce_double(total, parts, largest=mode == "max")


# The loops live beside their tiles because numba's cache watches only the file of the function it caches.
OUTER_ROWS, OUTER_WIDTH = 5, 64
OUTER_BLOCK = 1 << 17  # scalars kept in a core's cache while all lanes pass by
_outer = outer_tile(OUTER_ROWS, OUTER_WIDTH // LANES)
_sum, _max, _square = sequence_tile("sum"), sequence_tile("max"), sequence_tile("square")


@njit(nogil=True, cache=True)
def pack_scalars(e: Any, weights: Any, bound: float, packed: Any) -> None:
    """e (batch, n) -> packed (strips, batch, 2, 5): w e, and a threshold a hair inside C / |e|."""
    batch, size = e.shape
    inner = np.float32(bound * (1 - 2.0**-22))
    for first in range(0, size, 16 * OUTER_ROWS):  # a few strips at a time, so that e is read a cache line at a time
        for sample in range(batch):
            for at in range(first, min(size, first + 16 * OUTER_ROWS)):
                value, place = e[sample, at], packed[at // OUTER_ROWS, sample]
                place[0, at % OUTER_ROWS] = value * weights[sample]
                place[1, at % OUTER_ROWS] = inner / abs(value) if value != 0 else np.float32(np.inf)


@njit(nogil=True, cache=True)
def run_outer(scalars: Any, lanes: Any, start: int, stop: int, out: Any) -> None:
    """Strips start..stop of sum_b s_b clamp(v_b); scalars (strips, batch, 2, 5), lanes (panels, batch, 64)."""
    batch, strip_size, panel_size = lanes.shape[1], scalars[0].size, lanes[0].size
    group = max(1, OUTER_BLOCK // strip_size)
    left, right = scalars.reshape(-1), lanes.reshape(-1)
    buffer = np.empty(OUTER_ROWS * OUTER_WIDTH, np.float32)
    for first in range(start, stop, group):
        for panel in range(lanes.shape[0]):
            for strip in range(first, min(stop, first + group)):
                _outer(left, strip * strip_size, right, panel * panel_size, batch, buffer)
                for row in range(min(OUTER_ROWS, out.shape[0] - strip * OUTER_ROWS)):
                    for column in range(min(OUTER_WIDTH, out.shape[1] - panel * OUTER_WIDTH)):
                        out[strip * OUTER_ROWS + row, panel * OUTER_WIDTH + column] = buffer[row * OUTER_WIDTH + column]


@njit(nogil=True, cache=True)
def _pack(lanes: Any, first: int, last: int, block: int, width: int, packed: Any) -> None:
    """lanes (batch, positions, groups, n) of samples first..last -> packed (groups, panels, block, positions, width).

    The lanes beyond n are never written: they keep the zeros they start with.
    """
    _, positions, groups, size = lanes.shape
    panel = 0
    for group in range(groups):
        for column in range(0, size, width):
            used = min(width, size - column)
            for sample in range(first, last):
                at = (panel * block + sample - first) * positions * width
                for position in range(positions):
                    for lane in range(used):
                        packed[at + position * width + lane] = lanes[sample, position, group, column + lane]
            panel += 1


@njit(nogil=True, cache=True)
def run_windows(
    mode: int,
    scalars: Any,
    group_stride: int,
    base: Any,
    offsets: Any,
    rows: int,
    lanes: Any,
    width: int,
    block: int,
    bound: Any,
    weights: Any,
    start: int,
    stop: int,
    result: Any,
) -> None:
    """Samples start..stop of one reduction of g_b, a block that fits in the cache at a time.

    Modes: 0 adds w_b clamp(g_b) to result (tiles, 8 * width); 1 puts max|g_b| and 2 the sum of squares of clamp(g_b) in
    result (batch, 16), as 16 parts in float64.
    """
    _, positions, groups, size = lanes.shape
    panels, strips, stride = (size + width - 1) // width, offsets.size // ROWS, scalars.shape[1]
    packed = np.zeros(groups * panels * block * positions * width, np.float32)
    full, ragged = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    ragged[: rows - (strips - 1) * ROWS] = 1
    for first in range(start, stop, block):
        last = min(stop, first + block)
        _pack(lanes, first, last, block, width, packed)
        for item in range(groups * panels * strips):
            strip, panel = item % strips, item // strips
            scalar_at = panel // panels * group_stride
            lane_at = (panel * block - first) * positions * width  # so that sample `first` is at the start
            mask = full if strip < strips - 1 else ragged
            if mode == 0:
                _sum(scalars, scalar_at, stride, base, offsets, strip * ROWS, packed, lane_at, width, first, last, bound, weights, result, item * ROWS * width)  # fmt: skip  # noqa: E501
            elif mode == 1:
                _max(scalars, scalar_at, stride, base, offsets, strip * ROWS, packed, lane_at, width, first, last, bound, mask, result, 0)  # fmt: skip  # noqa: E501
            else:
                _square(scalars, scalar_at, stride, base, offsets, strip * ROWS, packed, lane_at, width, first, last, bound, mask, result, 0)  # fmt: skip  # noqa: E501
