"""Loops over samples that lie beside each other in memory, 16 of them in a vector: norms and sums of steps.

They give the same bits as the loops of `contiguous`, which read samples that lie one after another: sums of squares run
in the order that is written down there, and steps are whole numbers. Entry i of sample b is x[i * stride + b].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from bqsgd.persample._kernels.contiguous import SUM_BLOCK
from bqsgd.persample._kernels.threads import in_threads
from bqsgd.persample._kernels.tiles import BLOCK_SAMPLES, ROUNDER, ROUNDER_BITS, ROUNDING
from bqsgd.persample._kernels.vectors import DOUBLES, INT32, LANES, VECTOR, WHOLE, WORD, ZERO, Emit

ENTRIES = 32
"""Entries that stay in a core's cache while the vectors of samples pass by; whole turns of the 16 partial sums."""
BESIDE = 512
"""Samples that are one item of work, with a block of entries."""
PARTS = LANES * LANES
"""Partial sums of a vector of samples: 16 each."""


def _norm_tile(*, clamped: bool) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, x: Any, x_at: Any, stride: Any, count: Any, bound: Any, sums: Any, sums_at: Any, most: Any,
        most_at: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        """sums[i % 16] += min(|x_i|, bound)^2 in float64 and most = max(most, |x_i|) of 16 samples and `count` entries.

        Magnitudes are compared as integers, which order them as they are, with NaN above all.
        """

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            values = emit.pointer(kinds[0], arguments[0], arguments[1])
            total = emit.pointer(kinds[5], arguments[5], arguments[6])
            target = emit.pointer(kinds[7], arguments[7], arguments[8])
            largest = emit.registers(1, 1, WHOLE)[0][0]
            builder.store(emit.load(target, 0, WHOLE), largest)
            unsigned, high = ir.Constant(WHOLE, [0x7FFFFFFF] * LANES), emit.broadcast(arguments[4])
            with cgutils.for_range(builder, arguments[3], intp=WORD) as loop:
                row = emit.at(values, builder.mul(loop.index, arguments[2]))
                read = emit.load(row, 0)
                emit.prefetch(row, LANES)  # the next 16 samples, whose turn is after these entries
                size = builder.and_(builder.bitcast(read, WHOLE), unsigned)
                held = builder.load(largest)
                builder.store(builder.select(builder.icmp_signed(">", size, held), size, held), largest)
                turn = builder.and_(loop.index, ir.Constant(WORD, LANES - 1))
                place = emit.at(total, builder.mul(turn, ir.Constant(WORD, LANES)))
                value = builder.fpext(builder.bitcast(size, VECTOR), DOUBLES)
                if clamped:
                    value = emit.smaller(value, high)
                    found = builder.fadd(emit.load(place, 0, DOUBLES), builder.fmul(value, value))
                else:  # the square of a float32 is exact, so this is rounded once as well
                    found = emit.fma(value, value, emit.load(place, 0, DOUBLES))
                emit.store(found, place, 0)
            emit.store(builder.load(largest), target, 0)
            return context.get_dummy_value()

        return types.void(x, x_at, stride, count, bound, sums, sums_at, most, most_at), generate

    return tile  # type: ignore[no-any-return]


_norms_clamped, _norms_plain = _norm_tile(clamped=True), _norm_tile(clamped=False)


@njit(nogil=True, cache=True)
def _norms(
    x: Any, stride: int, size: int, samples: int, bound: float, start: int, stop: int, most: Any, squares: Any
) -> None:
    """Items start..stop of most and squares (blocks of entries, samples): a block and up to 512 samples each."""
    wide = (samples + BESIDE - 1) // BESIDE
    sums, bits = np.empty(BESIDE * LANES), np.empty(BESIDE, np.int32)
    ragged = np.zeros(ENTRIES * LANES, np.float32)
    for item in range(start, stop):
        block, first = item // wide, item % wide * BESIDE
        last, end = min(samples, first + BESIDE), min(size, (block + 1) * SUM_BLOCK)
        sums[:], bits[:] = 0, 0
        for entry in range(block * SUM_BLOCK, end, ENTRIES):
            count = min(ENTRIES, end - entry)
            for low in range(first, last, LANES):
                at, to, used = (low - first) * LANES, low - first, last - low
                if used >= LANES:
                    source, begin, step = x, entry * stride + low, stride
                else:  # beyond the last sample there may be no memory
                    for row in range(count):
                        for sample in range(used):
                            ragged[row * LANES + sample] = x[(entry + row) * stride + low + sample]
                    source, begin, step = ragged, 0, LANES
                if bound == np.inf:
                    _norms_plain(source, begin, step, count, bound, sums, at, bits, to)
                else:
                    _norms_clamped(source, begin, step, count, bound, sums, at, bits, to)
        for low in range(first, last, LANES):
            own = sums[(low - first) * LANES : (low - first) * LANES + PARTS]
            apart = PARTS // 2
            while apart >= LANES:  # the partial sums of all 16 samples, 8, 4, 2 and 1 apart
                for at in range(apart):
                    own[at] += own[at + apart]
                apart //= 2
            for sample in range(min(LANES, last - low)):
                squares[block, low + sample] = own[sample]
                most[block, low + sample] = bits[low - first + sample]


def lane_norms(
    x: np.ndarray, stride: int, samples: int, size: int, bound: float = np.inf
) -> tuple[np.ndarray, np.ndarray]:
    """(samples,) float32 largest magnitudes, NaN above all, and float64 sums of squares, clamped to +-bound first."""
    blocks = max(1, -(-size // SUM_BLOCK))
    most, squares = np.zeros((blocks, samples), np.int32), np.zeros((blocks, samples))
    in_threads(
        lambda start, stop: _norms(x, stride, size, samples, bound, start, stop, most, squares),
        blocks * -(-samples // BESIDE) if size else 0,
        each=min(size, SUM_BLOCK) * min(samples, BESIDE),
    )
    return most.max(axis=0).view(np.float32), np.add.accumulate(squares, axis=0)[-1]


def _step_tile(*, clamped: bool) -> Callable[..., Any]:
    @intrinsic
    def tile(
        typing: Any, factors: Any, bounds: Any, at: Any, x: Any, x_at: Any, vectors: Any
    ) -> tuple[Any, Callable[..., Any]]:
        """The sum of round(s_b clamp(x_b, -t_b, t_b)) of 16 * vectors neighbouring samples b of one entry, in int32."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds = Emit(context, builder), signature.args
            s, t = (emit.pointer(kinds[n], arguments[n], arguments[2]) for n in (0, 1))
            values = emit.pointer(kinds[3], arguments[3], arguments[4])
            rounder, register = ir.Constant(VECTOR, [ROUNDER] * LANES), emit.registers(1, 1, WHOLE)[0][0]
            builder.store(ir.Constant(WHOLE, [0] * LANES), register)
            with cgutils.for_range(builder, arguments[5], intp=WORD) as loop:
                along = builder.mul(loop.index, ir.Constant(WORD, LANES))
                value = emit.load(values, along)
                if clamped:
                    high = emit.load(t, along)
                    value = emit.clamp(value, high, builder.fsub(ZERO, high))
                steps = builder.bitcast(emit.fma(emit.load(s, along), value, rounder), WHOLE)
                builder.store(builder.add(builder.load(register), steps), register)
            found = emit.total(builder.load(register))
            counted = builder.mul(builder.trunc(arguments[5], INT32), ir.Constant(INT32, LANES * ROUNDER_BITS % 2**32))
            return builder.sub(found, counted)  # wraps, as the sum does

        return types.int32(factors, bounds, at, x, x_at, vectors), generate

    return tile  # type: ignore[no-any-return]


_steps_clamped, _steps_plain = _step_tile(clamped=True), _step_tile(clamped=False)


@njit(nogil=True, cache=True)
def add_lane_steps(
    factors: Any, bounds: Any, clamped: bool, x: Any, stride: int, start: int, stop: int, out: Any
) -> None:
    """out[i] += the sum over all samples of the steps of their entry i, of the entries start..stop."""
    samples = factors.size
    whole = samples - samples % LANES
    for entry in range(start, stop):
        total = 0.0
        for first in range(0, whole, BLOCK_SAMPLES):
            vectors = min(BLOCK_SAMPLES, whole - first) // LANES
            if clamped:
                total += np.float64(_steps_clamped(factors, bounds, first, x, entry * stride + first, vectors))
            else:
                total += np.float64(_steps_plain(factors, bounds, first, x, entry * stride + first, vectors))
        for sample in range(whole, samples):  # a product of two float32 is exact in float64
            held = min(max(x[entry * stride + sample], -bounds[sample]), bounds[sample])
            total += (np.float64(held) * np.float64(factors[sample]) + ROUNDING) - ROUNDING
        out[entry] += total
