"""Loops over samples that lie one after another in memory, as torch keeps them: products, norms and sums of steps.

A vector holds 16 neighbouring features of one sample. Sums over features therefore run across lanes, in one order that
follows from a feature's number alone:

- a product (`rows_product`): lane l adds the features l, l + 16, l + 32, ... by one fma each, starting from zero; then
  the 16 lanes are added in halves (0 + 8, 1 + 9, ...; then 4, 2, 1 apart), and the bias comes last;
- a sum of squares (`row_norms`): the same 16 lanes in float64 over each block of 2^13 features, the same halves, and
  the blocks are added one after another.

Sums over samples (`run_outer`, `add_rows`) are of whole numbers, which add exactly in any order. So neither the place
of a sample, nor its neighbours, the threads or the processor's vectors change a bit.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from torch import Tensor

from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads
from bqsgd._src.runtime.vectors import DOUBLES, INT32, LANES, VECTOR, WHOLE, WIDE, Emit, tile

STRIP = 5
"""Rows of weights or errors that a tile takes at once."""
AT_ONCE = 4 if WIDE else 1
"""Samples of a tile of products, and vectors of a tile of steps: 20 of 32 registers, or 10 of 16, hold sums."""
DEPTH, ROW_BLOCK = 32, 32
"""Vectors of features whose weights stay in a core's nearest cache while a block of so many samples passes by."""


@tile
def _dot_tile(
    emit: Emit, w: Any, w_at: Any, x: Any, x_at: Any, x_step: Any, count: Any, sums: Any, sums_at: Any, step: Any
) -> None:
    """sums[s, o] = fma(w[k, o], x[x_at + s x_step + 16 k], sums[s, o]) for k = 0 .. count - 1, in vectors of 16."""
    builder, weights = emit.builder, emit.at(w, w_at)
    values = [emit.at(emit.at(x, x_at), x_step, s) for s in range(AT_ONCE)]
    targets = [emit.at(emit.at(sums, sums_at), step, s) for s in range(AT_ONCE)]
    registers = emit.registers(AT_ONCE, STRIP)
    for place, own in zip(targets, registers, strict=True):
        for o, register in enumerate(own):
            builder.store(emit.load(place, LANES * o), register)
    with emit.count(count) as loop:
        read = [emit.load(emit.at(value, loop.index, LANES)) for value in values]
        factors = emit.at(weights, loop.index, LANES * STRIP)
        for o in range(STRIP):
            factor = emit.load(factors, LANES * o)
            for vector, own in zip(read, registers, strict=True):
                builder.store(emit.fma(factor, vector, builder.load(own[o])), own[o])
    for place, own in zip(targets, registers, strict=True):
        for o, register in enumerate(own):
            emit.store(builder.load(register), place, LANES * o)


@njit(nogil=True, cache=True)
def _halves(values: Any, at: int) -> Any:
    """The sum of 16 lanes: 0 + 8, 1 + 9, ...; then 4, 2 and 1 apart."""
    apart = LANES // 2
    while apart:
        for lane in range(apart):
            values[at + lane] += values[at + lane + apart]
        apart //= 2
    return values[at]


@njit(nogil=True, cache=True)
def _run_rows(w: Any, x: Any, features: int, bias: Any, start: int, stop: int, out: Any) -> None:
    """Samples start..stop of out (rows, samples) = bias + w x, from weights (strips, vectors of features, 5, 16)."""
    strips, steps, whole, flat = w.shape[0], w.shape[1], features // LANES, w.reshape(-1)
    wide = strips * STRIP * LANES  # sums of a sample
    sums, tail = np.empty(ROW_BLOCK * wide, np.float32), np.zeros(ROW_BLOCK * LANES, np.float32)
    for block in range(start, stop, ROW_BLOCK):
        samples = min(ROW_BLOCK, stop - block)
        sums[:] = 0
        for sample in range(samples):  # the last features, and zeros
            for lane in range(features - whole * LANES):
                tail[sample * LANES + lane] = x[(block + sample) * features + whole * LANES + lane]
        for begin in range(0, steps, DEPTH):
            depth, sample = min(DEPTH, whole - begin), 0
            while sample < samples:
                several = sample + AT_ONCE <= samples  # else one sample, which fills all places of the tile
                apart = 1 if several else 0
                x_at = (block + sample) * features + begin * LANES
                for strip in range(strips):
                    at, to = (strip * steps + begin) * STRIP * LANES, sample * wide + strip * STRIP * LANES
                    _dot_tile(flat, at, x, x_at, apart * features, depth, sums, to, apart * wide)
                    if steps - begin <= DEPTH and steps > whole:
                        at = (strip * steps + whole) * STRIP * LANES
                        _dot_tile(flat, at, tail, sample * LANES, apart * LANES, 1, sums, to, apart * wide)
                sample += AT_ONCE if several else 1
        for sample in range(samples):
            for row in range(bias.size):
                out[row, block + sample] = _halves(sums, sample * wide + row * LANES) + bias[row]


def rows_product(w: np.ndarray, x: Tensor | np.ndarray, bias: np.ndarray | None, lanes: int = 0) -> np.ndarray:
    """(rows, samples) bias + w x of (rows, features) weights and (samples, features) contiguous samples, in float32;
    with zeros up to so many lanes.

    For few rows: each of them is kept in 16 lanes a sample while the features pass by.
    """
    values = x.detach().numpy() if isinstance(x, Tensor) else x
    (samples, features), rows = values.shape, len(w)
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ValueError(f"x must be contiguous float32, got {values.dtype} with strides {values.strides}")
    filled = np.zeros((rows + -rows % STRIP, features + -features % LANES), np.float32)
    filled[:rows, :features] = w
    packed = np.ascontiguousarray(filled.reshape(-1, STRIP, filled.shape[1] // LANES, LANES).swapaxes(1, 2))
    shift, out = np.zeros(rows, np.float32) if bias is None else bias, np.zeros((rows, max(samples, lanes)), np.float32)
    fixed = packed, values.reshape(-1), features, shift
    in_threads(lambda start, stop: _run_rows(*fixed, start, stop, out), samples, each=features)
    return out


SUM_BLOCK = 1 << 13
"""Features whose squares are added before the sum is added to those of the blocks before; an item of work."""


@tile
def _norm_tile(emit: Emit, x: Any, x_at: Any, count: Any, bound: Any, squares: Any, largest: Any) -> None:
    """squares[l] += min(|x|, bound)^2 in float64 and largest[l] = max(largest[l], |x|) of the features l + 16 k.

    Magnitudes are compared as integers, which order them as they are, with NaN above all.
    """
    builder, values, high = emit.builder, emit.at(x, x_at), emit.broadcast(bound)
    ((total,),), ((most,),) = emit.registers(1, 1, DOUBLES), emit.registers(1, 1, WHOLE)
    builder.store(emit.load(squares, 0, DOUBLES), total)
    builder.store(emit.load(largest, 0, WHOLE), most)
    unsigned = ir.Constant(WHOLE, [0x7FFFFFFF] * LANES)
    with emit.count(count) as loop:
        size = builder.and_(emit.load(emit.at(values, loop.index, LANES), 0, WHOLE), unsigned)
        held = builder.load(most)
        builder.store(builder.select(builder.icmp_signed(">", size, held), size, held), most)
        value = emit.smaller(high, builder.fpext(builder.bitcast(size, VECTOR), DOUBLES))  # NaN stays
        builder.store(emit.fma(value, value, builder.load(total)), total)
    emit.store(builder.load(total), squares)
    emit.store(builder.load(most), largest)


@njit(nogil=True, cache=True)
def _block_norms(x: Any, at: int, size: int, bound: float, sums: Any, most: Any, tail: Any) -> Any:
    """The sum of squares of `size` features; `most` holds the largest magnitudes, the other arrays are scratch."""
    whole = size // LANES
    sums[:], most[:], tail[:] = 0, 0, 0
    for lane in range(size - whole * LANES):
        tail[lane] = x[at + whole * LANES + lane]
    _norm_tile(x, at, whole, bound, sums, most)
    _norm_tile(tail, 0, 1, bound, sums, most)
    return _halves(sums, 0)


class Rows(NamedTuple):
    """Where the values of several samples lie: those of tensor t of sample b are x[starts[t, b]] and the next ones.

    x: an array that begins at the lowest address; its length is not looked at.
    blocks: (blocks, 3) with the tensor, the first value and the number of values of pieces of at most 2^13 values.
    """

    x: np.ndarray
    starts: np.ndarray
    blocks: np.ndarray
    sizes: tuple[int, ...]


@lru_cache(maxsize=256)
def blocks_of(sizes: tuple[int, ...]) -> np.ndarray:
    """Tensors of these sizes in pieces of at most 2^13 values, in order."""
    cut = [(n, at, min(SUM_BLOCK, size - at)) for n, size in enumerate(sizes) for at in range(0, size, SUM_BLOCK)]
    return np.array(cut, np.int64).reshape(-1, 3)


@njit(nogil=True, cache=True)
def _row_norms(x: Any, starts: Any, blocks: Any, bound: float, start: int, stop: int, most: Any, squares: Any) -> None:
    """Items start..stop, numbered sample by sample and block by block, of largest magnitudes and sums of squares."""
    sums, largest, tail = np.empty(LANES), np.empty(LANES, np.int32), np.empty(LANES, np.float32)
    for item in range(start, stop):
        sample, block = divmod(item, len(blocks))
        tensor, first, size = blocks[block]
        squares[sample, block] = _block_norms(x, starts[tensor, sample] + first, size, bound, sums, largest, tail)
        for lane in range(1, LANES):
            largest[0] = max(largest[0], largest[lane])
        most[sample, block] = largest[0]


def row_norms(rows: Rows, bound: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """(samples,) float32 largest magnitudes, NaN above all, and float64 sums of squares, clamped to +-bound first."""
    samples, count = rows.starts.shape[1], len(rows.blocks)
    most, squares = np.zeros((samples, max(1, count)), np.int32), np.zeros((samples, max(1, count)))
    fixed, each = (rows.x, rows.starts, rows.blocks, bound), sum(rows.sizes) // max(1, count)
    in_threads(lambda start, stop: _row_norms(*fixed, start, stop, most, squares), samples * count, each=each)
    return most.max(axis=1).view(np.float32), np.add.accumulate(squares, axis=1)[:, -1]


@njit(nogil=True, cache=True, error_model="numpy")
def run_clamped_squares(x: Any, stride: int, size: int, e: Any, bound: float, start: int, stop: int, out: Any) -> None:
    """sum over o, i of min(|e_o| |x_i|, C)^2, as the sum over o, in order, of e_o^2 sum_i min(|x_i|, C / |e_o|)^2."""
    sums, most, tail = np.empty(LANES), np.empty(LANES, np.int32), np.empty(LANES, np.float32)
    for sample in range(start, stop):
        total = 0.0
        for row in range(e.shape[1]):
            factor = np.float64(e[sample, row])
            for first in range(0, size, SUM_BLOCK):
                at, count = sample * stride + first, min(SUM_BLOCK, size - first)
                total += factor * factor * _block_norms(x, at, count, bound / abs(factor), sums, most, tail)
        out[sample] = total


ROUNDER = 1.5 * 2.0**23
"""fma(s, v, ROUNDER) is ROUNDER plus s v rounded to the nearest whole number, for |s v| below 2^22."""
ROUNDER_BITS = int(np.float32(ROUNDER).view(np.int32))
"""Neighbouring float32 from 2^23 to 2^24 differ by 1, and so do their bits as integers: bits minus these are steps."""
ROUNDING = 1.5 * 2.0**52
"""Adding and taking away this rounds a float64 below 2^51 to the nearest whole number."""
BLOCK_SAMPLES = 256
"""Samples summed in int32 at most: 256 times 2^22 is below 2^31."""
PANEL = LANES * AT_ONCE
"""Features of a tile of steps."""


def _step_tile(
    rows: int, clamped: bool, scattered: bool, emit: Emit, scalars: Any, scalar_at: Any, x: Any, x_at: Any, stride: Any,
    count: Any, sums: Any, sums_at: Any,
) -> None:  # fmt: skip
    """sums += sum_b round(s_b clamp(x_b, -t_b, t_b)) with s, t scalars of the row, for `rows` rows and a panel.

    stride: from one sample to the next; of samples that are `scattered` an array of where each of them begins.

    scalars: (samples, 2, rows) holding s and t, or (samples, 1, rows) without a clamp. Products are rounded to whole
    numbers one by one, and whole numbers are added: the order does not matter.
    """
    builder, target, registers = emit.builder, emit.at(sums, sums_at), emit.registers(rows, AT_ONCE, WHOLE)
    samples = builder.trunc(count, INT32)
    less = emit.broadcast(builder.mul(samples, ir.Constant(INT32, -ROUNDER_BITS)))  # wraps, as the sum does
    for n, register in enumerate(chain(*registers)):
        builder.store(builder.add(emit.load(target, LANES * n, WHOLE), less), register)
    rounder, size = ir.Constant(VECTOR, [ROUNDER] * LANES), (2 if clamped else 1) * rows
    with emit.count(count) as loop:
        s = emit.at(emit.at(scalars, scalar_at), loop.index, size)
        away = builder.load(emit.at(stride, loop.index)) if scattered else builder.mul(loop.index, stride)
        v = emit.at(emit.at(x, x_at), away)
        read = [emit.load(v, LANES * n) for n in range(AT_ONCE)]
        for row, own in enumerate(registers):
            factor = emit.broadcast(builder.load(emit.at(s, row)))
            high = emit.broadcast(builder.load(emit.at(s, rows + row))) if clamped else None
            for value, register in zip(read, own, strict=True):
                held = emit.clamp(value, high) if clamped else value
                steps = builder.bitcast(emit.fma(factor, held, rounder), WHOLE)
                builder.store(builder.add(builder.load(register), steps), register)
    for n, register in enumerate(chain(*registers)):
        emit.store(builder.load(register), target, LANES * n)


_outer_clamped, _outer_plain = (tile(partial(_step_tile, STRIP, clamped, False)) for clamped in (True, False))
_row_clamped = tile(partial(_step_tile, 1, True, True))
LARGEST_RATIO = 2.0**40
"""Products beyond this many times their bound are taken for so many times it, so that no scalar overflows."""
CHUNK = 8 * PANEL
"""Features that are copied to a core's cache at a time: samples are then read in runs that are worth the way."""


@njit(nogil=True, cache=True, error_model="numpy")
def pack_scalars(e: Any, powers: Any, weights: Any, reach: float, start: int, stop: int, packed: Any) -> None:
    """Errors (samples, rows), over the samples' powers of two -> strips start..stop of (strips, samples, 1 or 2, 5):
    w e, and reach / |e|."""
    samples, parts = packed.shape[1:3]
    for strip in range(start, stop):
        used = min(STRIP, e.shape[1] - strip * STRIP)
        for sample in range(samples):
            own = packed[strip, sample]
            own[:] = 0
            for row in range(used):
                value = np.float64(e[sample, strip * STRIP + row]) / powers[sample]
                if parts == 2:
                    ratio = abs(value) / reach
                    if ratio > LARGEST_RATIO:
                        value, ratio = np.copysign(reach * LARGEST_RATIO, value), LARGEST_RATIO
                    own[1, row] = np.float32(1 / ratio)
                own[0, row] = np.float32(value * weights[sample])


@njit(nogil=True, cache=True)
def run_outer(scalars: Any, x: Any, stride: int, powers: Any, start: int, stop: int, out: Any) -> None:
    """Panels start..stop of out (rows, features) += sum_b round(s_b clamp(p_b x_b)), from scalars (strips, samples,
    parts, 5) and samples that begin at x[b stride]."""
    (strips, samples, parts, _), (rows, features), flat = scalars.shape, out.shape, scalars.reshape(-1)
    wide = CHUNK + LANES  # samples a power of two apart would share a few lines of the nearest cache
    packed, buffer = np.zeros(min(samples, BLOCK_SAMPLES) * wide, np.float32), np.empty(STRIP * PANEL, np.int32)
    for low in range(start * PANEL, min(features, stop * PANEL), CHUNK):
        high = min(features, stop * PANEL, low + CHUNK)
        for group in range(0, samples, BLOCK_SAMPLES):
            count = min(BLOCK_SAMPLES, samples - group)
            for sample in range(count):
                at, power = (group + sample) * stride + low, np.float32(powers[group + sample])
                source, target = x[at : at + high - low], packed[sample * wide : sample * wide + high - low]
                for place in range(target.size):
                    target[place] = source[place] * power
            for strip in range(strips):
                scalar_at = (strip * samples + group) * parts * STRIP
                for place in range(low, high, PANEL):
                    buffer[:] = 0
                    if parts == 2:
                        _outer_clamped(flat, scalar_at, packed, place - low, wide, count, buffer, 0)
                    else:
                        _outer_plain(flat, scalar_at, packed, place - low, wide, count, buffer, 0)
                    for row in range(min(STRIP, rows - strip * STRIP)):
                        into = out[strip * STRIP + row, place : min(high, place + PANEL)]
                        found = buffer[row * PANEL : row * PANEL + into.size]
                        for lane in range(into.size):
                            into[lane] += np.float64(found[lane])


@njit(nogil=True, cache=True)
def _add_rows(
    factors: Any, x: Any, starts: Any, blocks: Any, places: Any, first: int, last: int, begin: int, end: int, sums: Any
) -> None:
    for block in range(begin, end):
        tensor, low, size = blocks[block]
        own, at = starts[tensor, first:last], places[tensor] + low
        whole = size - size % PANEL
        for place in range(0, whole, PANEL):
            _row_clamped(factors, 2 * first, x, low + place, own, last - first, sums, at + place)
        for sample in range(first, last):
            factor, high = np.float64(factors[2 * sample]), factors[2 * sample + 1]
            source = own[sample - first] + low
            for place in range(whole, size):
                held = min(max(x[source + place], -high), high)
                sums[at + place] += np.int32((np.float64(held) * factor + ROUNDING) - ROUNDING)  # the product is exact


def add_rows(factors: np.ndarray, rows: Rows, first: int, last: int, sums: np.ndarray, at: int) -> None:
    """sums[at:] += steps of the samples first..last, at most 256, the tensors of a sample one after another.

    factors: for each sample what turns it into steps, and what it is clamped to before.
    """
    places, count = at + np.cumsum((0, *rows.sizes)), len(rows.blocks)
    fixed, each = (factors, rows.x, rows.starts, rows.blocks, places, first, last), (last - first) * sum(rows.sizes)
    in_threads(lambda begin, end: _add_rows(*fixed, begin, end, sums), count, each=each // max(1, count))
