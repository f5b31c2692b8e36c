"""From scores of runs with and without the record to a lower bound on epsilon, with a stated confidence.

If a mechanism is (epsilon, delta)-private, every event E has P(E) <= e^epsilon Q(E) + delta for P, Q = (with, without)
the record, either way round. Clopper-Pearson bounds P(E) from below and Q(E) from above, and
epsilon >= log((P(E) - delta) / Q(E)) follows.

The event, and the point of a claimed curve, are chosen on the first half of the runs and counted on the second. So
however many were tried, the bound is one statement about one event that was fixed before its runs were looked at. The
choice is made by the same Clopper-Pearson bounds: an event that is never seen in one world looks certain to a plug-in
error, and times e^epsilon its true uncertainty is the whole figure.

`audit` is the whole of it: take runs from a source of observations, bound epsilon from below, put the claim beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Release

Scores = npt.NDArray[np.float64]
_MAX_CANDIDATES = 1000


@dataclass(frozen=True, kw_only=True)
class Event:
    """ "The score is above (below) the threshold"; `above` events are likelier with the record, others without."""

    threshold: float
    above: bool

    def holds(self, scores: Scores) -> npt.NDArray[np.bool_]:
        """Which runs the event holds in."""
        return scores > self.threshold if self.above else scores < self.threshold


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """epsilon at `delta` is at least this, with probability `confidence` over the audit's own runs.

    likely, unlikely: the event's probability at least in one world, at most in the other.
    """

    epsilon: float
    delta: float
    confidence: float
    event: Event
    likely: float
    unlikely: float


@dataclass(frozen=True, kw_only=True)
class CurveCheck:
    """The claimed curve at the one point chosen on the first half: `lower` is what the second half shows there."""

    claimed_epsilon: float
    lower: LowerBound

    @property
    def broken(self) -> bool:
        """Epsilon at this delta is above the claimed one, beyond chance at this confidence."""
        return self.lower.epsilon > self.claimed_epsilon

    @property
    def delta_lower(self) -> float:
        """Delta at the claimed epsilon is at least this: the same statement read along the other axis."""
        return max(0.0, self.lower.likely - math.exp(self.claimed_epsilon) * self.lower.unlikely)


def at_least(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson lower bound on a probability (0 for no success)."""
    k = np.asarray(successes, dtype=np.float64)
    return np.where(k == 0, 0.0, beta.ppf(1 - confidence, np.maximum(k, 1), samples - k + 1))


def at_most(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson upper bound on a probability (1 when every sample is a success)."""
    k = np.asarray(successes, dtype=np.float64)
    return np.where(k == samples, 1.0, beta.ppf(confidence, k + 1, np.maximum(samples - k, 1)))


def _halves(scores: Scores) -> tuple[Scores, Scores]:
    """The half that chooses and the half that counts."""
    middle = scores.size // 2
    if middle < 1 or not bool(np.all(np.isfinite(scores))):
        raise InvalidParameter(f"an audit needs at least 2 finite scores a side, got {scores.size}")
    return scores[:middle], scores[middle:]


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """Events on one side of every threshold: how often the choosing half saw them, and the bounds that follow."""

    thresholds: Scores
    above: bool
    likely: Scores
    unlikely: Scores
    likely_low: Scores
    unlikely_high: Scores

    def event(self, index: int) -> Event:
        return Event(threshold=float(self.thresholds[index]), above=self.above)


def _candidates(with_record: Scores, without: Scores, *, confidence: float) -> Iterator[_Candidates]:
    pooled = np.unique(np.concatenate([with_record, without]))
    thresholds = np.unique(np.quantile(pooled, np.linspace(0, 1, _MAX_CANDIDATES), method="nearest"))
    for above in (True, False):
        likely, unlikely = (with_record, without) if above else (without, with_record)
        seen = [_beyond(np.sort(scores), thresholds, above=above) for scores in (likely, unlikely)]
        yield _Candidates(
            thresholds=thresholds,
            above=above,
            likely=seen[0] / likely.size,
            unlikely=seen[1] / unlikely.size,
            likely_low=at_least(seen[0], likely.size, confidence=_each(confidence)),
            unlikely_high=at_most(seen[1], unlikely.size, confidence=_each(confidence)),
        )


def _beyond(ordered: Scores, thresholds: Scores, *, above: bool) -> Scores:
    """How many scores lie strictly beyond each threshold."""
    if above:
        return (ordered.size - np.searchsorted(ordered, thresholds, side="right")).astype(np.float64)
    return np.searchsorted(ordered, thresholds, side="left").astype(np.float64)


def _each(confidence: float) -> float:
    """Two bounds that each hold with this confidence hold together with `confidence`."""
    return 1 - (1 - confidence) / 2


def _counted(event: Event, with_record: Scores, without: Scores, *, delta: float, confidence: float) -> LowerBound:
    """What the counting half says about an event chosen without it."""
    likely, unlikely = (with_record, without) if event.above else (without, with_record)
    low = float(at_least(int(event.holds(likely).sum()), likely.size, confidence=_each(confidence)))
    high = float(at_most(int(event.holds(unlikely).sum()), unlikely.size, confidence=_each(confidence)))
    epsilon = max(0.0, math.log((low - delta) / high)) if low > delta else 0.0
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, event=event, likely=low, unlikely=high)


def epsilon_lower_bound(with_record: Scores, without: Scores, *, delta: float, confidence: float) -> LowerBound:
    """The lower bound on epsilon at `delta`; 0 when nothing can be said."""
    (choose_in, count_in), (choose_out, count_out) = _halves(with_record), _halves(without)
    best, event = -math.inf, Event(threshold=0.0, above=True)
    for tried in _candidates(choose_in, choose_out, confidence=confidence):
        ratio = (tried.likely_low - delta) / tried.unlikely_high
        index = int(np.argmax(ratio))
        if ratio[index] > best:
            best, event = float(ratio[index]), tried.event(index)
    return _counted(event, count_in, count_out, delta=delta, confidence=confidence)


def check_curve(
    with_record: Scores, without: Scores, *, claimed: Mapping[float, float], confidence: float
) -> CurveCheck:
    """Compare with the claimed curve {epsilon: delta} at the point where the first half breaks it most clearly.

    A guarantee is a whole curve. Faults that hardly show at a small delta (where runs are rare) show at epsilon near 0,
    where delta is the total variation distance and a few thousand runs measure it well. Clearly means: the excess of
    P(E) - e^epsilon Q(E) over the claimed delta, in widths of its own Clopper-Pearson bound; above 1 the first half
    alone would break the claim.
    """
    (choose_in, count_in), (choose_out, count_out) = _halves(with_record), _halves(without)
    best, point, event = -math.inf, next(iter(claimed)), Event(threshold=0.0, above=True)
    for tried in _candidates(choose_in, choose_out, confidence=confidence):
        for epsilon, delta in claimed.items():
            times = math.exp(epsilon)
            width = tried.likely - tried.likely_low + times * (tried.unlikely_high - tried.unlikely)
            excess = (tried.likely - times * tried.unlikely - delta) / width
            index = int(np.argmax(excess))
            if excess[index] > best:
                best, point, event = float(excess[index]), epsilon, tried.event(index)
    lower = _counted(event, count_in, count_out, delta=claimed[point], confidence=confidence)
    return CurveCheck(claimed_epsilon=point, lower=lower)


_PROVES_NOTHING = (
    "Passing proves nothing: an audit finds faults in what it runs, on the inputs it tries. "
    "The guarantee rests on the accountant's proof."
)
_CURVE_POINTS = 9
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
        return f"no violation found. {_PROVES_NOTHING}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "verdict": "violation" if self.violated else "no violation found",
            "note": _PROVES_NOTHING,
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
    points = np.linspace(0, min(claimed.epsilon, math.log(samples)), _CURVE_POINTS)
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
