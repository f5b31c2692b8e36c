"""From scores of runs with and without the record to a lower bound on epsilon, with a stated confidence.

If a mechanism is (epsilon, delta)-private, every event E has P(E) <= e^epsilon Q(E) + delta for P, Q = (with, without)
the record, either way round. An event chosen on one half of the runs is counted on the other half; Clopper-Pearson
bounds its two probabilities, and epsilon >= log((P(E) - delta) / Q(E)) follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from bqsgd.errors import InvalidParameter

Scores = npt.NDArray[np.float64]
MAX_CANDIDATES = 1000


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
    """epsilon is at least this, with probability `confidence` over the audit's own runs."""

    epsilon: float
    delta: float
    confidence: float
    event: Event
    likely: float
    unlikely: float


def at_least(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson lower bound on a probability (0 for no success)."""
    k = np.asarray(successes, dtype=np.float64)
    return np.where(k == 0, 0.0, beta.ppf(1 - confidence, np.maximum(k, 1), samples - k + 1))


def at_most(successes: npt.ArrayLike, samples: int, *, confidence: float) -> Scores:
    """One-sided Clopper-Pearson upper bound on a probability (1 when every sample is a success)."""
    k = np.asarray(successes, dtype=np.float64)
    return np.where(k == samples, 1.0, beta.ppf(confidence, k + 1, np.maximum(samples - k, 1)))


def halves(scores: Scores) -> tuple[Scores, Scores]:
    """The half that chooses and the half that counts."""
    middle = scores.size // 2
    if middle < 1 or not bool(np.all(np.isfinite(scores))):
        raise InvalidParameter(f"an audit needs at least 2 finite scores a side, got {scores.size}")
    return scores[:middle], scores[middle:]


def candidates(with_record: Scores, without: Scores) -> tuple[Scores, dict[bool, tuple[Scores, Scores]]]:
    """Thresholds worth trying, and for either side of them how many runs (likely world, unlikely world) fall there."""
    pooled = np.unique(np.concatenate([with_record, without]))
    thresholds = np.unique(np.quantile(pooled, np.linspace(0, 1, MAX_CANDIDATES), method="nearest"))
    inside, outside = np.sort(with_record), np.sort(without)

    def above(ordered: Scores) -> Scores:
        return (ordered.size - np.searchsorted(ordered, thresholds, side="right")).astype(np.float64)

    def below(ordered: Scores) -> Scores:
        return np.searchsorted(ordered, thresholds, side="left").astype(np.float64)

    return thresholds, {True: (above(inside), above(outside)), False: (below(outside), below(inside))}


def _probabilities(event: Event, with_record: Scores, without: Scores, *, confidence: float) -> tuple[float, float]:
    """Bounds (likely from below, unlikely from above) that hold together with the given confidence."""
    likely, unlikely = (with_record, without) if event.above else (without, with_record)
    each = 1 - (1 - confidence) / 2
    low = at_least(int(event.holds(likely).sum()), likely.size, confidence=each)
    high = at_most(int(event.holds(unlikely).sum()), unlikely.size, confidence=each)
    return float(low), float(high)


def epsilon_lower_bound(with_record: Scores, without: Scores, *, delta: float, confidence: float) -> LowerBound:
    """The lower bound on epsilon at `delta`; 0 when nothing can be said."""
    (choose_in, count_in), (choose_out, count_out) = halves(with_record), halves(without)
    thresholds, counts = candidates(choose_in, choose_out)
    each = 1 - (1 - confidence) / 2
    best, event = -math.inf, Event(threshold=float(thresholds[0]), above=True)
    for side, (likely, unlikely) in counts.items():
        sizes = (choose_in.size, choose_out.size) if side else (choose_out.size, choose_in.size)
        low = at_least(likely, sizes[0], confidence=each)
        high = at_most(unlikely, sizes[1], confidence=each)
        ratio = np.maximum(low - delta, 1e-300) / high
        index = int(np.argmax(ratio))
        if ratio[index] > best:
            best, event = float(ratio[index]), Event(threshold=float(thresholds[index]), above=side)
    low_p, high_p = _probabilities(event, count_in, count_out, confidence=confidence)
    epsilon = max(0.0, math.log((low_p - delta) / high_p)) if low_p > delta else 0.0
    return LowerBound(epsilon=epsilon, delta=delta, confidence=confidence, event=event, likely=low_p, unlikely=high_p)


@dataclass(frozen=True, kw_only=True)
class CurveCheck:
    """Whether the runs break the claimed delta(epsilon) at the one point chosen on the first half."""

    epsilon: float
    claimed_delta: float
    delta_lower: float
    confidence: float

    @property
    def broken(self) -> bool:
        """The measured delta is above the claimed one, beyond chance at this confidence."""
        return self.delta_lower > self.claimed_delta


def check_curve(with_record: Scores, without: Scores, *, claimed: dict[float, float], confidence: float) -> CurveCheck:
    """Compare with the claimed curve {epsilon: delta} where the first half sees the largest excess.

    A guarantee is a whole curve. Faults that hardly show at a small delta (where runs are rare) show at epsilon near 0,
    where delta is the total variation distance and a few thousand runs measure it well.
    """
    (choose_in, count_in), (choose_out, count_out) = halves(with_record), halves(without)
    thresholds, counts = candidates(choose_in, choose_out)
    best, point, event = -math.inf, next(iter(claimed)), Event(threshold=float(thresholds[0]), above=True)
    for side, (likely, unlikely) in counts.items():
        sizes = (choose_in.size, choose_out.size) if side else (choose_out.size, choose_in.size)
        p, q = likely / sizes[0], unlikely / sizes[1]
        for epsilon, delta in claimed.items():
            # In standard errors, so that a large but uncertain excess does not hide a small and certain one.
            noise = np.sqrt(p * (1 - p) / sizes[0] + math.exp(2 * epsilon) * q * (1 - q) / sizes[1]) + 1 / min(sizes)
            excess = (p - math.exp(epsilon) * q - delta) / noise
            index = int(np.argmax(excess))
            if excess[index] > best:
                best, point = float(excess[index]), epsilon
                event = Event(threshold=float(thresholds[index]), above=side)
    low, high = _probabilities(event, count_in, count_out, confidence=confidence)
    return CurveCheck(
        epsilon=point,
        claimed_delta=claimed[point],
        delta_lower=max(0.0, low - math.exp(point) * high),
        confidence=confidence,
    )
