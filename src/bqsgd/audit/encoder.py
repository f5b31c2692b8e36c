"""The encoder as a source of observations: given values in, codes out, many messages at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bqsgd.audit.bound import Scores
from bqsgd.audit.inputs import Inputs, worst_case_inputs
from bqsgd.audit.likelihood import LikelihoodRatio
from bqsgd.errors import InvalidParameter
from bqsgd.mechanism.encoder import encode as encode_values
from bqsgd.noise import NoiseSource
from bqsgd.params import check_int
from bqsgd.release import Release

Encode = Callable[..., npt.NDArray[np.unsignedinteger]]
"""(values, *, rng) -> codes, one code per value."""
CHUNK_VALUES = 1 << 18


class EncoderRuns:
    """Runs of `rounds` messages of the encoder, with the record taking part in each at the release's rate.

    Args:
        release: what is claimed for one message; its mechanism and rate are what is run.
        inputs: the encoder's input in the two worlds; the accountant's worst case unless given.
        encode: another encoder than the real one, to see whether it keeps the claim.
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
        if self.inputs.without.size != release.dimension:
            raise InvalidParameter(
                f"inputs have {self.inputs.without.size} coordinates, the release has {release.dimension}"
            )
        self.encode = self._real if encode is None else encode
        self.score = LikelihoodRatio(self.inputs, release.mechanism, rate=release.sampling.rate)

    @property
    def seeded(self) -> bool:
        """Whether the noise was seeded."""
        return self.rng.seeded

    def _real(self, values: npt.NDArray[np.float64], *, rng: NoiseSource) -> npt.NDArray[np.unsignedinteger]:
        return encode_values(values, self.release.mechanism, range=1.0, rng=rng, clamp=True)

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each run, the sum over its messages, in the world where the record is `present` or not."""
        rate, dimension, total = self.release.sampling.rate, self.release.dimension, runs * self.rounds
        taking_part = np.full(total, present) if rate == 1 or not present else uniforms(total, rng=self.rng) < rate
        chunk = max(1, CHUNK_VALUES // dimension)
        found: Scores = np.empty(total)
        values = np.empty((min(chunk, total), dimension))
        filled: npt.NDArray[np.bool_] | None = None
        for start in range(0, total, chunk):
            part = taking_part[start : start + chunk]
            rows = values[: part.size]
            if filled is None or not np.array_equal(filled, part):
                rows[:] = np.where(part[:, None], self.inputs.with_record, self.inputs.without)
                filled = part
            codes = self.encode(rows.reshape(-1), rng=self.rng).reshape(rows.shape)
            found[start : start + part.size] = self.score(codes)
        totals: Scores = found.reshape(runs, self.rounds).sum(axis=1)
        return totals


def uniforms(count: int, *, rng: NoiseSource) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1) with 53 random bits each, from the noise source's keystream."""
    return (rng.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
