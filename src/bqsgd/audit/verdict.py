"""One audit: take runs from a source of observations, bound epsilon from below, put the claim beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from bqsgd.audit.bound import CurveCheck, LowerBound, Scores, check_curve, epsilon_lower_bound
from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Release

PROVES_NOTHING = (
    "Passing proves nothing: an audit finds faults in what it runs, on the inputs it tries. "
    "The guarantee rests on the accountant's proof."
)
CURVE_POINTS = 9
"""Where the claimed curve is checked: epsilons from 0 to the claimed one, or to the most that the runs can show."""


class Source(Protocol):
    """Two neighbouring worlds and a way to watch them: run, observe, reduce the observation to one number.

    Runs of one world must be independent of one another; higher scores are to mean "record in". How a source gets from
    a run to its score is its own affair: what it observes may be codes, a frame, or a sum over clients.
    """

    @property
    def rounds(self) -> int:
        """Messages in one run."""

    @property
    def seeded(self) -> bool:
        """Whether the noise was seeded."""

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each of `runs` runs in the world where the record is `present` or not."""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What the runs showed, beside what is claimed. Both statements hold together with `confidence`."""

    claim: Release
    rounds: int
    samples: int
    confidence: float
    lower: LowerBound
    curve: CurveCheck
    claimed: Guarantee
    seeded: bool

    @property
    def violated(self) -> bool:
        """The runs contradict the claim (wrongly with probability at most 1 - confidence)."""
        return self.lower.epsilon > self.claimed.epsilon or self.curve.broken

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.violated:
            return "VIOLATION: the audited client is less private than claimed"
        return f"no violation found. {PROVES_NOTHING}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "verdict": "violation" if self.violated else "no violation found",
            "note": PROVES_NOTHING,
            "epsilon_lower": self.lower.epsilon,
            "confidence": self.confidence,
            "claimed": self.claimed.to_dict(),
            "curve": {
                "epsilon": self.curve.claimed_epsilon,
                "claimed_delta": self.curve.lower.delta,
                "epsilon_lower": self.curve.lower.epsilon,
                "delta_lower": self.curve.delta_lower,
                "broken": self.curve.broken,
            },
            "samples": self.samples,
            "rounds": self.rounds,
            "audited_dimension": self.claim.dimension,
            "seeded": self.seeded,
            "release": self.claim.to_dict(),
        }


def audit(source: Source, *, claim: Release, samples: int, delta: float, confidence: float = 0.99) -> AuditResult:
    """Compare what `claim` says of every message with `samples` runs with the record and as many without.

    The highest epsilon that n runs can show is about log(n / 12): a low figure may only mean few runs.

    Raises:
        InvalidParameter: too few runs, a confidence outside (0, 1).
    """
    check_int("samples", samples, 4, 2**31)
    if not 0 < confidence < 1:
        raise InvalidParameter(f"confidence must lie strictly between 0 and 1, got {confidence}")
    accountant = Accountant().compose(claim, source.rounds)
    claimed = accountant.guarantee(delta=delta)
    points = np.linspace(0, min(claimed.epsilon, math.log(samples)), CURVE_POINTS)
    curve = {float(epsilon): accountant.delta(float(epsilon)) for epsilon in points}
    with_record, without = (source.scores(samples, present=present) for present in (True, False))
    each = 1 - (1 - confidence) / 2
    return AuditResult(
        claim=claim,
        rounds=source.rounds,
        samples=samples,
        confidence=confidence,
        lower=epsilon_lower_bound(with_record, without, delta=delta, confidence=each),
        curve=check_curve(with_record, without, claimed=curve, confidence=each),
        claimed=claimed,
        seeded=source.seeded,
    )
