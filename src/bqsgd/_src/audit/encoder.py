"""The encoder as a source of observations: values in, codes out, and a score for each message.

The inputs are the accountant's worst case by default. The score is the log-likelihood ratio of "record present" against
"record absent", computed from the encoder's exact law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.audit.bound import Scores
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.coarsening import position_law
from bqsgd._src.mechanism.encoder import encode as encode_values
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Mechanism, check_int
from bqsgd._src.release import Release
from bqsgd._src.runtime.compiling import njit

_Values = npt.NDArray[np.float64]
CANARY_SIZE = 1e3
"""A canary's gradient in every coordinate, in units of the range: so large that it shows unless it is clipped."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The encoder's input without and with the record, in units of its range."""

    without: _Values
    with_record: _Values

    def __post_init__(self) -> None:
        for name in ("without", "with_record"):
            values = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or not bool(np.all(np.isfinite(values))):
                raise InvalidParameter(f"{name} must be a finite vector, got shape {values.shape}")
            object.__setattr__(self, name, values)
        if self.without.shape != self.with_record.shape:
            raise InvalidParameter(f"inputs differ in shape: {self.without.shape} and {self.with_record.shape}")


def worst_case_inputs(release: Release) -> Inputs:
    """The pair of inputs that attains the accountant's bound: a whole step, and as far above it as one record can move.

    Every coordinate moves by linf, or with an L2 bound as many coordinates as it allows. A move of more than half the
    range starts at the lower end of the range.
    """
    linf = min(release.terms.sensitivity.linf, 2.0)
    moved, sensitivity = release.terms.dimension, release.terms.sensitivity
    if sensitivity.l2 is not None:
        # The factor undoes a rounding error in the square, which would otherwise lose a coordinate.
        moved = min(moved, max(1, math.floor((sensitivity.l2 / sensitivity.linf) ** 2 * (1 + 1e-12))))
    without = np.full(release.terms.dimension, 0.0 if linf <= 1 else -1.0)
    with_record = without.copy()
    with_record[:moved] += linf
    return Inputs(without=without, with_record=with_record)


_LOSS_LIMIT = 60.0
"""A code that only one world can give has an infinite ratio. This finite value decides the run as well, and sums stay
defined even if a faulty encoder gives such codes for both worlds."""


def code_laws(mechanism: Mechanism, values: npt.ArrayLike) -> _Values:
    """The probabilities of the codes 0 to code_count - 1, one row for each value (range 1).

    >>> code_laws(Mechanism(levels=1, trials=1), [0.5]).tolist()
    [[0.0, 0.25, 0.5, 0.25]]
    """
    steps = np.clip(np.asarray(values, dtype=np.float64), -1.0, 1.0) * mechanism.levels
    # The upper end of the range belongs to the last step, so that there is always a level above `whole`.
    whole = np.minimum(np.floor(steps), mechanism.levels - 1).astype(np.int64)
    up = (steps - whole)[:, None]
    positions, at = np.unique(np.concatenate([whole, whole + 1]), return_inverse=True)
    laws = np.stack([position_law(mechanism, int(position)) for position in positions])
    mixed: _Values = (1 - up) * laws[at[: whole.size]] + up * laws[at[whole.size :]]
    return mixed


def loss_tables(mechanism: Mechanism, *, without: npt.ArrayLike, with_record: npt.ArrayLike) -> _Values:
    """The log-likelihood ratio of each code, within +-_LOSS_LIMIT, one row per pair of values; 0 if impossible."""
    with np.errstate(divide="ignore", invalid="ignore"):
        tables: _Values = np.log(code_laws(mechanism, with_record)) - np.log(code_laws(mechanism, without))
    tables[np.isnan(tables)] = 0.0
    return tables.clip(-_LOSS_LIMIT, _LOSS_LIMIT)


@njit(cache=True, nogil=True)  # type: ignore[misc]
def _sum_losses(codes, tables, columns, table_of, out):  # type: ignore[no-untyped-def]
    for i in range(codes.shape[0]):
        total = 0.0
        for j in range(columns.size):
            total += tables[table_of[j], codes[i, columns[j]]]
        out[i] = total


class LikelihoodRatio:
    """Scores messages, one row of codes each: log(1 + q (e^L - 1)), with L the sum of the codes' losses.

    It is the best possible score when the encoder's inputs in the two worlds are `inputs` and the record takes part
    with probability q = `rate`. Any other score gives a valid bound too, only a lower one.
    """

    def __init__(self, inputs: Inputs, mechanism: Mechanism, *, rate: float) -> None:
        self.rate = rate
        self.columns = np.flatnonzero(inputs.without != inputs.with_record)
        without, with_record = inputs.without[self.columns], inputs.with_record[self.columns]
        # Few pairs of inputs differ, so coordinates share tables. A complex number holds a pair for `unique`.
        pairs, self.table_of = np.unique(without + 1j * with_record, return_inverse=True)
        self.tables = (
            loss_tables(mechanism, without=pairs.real, with_record=pairs.imag) if pairs.size else np.zeros((1, 1))
        )

    def __call__(self, codes: npt.NDArray[np.unsignedinteger]) -> _Values:
        losses: _Values = np.empty(len(codes))
        _sum_losses(codes, self.tables, self.columns, self.table_of, losses)
        if self.rate < 1:
            # log(1 - q + q e^L), computed without the overflow of e^L.
            losses = np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + losses)
        return losses


Encode = Callable[..., npt.NDArray[np.unsignedinteger]]
"""(values, *, rng) -> codes, one for each value."""
_CHUNK_VALUES = 1 << 18


class EncoderRuns:
    """Runs the encoder; one run is `rounds` messages, and the record takes part in each at the release's rate.

    Args:
        release: the claim for one message; its mechanism and rate are what runs.
        inputs: the encoder's input in the two worlds, by default the accountant's worst case.
        encode: an encoder to audit in place of the real one.
    """

    def __init__(
        self,
        release: Release,
        *,
        rng: NoiseSource,
        rounds: int = 1,
        inputs: Inputs | None = None,
        encode: Encode | None = None,
    ) -> None:
        self.release, self.rng = release, rng
        self.rounds = check_int("rounds", rounds, 1, 2**31)
        self.inputs = worst_case_inputs(release) if inputs is None else inputs
        if self.inputs.without.size != release.terms.dimension:
            raise InvalidParameter(
                f"inputs have {self.inputs.without.size} coordinates, but the release has {release.terms.dimension}"
            )
        self.encode = self._real if encode is None else encode
        self.score = LikelihoodRatio(self.inputs, release.mechanism, rate=release.terms.sampling.rate)

    @property
    def seeded(self) -> bool:
        """Whether the noise was seeded."""
        return self.rng.seeded

    def _real(self, values: npt.NDArray[np.float64], *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
        return encode_values(values, self.release.mechanism, range=1.0, rng=rng, clamp=True)

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run, the sum over its messages, in the world where the record is `present` or not."""
        rate, dimension, total = self.release.terms.sampling.rate, self.release.terms.dimension, runs * self.rounds
        # Without the record, nothing is drawn: it can take part in no message.
        included = np.full(total, present) if rate == 1 or not present else uniforms(total, rng=self.rng) < rate
        chunk = max(1, _CHUNK_VALUES // dimension)
        scores: Scores = np.empty(total)
        values = np.empty((min(chunk, total), dimension))
        filled: npt.NDArray[np.bool_] | None = None  # what `values` holds: usually the same for every chunk
        for start in range(0, total, chunk):
            part = included[start : start + chunk]
            rows = values[: part.size]
            if filled is None or not np.array_equal(filled, part):
                rows[:] = np.where(part[:, None], self.inputs.with_record, self.inputs.without)
                filled = part
            codes = self.encode(rows.reshape(-1), rng=self.rng).reshape(rows.shape)
            scores[start : start + part.size] = self.score(codes)
        totals: Scores = scores.reshape(runs, self.rounds).sum(axis=1)
        return totals


def uniforms(count: int, *, rng: NoiseSource) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1), with 53 random bits each, from the keystream of the noise source."""
    return (rng.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
