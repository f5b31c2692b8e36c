"""Many runs of the real encoder, each reduced to its log-likelihood ratio of "record in" against "record out"."""

from __future__ import annotations

import math
from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from bqsgd.audit.inputs import Inputs
from bqsgd.mechanism.coarsening import position_law
from bqsgd.noise import NoiseSource
from bqsgd.params import Mechanism

Encode = Callable[..., npt.NDArray[np.unsignedinteger]]
"""(values, *, rng) -> codes, one code a value."""
CHUNK_VALUES = 1 << 18
LOSS_LIMIT = 60.0
"""A code that only one side can give decides the run; a finite stand-in keeps sums defined for faulty encoders too."""


def code_law(mechanism: Mechanism, value: float) -> npt.NDArray[np.float64]:
    """The probabilities of the codes 0 .. code_count - 1 for one input value (clip 1).

    >>> code_law(Mechanism(levels=1, trials=1), 0.5).tolist()
    [0.0, 0.25, 0.5, 0.25]
    """
    steps = min(max(value, -1.0), 1.0) * mechanism.levels
    whole = min(math.floor(steps), mechanism.levels - 1)
    up = steps - whole
    return (1 - up) * position_law(mechanism, whole) + up * position_law(mechanism, whole + 1)


def loss_table(mechanism: Mechanism, *, without: float, with_record: float) -> npt.NDArray[np.float64]:
    """Log-likelihood ratio of each code, cut at +-LOSS_LIMIT; 0 for codes that neither side gives."""
    with np.errstate(divide="ignore", invalid="ignore"):
        table: npt.NDArray[np.float64] = np.log(code_law(mechanism, with_record)) - np.log(code_law(mechanism, without))
    table[np.isnan(table)] = 0.0
    return table.clip(-LOSS_LIMIT, LOSS_LIMIT)


@numba.njit(cache=True, nogil=True)  # type: ignore[misc]
def _sum_losses(codes, tables, table_of, moved, out):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        total = 0.0
        for j in range(moved):
            total += tables[table_of[j], codes[i, j]]
        out[i] = total


def uniforms(count: int, *, rng: NoiseSource) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) with 53 random bits each, from the noise source's keystream."""
    return (rng.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def scores(
    inputs: Inputs,
    mechanism: Mechanism,
    *,
    encode: Encode,
    rate: float,
    rounds: int,
    samples: int,
    present: bool,
    rng: NoiseSource,
) -> npt.NDArray[np.float64]:
    """The score of `samples` runs of `rounds` rounds in the world where the record is `present` or not.

    In each round a present record takes part with probability `rate`. A round's score is log(1 + q (e^L - 1)) with L
    the summed losses of its codes; a run's score is the sum over its rounds.
    """
    pairs, table_of = np.unique(inputs.without + 1j * inputs.with_record, return_inverse=True)
    tables = np.stack([loss_table(mechanism, without=pair.real, with_record=pair.imag) for pair in pairs])
    dimension, total = inputs.without.size, samples * rounds
    taking_part = np.full(total, present) if rate == 1 or not present else uniforms(total, rng=rng) < rate
    chunk = max(1, CHUNK_VALUES // dimension)
    losses: npt.NDArray[np.float64] = np.empty(total)
    values = np.empty((min(chunk, total), dimension))
    filled: npt.NDArray[np.bool_] | None = None
    for start in range(0, total, chunk):
        part = taking_part[start : start + chunk]
        rows = values[: part.size]
        if filled is None or not np.array_equal(filled, part):
            rows[:] = np.where(part[:, None], inputs.with_record, inputs.without)
            filled = part
        codes = encode(rows.reshape(-1), rng=rng).reshape(rows.shape)
        _sum_losses(codes, tables, table_of, inputs.moved, losses[start : start + part.size])
    if rate < 1:
        losses = np.logaddexp(math.log1p(-rate), math.log(rate) + losses)
    totals: npt.NDArray[np.float64] = losses.reshape(samples, rounds).sum(axis=1)
    return totals
