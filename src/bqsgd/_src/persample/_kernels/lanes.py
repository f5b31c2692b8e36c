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
from functools import lru_cache, partial
from itertools import product as combinations
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads
from bqsgd._src.runtime.vectors import LANES, WIDE, WORD, Emit, tile

STRIP = 6
MANY = 4 if WIDE else 1
"""A tile of a product: 6 rows by 64 samples in 24 of 32 registers, or by 16 in 12 of 16."""
AT_ONCE = 1 << 18
"""Weights that a thread copies at a time, about: in the order in which the loop reads them."""
TILES = 4
"""Pieces of work that a convolution has at least."""
DEPTH = 256
"""Terms whose values stay in a core's cache while the rows pass by."""


def _product_tile(
    vectors: int, emit: Emit, rows: Any, row_at: Any, terms: Any, lanes: Any, lane_at: Any, places: Any, start: Any,
    stop: Any, bias: Any, bias_at: Any, fresh: Any, out: Any, out_at: Any, out_stride: Any,
) -> None:  # fmt: skip
    """out[r, j] = fma(rows[terms[k], r], lanes[lane_at + places[k], j], out[r, j]) for k = start .. stop - 1, of a
    strip's 6 rows r and 16 * vectors samples j; `fresh` begins with bias[r] instead."""
    builder, sums = emit.builder, emit.registers(STRIP, vectors)
    left, right = emit.at(rows, row_at), emit.at(lanes, lane_at, LANES * vectors)
    targets = [emit.at(emit.at(out, out_at), out_stride, row) for row in range(STRIP)]
    with builder.if_else(fresh) as (begins, goes_on):
        with begins:
            for row in range(STRIP):
                value = emit.broadcast(builder.load(emit.at(emit.at(bias, bias_at), row)))
                for register in sums[row]:
                    builder.store(value, register)
        with goes_on:
            for row in range(STRIP):
                for column, register in enumerate(sums[row]):
                    builder.store(emit.load(targets[row], LANES * column), register)
    with cgutils.for_range_slice(builder, start, stop, ir.Constant(WORD, 1), intp=WORD) as (index, _):
        scalar = emit.at(left, builder.load(emit.at(terms, index)), STRIP)
        lane = emit.at(right, builder.load(emit.at(places, index)), LANES * vectors)
        values = [emit.load(lane, LANES * column) for column in range(vectors)]
        for row in range(STRIP):
            factor = emit.broadcast(builder.load(emit.at(scalar, row)))
            for value, register in zip(values, sums[row], strict=True):
                builder.store(emit.fma(factor, value, builder.load(register)), register)
    for row in range(STRIP):
        for column, register in enumerate(sums[row]):
            emit.store(builder.load(register), targets[row], LANES * column)


_four, _two, _one = (tile(partial(_product_tile, min(MANY, vectors))) for vectors in (4, 2, 1))


@njit(nogil=True, cache=True)
def _run_tile(vectors: int, *given: Any) -> None:
    if vectors == 4:
        _four(*given)
    elif vectors == 2:
        _two(*given)
    else:
        _one(*given)


@njit(nogil=True, cache=True)
def _block(vectors: int) -> int:
    """How many of the remaining vectors of samples the next tile takes."""
    if MANY == 4 and vectors >= 4:
        return 4
    return 2 if MANY == 4 and vectors >= 2 else 1


@njit(nogil=True, cache=True)
def _pack(x: Any, stride: int, low: int, start: int, stop: int, width: int, packed: Any, to: int) -> None:
    """Entries start..stop of the samples low .. low + width of x, one after another."""
    for entry in range(start, stop):
        for first in range(0, width, LANES):
            at, into = entry * stride + low + first, to + entry * width + first
            source, target = x[at : at + LANES], packed[into : into + LANES]
            for lane in range(LANES):  # a loop of known length is one instruction
                target[lane] = source[lane]


@njit(nogil=True, cache=True)
def _pack_tiles(x: Any, stride: int, terms: int, start: int, stop: int, packed: Any) -> None:
    """Terms start..stop of x (terms, samples) for each tile of samples, so that it reads them in order."""
    done, vectors = 0, stride // LANES
    while done < vectors:
        count = _block(vectors - done)
        _pack(x, stride, done * LANES, start, stop, count * LANES, packed, done * LANES * terms)
        done += count


@njit(nogil=True, cache=True)
def _fill_strips(w: Any, first: int, count: int, strips: Any) -> None:
    """w (rows, terms), from row `first` on -> `count` strips of (terms / 256, strips, 256, 6), zeros beyond rows."""
    rows, terms = w.shape
    for begin in range(0, terms, DEPTH):
        for strip in range(count):
            part, low = strips[begin // DEPTH, strip], first + strip * STRIP
            for term in range(min(DEPTH, terms - begin)):
                for row in range(STRIP):
                    part[term, row] = w[low + row, begin + term] if low + row < rows else np.float32(0)


@njit(nogil=True, cache=True)
def _run_product(w: Any, packed: Any, bias: Any, start: int, stop: int, out: Any) -> None:
    """Rows of strips start..stop, of 6 rows each, of out = bias + w x, from packed x."""
    terms, target, wide, order = w.shape[1], out.reshape(-1), out.shape[1], np.arange(DEPTH)
    most = max(1, AT_ONCE // (terms * STRIP))
    strips = np.empty((-(-terms // DEPTH), min(most, stop - start), DEPTH, STRIP), np.float32)
    flat, vectors = strips.reshape(-1), wide // LANES
    for first in range(start, stop, most):
        items, done = min(most, stop - first), 0
        _fill_strips(w, first * STRIP, items, strips)
        while done < vectors:
            count = _block(vectors - done)
            for begin in range(0, terms, DEPTH):
                lane_at = done * terms // count + begin  # in vectors of the tile
                for strip in range(items):
                    row_at, row = (begin // DEPTH * strips.shape[1] + strip) * DEPTH * STRIP, (first + strip) * STRIP
                    _run_tile(count, flat, row_at, order, packed, lane_at, order, 0, min(DEPTH, terms - begin), bias, row, begin == 0, target, row * wide + done * LANES, wide)  # fmt: skip  # noqa: E501
            done += count


def product(w: np.ndarray, x: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(rows, lanes) bias + w x of (rows, terms) weights, which may be transposed in memory, and (terms, lanes) x."""
    (rows, terms), lanes = w.shape, x.shape[1]
    count, flat = -(-rows // STRIP), x.reshape(-1)
    packed, shift = np.empty(x.size, np.float32), np.zeros(count * STRIP, np.float32)
    in_threads(lambda start, stop: _pack_tiles(flat, lanes, terms, start, stop, packed), terms, each=lanes)
    if bias is not None:
        shift[:rows] = bias
    w = w if w.flags.c_contiguous or w.flags.f_contiguous else np.ascontiguousarray(w)
    out, fixed = np.empty((count * STRIP, lanes), np.float32), (w, packed, shift)
    in_threads(lambda start, stop: _run_product(*fixed, start, stop, out), count, each=terms * STRIP * lanes)
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


Axes = tuple[int, ...]


@lru_cache(maxsize=256)
def reading(
    channels: int, space: Axes, kernel: Axes, size: Axes, stride: Axes, padding: Axes, dilation: Axes, backward: bool
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
    x: Any, stride: int, entries: int, base: Any, kind: Any, starts: Any, terms: Any, places: Any, strips: Any,
    outputs: int, bias: Any, parts: int, start: int, stop: int, out: Any,
) -> None:  # fmt: skip
    """Units start..stop of out (groups, outputs, positions, samples) from x (entries, samples): a tile of samples and
    one of `parts` of the strips each.

    strips (groups, outputs / 6, terms, 6), bias (groups, outputs filled up to whole strips).
    """
    groups, count, block, positions = strips.shape[0], strips.shape[1], strips.shape[2] * STRIP, base.size
    flat, target, wide = strips.reshape(-1), out.reshape(-1), out.shape[1]
    packed = np.empty(entries * LANES * MANY, np.float32)
    ragged = np.empty(STRIP * LANES * MANY, np.float32)
    for unit in range(start, stop):
        done, part = unit // parts * MANY, unit % parts
        end = min(wide // LANES, done + MANY)
        while done < end:
            vectors = _block(end - done)
            width = vectors * LANES
            _pack(x, stride, done * LANES, 0, entries, width, packed, 0)
            for item in range(part * groups * count // parts, (part + 1) * groups * count // parts):
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
    fixed = flat, lanes, entries, read.base, read.kind, read.starts, read.terms, read.places
    rest = strips, outputs, shift.reshape(-1)
    tiles = -(-lanes // (LANES * MANY))
    parts = min(groups * count, -(-TILES // tiles))  # few samples: threads share their outputs, not their vectors
    in_threads(lambda start, stop: _run_convolution(*fixed, *rest, parts, start, stop, out), tiles * parts)
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


def _rounded(function: Any) -> Callable[..., None]:
    """A loop that computes in float64."""

    @njit(nogil=True, cache=True, error_model="numpy")
    def loop(x: Any, out: Any) -> None:
        for at in range(x.size):
            out[at] = np.float32(function(np.float64(x[at])))

    return loop  # type: ignore[no-any-return]


def _entrywise(loop: Callable[..., None]) -> Callable[..., np.ndarray]:
    """A loop over entries as a function of an array: every entry is one fixed function of its own."""

    def function(x: np.ndarray) -> np.ndarray:
        out = np.empty(x.shape, np.float32)
        entries, results = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
        in_threads(lambda start, stop: loop(entries[start:stop], results[start:stop]), out.size, each=1)
        return out

    return function


tanh, exp = _entrywise(_tanh), _entrywise(_exp)
log, log1p, erf = (_entrywise(_rounded(function)) for function in (np.log, np.log1p, math.erf))


@njit(nogil=True, cache=True)
def _sums(x: Any, start: int, stop: int, out: Any) -> None:
    for row in range(start, stop):
        sums, own = out[row], x[row, 0]
        for lane in range(sums.size):  # a copy by slices takes seconds to compile: numba prepares the text of an error
            sums[lane] = own[lane]
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


@njit(nogil=True, cache=True)
def _max_pool(x: Any, kernel: Any, stride: Any, out: Any, chosen: Any) -> None:
    """The largest of each window and its place in the window; the first of equals, and NaN above all."""
    planes, rows, columns, samples = out.shape
    for plane in range(planes):
        for row in range(rows):
            for column in range(columns):
                best, place = out[plane, row, column], chosen[plane, row, column]
                more = x[plane, row * stride[0], column * stride[1]]
                for lane in range(samples):
                    best[lane], place[lane] = more[lane], 0
                for at in range(1, kernel[0] * kernel[1]):
                    more = x[plane, row * stride[0] + at // kernel[1], column * stride[1] + at % kernel[1]]
                    for lane in range(samples):
                        value, held = more[lane], best[lane]
                        larger = (value > held) | (value != value)
                        best[lane] = value if larger else held
                        place[lane] = np.int32(at) if larger else place[lane]


@njit(nogil=True, cache=True)
def _spread(error: Any, chosen: Any, kernel: Any, stride: Any, out: Any) -> None:
    """Adds each error to the chosen place of its window."""
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


def _pooled(x: np.ndarray, kernel: Pair, stride: Pair) -> list[int]:
    """The shape of windows that lie inside each of the (planes, height, width, samples)."""
    inside = [(x.shape[1 + axis] - kernel[axis]) // stride[axis] + 1 for axis in range(2)]
    return [len(x), *inside, x.shape[3]]


def _windows(x: np.ndarray, kernel: Pair, stride: Pair) -> list[np.ndarray]:
    """For each place of a window, line by line, what all windows have there."""
    _, rows, columns, _ = _pooled(x, kernel, stride)
    return [
        x[:, i : i + rows * stride[0] : stride[0], j : j + columns * stride[1] : stride[1]]
        for i, j in combinations(*map(range, kernel))
    ]


def mean_pool(x: np.ndarray, kernel: Pair, stride: Pair) -> np.ndarray:
    out = np.zeros(_pooled(x, kernel, stride), np.float32)
    for place in _windows(x, kernel, stride):
        out += place
    return out / np.float32(kernel[0] * kernel[1])


def mean_pool_backward(error: np.ndarray, shape: Sequence[int], kernel: Pair, stride: Pair) -> np.ndarray:
    out, share = np.zeros(shape, np.float32), error / np.float32(kernel[0] * kernel[1])
    for place in _windows(out, kernel, stride):
        place += share
    return out


def max_pool(x: np.ndarray, kernel: Pair, stride: Pair) -> tuple[np.ndarray, np.ndarray]:
    out, chosen = (np.empty(_pooled(x, kernel, stride), kind) for kind in (np.float32, np.int32))
    in_threads(lambda low, high: _max_pool(x[low:high], kernel, stride, out[low:high], chosen[low:high]), len(x))
    return out, chosen


def max_pool_backward(
    error: np.ndarray, chosen: np.ndarray, shape: Sequence[int], kernel: Pair, stride: Pair
) -> np.ndarray:
    out = np.empty(shape, np.float32)
    in_threads(lambda low, high: _spread(error[low:high], chosen[low:high], kernel, stride, out[low:high]), len(out))
    return out
