"""Products, convolutions and the like in which every entry is the same sequence of operations wherever it stands.

Samples lie in the lanes: an array here is (entries of a sample, samples), so that one instruction does the same to
neighbouring samples. An entry of a product is c, then fma(w_k, x_k, c) for k = 0, 1, ...: in this order whatever the
sample's place, the number of samples, the width of the processor's vectors and the threads. Element-wise loops are
compiled without contraction or reassociation, so each entry is the IEEE operations as written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product as combinations
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bqsgd.persample._kernels.threads import in_threads
from bqsgd.persample._kernels.vectors import LANES, WORD, Emit

STRIP = 6
MANY = 4 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else 1
"""A tile of a product: 6 rows by 64 samples in 24 of 32 registers, or by 16 in 12 of 16."""
DEPTH, GROUP = 256, 4
"""Terms and vectors of samples whose values stay in a core's cache while the rows pass by."""


def _product_tile(vectors: int) -> Callable[..., None]:
    @intrinsic
    def tile(
        typing: Any, rows: Any, row_at: Any, terms: Any, lanes: Any, lane_at: Any, places: Any, start: Any, stop: Any,
        bias: Any, bias_at: Any, fresh: Any, out: Any, out_at: Any, out_stride: Any,
    ) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
        """out[r, j] = fma(rows[terms[k], r], lanes[lane_at + places[k], j], out[r, j]) for k = start .. stop - 1, of a
        strip's 6 rows r and 16 * vectors samples j; `fresh` begins with bias[r] instead."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit, kinds, width = Emit(context, builder), signature.args, ir.Constant(WORD, LANES * vectors)
            zero = ir.Constant(WORD, 0)
            left = emit.pointer(kinds[0], arguments[0], arguments[1])
            term = emit.pointer(kinds[2], arguments[2], zero)
            right = emit.pointer(kinds[3], arguments[3], builder.mul(arguments[4], width))
            place = emit.pointer(kinds[5], arguments[5], zero)
            shift = emit.pointer(kinds[8], arguments[8], arguments[9])
            target = emit.pointer(kinds[11], arguments[11], arguments[12])
            targets = [emit.at(target, builder.mul(arguments[13], ir.Constant(WORD, row))) for row in range(STRIP)]
            sums = emit.registers(STRIP, vectors)
            with builder.if_else(arguments[10]) as (begins, goes_on):
                with begins:
                    for row in range(STRIP):
                        value = emit.broadcast(builder.load(emit.at(shift, row)))
                        for register in sums[row]:
                            builder.store(value, register)
                with goes_on:
                    for row in range(STRIP):
                        for column, register in enumerate(sums[row]):
                            builder.store(emit.load(targets[row], LANES * column), register)
            one = ir.Constant(WORD, 1)
            with cgutils.for_range_slice(builder, arguments[6], arguments[7], one, intp=WORD) as (index, _):
                scalar = emit.at(left, builder.mul(builder.load(emit.at(term, index)), ir.Constant(WORD, STRIP)))
                lane = emit.at(right, builder.mul(builder.load(emit.at(place, index)), width))
                values = [emit.load(lane, LANES * column) for column in range(vectors)]
                for row in range(STRIP):
                    factor = emit.broadcast(builder.load(emit.at(scalar, row)))
                    for value, register in zip(values, sums[row], strict=True):
                        builder.store(emit.fma(factor, value, builder.load(register)), register)
            for row in range(STRIP):
                for column, register in enumerate(sums[row]):
                    emit.store(builder.load(register), targets[row], LANES * column)
            return context.get_dummy_value()

        kinds = (rows, row_at, terms, lanes, lane_at, places, start, stop, bias, bias_at, fresh)
        return types.void(*kinds, out, out_at, out_stride), generate

    return tile  # type: ignore[no-any-return]


_four, _two, _one = _product_tile(MANY), _product_tile(min(MANY, 2)), _product_tile(1)


@njit(nogil=True, cache=True, inline="always")
def _run_tile(  # type: ignore[no-untyped-def]
    vectors, rows, row_at, terms, lanes, lane_at, places, start, stop, bias, bias_at, fresh, out, out_at, out_stride
):
    if vectors == 4:
        _four(rows, row_at, terms, lanes, lane_at, places, start, stop, bias, bias_at, fresh, out, out_at, out_stride)
    elif vectors == 2:
        _two(rows, row_at, terms, lanes, lane_at, places, start, stop, bias, bias_at, fresh, out, out_at, out_stride)
    else:
        _one(rows, row_at, terms, lanes, lane_at, places, start, stop, bias, bias_at, fresh, out, out_at, out_stride)


@njit(nogil=True, cache=True)
def _block(vectors: int) -> int:
    """How many of the remaining vectors of samples the next tile takes."""
    if MANY == 4 and vectors >= 4:
        return 4
    return 2 if MANY == 4 and vectors >= 2 else 1


@njit(nogil=True, cache=True)
def _pack(x: Any, stride: int, samples: int, low: int, start: int, stop: int, width: int, packed: Any) -> None:
    """Entries start..stop of samples low.. of x, `width` of them beside each other, zeros beyond the last sample."""
    for entry in range(start, stop):
        for first in range(0, width, LANES):
            at, to = entry * stride + low + first, (entry - start) * width + first
            target = packed[to : to + LANES]
            if low + first + LANES <= samples:  # a loop of known length is one instruction
                source = x[at : at + LANES]
                for lane in range(LANES):
                    target[lane] = source[lane]
            else:
                for lane in range(LANES):
                    target[lane] = x[at + lane] if low + first + lane < samples else np.float32(0)


@njit(nogil=True, cache=True)
def _fill_strips(w: Any, rows: int, terms: int, start: int, stop: int, strips: Any) -> None:
    """w[row * terms + term] -> strips start..stop of (terms / 256, rows / 6, 256, 6), zeros beyond the last row."""
    for strip in range(start, stop):
        for begin in range(0, terms, DEPTH):
            part, depth = strips[begin // DEPTH, strip], min(DEPTH, terms - begin)
            for row in range(STRIP):
                if strip * STRIP + row < rows:
                    own = w[(strip * STRIP + row) * terms + begin : (strip * STRIP + row) * terms + begin + depth]
                    for term in range(depth):
                        part[term, row] = own[term]
                else:
                    for term in range(depth):
                        part[term, row] = 0


@njit(nogil=True, cache=True)
def _fill_strips_across(w: Any, rows: int, terms: int, start: int, stop: int, strips: Any) -> None:
    """The same of w[term * rows + row]."""
    for begin in range(0, terms, DEPTH):
        for strip in range(start, stop):
            part, full = strips[begin // DEPTH, strip], strip * STRIP + STRIP <= rows
            for term in range(min(DEPTH, terms - begin)):
                at = (begin + term) * rows + strip * STRIP
                for row in range(STRIP):
                    part[term, row] = w[at + row] if full or strip * STRIP + row < rows else np.float32(0)


@njit(nogil=True, cache=True)
def _run_product(
    strips: Any, terms: int, x: Any, stride: int, samples: int, bias: Any, start: int, stop: int, out: Any
) -> None:
    """Rows of strips start..stop of out = bias + w x, from strips (terms / 256, rows / 6, 256, 6)."""
    flat, target, wide = strips.reshape(-1), out.reshape(-1), out.shape[1]
    panel, order = np.empty(DEPTH * LANES * GROUP, np.float32), np.arange(DEPTH)
    vectors = (samples + LANES - 1) // LANES
    for done in range(0, vectors, GROUP):
        group = min(GROUP, vectors - done)
        for begin in range(0, terms, DEPTH):
            depth, at = min(DEPTH, terms - begin), 0
            while at < group:
                count = _block(group - at)
                part = panel[at * LANES * DEPTH :]
                _pack(x, stride, samples, (done + at) * LANES, begin, begin + depth, count * LANES, part)
                at += count
            for strip in range(start, stop):
                row_at, at = (begin // DEPTH * strips.shape[1] + strip) * DEPTH * STRIP, 0
                while at < group:
                    count = _block(group - at)
                    out_at = strip * STRIP * wide + (done + at) * LANES
                    _run_tile(count, flat, row_at, order, panel, at * DEPTH // count, order, 0, depth, bias, strip * STRIP, begin == 0, target, out_at, wide)  # fmt: skip  # noqa: E501
                    at += count


def product(w: np.ndarray, x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(rows, lanes) bias + w x of (rows, terms) weights, which may be transposed in memory, and (terms, lanes) x."""
    (rows, terms), count = w.shape, -(-w.shape[0] // STRIP)
    strips = np.empty((-(-terms // DEPTH), count, DEPTH, STRIP), np.float32)
    fill, flat = (_fill_strips, w) if w.flags.c_contiguous else (_fill_strips_across, np.ascontiguousarray(w.T))
    flat = flat.reshape(-1)
    in_threads(lambda start, stop: fill(flat, rows, terms, start, stop, strips), count, each=terms * STRIP)
    shift = np.zeros(count * STRIP, np.float32)
    if bias is not None:
        shift[:rows] = bias
    out = np.empty((count * STRIP, x.shape[1]), np.float32)
    fixed = strips, terms, x.reshape(-1), x.shape[1], x.shape[1], shift
    in_threads(lambda start, stop: _run_product(*fixed, start, stop, out), count, each=terms * STRIP * x.shape[1])
    return out[:rows]


@dataclass(frozen=True, eq=False)
class Reading:
    """What every output position reads: the terms k of one class of positions, at `base` + places[k] of a plane.

    Positions near an edge have fewer terms; they are classes of their own. A term is (channel, tap of the kernel).
    """

    base: np.ndarray
    kind: np.ndarray
    starts: np.ndarray
    terms: np.ndarray
    places: np.ndarray


@lru_cache(maxsize=256)
def reading(
    channels: int,
    space: tuple[int, ...],
    kernel: tuple[int, ...],
    size: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    backward: bool,
) -> Reading:
    """Forward, position p reads p * stride + tap * dilation - padding; backward it reads q of p = q * stride + ...

    Points outside `space` are left out, not read as zeros.
    """
    axes = [
        _axis(*each, backward=backward) for each in zip(space, kernel, size, stride, padding, dilation, strict=True)
    ]
    steps = [int(np.prod(space[axis + 1 :])) for axis in range(len(space))]
    area, taps = int(np.prod(space)), int(np.prod(kernel))
    base, kind = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for (first, which, classes), step in zip(axes, steps, strict=True):
        base = (base[:, None] + first * step).reshape(-1)
        kind = (kind[:, None] * len(classes) + which).reshape(-1)
    starts, terms, places = [0], [], []
    for chosen in combinations(*(classes for _, _, classes in axes)):
        term, place = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for pairs, step, extent in zip(chosen, steps, kernel, strict=True):
            own = np.array(pairs, np.int64).reshape(-1, 2)
            term = (term[:, None] * extent + own[:, 1]).reshape(-1)
            place = (place[:, None] + own[:, 0] * step).reshape(-1)
        terms.append((np.arange(channels)[:, None] * taps + term).reshape(-1))
        places.append((np.arange(channels)[:, None] * area + place).reshape(-1))
        starts.append(starts[-1] + len(terms[-1]))
    return Reading(base, kind, np.array(starts), np.concatenate(terms), np.concatenate(places))


def _axis(
    points: int, kernel: int, size: int, stride: int, padding: int, dilation: int, *, backward: bool
) -> tuple[np.ndarray, np.ndarray, list[tuple[tuple[int, int], ...]]]:
    """Along one axis: where each position starts to read, its class, and the (distance, tap) pairs of each class."""
    classes: dict[tuple[tuple[int, int], ...], int] = {}
    first, which = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for position in range(size):
        pairs = []
        for tap in range(kernel):
            if backward:
                point, rest = divmod(position + padding - tap * dilation, stride)
            else:
                point, rest = position * stride + tap * dilation - padding, 0
            if rest == 0 and 0 <= point < points:
                pairs.append((point, tap))
        first[position] = pairs[0][0] if pairs else 0
        relative = tuple((point - int(first[position]), tap) for point, tap in pairs)
        which[position] = classes.setdefault(relative, len(classes))
    return first, which, list(classes)


@njit(nogil=True, cache=True)
def _run_convolution(
    x: Any,
    stride: int,
    samples: int,
    entries: int,
    base: Any,
    kind: Any,
    starts: Any,
    terms: Any,
    places: Any,
    strips: Any,
    outputs: int,
    bias: Any,
    start: int,
    stop: int,
    out: Any,
) -> None:
    """Vectors start..stop of samples of out (groups, outputs, positions, samples) from x (entries, samples).

    strips (groups, outputs / 6, terms, 6), bias (groups, outputs filled up to whole strips).
    """
    groups, count, block, positions = strips.shape[0], strips.shape[1], strips.shape[2] * STRIP, base.size
    flat, target, wide = strips.reshape(-1), out.reshape(-1), out.shape[1]
    packed = np.empty(entries * LANES * MANY, np.float32)
    ragged = np.empty(STRIP * LANES * MANY, np.float32)
    done = start
    while done < stop:
        vectors = _block(stop - done)
        width = vectors * LANES
        _pack(x, stride, samples, done * LANES, 0, entries, width, packed)
        for item in range(groups * count):
            group, strip = item // count, item % count
            used, lane_at = min(STRIP, outputs - strip * STRIP), group * (entries // groups)
            for position in range(positions):
                first, last = starts[kind[position]], starts[kind[position] + 1]
                row = ((group * outputs + strip * STRIP) * positions + position) * wide + done * LANES
                if used == STRIP:
                    _run_tile(vectors, flat, item * block, terms, packed, lane_at + base[position], places, first, last, bias, item * STRIP, True, target, row, positions * wide)  # fmt: skip  # noqa: E501
                else:
                    _run_tile(vectors, flat, item * block, terms, packed, lane_at + base[position], places, first, last, bias, item * STRIP, True, ragged, 0, width)  # fmt: skip  # noqa: E501
                    for own in range(used):
                        for lane in range(width):
                            target[row + own * positions * wide + lane] = ragged[own * width + lane]
        done += vectors


def convolution(x: np.ndarray, read: Reading, weights: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(groups * outputs * positions, lanes) from (entries of a sample, lanes) and weights (groups, outputs, terms)."""
    groups, outputs, terms = weights.shape
    count = -(-outputs // STRIP)
    strips, shift = np.zeros((groups, count, terms, STRIP), np.float32), np.zeros((groups, count * STRIP), np.float32)
    for row in range(outputs):
        strips[:, row // STRIP, :, row % STRIP] = weights[:, row]
    if bias is not None:
        shift[:, :outputs] = bias.reshape(groups, outputs)
    (entries, lanes), flat = x.shape, x.reshape(-1)
    out = np.empty((groups * outputs * len(read.base), lanes), np.float32)
    fixed = (flat, lanes, lanes, entries, read.base, read.kind, read.starts, read.terms, read.places, strips)
    rest = (outputs, shift.reshape(-1))
    in_threads(lambda start, stop: _run_convolution(*fixed, *rest, start, stop, out), lanes // LANES)
    return out


SATURATED = np.float32(7.90531110763549805)
"""Beyond this tanh is 1 in float32."""


@njit(nogil=True, cache=True, error_model="numpy")
def _tanh(x: Any, out: Any) -> None:
    """The rational function of Eigen's `ptanh`, within 7 units in the last place."""
    f = np.float32
    for at in range(x.size):
        v = x[at]
        held = min(max(v, -SATURATED), SATURATED)
        s = held * held
        p = f(-2.76076847742355e-16) * s + f(2.00018790482477e-13)
        p = p * s + f(-8.60467152213735e-11)
        p = p * s + f(5.12229709037114e-08)
        p = p * s + f(1.48572235717979e-05)
        p = p * s + f(6.37261928875436e-04)
        p = p * s + f(4.89352455891786e-03)
        q = f(1.19825839466702e-06) * s + f(1.18534705686654e-04)
        q = q * s + f(2.26843463243900e-03)
        q = q * s + f(4.89352518554385e-03)
        found = held * p / q
        out[at] = v if abs(v) < f(0.0004) or v != v else found


@njit(nogil=True, cache=True)
def _tanh_backward(error: Any, output: Any, out: Any) -> None:
    for at in range(error.size):
        out[at] = error[at] * (np.float32(1) - output[at] * output[at])


@njit(nogil=True, cache=True, error_model="numpy")
def _exp(x: Any, out: Any) -> None:
    """Cephes' `expf`: 2^n times a polynomial of the rest, within one unit in the last place; 0 where it underflows."""
    f = np.float32
    for at in range(x.size):
        v = x[at]
        held = min(max(v, f(-87.3)), f(88.72))
        n = (held * f(1.44269504088896341) + f(12582912.0)) - f(12582912.0)  # the nearest whole number
        r = (held - n * f(0.693359375)) + n * f(2.12194440e-4)
        p = f(1.9875691500e-4) * r + f(1.3981999507e-3)
        p = p * r + f(8.3334519073e-3)
        p = p * r + f(4.1665795894e-2)
        p = p * r + f(1.6666665459e-1)
        p = p * r + f(5.0000001201e-1)
        p = p * (r * r) + r + f(1)
        whole = np.int32(n)
        half = whole >> np.int32(1)  # in two factors: 2^128 is no float32
        low = np.int32((half + np.int32(127)) << np.int32(23)).view(np.float32)
        high = np.int32((whole - half + np.int32(127)) << np.int32(23)).view(np.float32)
        found = p * low * high
        found = f(np.inf) if v > f(88.72) else found
        found = f(0) if v < f(-87.3) else found
        out[at] = v if v != v else found


@njit(nogil=True, cache=True, error_model="numpy")
def _log(x: Any, out: Any) -> None:
    for at in range(x.size):
        out[at] = np.float32(math.log(np.float64(x[at]))) if x[at] > 0 else np.float32(np.log(x[at]))


@njit(nogil=True, cache=True, error_model="numpy")
def _log1p(x: Any, out: Any) -> None:
    for at in range(x.size):
        out[at] = np.float32(math.log1p(np.float64(x[at]))) if x[at] > -1 else np.float32(np.log1p(x[at]))


@njit(nogil=True, cache=True, error_model="numpy")
def _erf(x: Any, out: Any) -> None:
    for at in range(x.size):
        out[at] = np.float32(math.erf(np.float64(x[at])))


def _entrywise(loop: Callable[..., None]) -> Callable[[np.ndarray], np.ndarray]:
    """A loop over entries as a function of an array: every entry is one fixed function of itself."""

    def function(x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        flat, found = x.reshape(-1), out.reshape(-1)
        in_threads(lambda start, stop: loop(flat[start:stop], found[start:stop]), x.size, each=1)
        return out

    return function


tanh, exp, log, log1p, erf = (_entrywise(loop) for loop in (_tanh, _exp, _log, _log1p, _erf))


def tanh_backward(error: np.ndarray, output: np.ndarray) -> np.ndarray:
    """error (1 - output^2)."""
    error, output = np.ascontiguousarray(error), np.ascontiguousarray(output)
    out = np.empty_like(error)
    flat = error.reshape(-1), output.reshape(-1), out.reshape(-1)
    in_threads(lambda start, stop: _tanh_backward(*(part[start:stop] for part in flat)), error.size, each=1)
    return out


@njit(nogil=True, cache=True)
def _sums(x: Any, start: int, stop: int, out: Any) -> None:
    for row in range(start, stop):
        sums = out[row]
        sums[:] = x[row, 0]
        for term in range(1, x.shape[1]):
            own = x[row, term]
            for lane in range(sums.size):
                sums[lane] += own[lane]


def sums(x: np.ndarray) -> np.ndarray:
    """(rows, terms, lanes) -> (rows, lanes), one term after another."""
    if x.shape[1] == 1:
        return x[:, 0]
    x, out = np.ascontiguousarray(x), np.empty((len(x), x.shape[2]), np.float32)
    in_threads(lambda start, stop: _sums(x, start, stop, out), len(x), each=x.shape[1] * x.shape[2])
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_pool(x: Any, kernel: Any, stride: Any, out: Any) -> None:
    """Windows are added line by line, of (planes, height, width, samples)."""
    share = np.float32(kernel[0] * kernel[1])
    planes, rows, columns, samples = out.shape
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                sums = out[plane, row, column]
                sums[:] = x[plane, row * stride[0], column * stride[1]]
                for at in range(1, kernel[0] * kernel[1]):
                    more = x[plane, row * stride[0] + at // kernel[1], column * stride[1] + at % kernel[1]]
                    for lane in range(samples):
                        sums[lane] += more[lane]
                for lane in range(samples):
                    sums[lane] /= share


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_pool_backward(error: Any, kernel: Any, stride: Any, out: Any) -> None:
    share = np.float32(kernel[0] * kernel[1])
    planes, rows, columns, samples = error.shape
    out[:] = 0
    parts = np.empty(samples, np.float32)
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                for lane in range(samples):
                    parts[lane] = error[plane, row, column, lane] / share
                for at in range(kernel[0] * kernel[1]):
                    sums = out[plane, row * stride[0] + at // kernel[1], column * stride[1] + at % kernel[1]]
                    for lane in range(samples):
                        sums[lane] += parts[lane]


@njit(nogil=True, cache=True)
def _max_pool(x: Any, kernel: Any, stride: Any, out: Any, chosen: Any) -> None:
    """The largest of each window and its place in the window; the first of equals, and NaN above all."""
    planes, rows, columns, samples = out.shape
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                best, place = out[plane, row, column], chosen[plane, row, column]
                best[:] = x[plane, row * stride[0], column * stride[1]]
                place[:] = 0
                for at in range(1, kernel[0] * kernel[1]):
                    more = x[plane, row * stride[0] + at // kernel[1], column * stride[1] + at % kernel[1]]
                    for lane in range(samples):
                        value, held = more[lane], best[lane]
                        larger = (value > held) | (value != value)
                        best[lane] = value if larger else held
                        place[lane] = np.int32(at) if larger else place[lane]


@njit(nogil=True, cache=True)
def _max_pool_backward(error: Any, chosen: Any, kernel: Any, stride: Any, out: Any) -> None:
    planes, rows, columns, samples = error.shape
    out[:] = 0
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                values, place = error[plane, row, column], chosen[plane, row, column]
                for at in range(kernel[0] * kernel[1]):
                    sums = out[plane, row * stride[0] + at // kernel[1], column * stride[1] + at % kernel[1]]
                    for lane in range(samples):
                        sums[lane] += values[lane] if place[lane] == at else np.float32(0)


Pair = tuple[int, int]


def pooled(x: np.ndarray, kernel: Pair, stride: Pair) -> list[int]:
    """The shape of windows that lie inside each of the (planes, height, width, samples)."""
    inside = [(x.shape[1 + axis] - kernel[axis]) // stride[axis] + 1 for axis in range(2)]
    return [len(x), *inside, x.shape[3]]


def mean_pool(x: np.ndarray, kernel: Pair, stride: Pair) -> np.ndarray:
    out = np.empty(pooled(x, kernel, stride), np.float32)
    in_threads(lambda start, stop: _mean_pool(x[start:stop], kernel, stride, out[start:stop]), len(x))
    return out


def mean_pool_backward(error: np.ndarray, shape: Sequence[int], kernel: Pair, stride: Pair) -> np.ndarray:
    out = np.empty(shape, np.float32)
    in_threads(lambda start, stop: _mean_pool_backward(error[start:stop], kernel, stride, out[start:stop]), len(error))
    return out


def max_pool(x: np.ndarray, kernel: Pair, stride: Pair) -> tuple[np.ndarray, np.ndarray]:
    shape = pooled(x, kernel, stride)
    out, chosen = np.empty(shape, np.float32), np.empty(shape, np.int32)
    in_threads(
        lambda start, stop: _max_pool(x[start:stop], kernel, stride, out[start:stop], chosen[start:stop]), len(x)
    )
    return out, chosen


def max_pool_backward(
    error: np.ndarray, chosen: np.ndarray, shape: Sequence[int], kernel: Pair, stride: Pair
) -> np.ndarray:
    out = np.empty(shape, np.float32)
    in_threads(
        lambda start, stop: _max_pool_backward(error[start:stop], chosen[start:stop], kernel, stride, out[start:stop]),
        len(error),
    )
    return out
