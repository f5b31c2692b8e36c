"""Register tiles of the fused kernels and the loops over them.

A tile is `rows` x `lanes` coordinates of a weight gradient. Its rows are read as scalars and broadcast, its lanes as
vectors of 16 float32; the accumulators stay in registers, so no (batch, out, in) tensor exists for one-position layers.
Every operation is an IEEE one on the lane of one sample and one coordinate, so neither the other samples nor the width
of the processor's vectors changes a bit.
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

from bqsgd.persample._kernels.vectors import FLOAT, INT32, LANES, VECTOR, WHOLE, WORD, ZERO, Emit

ROUNDER = 1.5 * 2.0**23
"""fma(s, v, ROUNDER) is ROUNDER plus s v rounded to the nearest whole number, for |s v| below 2^22."""
ROUNDER_BITS = int(np.float32(ROUNDER).view(np.int32))
"""Neighbouring float32 from 2^23 to 2^24 differ by 1, and so do their bits as integers: bits minus these are steps."""
BLOCK_SAMPLES = 256
"""Samples summed in int32 at most: 256 times 2^22 is below 2^31."""


def outer_tile(rows: int, vectors: int, *, clamped: bool) -> Callable[..., None]:
    """Tile of sum_b round(s_b clamp(v_b, -t_b, t_b)) with s, t scalars of the row: one position a sample.

    scalars: (batch, 2, rows) holding s and t, or (batch, 1, rows) without a clamp; lanes: (batch, 16 * vectors).
    Products are rounded to whole numbers one by one, and whole numbers are added: the order does not matter.
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
            sums = emit.registers(rows, vectors, WHOLE)
            samples = builder.trunc(arguments[4], INT32)
            start = emit.broadcast(builder.mul(samples, ir.Constant(INT32, -ROUNDER_BITS)))  # wraps, as the sum does
            for register in chain(*sums):
                builder.store(start, register)
            rounder = ir.Constant(VECTOR, [ROUNDER] * LANES)
            parts = 2 if clamped else 1
            with cgutils.for_range(builder, arguments[4], intp=WORD) as loop:
                s = emit.at(scalar, builder.mul(loop.index, ir.Constant(WORD, parts * rows)))
                v = emit.at(lane, builder.mul(loop.index, ir.Constant(WORD, LANES * vectors)))
                values = [emit.load(v, LANES * column) for column in range(vectors)]
                for row in range(rows):
                    factor = emit.broadcast(builder.load(emit.at(s, row)))
                    high = emit.broadcast(builder.load(emit.at(s, rows + row))) if clamped else None
                    low = builder.fsub(ZERO, high) if clamped else None
                    for column, register in enumerate(sums[row]):
                        held = emit.clamp(values[column], high, low) if clamped else values[column]
                        steps = builder.bitcast(emit.fma(factor, held, rounder), WHOLE)
                        builder.store(builder.add(builder.load(register), steps), register)
            for row in range(rows):
                for column, register in enumerate(sums[row]):
                    emit.store(builder.load(register), target, LANES * (row * vectors + column))
            return context.get_dummy_value()

        return types.void(scalars, scalar_at, lanes, lane_at, batch, out), generate

    return tile  # type: ignore[no-any-return]


ROWS, NARROW, WIDE = 8, 16, 32
"""A sequence tile is 8 rows by one or two vectors."""


@intrinsic
def sequence(
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
    mask: Any,
    result: Any,
    result_at: Any,
    result_stride: Any,
) -> tuple[Any, Callable[..., Any]]:
    """Tile of g_b = sum_p s_bp v_bp for each sample b of start..stop, written to result[result_at + b * stride].

    Row r at position p reads scalars[scalar_at + b * stride + base[p] + offsets[offset_at + r]]: a convolution needs no
    unfolded copy of its input. Lanes: (batch, positions, width), width 16 or 32. Rows with mask 0 become zeros.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, kinds, zero = Emit(context, builder), signature.args, ir.Constant(WORD, 0)
        positions = context.make_array(kinds[3])(context, builder, arguments[3]).nitems
        pointers = {
            "scalar": emit.pointer(kinds[0], arguments[0], arguments[1]),
            "base": emit.pointer(kinds[3], arguments[3], zero),
            "offset": emit.pointer(kinds[4], arguments[4], arguments[5]),
            "lane": emit.pointer(kinds[6], arguments[6], arguments[7]),
            "mask": emit.pointer(kinds[11], arguments[11], zero),
            "result": emit.pointer(kinds[12], arguments[12], arguments[13]),
        }
        wide = builder.icmp_signed("==", arguments[8], ir.Constant(WORD, WIDE))
        with builder.if_else(wide) as (two, one):
            for branch, vectors in ((two, 2), (one, 1)):
                with branch:
                    _sequence_body(emit, vectors, pointers, arguments[2], positions, arguments[9:11], arguments[14])
        return context.get_dummy_value()

    kinds = (scalars, scalar_at, stride, base, offsets, offset_at, lanes, lane_at, width, start, stop, mask)
    return types.void(*kinds, result, result_at, result_stride), generate


def _sequence_body(
    emit: Emit, vectors: int, pointers: dict[str, Any], stride: Any, positions: Any, span: Any, result_stride: Any
) -> None:
    builder, width = emit.builder, ir.Constant(WORD, LANES * vectors)
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
        result = emit.at(pointers["result"], builder.mul(sample, result_stride))
        for row in range(ROWS):
            mask = builder.fcmp_ordered("!=", builder.load(emit.at(pointers["mask"], row)), ir.Constant(FLOAT, 0.0))
            for column, register in enumerate(sums[row]):
                value = builder.select(mask, builder.load(register), ZERO)
                emit.store(value, result, LANES * (row * vectors + column))


# The loops live beside their tiles because numba's cache watches only the file of the function it caches.
OUTER_ROWS, OUTER_WIDTH = 5, 64
OUTER_BLOCK = 1 << 17  # scalars kept in a core's cache while all lanes pass by
_outer_clamped = outer_tile(OUTER_ROWS, OUTER_WIDTH // LANES, clamped=True)
_outer_plain = outer_tile(OUTER_ROWS, OUTER_WIDTH // LANES, clamped=False)
LARGEST_RATIO = 2.0**40
"""Products beyond this many times their bound are taken for so many times it, so that no scalar overflows."""


@njit(nogil=True, cache=True)
def pack_lanes(a: Any, scales: Any, start: int, stop: int, packed: Any) -> None:
    """a (batch, n) of samples start..stop, times a power of two each -> packed (panels, batch, 64), the rest zeros."""
    for sample in range(start, stop):
        for panel in range(packed.shape[0]):
            first = panel * OUTER_WIDTH
            used = min(OUTER_WIDTH, a.shape[1] - first)
            for lane in range(used):
                packed[panel, sample, lane] = np.float32(np.float64(a[sample, first + lane]) * scales[sample])
            for lane in range(used, OUTER_WIDTH):
                packed[panel, sample, lane] = np.float32(0)


@njit(nogil=True, cache=True, error_model="numpy")
def pack_scalars(e: Any, scales: Any, weights: Any, reach: float, packed: Any) -> None:
    """e (batch, n), divided by the lanes' powers of two -> packed (strips, batch, 1 or 2, 5): w e, and reach / |e|."""
    batch, size = e.shape
    clamped = packed.shape[2] == 2
    for first in range(0, packed.shape[0], 16):  # a few strips at a time, so that e is read a cache line at a time
        for sample in range(batch):
            unscale, weight = 1 / scales[sample], weights[sample]
            for strip in range(first, min(packed.shape[0], first + 16)):
                values, place = e[sample, strip * OUTER_ROWS : (strip + 1) * OUTER_ROWS], packed[strip, sample]
                for at in range(min(OUTER_ROWS, size - strip * OUTER_ROWS)):
                    value = np.float64(values[at]) * unscale
                    if clamped:
                        ratio = abs(value) / reach
                        if ratio > LARGEST_RATIO:
                            value, ratio = np.copysign(reach * LARGEST_RATIO, value), LARGEST_RATIO
                        place[1, at] = np.float32(1 / ratio)
                    place[0, at] = np.float32(value * weight)


@njit(nogil=True, cache=True)
def run_outer(scalars: Any, lanes: Any, start: int, stop: int, out: Any) -> None:
    """Strips start..stop of sum_b round(s_b clamp(v_b)), from (strips, batch, parts, 5) and (panels, batch, 64)."""
    batch, strip_size, panel_size = lanes.shape[1], scalars[0].size, lanes[0].size
    parts = scalars.shape[2]
    group = max(1, OUTER_BLOCK // strip_size)
    left, right = scalars.reshape(-1), lanes.reshape(-1)
    buffer = np.empty(OUTER_ROWS * OUTER_WIDTH, np.int32)
    for first in range(start, stop, group):
        for panel in range(lanes.shape[0]):
            for strip in range(first, min(stop, first + group)):
                for block in range(0, batch, BLOCK_SAMPLES):
                    count = min(BLOCK_SAMPLES, batch - block)
                    scalar_at = strip * strip_size + block * parts * OUTER_ROWS
                    lane_at = panel * panel_size + block * OUTER_WIDTH
                    if parts == 2:
                        _outer_clamped(left, scalar_at, right, lane_at, count, buffer)
                    else:
                        _outer_plain(left, scalar_at, right, lane_at, count, buffer)
                    for row in range(min(OUTER_ROWS, out.shape[0] - strip * OUTER_ROWS)):
                        low, used = panel * OUTER_WIDTH, min(OUTER_WIDTH, out.shape[1] - panel * OUTER_WIDTH)
                        target = out[strip * OUTER_ROWS + row, low : low + used]
                        found = buffer[row * OUTER_WIDTH : row * OUTER_WIDTH + used]
                        if block:
                            for column in range(used):
                                target[column] += np.float64(found[column])
                        else:
                            for column in range(used):
                                target[column] = np.float64(found[column])


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
    scalars: Any,
    group_stride: int,
    base: Any,
    offsets: Any,
    rows: int,
    lanes: Any,
    width: int,
    block: int,
    start: int,
    stop: int,
    result: Any,
    result_stride: int,
) -> None:
    """The gradients g_b of samples start..stop in result (batch, tiles, 8, width), a block that fits in the cache at a
    time."""
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
            sequence(scalars, scalar_at, stride, base, offsets, strip * ROWS, packed, lane_at, width, first, last, mask, result, item * ROWS * width, result_stride)  # type: ignore[call-arg]  # fmt: skip  # noqa: E501
