"""The kept coordinates of per-sample gradients, where a message carries a subset of them (`bqsgd._src.subset`).

As everywhere in this folder, a sample's kept coordinates depend on that sample alone: a row is rotated by a fixed
sequence of IEEE operations on its own numbers. For a linear layer, the inputs are rotated instead of the gradient, and
a kept coordinate is one product: the (batch, outputs, inputs) gradients are never built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from torch import Tensor

from bqsgd._src.persample._kernels.contiguous import BLOCK_SAMPLES
from bqsgd._src.persample.factors import Dense, Outer, Piece, Scattered, Summed, TableRows, micro_batch
from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads, recycled
from bqsgd._src.runtime.vectors import INT32, LANES, Emit, tile
from bqsgd._src.subset import Subset, rotate_rows, transform_row

CACHED = 1 << 20
"""Kept coordinates at a time, about: few enough to be added up while they are still in the caches."""


def kept_parts(pieces: Sequence[Piece], samples: int, subset: Subset, double: bool) -> Iterator[tuple[int, Piece]]:
    """Some samples at a time, and their kept coordinates, of all parameters together; valid until the next ones."""
    parameters, kept = slice(0, len(subset.subsets.shapes)), subset.subsets.kept
    size = min(micro_batch(kept), BLOCK_SAMPLES * max(1, CACHED // (BLOCK_SAMPLES * kept)))
    held = recycled((min(samples, size), kept), np.float64 if double else np.float32)
    for start in range(0, samples, size):
        part, at = slice(start, min(start + size, samples)), 0
        out = held[: part.stop - start]
        for piece in pieces:
            span = subset.span(piece.parameters.start, piece.parameters.stop)
            out[:, at : span.start] = 0  # of parameters that the loss does not use
            _keep(piece, part, subset, out, span)
            at = span.stop
        out[:, at:] = 0
        yield len(out), Piece(parameters, Dense(torch.from_numpy(out)))


def _keep(piece: Piece, part: slice, subset: Subset, out: Any, span: slice) -> None:
    """Write the kept coordinates of some samples to the columns `span` of `out`."""
    match piece.factor:
        case Dense(values=values):
            out[:, span] = _gathered(_array(values[part]), subset, piece.parameters)
        case Scattered(samples=samples):
            for row, tensors in zip(out, samples[part], strict=True):
                whole = np.concatenate([_array(tensor).reshape(-1) for tensor in tensors])[None]
                row[span] = _gathered(whole, subset, piece.parameters)
        case Outer() as outer:
            _products(outer, part, subset, piece.parameters.start, out)
        case Summed() | TableRows() as built:
            # All coordinates of a few samples at a time, because they may be many more than the kept ones.
            size = micro_batch(built.coordinates)
            for start in range(part.start, part.stop, size):
                few = slice(start, min(part.stop, start + size))
                whole = _array(built.gradients(few).values)
                rows = slice(few.start - part.start, few.stop - part.start)
                out[rows, span] = _gathered(whole, subset, piece.parameters)
        case _:
            raise NotImplementedError(type(piece.factor).__name__)


def _places(subset: Subset, parameters: slice) -> Any:
    """The kept coordinates of some parameters, counted from the first of these parameters on."""
    return subset.places[subset.span(parameters.start, parameters.stop)] - subset.subsets.starts[parameters.start]


def _array(values: Tensor) -> Any:
    """A copy in memory of its own, which may be written to; float64 stays, everything narrower becomes float32."""
    return (
        values.detach().cpu().to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True).numpy()
    )


@tile
def _fetch(emit: Emit, x: Any, at: Any, count: Any) -> None:
    """Ask for so many vectors of x before they are read: memory is slower than what is done to a sample."""
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), INT32, INT32, INT32])
    function = cgutils.get_or_insert_function(emit.builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
    how = [ir.Constant(INT32, value) for value in (0, 3, 1)]  # for reading, into all caches, as data
    with emit.count(count) as loop:
        place = emit.builder.bitcast(emit.at(emit.at(x, at), loop.index, LANES), kind.args[0])
        emit.builder.call(function, [place, *how])


@njit(nogil=True, cache=True)
def _multiply(
    inputs: Any, errors: Any, signs: Any, rotated: bool, edges: Any, columns: Any, out: Any, start: int, stop: int
) -> None:
    scratch = np.empty(inputs.shape[1], inputs.dtype)  # one sample's inputs: they stay in the nearest cache
    flat, vectors, outputs = inputs.reshape(-1), inputs.shape[1] // LANES, errors.shape[1]
    for sample in range(start, stop):
        row = inputs[sample]
        if rotated:
            for i in range(row.size):
                scratch[i] = row[i] * signs[i]
            transform_row(scratch)
            row = scratch
        for output in range(outputs):
            if sample + 1 < stop:  # a part of the next sample's inputs
                first, last = vectors * output // outputs, vectors * (output + 1) // outputs
                _fetch(flat, (sample + 1) * inputs.shape[1] + first * LANES, last - first)
            error, part = errors[sample, output], out[sample, edges[output] : edges[output + 1]]
            own = columns[edges[output] - edges[0] : edges[output + 1] - edges[0]]
            for n in range(part.size):  # apart from the products, which the compiler then makes vectors of
                part[n] = row[own[n]]
            for n in range(part.size):
                part[n] *= error


@lru_cache(maxsize=16)
def _picked(subset: Subset, number: int, outputs: int, width: int) -> tuple[Any, Any]:
    """Where the kept coordinates of each row of a matrix begin in a message, and the columns that they are in."""
    places = _places(subset, slice(number, number + 1))
    edges = subset.span(number, number + 1).start + np.searchsorted(places, np.arange(outputs + 1) * width)
    # Unsigned: the loop need not look for indices from the end. Narrow: more of them stay in the nearest cache.
    return edges, (places % width).astype(np.uint16 if width <= 1 << 16 else np.uint32)


def _products(outer: Outer, part: slice, subset: Subset, number: int, out: Any) -> None:
    """The kept coordinates of e_b a_b^T: those of e_b (R a_b)^T, with R the rotation of a row."""
    inputs, errors = (side[part].detach().cpu().reshape(len(out), -1).numpy() for side in (outer.a, outer.e))
    width = inputs.shape[1]
    edges, columns = _picked(subset, number, errors.shape[1], width)
    fixed = inputs, errors, subset.signs[number], subset.subsets.rotated, edges, columns, out
    in_threads(lambda start, stop: _multiply(*fixed, start, stop), len(out), each=8 * width + len(columns))


def _rotate(rows: Any, subset: Subset, number: int) -> None:
    if subset.subsets.rotated:
        signs = subset.signs[number]
        in_threads(lambda start, stop: rotate_rows(rows, signs, start, stop), len(rows), each=8 * rows.shape[1])


def _gathered(values: Any, subset: Subset, parameters: slice) -> Any:
    """The kept part of (samples, coordinates) gradients of some parameters; the others are overwritten."""
    starts, first, places = subset.subsets.starts, parameters.start, _places(subset, parameters)
    for number in range(first, parameters.stop) if len(places) else ():
        _, columns = subset.subsets.matrices[number]
        part = values[:, starts[number] - starts[first] : starts[number + 1] - starts[first]]
        rows = np.ascontiguousarray(part).reshape(-1, columns)
        _rotate(rows, subset, number)
        part[:] = rows.reshape(part.shape)
    return values[:, places]
