"""Products, convolutions and the like in which every entry is the same sequence of operations wherever it stands.

An entry of a product is c, then fma(x_k, w_k, c) for k = 0, 1, ...: in this order whatever the entry's row and column,
the number of rows, the width of the processor's vectors and the threads. Element-wise loops are compiled without
contraction or reassociation, so each entry is the IEEE operations as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from bqsgd.persample._kernels.loops import in_threads
from bqsgd.persample._kernels.vectors import LANES, WORD, Emit

STRIP = 6
VECTORS = 4 if "+avx512f" in cpu_target.target_context.codegen().magic_tuple()[2] else 1
"""A tile of a product: 6 rows by 64 columns in 24 of 32 registers, or by 16 in 12 of 16."""
WIDTH = LANES * VECTORS
DEPTH = 128
"""Terms of a panel that stay in the nearest cache while the rows pass by."""


@intrinsic
def _tile(
    typing: Any, rows: Any, row_at: Any, lanes: Any, lane_at: Any, places: Any, place_at: Any, depth: Any, out: Any,
    out_at: Any, out_stride: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """out[r, j] = fma(rows[k, r], lanes[places[k] + j], out[r, j]) for k = 0 .. depth - 1, of a strip's 6 rows r."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, kinds = Emit(context, builder), signature.args
        left = emit.pointer(kinds[0], arguments[0], arguments[1])
        right = emit.pointer(kinds[2], arguments[2], arguments[3])
        place = emit.pointer(kinds[4], arguments[4], arguments[5])
        target = emit.pointer(kinds[7], arguments[7], arguments[8])
        targets = [emit.at(target, builder.mul(arguments[9], ir.Constant(WORD, row))) for row in range(STRIP)]
        sums = emit.registers(STRIP, VECTORS)
        for row in range(STRIP):
            for column, register in enumerate(sums[row]):
                builder.store(emit.load(targets[row], LANES * column), register)
        with cgutils.for_range(builder, arguments[6], intp=WORD) as loop:
            scalar = emit.at(left, builder.mul(loop.index, ir.Constant(WORD, STRIP)))
            lane = emit.at(right, builder.load(emit.at(place, loop.index)))
            values = [emit.load(lane, LANES * column) for column in range(VECTORS)]
            for row in range(STRIP):
                factor = emit.broadcast(builder.load(emit.at(scalar, row)))
                for value, register in zip(values, sums[row], strict=True):
                    builder.store(emit.fma(factor, value, builder.load(register)), register)
        for row in range(STRIP):
            for column, register in enumerate(sums[row]):
                emit.store(builder.load(register), targets[row], LANES * column)
        return context.get_dummy_value()

    kinds = (rows, row_at, lanes, lane_at, places, place_at, depth, out, out_at, out_stride)
    return types.void(*kinds), generate


@njit(nogil=True, cache=True)
def _fill_strips(rows: Any, strips: Any) -> None:
    for group in range(rows.shape[0]):
        for row in range(rows.shape[1]):
            strips[group, row // STRIP, :, row % STRIP] = rows[group, row]


def _strips(rows: np.ndarray) -> np.ndarray:
    """(groups, n, terms) -> (groups, n / 6, terms, 6), with zeros where the last strip is filled up."""
    groups, count, terms = rows.shape
    found = np.zeros((groups, -(-count // STRIP), terms, STRIP), np.float32)
    _fill_strips(rows, found)
    return found


@njit(nogil=True, cache=True)
def _run_product(
    strips: Any, w: Any, across: bool, bias: Any, first: int, last: int, start: int, stop: int, out: Any
) -> None:
    """Columns of panels start..stop and rows of strips first..last of out = bias + x w.

    w is (terms, columns), or (columns, terms) if `across`.
    """
    terms, columns = strips.shape[1], out.shape[1]
    panel, sums = np.zeros(DEPTH * WIDTH, np.float32), np.zeros((last - first) * STRIP * WIDTH, np.float32)
    places = np.arange(DEPTH) * WIDTH
    flat = strips.reshape(-1)
    for at in range(start, stop):
        low = at * WIDTH
        used = min(WIDTH, columns - low)
        for row in range((last - first) * STRIP):
            sums[row * WIDTH : row * WIDTH + used] = bias[low : low + used]
        for begin in range(0, terms, DEPTH):
            depth = min(DEPTH, terms - begin)
            if across:
                for block in range(0, depth, LANES):  # a cache line of each column at a time
                    end = min(depth, block + LANES)
                    for lane in range(used):
                        column = w[low + lane, begin + block : begin + end]
                        for k in range(column.size):
                            panel[(block + k) * WIDTH + lane] = column[k]
            else:
                for k in range(depth):
                    panel[k * WIDTH : k * WIDTH + used] = w[begin + k, low : low + used]
            for strip in range(first, last):
                row_at, sum_at = (strip * terms + begin) * STRIP, (strip - first) * STRIP * WIDTH
                _tile(flat, row_at, panel, 0, places, 0, depth, sums, sum_at, WIDTH)  # type: ignore[call-arg]
        for row in range(first * STRIP, min(last * STRIP, out.shape[0])):
            at = (row - first * STRIP) * WIDTH
            out[row, low : low + used] = sums[at : at + used]


def product(x: np.ndarray, w: np.ndarray, *, across: bool, bias: np.ndarray | None) -> np.ndarray:
    """bias + x w of (n, terms) rows and (terms, columns) weights, or (columns, terms) weights if `across`."""
    columns = len(w) if across else w.shape[1]
    strips = _strips(x[None])[0]
    start = np.zeros(columns, np.float32) if bias is None else bias
    out, panels = np.empty((len(x), columns), np.float32), -(-columns // WIDTH)
    if panels >= len(strips) or panels >= 4 * torch.get_num_threads():
        in_threads(lambda low, high: _run_product(strips, w, across, start, 0, len(strips), low, high, out), panels)
    else:
        in_threads(lambda low, high: _run_product(strips, w, across, start, low, high, 0, panels, out), len(strips))
    return out


@njit(nogil=True, cache=True)
def _run_convolution(
    x: Any,
    stride: int,
    group_stride: int,
    taps: Any,
    strips: Any,
    bias: Any,
    lines: Any,
    start: int,
    stop: int,
    out: Any,
) -> None:
    """Samples start..stop of out[b, group, o, line] = bias[o] + sum_k x[b, group, lines[line] + taps[k] + ...] w[o, k].

    strips (groups, outputs / 6, taps, 6); out (batch, groups, outputs, lines, length of a line).
    """
    groups, outputs, length = out.shape[1], out.shape[2], out.shape[4]
    size = (lines[-1] + length + WIDTH - 1) // WIDTH * WIDTH
    found = np.empty(STRIP * size, np.float32)
    flat, block = strips.reshape(-1), taps.size * STRIP
    for sample in range(start, stop):
        for group in range(groups):
            for strip in range(strips.shape[1]):
                used = min(STRIP, outputs - strip * STRIP)
                for row in range(used):
                    found[row * size : row * size + size] = bias[group * outputs + strip * STRIP + row]
                row_at, lane_at = (group * strips.shape[1] + strip) * block, sample * stride + group * group_stride
                for low in range(0, size, WIDTH):
                    _tile(flat, row_at, x, lane_at + low, taps, 0, taps.size, found, low, size)  # type: ignore[call-arg]
                for row in range(used):
                    for line in range(lines.size):
                        at = row * size + lines[line]
                        out[sample, group, strip * STRIP + row, line] = found[at : at + length]


def convolution(
    x: np.ndarray,
    batch: int,
    group_stride: int,
    taps: np.ndarray,
    weights: np.ndarray,
    bias: np.ndarray | None,
    lines: np.ndarray,
    length: int,
) -> np.ndarray:
    """(batch, groups, outputs, lines, length) of `batch` flat samples x and weights (groups, outputs, taps).

    Place j of a line reads x[b, group * group_stride + lines[line] + j + taps[k]]. The lines of a group are computed as
    one, with what lies between them, and up to `WIDTH` places beyond the last: x is so much longer than its samples.
    """
    groups, outputs, _ = weights.shape
    shift = np.zeros(groups * outputs, np.float32) if bias is None else bias
    out = np.empty((batch, groups, outputs, lines.size, length), np.float32)
    fixed = ((len(x) - WIDTH) // batch, group_stride, taps, _strips(weights), shift, lines)
    in_threads(lambda start, stop: _run_convolution(x, *fixed, start, stop, out), len(out))
    return out


SATURATED = np.float32(7.90531110763549805)
"""Beyond this tanh is 1 in float32."""


@njit(nogil=True, cache=True, error_model="numpy")
def _tanh(x: Any, out: Any) -> None:
    """The rational function of Eigen's `ptanh`, within 4 units in the last place."""
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


def tanh(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    flat, found = x.reshape(-1), out.reshape(-1)
    in_threads(lambda start, stop: _tanh(flat[start:stop], found[start:stop]), x.size)
    return out


def tanh_backward(error: np.ndarray, output: np.ndarray) -> np.ndarray:
    """error (1 - output^2)."""
    out = np.empty_like(error)
    flat = error.reshape(-1), output.reshape(-1), out.reshape(-1)
    in_threads(lambda start, stop: _tanh_backward(*(part[start:stop] for part in flat)), error.size)
    return out


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_pool(x: Any, kernel: Any, stride: Any, out: Any) -> None:
    """The lines of a window are added first, then the columns of their sum."""
    share = np.float32(kernel[0] * kernel[1])
    planes, rows, columns = out.shape
    sums = np.empty(x.shape[2], np.float32)
    for plane in range(planes):
        for row in range(rows):
            sums[:] = x[plane, row * stride[0]]
            for i in range(1, kernel[0]):
                line = x[plane, row * stride[0] + i]
                for at in range(sums.size):
                    sums[at] += line[at]
            for column in range(columns):
                total = sums[column * stride[1]]
                for j in range(1, kernel[1]):
                    total += sums[column * stride[1] + j]
                out[plane, row, column] = total / share


@njit(nogil=True, cache=True, error_model="numpy")
def _mean_pool_backward(error: Any, kernel: Any, stride: Any, out: Any) -> None:
    share = np.float32(kernel[0] * kernel[1])
    planes, rows, columns = error.shape
    out[:] = 0
    sums = np.empty(out.shape[2], np.float32)
    for plane in range(planes):
        for row in range(rows):
            sums[:] = 0
            for column in range(columns):
                value = error[plane, row, column] / share
                for j in range(kernel[1]):
                    sums[column * stride[1] + j] += value
            for i in range(kernel[0]):
                line = out[plane, row * stride[0] + i]
                for at in range(sums.size):
                    line[at] += sums[at]


def mean_pool(x: np.ndarray, kernel: tuple[int, int], stride: tuple[int, int]) -> np.ndarray:
    """Means over windows that lie inside each of the (planes, height, width)."""
    size = [(x.shape[1 + axis] - kernel[axis]) // stride[axis] + 1 for axis in range(2)]
    out = np.empty((len(x), *size), np.float32)
    in_threads(lambda start, stop: _mean_pool(x[start:stop], kernel, stride, out[start:stop]), len(x))
    return out


def mean_pool_backward(
    error: np.ndarray, shape: tuple[int, ...], kernel: tuple[int, int], stride: tuple[int, int]
) -> np.ndarray:
    out = np.empty(shape, np.float32)
    in_threads(lambda start, stop: _mean_pool_backward(error[start:stop], kernel, stride, out[start:stop]), len(error))
    return out
