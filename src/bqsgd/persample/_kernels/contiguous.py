"""Loops over samples that lie one after another in memory, as torch keeps them, so that nothing is transposed first.

A vector holds 16 neighbouring features of one sample. Sums over features therefore run across lanes, in one order that
follows from a feature's number alone:

- a product (`run_rows`): lane l adds the features l, l + 16, l + 32, ... by one fma each, starting from zero; then the
  16 lanes are added in halves (0 + 8, 1 + 9, ...; then 4, 2, 1 apart), and the bias comes last;
- a sum of squares (`row_norms`, and `loops._squares` for samples that lie the other way): the same 16 lanes in float64
  over each block of 2^13 features, the same halves, and the blocks are added one after another.

So neither the place of a sample, nor its neighbours, the threads or the processor's vectors change a bit.
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
from torch import Tensor

from bqsgd.persample._kernels.threads import in_threads
from bqsgd.persample._kernels.tiles import BLOCK_SAMPLES, LARGEST_RATIO, OUTER_WIDTH, ROUNDER, ROUNDER_BITS, ROUNDING
from bqsgd.persample._kernels.vectors import DOUBLES, INT32, LANES, VECTOR, WHOLE, WORD, ZERO, Emit

SUM_BLOCK = 1 << 13
"""Features whose squares are added before the sum is added to those of the blocks before."""
WIDE = "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2]
TILE_ROWS = (10, 5, 2, 1) if WIDE else (5, 2, 1, 1)
"""Rows that a tile takes at once: the largest first, until all rows are done."""
BOTH = 2 if WIDE else 1
"""Samples of a tile of products, and vectors of a tile of steps: 20 of 32 registers, or 10 of 16, hold sums."""
DEPTH = 32
"""Vectors of features whose weights stay in a core's nearest cache while a block of samples passes by."""
ROW_BLOCK = 32
"""Samples that pass by at a time."""


def _dot_tile(outputs: int) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, w: Any, w_at: Any, x: Any, x_at: Any, x_step: Any, count: Any, sums: Any, sums_at: Any, step: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        """sums[s, o] = fma(w[k, o], x[x_at + s x_step + 16 k], sums[s, o]) for k = 0 .. count - 1, vectors of 16."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            weights = emit.pointer(kinds[0], arguments[0], arguments[1])
            first = emit.pointer(kinds[2], arguments[2], arguments[3])
            values = [emit.at(first, builder.mul(arguments[4], ir.Constant(WORD, s))) for s in range(BOTH)]
            target = emit.pointer(kinds[6], arguments[6], arguments[7])
            targets = [emit.at(target, builder.mul(arguments[8], ir.Constant(WORD, s))) for s in range(BOTH)]
            registers = emit.registers(BOTH, outputs)
            for place, own in zip(targets, registers, strict=True):
                for o, register in enumerate(own):
                    builder.store(emit.load(place, LANES * o), register)
            with cgutils.for_range(builder, arguments[5], intp=WORD) as loop:
                along = builder.mul(loop.index, ir.Constant(WORD, LANES))
                read = [emit.load(value, along) for value in values]
                for value in values:  # the samples of the next tile
                    emit.prefetch(emit.at(value, builder.mul(arguments[4], ir.Constant(WORD, BOTH))), along)
                factors = emit.at(weights, builder.mul(along, ir.Constant(WORD, outputs)))
                for o in range(outputs):
                    factor = emit.load(factors, LANES * o)
                    for vector, own in zip(read, registers, strict=True):
                        builder.store(emit.fma(factor, vector, builder.load(own[o])), own[o])
            for place, own in zip(targets, registers, strict=True):
                for o, register in enumerate(own):
                    emit.store(builder.load(register), place, LANES * o)
            return context.get_dummy_value()

        return types.void(w, w_at, x, x_at, x_step, count, sums, sums_at, step), generate

    return tile  # type: ignore[no-any-return]


_dots = [_dot_tile(rows) for rows in TILE_ROWS]
_dot_a, _dot_b, _dot_c, _dot_d = _dots
_A, _B, _C, _D = TILE_ROWS


@njit(nogil=True, cache=True)
def _tile_rows(left: int) -> int:
    """Rows of the next tile, of so many that are left."""
    if left >= _A:
        return _A
    if left >= _B:
        return _B
    return _C if left >= _C else _D


def tile_count(rows: int) -> int:
    """Tiles of so many rows."""
    return 1 + tile_count(rows - _tile_rows(rows)) if rows else 0


@njit(nogil=True, cache=True)
def pack_weights(w: Any, packed: Any) -> None:
    """w (rows, features) -> for each tile of rows, for each 16 features, the tile's rows; zeros beyond the last."""
    rows, features = w.shape
    steps, first = (features + LANES - 1) // LANES, 0
    while first < rows:
        count = _tile_rows(rows - first)
        for row in range(count):
            own = w[first + row]
            for step in range(steps):
                at = (first * steps + step * count + row) * LANES
                for lane in range(LANES):
                    packed[at + lane] = own[step * LANES + lane] if step * LANES + lane < features else np.float32(0)
        first += count


@njit(nogil=True, cache=True)
def _halves(values: Any, at: int) -> Any:
    """The sum of 16 lanes: 0 + 8, 1 + 9, ...; then 4, 2 and 1 apart."""
    apart = LANES // 2
    while apart:
        for lane in range(apart):
            values[at + lane] += values[at + lane + apart]
        apart //= 2
    return values[at]


@njit(nogil=True, cache=True, inline="always")
def _dot(count, w, w_at, x, x_at, x_step, steps, sums, at, step):  # type: ignore[no-untyped-def]
    if count == _A:
        _dot_a(w, w_at, x, x_at, x_step, steps, sums, at, step)
    elif count == _B:
        _dot_b(w, w_at, x, x_at, x_step, steps, sums, at, step)
    elif count == _C:
        _dot_c(w, w_at, x, x_at, x_step, steps, sums, at, step)
    else:
        _dot_d(w, w_at, x, x_at, x_step, steps, sums, at, step)


@njit(nogil=True, cache=True)
def run_rows(w: Any, x: Any, stride: int, features: int, bias: Any, start: int, stop: int, out: Any) -> None:
    """Samples start..stop of out (rows, samples) = bias + w x, from packed weights; sample b begins at x[b stride]."""
    rows, whole, steps = bias.size, features // LANES, (features + LANES - 1) // LANES
    sums = np.empty((ROW_BLOCK + 1) * rows * LANES, np.float32)
    tail = np.zeros((ROW_BLOCK + 1) * LANES, np.float32)  # the last features of each sample, and zeros
    for block in range(start, stop, ROW_BLOCK):
        samples = min(ROW_BLOCK, stop - block)
        sums[:] = 0
        for sample in range(samples):
            for lane in range(features - whole * LANES):
                tail[sample * LANES + lane] = x[(block + sample) * stride + whole * LANES + lane]
        for begin in range(0, steps, DEPTH):
            depth = min(DEPTH, whole - begin)
            for sample in range(0, samples, BOTH):
                other = stride if sample + 1 < samples else 0  # the last may stand alone: it is then read twice
                x_at, sums_at, first = (block + sample) * stride + begin * LANES, sample * rows * LANES, 0
                while first < rows:
                    count = _tile_rows(rows - first)
                    at, to = (first * steps + begin * count) * LANES, sums_at + first * LANES
                    _dot(count, w, at, x, x_at, other, depth, sums, to, rows * LANES)
                    if steps - begin <= DEPTH and steps > whole:
                        at = (first * steps + whole * count) * LANES
                        _dot(count, w, at, tail, sample * LANES, LANES, 1, sums, to, rows * LANES)
                    first += count
        for sample in range(samples):
            for row in range(rows):
                out[row, block + sample] = _halves(sums, (sample * rows + row) * LANES) + bias[row]


def rows_product(w: np.ndarray, x: Tensor | np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(rows, samples) bias + w x of (rows, features) weights and (samples, features) contiguous samples, in float32.

    For few rows: each of them is kept in 16 lanes a sample while the features pass by.
    """
    values = x.detach().numpy() if isinstance(x, Tensor) else x
    (samples, features), rows = values.shape, len(w)
    if values.dtype != np.float32 or not values.flags.c_contiguous:
        raise ValueError(f"x must be contiguous float32, got {values.dtype} with strides {values.strides}")
    packed, out = np.empty(rows * -(-features // LANES) * LANES, np.float32), np.empty((rows, samples), np.float32)
    pack_weights(w, packed)
    shift = np.zeros(rows, np.float32) if bias is None else bias
    fixed = packed, values.reshape(-1), features, features, shift
    in_threads(lambda start, stop: run_rows(*fixed, start, stop, out), samples, each=features)
    return out


def _step_tile(rows: int, *, clamped: bool) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, scalars: Any, scalar_at: Any, x: Any, x_at: Any, stride: Any, count: Any, sums: Any, sums_at: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        """sums[r] += round(s_br clamp(p_b x_b, -t_br, t_br)) over the samples b, in int32; x_b is 16 BOTH features.

        scalars: for each sample p, the rows' s and, if clamped, their t.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            scalar = emit.pointer(kinds[0], arguments[0], arguments[1])
            values = emit.pointer(kinds[2], arguments[2], arguments[3])
            target = emit.pointer(kinds[6], arguments[6], arguments[7])
            ahead = builder.mul(arguments[4], ir.Constant(WORD, ROW_BLOCK))
            registers = emit.registers(rows, BOTH, WHOLE)
            samples = builder.trunc(arguments[5], INT32)
            less = emit.broadcast(builder.mul(samples, ir.Constant(INT32, -ROUNDER_BITS)))  # wraps, as the sum does
            for n, register in enumerate(chain(*registers)):
                held = emit.load(target, LANES * n, WHOLE)
                builder.store(builder.add(held, less), register)
            rounder = ir.Constant(VECTOR, [ROUNDER] * LANES)
            size = 1 + (2 if clamped else 1) * rows
            with cgutils.for_range(builder, arguments[5], intp=WORD) as loop:
                s = emit.at(scalar, builder.mul(loop.index, ir.Constant(WORD, size)))
                v = emit.at(values, builder.mul(loop.index, arguments[4]))
                power = emit.broadcast(builder.load(s))
                scaled = [builder.fmul(emit.load(v, LANES * n), power) for n in range(BOTH)]
                for n in range(BOTH):  # the samples of the next block
                    emit.prefetch(emit.at(v, ahead), LANES * n)
                for row, own in enumerate(registers):
                    factor = emit.broadcast(builder.load(emit.at(s, 1 + row)))
                    high = emit.broadcast(builder.load(emit.at(s, 1 + rows + row))) if clamped else None
                    low = builder.fsub(ZERO, high) if clamped else None
                    for value, register in zip(scaled, own, strict=True):
                        held = emit.clamp(value, high, low) if clamped else value
                        steps = builder.bitcast(emit.fma(factor, held, rounder), WHOLE)
                        builder.store(builder.add(builder.load(register), steps), register)
            for n, register in enumerate(chain(*registers)):
                emit.store(builder.load(register), target, LANES * n)
            return context.get_dummy_value()

        return types.void(scalars, scalar_at, x, x_at, stride, count, sums, sums_at), generate

    return tile  # type: ignore[no-any-return]


PANEL = LANES * BOTH
"""Features of a tile of steps."""
CHUNK = 32
"""Panels whose sums stay in a core's cache while a group of samples passes by."""
_plain_a, _plain_b, _plain_c, _plain_d = (_step_tile(rows, clamped=False) for rows in TILE_ROWS)
_clamped_a, _clamped_b, _clamped_c, _clamped_d = (_step_tile(rows, clamped=True) for rows in TILE_ROWS)


@njit(nogil=True, cache=True, inline="always")
def _add_tile(count, clamped, scalars, scalar_at, x, x_at, stride, samples, sums, at):  # type: ignore[no-untyped-def]
    if clamped:
        if count == _A:
            _clamped_a(scalars, scalar_at, x, x_at, stride, samples, sums, at)
        elif count == _B:
            _clamped_b(scalars, scalar_at, x, x_at, stride, samples, sums, at)
        elif count == _C:
            _clamped_c(scalars, scalar_at, x, x_at, stride, samples, sums, at)
        else:
            _clamped_d(scalars, scalar_at, x, x_at, stride, samples, sums, at)
    elif count == _A:
        _plain_a(scalars, scalar_at, x, x_at, stride, samples, sums, at)
    elif count == _B:
        _plain_b(scalars, scalar_at, x, x_at, stride, samples, sums, at)
    elif count == _C:
        _plain_c(scalars, scalar_at, x, x_at, stride, samples, sums, at)
    else:
        _plain_d(scalars, scalar_at, x, x_at, stride, samples, sums, at)


@njit(nogil=True, cache=True, error_model="numpy")
def pack_row_scalars(e: Any, powers: Any, weights: Any, reach: float, packed: Any) -> None:
    """Errors (samples, rows) -> for each tile of rows, for each sample: its power of two p, then w e / p of the rows
    and, if `reach` is finite, their p reach / |e|."""
    (samples, rows), parts, first, at = e.shape, 1 if reach == np.inf else 2, 0, 0
    while first < rows:
        count = _tile_rows(rows - first)
        for sample in range(samples):
            packed[at] = np.float32(powers[sample])
            for row in range(count):
                value = np.float64(e[sample, first + row]) / powers[sample]
                if parts == 2:
                    ratio = abs(value) / reach
                    if ratio > LARGEST_RATIO:
                        value, ratio = np.copysign(reach * LARGEST_RATIO, value), LARGEST_RATIO
                    packed[at + 1 + count + row] = np.float32(1 / ratio)
                packed[at + 1 + row] = np.float32(value * weights[sample])
            at += 1 + parts * count
        first += count


@njit(nogil=True, cache=True)
def run_row_steps(scalars: Any, parts: int, x: Any, stride: int, samples: int, start: int, stop: int, out: Any) -> None:
    """Panels start..stop of out (rows, features) += the sum over the samples of their steps."""
    rows, features = out.shape
    sums, tail = np.empty(CHUNK * rows * PANEL, np.int32), np.zeros(BLOCK_SAMPLES * PANEL, np.float32)
    for low in range(start, stop, CHUNK):
        high = min(stop, low + CHUNK)
        for group in range(0, samples, BLOCK_SAMPLES):
            end = min(samples, group + BLOCK_SAMPLES)
            sums[:] = 0
            if high * PANEL > features:
                for sample in range(group, end):
                    for lane in range(features - (high - 1) * PANEL):
                        tail[(sample - group) * PANEL + lane] = x[sample * stride + (high - 1) * PANEL + lane]
            for block in range(group, end, ROW_BLOCK):
                count = min(ROW_BLOCK, end - block)
                for panel in range(low, high):
                    first, behind, at = 0, 0, (panel - low) * rows * PANEL
                    while first < rows:
                        tile = _tile_rows(rows - first)
                        scalar_at = behind + block * (1 + parts * tile)
                        if panel * PANEL + PANEL <= features:
                            _add_tile(tile, parts == 2, scalars, scalar_at, x, block * stride + panel * PANEL, stride, count, sums, at + first * PANEL)  # fmt: skip  # noqa: E501
                        else:
                            _add_tile(tile, parts == 2, scalars, scalar_at, tail, (block - group) * PANEL, PANEL, count, sums, at + first * PANEL)  # fmt: skip  # noqa: E501
                        behind += samples * (1 + parts * tile)
                        first += tile
            for panel in range(low, high):
                for row in range(rows):
                    used = min(PANEL, features - panel * PANEL)
                    target = out[row, panel * PANEL : panel * PANEL + used]
                    at = ((panel - low) * rows + row) * PANEL
                    found = sums[at : at + used]
                    for lane in range(used):
                        target[lane] += np.float64(found[lane])


@njit(nogil=True, cache=True)
def pack_panels(x: Any, stride: int, size: int, powers: Any, start: int, stop: int, packed: Any) -> None:
    """What `tiles.pack_lanes` makes of samples that lie the other way: panels start..stop of (panels, batch, 64)."""
    batch = packed.shape[1]
    for panel in range(start, stop):
        used = min(OUTER_WIDTH, size - panel * OUTER_WIDTH)
        for sample in range(batch):
            at, power, target = sample * stride + panel * OUTER_WIDTH, np.float32(powers[sample]), packed[panel, sample]
            own = x[at : at + used]
            if used == OUTER_WIDTH:  # a loop of known length
                for lane in range(OUTER_WIDTH):
                    target[lane] = own[lane] * power
            else:
                target[:] = 0
                for lane in range(used):
                    target[lane] = own[lane] * power


def _norm_tile(*, clamped: bool) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, x: Any, x_at: Any, count: Any, bound: Any, squares: Any, largest: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """squares[l] += min(|x|, bound)^2 in float64 and largest[l] = max(largest[l], |x|) of the features l + 16 k.

        Magnitudes are compared as integers, which order them as they are, with NaN above all.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds, zero = Emit(context, builder), signature.args, ir.Constant(WORD, 0)
            values = emit.pointer(kinds[0], arguments[0], arguments[1])
            targets = [emit.pointer(kinds[n], arguments[n], zero) for n in (4, 5)]
            (total,), (most,) = emit.registers(1, 1, DOUBLES)[0], emit.registers(1, 1, WHOLE)[0]
            builder.store(emit.load(targets[0], 0, DOUBLES), total)
            builder.store(emit.load(targets[1], 0, WHOLE), most)
            unsigned, high = ir.Constant(WHOLE, [0x7FFFFFFF] * LANES), emit.broadcast(arguments[3])
            with cgutils.for_range(builder, arguments[2], intp=WORD) as loop:
                read = emit.load(values, builder.mul(loop.index, ir.Constant(WORD, LANES)))
                size = builder.and_(builder.bitcast(read, WHOLE), unsigned)
                held = builder.load(most)
                builder.store(builder.select(builder.icmp_signed(">", size, held), size, held), most)
                value = builder.fpext(builder.bitcast(size, VECTOR), DOUBLES)
                if clamped:
                    value = emit.smaller(value, high)
                    builder.store(builder.fadd(builder.load(total), builder.fmul(value, value)), total)
                else:  # the square of a float32 is exact, so this is rounded once as well
                    builder.store(emit.fma(value, value, builder.load(total)), total)
            for target, register in zip(targets, (total, most), strict=True):
                emit.store(builder.load(register), target, 0)
            return context.get_dummy_value()

        return types.void(x, x_at, count, bound, squares, largest), generate

    return tile  # type: ignore[no-any-return]


_norms_clamped, _norms_plain = _norm_tile(clamped=True), _norm_tile(clamped=False)


@njit(nogil=True, cache=True)
def _row_norms(
    x: Any, stride: int, features: int, bound: float, start: int, stop: int, most: Any, squares: Any
) -> None:
    """Blocks start..stop, numbered sample by sample, of largest magnitudes and sums of squares."""
    blocks = (features + SUM_BLOCK - 1) // SUM_BLOCK
    sums, largest, tail = np.empty(LANES), np.empty(LANES, np.int32), np.empty(LANES, np.float32)
    for item in range(start, stop):
        first = item % blocks * SUM_BLOCK
        size, at = min(SUM_BLOCK, features - first), item // blocks * stride + first
        whole = size // LANES
        sums[:], largest[:], tail[:] = 0, 0, 0
        for lane in range(size - whole * LANES):
            tail[lane] = x[at + whole * LANES + lane]
        if bound == np.inf:
            _norms_plain(x, at, whole, bound, sums, largest)
            _norms_plain(tail, 0, 1, bound, sums, largest)
        else:
            _norms_clamped(x, at, whole, bound, sums, largest)
            _norms_clamped(tail, 0, 1, bound, sums, largest)
        most[item], squares[item] = largest.max(), _halves(sums, 0)


def row_norms(
    x: np.ndarray, stride: int, samples: int, features: int, bound: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """(samples,) float32 largest magnitudes, NaN above all, and float64 sums of squares, clamped to +-bound first."""
    blocks = max(1, -(-features // SUM_BLOCK))
    most, squares = np.zeros((samples, blocks), np.int32), np.zeros((samples, blocks))
    each, fixed = min(features, SUM_BLOCK), (x, stride, features, bound)
    in_threads(
        lambda start, stop: _row_norms(*fixed, start, stop, most.reshape(-1), squares.reshape(-1)),
        most.size if features else 0,
        each=each,
    )
    return most.max(axis=1).view(np.float32), np.add.accumulate(squares, axis=1)[:, -1]


SWEEP = 4
"""Rows whose clamped squares are added at a time."""


@intrinsic
def _sweep_tile(typing: Any, x: Any, x_at: Any, count: Any, bounds: Any, sums: Any) -> tuple[Any, Callable[..., Any]]:
    """sums[r, l] = fma(v, v, sums[r, l]) in float64, v = min(|x|, bounds[r]), of the features l + 16 k and 4 rows r."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, kinds, zero = Emit(context, builder), signature.args, ir.Constant(WORD, 0)
        values = emit.pointer(kinds[0], arguments[0], arguments[1])
        bound, target = (emit.pointer(kinds[n], arguments[n], zero) for n in (3, 4))
        registers = emit.registers(1, SWEEP, DOUBLES)[0]
        for n, register in enumerate(registers):
            builder.store(emit.load(target, LANES * n, DOUBLES), register)
        highs = [emit.broadcast(builder.load(emit.at(bound, n))) for n in range(SWEEP)]
        unsigned = ir.Constant(WHOLE, [0x7FFFFFFF] * LANES)
        with cgutils.for_range(builder, arguments[2], intp=WORD) as loop:
            read = emit.load(values, builder.mul(loop.index, ir.Constant(WORD, LANES)))
            size = builder.and_(builder.bitcast(read, WHOLE), unsigned)
            value = builder.fpext(builder.bitcast(size, VECTOR), DOUBLES)
            for high, register in zip(highs, registers, strict=True):
                held = emit.smaller(value, high)
                builder.store(emit.fma(held, held, builder.load(register)), register)
        for n, register in enumerate(registers):
            emit.store(builder.load(register), target, LANES * n)
        return context.get_dummy_value()

    return types.void(x, x_at, count, bounds, sums), generate


@njit(nogil=True, cache=True, error_model="numpy")
def run_clamped_squares(a: Any, e: Any, bound: float, start: int, stop: int, out: Any) -> None:
    """sum over o, i of min(|e_o| |a_i|, C)^2, as the sum over o, in order, of e_o^2 sum_i min(|a_i|, C / |e_o|)^2."""
    x, features, rows = a.reshape(-1), a.shape[1], e.shape[1]
    whole = features // LANES
    bounds, sums, tail = np.empty(SWEEP), np.empty(SWEEP * LANES), np.zeros(LANES, np.float32)
    for sample in range(start, stop):
        total = 0.0
        for lane in range(features - whole * LANES):
            tail[lane] = a[sample, whole * LANES + lane]
        for first in range(0, rows, SWEEP):
            count = min(SWEEP, rows - first)
            bounds[:], sums[:] = 0, 0
            for row in range(count):
                bounds[row] = bound / abs(np.float64(e[sample, first + row]))
            _sweep_tile(x, sample * features, whole, bounds, sums)  # type: ignore[call-arg]
            _sweep_tile(tail, 0, 1, bounds, sums)  # type: ignore[call-arg]
            for row in range(count):
                factor = np.float64(e[sample, first + row])
                total += factor * factor * _halves(sums, row * LANES)
        out[sample] = total


SUM_VECTORS = 4
SUM_PANEL, SUM_PIECE = LANES * SUM_VECTORS, 1 << 13
"""Coordinates of a tile, and those whose sums stay in a core's nearest cache while the samples pass by."""


def _sum_tile(*, clamped: bool) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, scalars: Any, scalar_at: Any, x: Any, x_at: Any, stride: Any, count: Any, sums: Any, sums_at: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        """sums += round(s_b clamp(x_b, -t_b, t_b)) over the samples b, in int32, of 64 coordinates; scalars: s, t."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            scalar = emit.pointer(kinds[0], arguments[0], arguments[1])
            values = emit.pointer(kinds[2], arguments[2], arguments[3])
            target = emit.pointer(kinds[6], arguments[6], arguments[7])
            registers = emit.registers(1, SUM_VECTORS, WHOLE)[0]
            samples = builder.trunc(arguments[5], INT32)
            less = emit.broadcast(builder.mul(samples, ir.Constant(INT32, -ROUNDER_BITS)))  # wraps, as the sum does
            for n, register in enumerate(registers):
                builder.store(builder.add(emit.load(target, LANES * n, WHOLE), less), register)
            rounder = ir.Constant(VECTOR, [ROUNDER] * LANES)
            with cgutils.for_range(builder, arguments[5], intp=WORD) as loop:
                s = emit.at(scalar, builder.mul(loop.index, ir.Constant(WORD, 2)))
                v = emit.at(values, builder.mul(loop.index, arguments[4]))
                factor, high = emit.broadcast(builder.load(s)), emit.broadcast(builder.load(emit.at(s, 1)))
                low = builder.fsub(ZERO, high)
                for n, register in enumerate(registers):
                    value = emit.load(v, LANES * n)
                    held = emit.clamp(value, high, low) if clamped else value
                    steps = builder.bitcast(emit.fma(factor, held, rounder), WHOLE)
                    builder.store(builder.add(builder.load(register), steps), register)
            for n, register in enumerate(registers):
                emit.store(builder.load(register), target, LANES * n)
            return context.get_dummy_value()

        return types.void(scalars, scalar_at, x, x_at, stride, count, sums, sums_at), generate

    return tile  # type: ignore[no-any-return]


_sum_clamped, _sum_plain = _sum_tile(clamped=True), _sum_tile(clamped=False)


@njit(nogil=True, cache=True)
def add_rows(
    scalars: Any, clamped: bool, x: Any, x_at: int, stride: int, first: int, last: int, sums: Any, at: int, size: int
) -> None:
    """sums[at : at + size] += steps of the samples first..last, of their coordinates from x_at on; at most 256."""
    whole = size - size % SUM_PANEL
    for place in range(0, whole, SUM_PANEL):
        source = first * stride + x_at + place
        if clamped:
            _sum_clamped(scalars, 2 * first, x, source, stride, last - first, sums, at + place)
        else:
            _sum_plain(scalars, 2 * first, x, source, stride, last - first, sums, at + place)
    for sample in range(first, last):
        factor, high, source = np.float64(scalars[2 * sample]), scalars[2 * sample + 1], sample * stride + x_at
        for place in range(whole, size):
            held = min(max(x[source + place], -high), high)
            sums[at + place] += np.int32((np.float64(held) * factor + ROUNDING) - ROUNDING)  # the product is exact


@njit(nogil=True, cache=True)
def run_row_sums(
    scalars: Any, clamped: bool, x: Any, stride: int, samples: int, start: int, stop: int, out: Any
) -> None:
    """out[start:stop] += the sum over all samples of their steps, in float64."""
    sums = np.empty(SUM_PIECE, np.int32)
    for low in range(start, stop, SUM_PIECE):
        size = min(SUM_PIECE, stop - low)
        target = out[low : low + size]
        for group in range(0, samples, BLOCK_SAMPLES):
            sums[:] = 0
            add_rows(scalars, clamped, x, low, stride, group, min(samples, group + BLOCK_SAMPLES), sums, 0, size)
            for place in range(size):
                target[place] += np.float64(sums[place])
