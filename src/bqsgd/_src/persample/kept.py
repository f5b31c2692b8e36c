"""The kept coordinates of per-sample gradients, where a message carries a subset of them (`bqsgd._src.subset`).

As everywhere in this folder, a sample's kept coordinates depend on that sample alone: a row is rotated by a fixed
sequence of IEEE operations on its own numbers. For a linear layer, the inputs are rotated instead of the gradient, and
a kept coordinate is one product: the (batch, outputs, inputs) gradients are never built.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from bqsgd._src.persample.factors import Built, Dense, Factor, Outer, Piece, Scattered, TableRows, micro_batch
from bqsgd._src.runtime.threads import in_threads
from bqsgd._src.subset import Subset, rotate_rows


def kept_piece(piece: Piece, subset: Subset) -> Piece:
    """The same piece with the kept coordinates alone."""
    first, stop = piece.parameters.start, piece.parameters.stop
    span = subset.span(first, stop)
    places = subset.places[span] - subset.subsets.starts[first]
    if not len(places):
        return Piece(piece.parameters, Dense(torch.empty(_samples(piece.factor), 0)))
    if isinstance(piece.factor, Outer):
        return Piece(piece.parameters, _products(piece.factor, subset, first, places))
    parts = [_gathered(part, subset, first, stop, places) for part in _built(piece.factor)]
    return Piece(piece.parameters, Dense(torch.from_numpy(np.concatenate(parts))))


def _samples(factor: Factor) -> int:
    return factor.batch if isinstance(factor, (Built, TableRows)) else len(factor.max_norms())


def _array(values: Tensor) -> Any:
    """A copy in memory of its own, which may be written to; float64 stays, everything narrower becomes float32."""
    return (
        values.detach().cpu().to(torch.float64 if values.dtype == torch.float64 else torch.float32, copy=True).numpy()
    )


@njit(nogil=True, cache=True)
def _multiply(
    inputs: Any, errors: Any, signs: Any, rotated: bool, rows: Any, columns: Any, start: int, stop: int, out: Any
) -> None:
    row = np.empty((1, inputs.shape[1]), inputs.dtype)  # one sample's inputs: they stay in the nearest cache
    for sample in range(start, stop):
        row[0] = inputs[sample]
        if rotated:
            rotate_rows(row, signs, 0, 1)
        for n in range(len(rows)):
            out[sample, n] = errors[sample, rows[n]] * row[0, columns[n]]


def _products(outer: Outer, subset: Subset, number: int, places: Any) -> Dense:
    """The kept coordinates of e_b a_b^T: those of e_b (R a_b)^T, with R the rotation of a row."""
    inputs, errors = (side.detach().cpu().reshape(outer.batch, -1).numpy() for side in (outer.a, outer.e))
    rows, columns = np.divmod(places, inputs.shape[1])
    out = np.empty((outer.batch, len(places)), inputs.dtype)
    fixed = (
        inputs,
        errors,
        subset.signs[number],
        subset.subsets.rotated,
        rows.astype(np.int32),
        columns.astype(np.int32),
    )
    work = 8 * inputs.shape[1] + len(places)
    in_threads(lambda start, stop: _multiply(*fixed, start, stop, out), outer.batch, each=work)
    return Dense(torch.from_numpy(out))


def _rotate(rows: Any, subset: Subset, number: int) -> None:
    if subset.subsets.rotated:
        signs = subset.signs[number]
        in_threads(lambda start, stop: rotate_rows(rows, signs, start, stop), len(rows), each=8 * rows.shape[1])


def _gathered(values: Any, subset: Subset, first: int, stop: int, places: Any) -> Any:
    """Of (samples, coordinates) gradients of the tensors first..stop, in memory that may be written to."""
    starts = subset.subsets.starts
    for number in range(first, stop):
        _, columns = subset.subsets.matrices[number]
        part = values[:, starts[number] - starts[first] : starts[number + 1] - starts[first]]
        rows = np.ascontiguousarray(part).reshape(-1, columns)
        _rotate(rows, subset, number)
        part[:] = rows.reshape(part.shape)
    return values[:, places]


def _built(factor: Factor) -> Iterator[Any]:
    """Gradients as (samples, coordinates) arrays, a few samples at a time."""
    match factor:
        case Dense(values=values):
            yield _array(values)
        case Scattered(samples=samples):
            for tensors in samples:
                yield np.concatenate([_array(tensor).reshape(-1) for tensor in tensors])[None]
        case TableRows() | Built():
            size = micro_batch(factor.coordinates)
            for start in range(0, factor.batch, size):
                part = slice(start, min(factor.batch, start + size))
                built = factor.gradients(part)
                yield _array(built.values)
        case _:
            raise NotImplementedError(type(factor).__name__)
