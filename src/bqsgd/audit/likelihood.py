"""The score of a message: the log-likelihood ratio of "record in" against "record out", from the encoder's own law."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from bqsgd.audit.inputs import Inputs, Values
from bqsgd.mechanism.coarsening import position_law
from bqsgd.params import Mechanism

LOSS_LIMIT = 60.0
"""A code that only one side can give decides the run; a finite stand-in keeps sums defined for faulty encoders too."""


def code_laws(mechanism: Mechanism, values: npt.ArrayLike) -> Values:
    """A row a value (clip 1): the probabilities of the codes 0 .. code_count - 1.

    >>> code_laws(Mechanism(levels=1, trials=1), [0.5]).tolist()
    [[0.0, 0.25, 0.5, 0.25]]
    """
    steps = np.clip(np.asarray(values, dtype=np.float64), -1.0, 1.0) * mechanism.levels
    whole = np.minimum(np.floor(steps), mechanism.levels - 1).astype(np.int64)
    up = (steps - whole)[:, None]
    positions, at = np.unique(np.concatenate([whole, whole + 1]), return_inverse=True)
    laws = np.stack([position_law(mechanism, int(position)) for position in positions])
    mixed: Values = (1 - up) * laws[at[: whole.size]] + up * laws[at[whole.size :]]
    return mixed


def loss_tables(mechanism: Mechanism, *, without: npt.ArrayLike, with_record: npt.ArrayLike) -> Values:
    """A row a pair of values: the log-likelihood ratio of each code, cut at +-LOSS_LIMIT; 0 where neither gives it."""
    with np.errstate(divide="ignore", invalid="ignore"):
        tables: Values = np.log(code_laws(mechanism, with_record)) - np.log(code_laws(mechanism, without))
    tables[np.isnan(tables)] = 0.0
    return tables.clip(-LOSS_LIMIT, LOSS_LIMIT)


@numba.njit(cache=True, nogil=True)  # type: ignore[misc]
def _sum_losses(codes, tables, columns, table_of, out):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        total = 0.0
        for j in range(columns.size):
            total += tables[table_of[j], codes[i, columns[j]]]
        out[i] = total


class LikelihoodRatio:
    """Scores messages, a row of codes each: log(1 + q (e^L - 1)) with L the summed losses of the codes.

    It is the best score there is when the encoder is given `inputs` in the two worlds and the record takes part with
    probability q = `rate`. Any other score would give a valid bound too, only a lower one.
    """

    def __init__(self, inputs: Inputs, mechanism: Mechanism, *, rate: float) -> None:
        self.rate = rate
        self.columns = np.flatnonzero(inputs.without != inputs.with_record)
        without, with_record = inputs.without[self.columns], inputs.with_record[self.columns]
        pairs, self.table_of = np.unique(without + 1j * with_record, return_inverse=True)
        self.tables = (
            loss_tables(mechanism, without=pairs.real, with_record=pairs.imag) if pairs.size else np.zeros((1, 1))
        )

    def __call__(self, codes: npt.NDArray[np.unsignedinteger]) -> Values:
        losses: Values = np.empty(len(codes))
        _sum_losses(codes, self.tables, self.columns, self.table_of, losses)
        if self.rate < 1:
            losses = np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + losses)
        return losses
