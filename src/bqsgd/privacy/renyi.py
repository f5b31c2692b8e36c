"""Accounting with an L2 as well as an L-infinity sensitivity, through integer moments of the likelihood ratio.

delta(epsilon) <= min over orders a of  exp(sum of log moments - (a - 1) epsilon) (1 - 1/a)^(a-1) / a, plus the tails
that were moved to delta (docs/accounting.md, Claims 4 and 5).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from bqsgd.errors import AccountingError
from bqsgd.noise import ROUNDING_SLACK_STEPS, mirror_distance
from bqsgd.privacy.moments import MAX_ORDER, ORDERS, MomentRates, chords, moment_rates
from bqsgd.privacy.pair import Floats
from bqsgd.release import Relation, Release, Scheme

TAIL_SHARE = 1e-3
"""Share of delta that the tails may use up."""
LEAST_TAIL, MOST_TAIL = 1e-250, 1e-9
SPLITS = np.concatenate([[0.0], 1 - 0.5 ** np.arange(1, 11)])
"""Likelihood ratios below which the remainder of the "add" expansion is bounded apart; 0 is no split."""
FLOAT_MARGIN = 1e-9
"""Relative error allowed for in sums of moments: logarithms of binomial coefficients of order 2^15 are off by 1e-10."""
_EVERY_ORDER = np.arange(MAX_ORDER + 1)


def _log_comb(n: Floats | float, k: Floats | float) -> Floats:
    n, k = np.asarray(n, dtype=np.float64), np.asarray(k, dtype=np.float64)
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def _message_log_moments(release: Release, rates: MomentRates) -> tuple[Floats, float, float]:
    """Bounds on log M_k of one unsampled message for k = 0 .. MAX_ORDER, its tails' mass, and its whole drift."""
    spread = math.sqrt(release.dimension)
    length = release.shift_l2 + spread * ROUNDING_SLACK_STEPS
    drift = rates.drift * spread * length
    # The law is symmetric but for a relative `uneven`, which moves a moment by (1 + uneven)^(2k) a coordinate.
    uneven = mirror_distance(release.mechanism.trials) * release.dimension
    with np.errstate(over="ignore", invalid="ignore"):
        known = rates.per_square * length**2 + ORDERS * (drift + 2 * uneven)
    # M_0 = Q(kept) and M_1 = P(kept) are at most 1.
    orders, bounds = np.concatenate([[0, 1], ORDERS]), np.concatenate([[0.0, 0.0], known])
    return chords(orders, bounds, _EVERY_ORDER), release.dimension * rates.tail, drift + uneven


def _log_expm1(x: Floats) -> Floats:
    """log(e^x - 1) for x >= 0, to full relative precision; minus infinity at 0."""
    return np.where(x > 1, x + np.log1p(-np.exp(-np.maximum(x, 1))), np.log(np.expm1(np.minimum(x, 1))))


def _log1p_sum(logs: Floats) -> float:
    """log(1 + sum of exp(logs)), rounded up by more than the logarithms of the binomial coefficients are off."""
    return float(np.logaddexp(0.0, logsumexp(logs))) * (1 + FLOAT_MARGIN)


def _mixed(log_moments: Floats, rate: float) -> Floats:
    """log(1 - g + g M_a): joint convexity bounds a sampled moment of either direction, and keeps it below M_a."""
    whole = log_moments[ORDERS]
    mixed: Floats = np.minimum(np.logaddexp(0.0, math.log(rate) + _log_expm1(whole)), whole)
    return mixed


def _removed(log_moments: Floats, rate: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^a]: a binomial sum of the message's moments, M_k - 1 for k >= 2."""
    result = np.empty(ORDERS.size)
    excess = _log_expm1(log_moments)
    for row, a in enumerate(ORDERS.tolist()):
        k = np.arange(2, a + 1, dtype=np.float64)
        weights = _log_comb(float(a), k) + (a - k) * math.log1p(-rate) + k * math.log(rate)
        result[row] = _log1p_sum(weights + excess[2 : a + 1])
    return result


def _added(log_moments: Floats, rates: MomentRates, rate: float, edge: float, drift: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^(1-a)], expanded to second or fourth order in g (P/Q - 1) >= -g with its remainder.

    With v = log M_2: M_3 >= e^(cubic v) and M_4 <= e^(quartic v). The bound is taken over all v up to its largest
    value, on intervals: terms that grow with v at the upper end, terms that fall at the lower one. Outcomes with
    P/Q < split have a larger remainder, but are rare (Chernoff).
    """
    n = ORDERS - 1.0
    largest = float(log_moments[2])
    c2, c3, c4 = (np.exp(_log_comb(n + j - 1, float(j)) + j * math.log(rate)) for j in (2, 3, 4))
    slack = (4 + 2 * rates.quartic) * (edge + drift)
    v = np.linspace(-3 * edge, largest, 2001)
    square, cube, fourth = (np.expm1(x) for x in (v[1:], rates.cubic * v[:-1] - slack, rates.quartic * v[1:] + slack))
    bounded = np.isfinite(log_moments[ORDERS])
    best = np.full(ORDERS.size, math.inf)
    for split in SPLITS.tolist():
        with np.errstate(divide="ignore"):
            rare = np.exp(np.min((log_moments[ORDERS] + n * np.log(split))[bounded], initial=0.0))
        second = c2 * np.exp(-(n + 2) * math.log1p(-rate * (1 - split))) * (np.expm1(largest) + 2 * edge)
        second += c2 * np.exp(-(n + 2) * math.log1p(-rate)) * rare
        near, far = (c4 * np.exp(-(n + 4) * math.log1p(-rate * share)) for share in (1 - split, 1.0))
        rising = np.outer(c2 + 3 * c3 + 6 * near, square) + np.outer(near, fourth)
        falling = np.outer(c3 + 4 * near, cube)
        curve = np.max(rising - falling + FLOAT_MARGIN * np.abs(rising), axis=1)
        expanded = curve + (2 * c2 + 4 * c3 + 8 * near) * edge + far * rare
        best = np.fmin(best, np.fmin(second, expanded))
    # (1 - g + g r)^-n <= r^(-g n), the geometric mean: the better one where g n is large.
    power = np.interp(1 + rate * n, _EVERY_ORDER, log_moments)
    result: Floats = np.fmin(np.log1p(np.maximum(best, 0.0) + n * rate * edge), power)
    return result


def _without_replacement(log_moments: Floats, rate: float, edge: float) -> Floats:
    """Fixed-size batches under replace-one (Wang, Balle, Kasiviswanathan 2019, Theorem 9; tails as in Claim 4)."""
    result = np.empty(ORDERS.size)
    second = np.minimum(math.log(4) + np.log(np.expm1(log_moments[2]) + 2 * edge), math.log(2) + log_moments[2])
    for row, a in enumerate(ORDERS.tolist()):
        j = np.arange(3, a + 1, dtype=np.float64)
        terms = math.log(2) + _log_comb(float(a), j) + j * math.log(rate) + log_moments[3 : a + 1]
        pair = float(_log_comb(float(a), 2.0)) + 2 * math.log(rate) + second
        result[row] = _log1p_sum(np.concatenate([[np.log(a * rate * edge), pair], terms]))
    return result


@lru_cache(maxsize=1024)
def _log_moments(release: Release, tail: float) -> tuple[Floats, float]:
    """log moments of one sampled message at ORDERS, the worse of add and remove, and its mass moved to delta."""
    nothing = np.full(ORDERS.size, math.inf), 0.0
    if release.mechanism.trials == 0:
        return nothing
    triple = release.sensitivity.relation is Relation.REPLACE  # fixed-size batches need it; with and without sampling
    try:
        rates = moment_rates(release.mechanism.trials, release.shift + ROUNDING_SLACK_STEPS, tail, triple=triple)
    except AccountingError:
        return nothing
    rate = release.sampling.rate
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        moments, edge, drift = _message_log_moments(release, rates)
        if not edge < 1:
            return nothing
        if rate == 1.0:
            total = moments[ORDERS]
        elif release.sampling.scheme is Scheme.FIXED_SIZE:
            total = np.fmin(_without_replacement(moments, rate, edge), _mixed(moments, rate))
        else:
            mixed = _mixed(moments, rate)
            removed = np.fmin(_removed(moments, rate), mixed)
            added = np.fmin(_added(moments, rates, rate, edge, drift), mixed)
            total = np.maximum(removed, added)
    return np.where(np.isnan(total), math.inf, np.maximum(total, 0.0)), edge


def _totals(spent: tuple[tuple[Release, int], ...], delta: float) -> tuple[Floats, float]:
    coordinates = sum(rounds * release.dimension for release, rounds in spent)
    # Rounded down to a power of ten, so that nearby queries share the cached moments.
    tail = 10.0 ** math.floor(math.log10(TAIL_SHARE) + math.log10(delta) - math.log10(coordinates))
    tail = min(max(tail, LEAST_TAIL), MOST_TAIL)
    parts = [(*_log_moments(release, tail), rounds) for release, rounds in spent]
    return sum((rounds * moments for moments, _, rounds in parts), np.zeros(ORDERS.size)), sum(
        rounds * edge for _, edge, rounds in parts
    )


def epsilon(spent: tuple[tuple[Release, int], ...], delta: float) -> float:
    """Least epsilon over the integer orders at `delta`; infinity when the tails alone weigh more."""
    moments, edge = _totals(spent, delta)
    if not edge < delta:
        return math.inf
    figures = (moments - math.log(delta - edge) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(np.min(figures)))


def delta(spent: tuple[tuple[Release, int], ...], epsilon: float) -> float:
    """Least delta over the integer orders at `epsilon`."""
    moments, edge = _totals(spent, 1e-9)
    logs = moments - (ORDERS - 1) * min(epsilon, 1e9) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
    return min(1.0, edge + math.exp(min(0.0, float(np.min(logs)))))


def delta_floor(spent: tuple[tuple[Release, int], ...], delta: float) -> float:
    """The mass that the tails moved to delta when asked at `delta`."""
    return _totals(spent, delta)[1]
