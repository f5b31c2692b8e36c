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
from bqsgd.noise import ROUNDING_SLACK_STEPS
from bqsgd.privacy.moments import MAX_ORDER, MomentRates, moment_rates
from bqsgd.privacy.pair import Floats
from bqsgd.release import Release, Scheme

TAIL_SHARE = 1e-3
"""Share of delta that the tails may use up."""
ORDERS = np.arange(2, MAX_ORDER + 1)


def _log_comb(n: float, k: Floats | float) -> Floats:
    return np.asarray(gammaln(n + 1) - gammaln(np.asarray(k) + 1) - gammaln(n - np.asarray(k) + 1))


def _message_log_moments(release: Release, rates: MomentRates) -> tuple[Floats, float]:
    """Upper bounds on log M_k of one unsampled message for k = 0 .. MAX_ORDER, and the mass its tails move to delta."""
    spread = math.sqrt(release.dimension)
    length = release.shift_l2 + spread * ROUNDING_SLACK_STEPS
    orders = np.arange(MAX_ORDER + 1)
    log_moments = rates.per_square * length**2 + orders * rates.drift * spread * length
    log_moments[:2] = 0.0  # M_0 = Q(kept) and M_1 = P(kept) are at most 1
    return log_moments, release.dimension * rates.tail


def _removed(log_moments: Floats, rate: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^a]: an exact binomial sum of the message's moments."""
    result = np.empty(ORDERS.size)
    for row, a in enumerate(ORDERS):
        k = np.arange(a + 1, dtype=np.float64)
        terms = _log_comb(float(a), k) + (a - k) * math.log1p(-rate) + k * math.log(rate) + log_moments[: a + 1]
        result[row] = logsumexp(terms)
    return np.maximum(result, 0.0)


def _added(log_moments: Floats, rates: MomentRates, rate: float, edge: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^(1-a)], expanded to second or fourth order in g (P/Q - 1) >= -g with its remainder.

    With v = log M_2: M_3 >= e^(cubic v) and M_4 <= e^(quartic v). The bound is taken over all v up to its largest
    value, on intervals: terms that grow with v at the upper end, terms that fall at the lower one.
    """
    largest = float(log_moments[2])
    v = np.linspace(0.0, largest, 2001)
    low, high = v[:-1], v[1:]
    result = np.empty(ORDERS.size)
    for row, a in enumerate(ORDERS):
        n = float(a - 1)
        c2, c3, c4 = (float(np.exp(_log_comb(n + j - 1, float(j)))) * rate**j for j in (2, 3, 4))
        second = c2 * (1 - rate) ** -(n + 2) * (float(np.expm1(largest)) + 2 * edge)
        c4 *= (1 - rate) ** -(n + 4)
        rising = (c2 + 3 * c3 + 6 * c4) * np.exp(high) + c4 * np.exp(rates.quartic * high)
        falling = (c3 + 4 * c4) * np.exp(rates.cubic * low)
        constant = -c2 - 2 * c3 - 3 * c4 + (n * rate + 2 * c2 + 4 * c3 + 8 * c4) * edge
        fourth = float(np.max(rising - falling)) + constant
        result[row] = math.log1p(max(0.0, min(second, fourth)) + n * rate * edge)
    return result


def _without_replacement(log_moments: Floats, rate: float) -> Floats:
    """Fixed-size batches under replace-one (Wang, Balle, Kasiviswanathan 2019, Theorem 9)."""
    result = np.empty(ORDERS.size)
    second = min(math.log(4) + math.log(math.expm1(max(log_moments[2], 1e-300))), math.log(2) + log_moments[2])
    for row, a in enumerate(ORDERS):
        j = np.arange(3, a + 1, dtype=np.float64)
        terms = math.log(2) + _log_comb(float(a), j) + j * math.log(rate) + log_moments[3 : a + 1]
        pair = float(_log_comb(float(a), 2.0)) + 2 * math.log(rate) + second
        result[row] = logsumexp(np.concatenate([[0.0, pair], terms]))
    return result


@lru_cache(maxsize=1024)
def _log_moments(release: Release, tail: float) -> tuple[Floats, float]:
    """log moments of one sampled message at ORDERS, the worse of add and remove, and its mass moved to delta."""
    if release.mechanism.trials == 0:
        return np.full(ORDERS.size, math.inf), 0.0
    try:
        rates = moment_rates(release.mechanism.trials, release.shift + ROUNDING_SLACK_STEPS, tail)
    except AccountingError:
        return np.full(ORDERS.size, math.inf), 0.0
    moments, edge = _message_log_moments(release, rates)
    rate = release.sampling.rate
    with np.errstate(over="ignore", invalid="ignore"):
        if release.sampling.scheme is Scheme.FIXED_SIZE:
            total = _without_replacement(moments, rate)
        elif rate == 1.0:
            total = moments[2:]
        else:
            total = np.maximum(_removed(moments, rate), _added(moments, rates, rate, edge))
    return np.where(np.isnan(total), math.inf, total), edge


def _totals(spent: tuple[tuple[Release, int], ...], delta: float) -> tuple[Floats, float]:
    coordinates = sum(rounds * release.dimension for release, rounds in spent)
    # Rounded down to a power of ten, so that nearby queries share the cached moments.
    tail = 10.0 ** math.floor(math.log10(TAIL_SHARE * delta / coordinates))
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
    best = float(np.min(figures))
    return math.inf if math.isnan(best) else max(0.0, best)


def delta(spent: tuple[tuple[Release, int], ...], epsilon: float) -> float:
    """Least delta over the integer orders at `epsilon`."""
    moments, edge = _totals(spent, 1e-9)
    logs = moments - (ORDERS - 1) * epsilon + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
    return min(1.0, edge + math.exp(min(0.0, float(np.min(logs)))))


def delta_floor(spent: tuple[tuple[Release, int], ...], delta: float) -> float:
    """The mass that the tails moved to delta when asked at `delta`."""
    return _totals(spent, delta)[1]
