"""The kept coordinates of per-sample gradients, where a message carries a subset of them (`bqsgd._src.subset`).

As everywhere in this folder, a sample's kept coordinates depend on that sample alone: a row is rotated by a fixed
sequence of IEEE operations on its own numbers. For a linear layer, the inputs are rotated instead of the gradient, and
a kept coordinate is one product: the (batch, outputs, inputs) gradients are never built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from bqsgd._src.persample.factors import Built, Dense, Outer, Piece, Scattered, Summed, TableRows, micro_batch
from bqsgd._src.runtime.compiling import njit
from bqsgd._src.runtime.threads import in_threads
from bqsgd._src.subset import Subset, rotate_rows


def kept_piece(piece: Piece, subset: Subset) -> Piece:
    """The same piece with the kept coordinates alone."""
    match piece.factor:
        case Dense(values=values):
            return Piece(piece.parameters, Dense(torch.from_numpy(_gathered(_array(values), subset, piece.parameters))))
        case Scattered(samples=samples):
            rows = (np.concatenate([_array(tensor).reshape(-1) for tensor in tensors])[None] for tensors in samples)
            kept = np.concatenate([_gathered(row, subset, piece.parameters) for row in rows])
            return Piece(piece.parameters, Dense(torch.from_numpy(kept)))
        case Outer() | Summed() | TableRows():
            return Piece(piece.parameters, KeptFactor(piece.factor, subset, piece.parameters))
        case _:
            raise NotImplementedError(type(piece.factor).__name__)


class KeptFactor(Built):
    """The kept coordinates of a gradient that is made of factors: built for as many samples as the scratch takes."""

    def __init__(self, factor: Outer | Summed | TableRows, subset: Subset, parameters: slice) -> None:
        self._factor, self._subset, self._parameters = factor, subset, parameters
        self.batch, self.coordinates = factor.batch, len(_places(subset, parameters))

    def take(self, index: Tensor) -> KeptFactor:
        return KeptFactor(self._factor.take(index), self._subset, self._parameters)

    def gradients(self, part: slice) -> Dense:
        if isinstance(self._factor, Outer):
            return _products(self._factor, part, self._subset, self._parameters)
        # All coordinates of a few samples at a time, because those of a part may be many more than the kept ones.
        size, parts = micro_batch(self._factor.coordinates), []
        for start in range(part.start, part.stop, size):
            whole = self._factor.gradients(slice(start, min(part.stop, start + size))).values
            parts.append(_gathered(_array(whole), self._subset, self._parameters))
        return Dense(torch.from_numpy(np.concatenate(parts)))


def _places(subset: Subset, parameters: slice) -> Any:
    """The kept coordinates of some parameters, counted from the first of these parameters on."""
    return subset.places[subset.span(parameters.start, parameters.stop)] - subset.subsets.starts[parameters.start]


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


def _products(outer: Outer, part: slice, subset: Subset, parameters: slice) -> Dense:
    """The kept coordinates of e_b a_b^T: those of e_b (R a_b)^T, with R the rotation of a row."""
    batch, number, places = part.stop - part.start, parameters.start, _places(subset, parameters)
    inputs, errors = (side[part].detach().cpu().reshape(batch, -1).numpy() for side in (outer.a, outer.e))
    rows, columns = np.divmod(places, inputs.shape[1])
    out = np.empty((batch, len(places)), inputs.dtype)
    fixed = (
        inputs,
        errors,
        subset.signs[number],
        subset.subsets.rotated,
        rows.astype(np.uint32),  # unsigned: the loop then need not look for indices from the end, a third of its time
        columns.astype(np.uint32),
    )
    work = 8 * inputs.shape[1] + len(places)
    in_threads(lambda start, stop: _multiply(*fixed, start, stop, out), batch, each=work)
    return Dense(torch.from_numpy(out))


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
