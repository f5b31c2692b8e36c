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
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bqsgd.persample._kernels.vectors import INT32, LANES, VECTOR, WHOLE, WORD, ZERO, Emit

ROUNDER = 1.5 * 2.0**23
"""fma(s, v, ROUNDER) is ROUNDER plus s v rounded to the nearest whole number, for |s v| below 2^22."""
ROUNDER_BITS = int(np.float32(ROUNDER).view(np.int32))
"""Neighbouring float32 from 2^23 to 2^24 differ by 1, and so do their bits as integers: bits minus these are steps."""
ROUNDING = 1.5 * 2.0**52
"""Adding and taking away this rounds a float64 below 2^51 to the nearest whole number."""
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


PAIR_ROWS, PAIR_COLUMNS = (4, 4) if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else (3, 2)
"""A tile of gradients of 16 samples: 24 of 32 registers, or 12 of 16."""
PAIRS = PAIR_ROWS * PAIR_COLUMNS


@intrinsic
def _pair_tile(
    typing: Any, e: Any, rows: Any, row_at: Any, row_steps: Any, a: Any, columns: Any, column_at: Any,
    column_steps: Any, out: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """out[r, c] = sum_p e[rows[row_at + r] + row_steps[p]] a[columns[column_at + c] + column_steps[p]] of 16 samples.

    A sample has a lane: the sum runs over the positions in order, by one fma each.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, kinds, zero = Emit(context, builder), signature.args, ir.Constant(WORD, 0)
        width = ir.Constant(WORD, LANES)
        positions = context.make_array(kinds[3])(context, builder, arguments[3]).nitems
        left, right = emit.pointer(kinds[0], arguments[0], zero), emit.pointer(kinds[4], arguments[4], zero)
        row = emit.pointer(kinds[1], arguments[1], arguments[2])
        column = emit.pointer(kinds[5], arguments[5], arguments[6])
        steps = emit.pointer(kinds[3], arguments[3], zero), emit.pointer(kinds[7], arguments[7], zero)
        target = emit.pointer(kinds[8], arguments[8], zero)
        lefts = [emit.at(left, builder.mul(builder.load(emit.at(row, n)), width)) for n in range(PAIR_ROWS)]
        rights = [emit.at(right, builder.mul(builder.load(emit.at(column, n)), width)) for n in range(PAIR_COLUMNS)]
        sums = emit.registers(PAIR_ROWS, PAIR_COLUMNS)
        for register in chain(*sums):
            builder.store(ZERO, register)
        with cgutils.for_range(builder, positions, intp=WORD) as loop:
            down, along = (builder.mul(builder.load(emit.at(step, loop.index)), width) for step in steps)
            values = [emit.load(emit.at(pointer, along), 0) for pointer in rights]
            for pointer, registers in zip(lefts, sums, strict=True):
                factor = emit.load(emit.at(pointer, down), 0)
                for value, register in zip(values, registers, strict=True):
                    builder.store(emit.fma(factor, value, builder.load(register)), register)
        for n, register in enumerate(chain(*sums)):
            emit.store(builder.load(register), target, LANES * n)
        return context.get_dummy_value()

    kinds = (e, rows, row_at, row_steps, a, columns, column_at, column_steps, out)
    return types.void(*kinds), generate


# The loops live beside their tiles because numba's cache watches only the file of the function it caches.
OUTER_ROWS, OUTER_WIDTH = 5, 64
OUTER_BLOCK = 1 << 17  # scalars kept in a core's cache while all lanes pass by
_outer_clamped = outer_tile(OUTER_ROWS, OUTER_WIDTH // LANES, clamped=True)
_outer_plain = outer_tile(OUTER_ROWS, OUTER_WIDTH // LANES, clamped=False)
LARGEST_RATIO = 2.0**40
"""Products beyond this many times their bound are taken for so many times it, so that no scalar overflows."""


@njit(nogil=True, cache=True)
def pack_lanes(a: Any, stride: int, size: int, scales: Any, start: int, stop: int, packed: Any) -> None:
    """Entry i of sample b is a[i * stride + b]: panels start..stop of packed (panels, batch, 64), each sample times a
    power of two, the rest zeros."""
    batch = packed.shape[1]
    for panel in range(start, stop):
        used = min(OUTER_WIDTH, size - panel * OUTER_WIDTH)
        for first in range(0, batch, LANES):
            if used == OUTER_WIDTH and first + LANES <= batch:  # loops of known length
                for lane in range(OUTER_WIDTH):
                    source = (panel * OUTER_WIDTH + lane) * stride + first
                    for sample in range(LANES):
                        scaled = np.float32(np.float64(a[source + sample]) * scales[first + sample])
                        packed[panel, first + sample, lane] = scaled
            else:
                for lane in range(OUTER_WIDTH):
                    source = (panel * OUTER_WIDTH + lane) * stride
                    for sample in range(first, min(batch, first + LANES)):
                        value = np.float64(a[source + sample]) * scales[sample] if lane < used else 0.0
                        packed[panel, sample, lane] = np.float32(value)


@njit(nogil=True, cache=True, error_model="numpy")
def pack_scalars(
    e: Any, stride: int, size: int, scales: Any, weights: Any, reach: float, start: int, packed: Any
) -> None:
    """e, over the lanes' powers of two -> packed (strips from `start`, batch, 1 or 2, 5): w e, and reach / |e|."""
    strips, batch, parts = packed.shape[:3]
    for strip in range(strips):
        for at in range(OUTER_ROWS):
            row = (start + strip) * OUTER_ROWS + at
            if row >= size:
                packed[strip, :, :, at] = 0
                continue
            for sample in range(batch):
                value = np.float64(e[row * stride + sample]) / scales[sample]
                if parts == 2:
                    ratio = abs(value) / reach
                    if ratio > LARGEST_RATIO:
                        value, ratio = np.copysign(reach * LARGEST_RATIO, value), LARGEST_RATIO
                    packed[strip, sample, 1, at] = np.float32(1 / ratio)
                packed[strip, sample, 0, at] = np.float32(value * weights[sample])


@njit(nogil=True, cache=True)
def run_outer(scalars: Any, lanes: Any, start: int, stop: int, out: Any) -> None:
    """Add strips start..stop of sum_b round(s_b clamp(v_b)) to `out`, from scalars (strips, batch, parts, 5) and lanes
    (panels, batch, 64)."""
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
                        for column in range(used):
                            target[column] += np.float64(found[column])


@njit(nogil=True, cache=True)
def _pack_block(x: Any, stride: int, samples: int, low: int, places: Any, packed: Any) -> None:
    """Samples low .. low + 16 of x, entry i at packed[places[i]]; zeros beyond the last sample."""
    used = min(LANES, samples - low)
    for entry in range(places.size):
        at, target = entry * stride + low, packed[places[entry] * LANES : places[entry] * LANES + LANES]
        if used == LANES:  # a loop of known length is one instruction
            source = x[at : at + LANES]
            for lane in range(LANES):
                target[lane] = source[lane]
        else:
            for lane in range(LANES):
                target[lane] = x[at + lane] if lane < used else np.float32(0)


@njit(nogil=True, cache=True)
def run_pairs(
    e: Any,
    e_stride: int,
    e_places: Any,
    rows: Any,
    row_steps: Any,
    row_group: int,
    a: Any,
    a_stride: int,
    a_places: Any,
    a_size: int,
    columns: Any,
    column_steps: Any,
    column_group: int,
    groups: int,
    height: int,
    width: int,
    samples: int,
    start: int,
    stop: int,
    out: Any,
) -> None:
    """Blocks start..stop of 16 samples of out (groups * height * width, samples); rows and columns fill whole tiles."""
    target, wide = out.reshape(-1), out.shape[1]
    left, right = np.empty(e_places.size * LANES, np.float32), np.zeros(a_size * LANES, np.float32)
    tile = np.empty(PAIRS * LANES, np.float32)
    for block in range(start, stop):
        _pack_block(e, e_stride, samples, block * LANES, e_places, left)
        _pack_block(a, a_stride, samples, block * LANES, a_places, right)
        for group in range(groups):
            from_row, from_column = left[group * row_group * LANES :], right[group * column_group * LANES :]
            for row in range(0, height, PAIR_ROWS):
                for column in range(0, width, PAIR_COLUMNS):
                    _pair_tile(from_row, rows, row, row_steps, from_column, columns, column, column_steps, tile)  # type: ignore[call-arg]
                    for r in range(min(PAIR_ROWS, height - row)):
                        for c in range(min(PAIR_COLUMNS, width - column)):
                            at = ((group * height + row + r) * width + column + c) * wide + block * LANES
                            into, found = target[at : at + LANES], tile[(r * PAIR_COLUMNS + c) * LANES :]
                            for lane in range(LANES):
                                into[lane] = found[lane]
