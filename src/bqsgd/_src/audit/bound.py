"""From scores of runs with and without the record to a lower bound on epsilon, with a stated confidence.

If a mechanism is (epsilon, delta)-private, every event E has P(E) <= e^epsilon Q(E) + delta for P, Q = (with, without)
the record, either way round. Clopper-Pearson bounds P(E) from below and Q(E) from above, and
epsilon >= log((P(E) - delta) / Q(E)) follows.

The first half of the runs chooses the event, and the point of a claimed curve; the second half counts. However many
events were tried, the bound is therefore one statement about one event that was fixed before its runs were looked at.
The choice also uses Clopper-Pearson bounds, not observed frequencies: the frequency of an event that one world never
showed is 0 and looks certain, while its true uncertainty, times e^epsilon, is the whole figure.

`audit` does all of it: it takes runs from a source of observations, bounds epsilon from below and compares the claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Release

Scores = npt.NDArray[np.float64]
_MAX_CANDIDATES = 1000


@dataclass(frozen=True, kw_only=True)
class Event:
    """The event that a score lies above (or below) a threshold; `above` events are likelier with the record."""

    threshold: float
    above: bool

    def holds(self, scores: Scores) -> npt.NDArray[np.bool_]:
        """The runs in which the event holds."""
        return scores > self.threshold if self.above else scores < self.threshold


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """Epsilon at `delta` is at least this, with probability `confidence` over the runs of the audit.

    likely: a lower bound on the event's probability in one world. unlikely: an upper bound on it in the other world.
    """

    epsilon: float
    delta: float
    confidence: float
    event: Event
    likely: float
    unlikely: float


@dataclass(frozen=True, kw_only=True)
class CurveCheck:
    """A point of the claimed curve, chosen on the first half of the runs; `lower` is what the second half shows."""

    claimed_epsilon: float
    lower: LowerBound

    @property
    def broken(self) -> bool:
        """Whether epsilon at this delta is above the claimed one, at this confidence."""
        return self.lower.epsilon > self.claimed_epsilon

    @property
    def delta_lower(self) -> float:
        """Delta at the claimed epsilon is at least this: the same statement, along the other axis."""
        return max(0.0, self.lower.likely - math.exp(self.claimed_epsilon) * self.lower.unlikely)


def at_least(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson lower bound on a probability (0 for no success)."""
    k = np.asarray(successes, dtype=np.float64)
    # The beta quantile is undefined at k = 0, where the bound is 0 by definition.
    return np.where(k == 0, 0.0, beta.ppf(1 - confidence, np.maximum(k, 1), samples - k + 1))


def at_most(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson upper bound on a probability (1 when every sample is a success)."""
    k = np.asarray(successes, dtype=np.float64)
    return np.where(k == samples, 1.0, beta.ppf(confidence, k + 1, np.maximum(samples - k, 1)))


def _halves(scores: Scores) -> tuple[Scores, Scores]:
    """The half that chooses the event, and the half that counts it.

    No run may be in both: a bound on an event chosen for its count would hold less often than stated.
    """
    middle = scores.size // 2
    if middle < 1 or not bool(np.all(np.isfinite(scores))):
        raise InvalidParameter(f"an audit needs at least 2 scores in each world, all finite, got {scores.size}")
    return scores[:middle], scores[middle:]


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """One event for each threshold, all on the same side: how often the choosing half saw it, and the bounds on it."""

    thresholds: Scores
    above: bool
    likely: Scores
    unlikely: Scores
    likely_low: Scores
    unlikely_high: Scores

    def event(self, index: int) -> Event:
        return Event(threshold=float(self.thresholds[index]), above=self.above)


def _candidates(with_record: Scores, without: Scores, *, confidence: float) -> Iterator[_Candidates]:
    # Thresholds are scores that occurred: events between two of them have the same counts.
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
            likely_low=at_least(seen[0], likely.size, confidence=_each_of_two(confidence)),
            unlikely_high=at_most(seen[1], unlikely.size, confidence=_each_of_two(confidence)),
        )


def _beyond(ordered: Scores, thresholds: Scores, *, above: bool) -> Scores:
    """The number of scores strictly beyond each threshold."""
    if above:
        return (ordered.size - np.searchsorted(ordered, thresholds, side="right")).astype(np.float64)
    return np.searchsorted(ordered, thresholds, side="left").astype(np.float64)


def _each_of_two(confidence: float) -> float:
    """The confidence of each of two statements that must hold together with `confidence` (union bound)."""
    return 1 - (1 - confidence) / 2


def _counted(event: Event, with_record: Scores, without: Scores, *, delta: float, confidence: float) -> LowerBound:
    """The bound that the counting half gives for an event chosen without it."""
    likely, unlikely = (with_record, without) if event.above else (without, with_record)
    low = float(at_least(int(event.holds(likely).sum()), likely.size, confidence=_each_of_two(confidence)))
    high = float(at_most(int(event.holds(unlikely).sum()), unlikely.size, confidence=_each_of_two(confidence)))
    # `high` is never 0: it is an upper confidence bound, positive even for an event that was never seen.
    epsilon = max(0.0, math.log((low - delta) / high)) if low > delta else 0.0
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, event=event, likely=low, unlikely=high)


def epsilon_lower_bound(with_record: Scores, without: Scores, *, delta: float, confidence: float) -> LowerBound:
    """The lower bound on epsilon at `delta`; 0 if the runs show nothing."""
    (choose_in, count_in), (choose_out, count_out) = _halves(with_record), _halves(without)
    # If no event stands out, any event gives a valid bound, so we start with an arbitrary one.
    best, event = -math.inf, Event(threshold=0.0, above=True)
    for events in _candidates(choose_in, choose_out, confidence=confidence):
        ratio = (events.likely_low - delta) / events.unlikely_high
        index = int(np.argmax(ratio))
        if ratio[index] > best:
            best, event = float(ratio[index]), events.event(index)
    return _counted(event, count_in, count_out, delta=delta, confidence=confidence)


def check_curve(
    with_record: Scores, without: Scores, *, claimed: Mapping[float, float], confidence: float
) -> CurveCheck:
    """Compare with the claimed curve {epsilon: delta} at the point that the first half of the runs breaks most clearly.

    A guarantee is a whole curve. A fault that hardly shows at a small delta, where the telling runs are rare, shows at
    epsilon near 0: there delta is the total variation distance, which a few thousand runs measure well. How clearly a
    point is broken is the excess of P(E) - e^epsilon Q(E) over the claimed delta, in widths of its Clopper-Pearson
    bound. Above 1, the first half alone would break the claim.
    """
    (choose_in, count_in), (choose_out, count_out) = _halves(with_record), _halves(without)
    best, point, event = -math.inf, next(iter(claimed)), Event(threshold=0.0, above=True)
    for events in _candidates(choose_in, choose_out, confidence=confidence):
        for epsilon, delta in claimed.items():
            times = math.exp(epsilon)
            width = events.likely - events.likely_low + times * (events.unlikely_high - events.unlikely)
            excess = (events.likely - times * events.unlikely - delta) / width
            index = int(np.argmax(excess))
            if excess[index] > best:
                best, point, event = float(excess[index]), epsilon, events.event(index)
    lower = _counted(event, count_in, count_out, delta=claimed[point], confidence=confidence)
    return CurveCheck(claimed_epsilon=point, lower=lower)


_PROVES_NOTHING = (
    "Passing proves nothing: an audit finds faults in what it runs, on the inputs it tries. "
    "The guarantee rests on the accountant's proof."
)
_CURVE_POINTS = 9
"""Number of points at which the claimed curve is checked, from epsilon 0 to the claimed one or the most that the runs
can show."""


class Source(Protocol):
    """Runs two neighbouring worlds and reduces what a server observes in each run to one number, the score.

    Runs must be independent of one another. Higher scores should mean that the record is present. What a source
    observes is up to it: codes, a frame, or a sum over clients.
    """

    @property
    def rounds(self) -> int:
        """The number of messages in one run."""

    @property
    def seeded(self) -> bool:
        """Whether the noise was seeded."""

    def scores(self, runs: int, *, present: bool) -> Scores:
        """The score of each of `runs` runs in the world where the record is `present` or not."""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """What the runs showed, and what is claimed. `lower` and `curve` hold together with `confidence`."""

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
        """Whether the runs contradict the claim. An honest client is accused with probability <= 1 - confidence."""
        return self.lower.epsilon > self.claimed.epsilon or self.curve.broken

    @property
    def verdict(self) -> str:
        """The result in one line."""
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
            "audited_dimension": self.claim.terms.dimension,
            "seeded": self.seeded,
            "release": self.claim.to_dict(),
        }


def audit(source: Source, *, claim: Release, samples: int, delta: float, confidence: float = 0.99) -> AuditResult:
    """Compare what `claim` says about every message with `samples` runs with the record and as many without it.

    The highest epsilon that n runs can show is about log(n / 12), so a low figure may only mean that there were few
    runs.

    Raises:
        InvalidParameter: there are too few runs, or the confidence is outside (0, 1).
    """
    check_int("samples", samples, 4, 2**31)
    if not 0 < confidence < 1:
        raise InvalidParameter(f"confidence must lie strictly between 0 and 1, got {confidence}")
    claimed, curve = _claimed(claim, source.rounds, samples, delta)
    with_record, without = (source.scores(samples, present=present) for present in (True, False))
    # The two statements are made about the same runs, so each must hold with more than `confidence`.
    joint = _each_of_two(confidence)
    return AuditResult(
        claim=claim,
        rounds=source.rounds,
        samples=samples,
        confidence=confidence,
        lower=epsilon_lower_bound(with_record, without, delta=delta, confidence=joint),
        curve=check_curve(with_record, without, claimed=dict(curve), confidence=joint),
        claimed=claimed,
        seeded=source.seeded,
    )


@lru_cache(maxsize=16)
def _claimed(
    claim: Release, rounds: int, samples: int, delta: float
) -> tuple[Guarantee, tuple[tuple[float, float], ...]]:
    """What is claimed about `rounds` messages: the guarantee, and points (epsilon, delta) of the whole curve.

    Cached, because audits often repeat one claim with new noise, and the curve takes longer than the runs.
    """
    accountant = Accountant().compose(claim, rounds)
    claimed = accountant.guarantee(delta=delta)
    # `samples` runs cannot show an epsilon above log(samples), so points beyond it would check nothing.
    points = np.linspace(0, min(claimed.epsilon, math.log(samples)), _CURVE_POINTS)
    return claimed, tuple((float(epsilon), accountant.delta(float(epsilon))) for epsilon in points)
