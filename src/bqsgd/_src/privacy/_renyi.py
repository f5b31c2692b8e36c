"""Accounting under an L2 and an L-infinity bound, through integer moments of the likelihood ratio (Claims 4 and 5).

delta(epsilon) <= min over orders a of  exp(sum of log moments - (a - 1) epsilon) (1 - 1/a)^(a-1) / a, plus the mass of
the tails that were moved to delta.

For a shift vector u with ||u||_2 <= D2 and |u_j| <= U, the k-th moment M_k = E_Q[(P/Q)^k] of a message is a product
over coordinates, so log M_k = sum_j psi_k(u_j) <= D2^2 sup_{0 < u <= U} psi_k(u) / u^2. That is a search in one
dimension, and its result is certified on intervals. Outcomes in the far tails, where the ratio explodes, are first
moved to delta: `tail` is the mass left out per coordinate. The claims are in docs/accounting.md.

Whatever overflows or cannot be certified becomes infinite, and `min` over orders then passes over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, logsumexp

from bqsgd._src.errors import AccountingError
from bqsgd._src.laws import NoiseLaw, mirror_distance
from bqsgd._src.noise import ROUNDING_SLACK_STEPS
from bqsgd._src.privacy._pairs import Floats
from bqsgd._src.release import Relation, Release, Scheme, Spent

MAX_ORDER = 1 << 15
_DENSE = 128
ORDERS = np.concatenate(
    [np.arange(2, _DENSE + 1), np.unique(np.geomspace(_DENSE, MAX_ORDER, 41).round().astype(np.int64))[1:]]
)
"""The orders whose moments are computed: every integer up to 128, then ever fewer. Small epsilons need large orders."""
RATIO, FINE_RATIO = 1.02, 1.002
"""Ratio of neighbouring shifts at which moments are computed; FINE_RATIO for `cubic` and `quartic`."""
COARSE_RATIO = 1.1
"""The same for laws too wide for RATIO; a chord is then at most 0.3 % above its curve."""
FINE_CELLS, MOST_CELLS = 1_000_000, 4_000_000
"""Shifts times outcomes: up to FINE_CELLS with RATIO and every order; above MOST_CELLS L2 accounting is refused."""
THIN_ORDERS = ORDERS[(ORDERS <= 16) | (np.arange(ORDERS.size) % 3 == 0) | (ORDERS == MAX_ORDER)]
SMALLEST = 1e-3
"""Shifts below U * SMALLEST are covered by a Taylor bound, not by the grid."""
MOST_STEPS = 500.0
"""Longer shifts are not accounted here: U * SMALLEST would leave the range of the Taylor bound."""


@dataclass(frozen=True, kw_only=True)
class MomentRates:
    """Bounds on the moments of one coordinate.

    per_square[i] bounds psi_k(u) / u^2 for k = ORDERS[i], for A and B and all shifts u. Apart from the tails,
    psi_3 >= cubic psi_2 and psi_4 <= quartic psi_2 for every shift. `tail` is the mass moved to delta per coordinate.
    `drift`: cutting the tails adds at most k * drift * u to psi_k, in first order.
    """

    per_square: Floats
    cubic: float
    quartic: float
    tail: float
    drift: float


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The outcomes of one coordinate that are kept: of 0 .. m + R, R = ceil U, `cut` are left out on either side.

    A pair between integers keeps one outcome less on each side, so that its moments are bounded at both ends of its
    cell. Three laws at once (`triple`) keep R less again ("Windows" in Claim 5). `left_out` is the mass of all these.
    """

    law: Floats
    reach: int
    cut: int
    left_out: float

    @classmethod
    def of(cls, noise: NoiseLaw, largest: float, tail: float, *, triple: bool) -> _Window:
        law = noise.pmf
        reach = math.ceil(largest)
        more = reach if triple else 0
        below = np.cumsum(law)
        cut = max(reach, int(np.searchsorted(below, tail / 2, side="right")) - 1 - more)
        if 2 * (cut + more) >= law.size:
            raise AccountingError(f"a shift of {largest:.3g} steps leaves nothing of {noise} to account in L2")
        return cls(law=law, reach=reach, cut=cut, left_out=2 * float(below[cut + more]))

    @property
    def outcomes(self) -> npt.NDArray[np.int64]:
        return np.arange(self.cut, self.law.size + self.reach - self.cut)

    @property
    def base(self) -> Floats:
        """P(0) on the kept outcomes."""
        return self.law[self.outcomes]

    def moved(self, shifts: Floats) -> Floats:
        """P(u) on the kept outcomes, one row for each shift u."""
        padded = np.concatenate([np.zeros(self.reach + 1), self.law])
        whole = np.floor(shifts).astype(np.int64)[:, None]
        part = (shifts - np.floor(shifts))[:, None]
        index = self.outcomes[None, :] + self.reach + 1 - whole
        result: Floats = (1 - part) * padded[index] + part * padded[index - 1]
        return result


def _log_ratio(moved: Floats, base: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        result: Floats = np.where(moved > 0, np.log1p((moved - base) / base), 0.0)
    return result


def _excess(log_ratio: Floats, base: Floats, order: int) -> tuple[Floats, Floats]:
    """The k-th moment less 1 for each shift: of A it is sum P(0) r^k - 1, of B sum P(0) r^(1-k) - 1."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinite and will not be used
        return np.expm1(order * log_ratio) @ base, np.expm1((1 - order) * log_ratio) @ base


def _intervals(largest: float, ratio: float) -> Floats:
    """The breaks between intervals: geometric from U * SMALLEST to U, with all integers, and a few more next to U."""
    count = math.ceil(math.log(1 / SMALLEST) / math.log(ratio)) + 1
    grid = np.geomspace(largest * SMALLEST, largest, count)
    last = np.linspace(max(grid[0], math.ceil(largest) - 1.0), largest, 4)  # the last cell has at least three intervals
    return np.unique(np.concatenate([grid, last, np.arange(1.0, math.floor(largest) + 1)]))


def _chord_bound(u: Floats, y: Floats) -> float:
    """The largest log(1 + y(u)) / u^2 if y is convex between breaks, where it lies below its chord a + b u."""
    y1, y2, u1, u2 = y[:-1], y[1:], u[:-1], u[1:]
    slope = (y2 - y1) / (u2 - u1)
    start = y1 - slope * u1
    best = np.maximum(y1 / u1**2, y2 / u2**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = -2 * start / slope  # where (a + b u) / u^2 has its only maximum
        inside = np.isfinite(peak) & (peak > u1) & (peak < u2)
        best = np.where(inside, np.maximum(best, slope**2 / (-4 * start)), best)
    # log(1 + y) <= y log(1 + y0) / y0 for y >= y0, because log(1 + y) / y falls: a little better than log(1 + y) <= y.
    least = np.minimum(y1, y2)
    shrink = np.where(least > 1e-12, np.log1p(least) / np.maximum(least, 1e-300), 1.0)
    return float(np.max(best * shrink))


def _second_difference(order: int, x: Floats) -> Floats:
    """((1 + x)^order - 1 - order x) / x^2 for x > -1; half the largest second derivative where that would cancel."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        direct = (np.expm1(order * np.log1p(x)) - order * x) / x**2
        bound = order * (order - 1) / 2 * np.maximum(1.0, np.exp((order - 2) * np.log1p(x)))
    result: Floats = np.where(np.abs(order * x) > 0.01, direct, bound)
    return result


def _below_the_first_break(order: int, least: float, score: Floats, base: Floats) -> float:
    """The largest (moment - 1 - first-order term) / u^2 over 0 < u <= least; the larger value of A and B.

    With S = B_1/B_0 - 1 >= -1 the moments are E[(1 + uS)^k] and E[(1 + uS)^(1-k)]. The second difference of x^k grows
    with x and that of x^(1-k) falls, so the term of each outcome is largest at u = least or in the limit u = 0.
    """
    limit = order * (order - 1) / 2
    up = np.where(score > 0, _second_difference(order, least * score), limit)
    down = np.where(score < 0, _second_difference(1 - order, least * score), limit)
    square = base * score**2
    return float(max(up @ square, down @ square))


def _least_between(u: Floats, y: Floats) -> Floats:
    """A lower bound on each interval of a function that is convex between integers: extended neighbouring chords."""
    width, slope = np.diff(u), np.diff(y) / np.diff(u)
    inner = u[1:-1] != np.floor(u[1:-1])  # convex across this break, which is not an integer
    from_left = np.full(width.size, -math.inf)
    from_left[1:] = np.where(inner, y[1:-1] + np.minimum(slope[:-1], 0.0) * width[1:], -math.inf)
    from_right = np.full(width.size, -math.inf)
    from_right[:-1] = np.where(inner, y[1:-1] - np.maximum(slope[1:], 0.0) * width[:-1], -math.inf)
    result: Floats = np.maximum(from_left, from_right)
    return result


def _third_and_fourth(breaks: Floats, log_ratio: Floats, base: Floats, score: Floats) -> tuple[float, float]:
    """(cubic, quartic): the least psi_3 / psi_2 and the largest psi_4 / psi_2 over all shifts, for A and B.

    On an interval a convex function is at most its larger end and at least the extended neighbouring chords. Below the
    first break both are ratios of Taylor polynomials with remainder (Claim 5). M_3 >= M_2^2 always holds, so cubic is
    at least 2. quartic is infinite if the tails that were cut outweigh the moments.
    """
    moments = {k: _excess(log_ratio, base, k) for k in (2, 3, 4)}
    least = float(breaks[0])
    second, third, fourth = (float(abs(base @ score**j)) for j in (2, 3, 4))
    skew, square, fourth = least * third / second, least**2 * second, least**2 * fourth / second
    cubics = [
        3 - skew - 5 * square,
        (3 - 4 * skew - 5 * square) / (1 + skew + fourth / (1 - least)),
    ]
    quartics = [
        (6 + 4 * skew + fourth) / (1 - square),
        (6 + 10 * skew + 15 * fourth * (1 - least) ** -7) / (1 - skew - square),
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        for two, three, four in zip(moments[2], moments[3], moments[4], strict=True):
            top_two, top_four = (np.log1p(np.maximum(y[:-1], y[1:])) for y in (two, four))
            least_two, least_three = (np.log1p(_least_between(breaks, y)) for y in (two, three))
            cubics.append(float(np.min(np.where(top_two > 0, least_three / top_two, -math.inf))))
            quartics.append(float(np.max(np.where(least_two > 0, top_four / least_two, math.inf))))
    cubic, quartic = float(np.min(cubics)), float(np.max(quartics))
    sound = square < 0.1 and skew < 0.1 and math.isfinite(quartic)
    return (cubic if cubic > 2 else 2.0), (quartic if sound else math.inf)


@lru_cache(maxsize=256)
def moment_rates(noise: NoiseLaw, largest: float, tail: float, *, triple: bool = False) -> MomentRates:
    """Bounds for every order in ORDERS and every shift in (0, largest], certified on intervals.

    Raises:
        AccountingError: the shift is too long for the trials, or the search would take too long.
    """
    if not largest < MOST_STEPS:
        raise AccountingError(f"a shift of {largest:.3g} steps is too large to account in L2")
    window = _Window.of(noise, largest, tail, triple=triple)
    base = window.base
    breaks = _intervals(largest, RATIO)
    orders = ORDERS
    if breaks.size * base.size > FINE_CELLS:
        breaks, orders = _intervals(largest, COARSE_RATIO), THIN_ORDERS
    # Checked before the arrays of this size are made: the settings of a run must not exhaust a client's memory.
    if breaks.size * base.size > MOST_CELLS:
        raise AccountingError(f"a shift of {largest:.3g} steps with {noise} takes too long to account in L2")
    log_ratio = _log_ratio(window.moved(breaks), base)
    unit = min(1.0, largest)
    score = (window.moved(np.array([unit]))[0] / base - 1.0) / unit
    rates = np.full(orders.size, math.inf)
    for row, order in enumerate(orders.tolist()):
        excess = np.maximum(np.maximum(*_excess(log_ratio, base, order)), 0.0)
        if not np.all(np.isfinite(excess)):
            break  # moments grow with the order: larger ones overflow as well
        with np.errstate(over="ignore", invalid="ignore"):
            rates[row] = max(_below_the_first_break(order, float(breaks[0]), score, base), _chord_bound(breaks, excess))
    fine = _intervals(largest, FINE_RATIO)
    if fine.size * base.size > MOST_CELLS:
        fine = breaks
    cubic, quartic = _third_and_fourth(fine, _log_ratio(window.moved(fine), base), base, score)
    return MomentRates(
        # The largest log moment is convex in the order, so chords bound the orders that were left out.
        per_square=chords(orders, rates, ORDERS),
        cubic=cubic,
        quartic=quartic,
        tail=window.left_out,
        drift=float(abs(base @ score)),
    )


def chords(orders: npt.NDArray[np.int64], bounds: Floats, wanted: npt.NDArray[Any]) -> Floats:
    """Bounds at the `wanted` orders, by chords between the bounds at `orders`; infinite beyond the last of them.

    Valid for a function that is convex in the order.
    """
    with np.errstate(invalid="ignore"):
        between: Floats = np.interp(wanted, orders, bounds)
    between[np.isnan(between) | (wanted > orders[-1])] = math.inf
    # np.interp turns a finite bound beside an infinite one into NaN: put the known bounds back.
    known = np.isin(wanted, orders)
    between[known] = bounds[np.searchsorted(orders, wanted[known])]
    between[np.isnan(between)] = math.inf
    return between


TAIL_FRACTION = 1e-3
"""The part of delta that the tails may use up."""
LEAST_TAIL, MOST_TAIL = 1e-250, 1e-9
"""Bounds on the mass that one coordinate may move to delta."""
SPLITS = np.concatenate([[0.0], 1 - 0.5 ** np.arange(1, 11)])
"""Likelihood ratios below which the remainder of the "add" expansion is bounded separately; 0 means no split."""
FLOAT_MARGIN = 1e-9
"""Sums of moments are raised by this fraction: logarithms of binomial coefficients of order 2^15 are off by 1e-10."""
_EVERY_ORDER = np.arange(MAX_ORDER + 1)


def _log_comb(n: Floats | float, k: Floats | float) -> Floats:
    n, k = np.asarray(n, dtype=np.float64), np.asarray(k, dtype=np.float64)
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def _message_log_moments(release: Release, rates: MomentRates) -> tuple[Floats, float, float]:
    """For one unsampled message: bounds on log M_k for k = 0 .. MAX_ORDER, the mass of the tails, and the drift."""
    spread = math.sqrt(release.terms.dimension)
    length = release.shift_l2 + spread * ROUNDING_SLACK_STEPS
    drift = rates.drift * spread * length
    # The law is symmetric but for a relative `uneven`, which moves a moment by (1 + uneven)^(2k) per coordinate.
    uneven = mirror_distance(release.mechanism.law) * release.terms.dimension
    with np.errstate(over="ignore", invalid="ignore"):
        known = rates.per_square * length**2 + ORDERS * (drift + 2 * uneven)
    # M_0 = Q(kept) and M_1 = P(kept) are at most 1.
    orders, bounds = np.concatenate([[0, 1], ORDERS]), np.concatenate([[0.0, 0.0], known])
    return chords(orders, bounds, _EVERY_ORDER), release.terms.dimension * rates.tail, drift + uneven


def _log_expm1(x: Floats) -> Floats:
    """log(e^x - 1) for x >= 0, to full relative precision; minus infinity at 0."""
    return np.where(x > 1, x + np.log1p(-np.exp(-np.maximum(x, 1))), np.log(np.expm1(np.minimum(x, 1))))


def _log1p_sum(logs: Floats) -> float:
    """log(1 + sum of exp(logs)), raised by FLOAT_MARGIN so that float error cannot make it too small."""
    return float(np.logaddexp(0.0, logsumexp(logs))) * (1 + FLOAT_MARGIN)


def _mixed(log_moments: Floats, rate: float) -> Floats:
    """log(1 - g + g M_a), which bounds a sampled moment in either direction by joint convexity; at most log M_a."""
    whole = log_moments[ORDERS]
    mixed: Floats = np.minimum(np.logaddexp(0.0, math.log(rate) + _log_expm1(whole)), whole)
    return mixed


def _removed(log_moments: Floats, rate: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^a], "remove" (Claim 4): a binomial sum of M_k - 1 for k >= 2."""
    result = np.empty(ORDERS.size)
    excess = _log_expm1(log_moments)
    for row, a in enumerate(ORDERS.tolist()):
        k = np.arange(2, a + 1, dtype=np.float64)
        weights = _log_comb(float(a), k) + (a - k) * math.log1p(-rate) + k * math.log(rate)
        result[row] = _log1p_sum(weights + excess[2 : a + 1])
    return result


def _added(log_moments: Floats, rates: MomentRates, rate: float, edge: float, drift: float) -> Floats:
    """log E_Q[(1 - g + g P/Q)^(1-a)], "add" (Claim 4), expanded to second or fourth order in g (P/Q - 1) >= -g.

    With v = log M_2, M_3 >= e^(cubic v) and M_4 <= e^(quartic v). The bound is the largest over all v up to the bound
    on log M_2, on intervals: terms that raise it are taken at the upper end, terms that lower it at the lower end.
    Outcomes with P/Q < split have a larger remainder but are rare, by Chernoff's bound.
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
        near, far = (c4 * np.exp(-(n + 4) * math.log1p(-rate * most)) for most in (1 - split, 1.0))
        rising = np.outer(c2 + 3 * c3 + 6 * near, square) + np.outer(near, fourth)
        falling = np.outer(c3 + 4 * near, cube)
        curve = np.max(rising - falling + FLOAT_MARGIN * np.abs(rising), axis=1)
        expanded = curve + (2 * c2 + 4 * c3 + 8 * near) * edge + far * rare
        best = np.fmin(best, np.fmin(second, expanded))
    # (1 - g + g r)^-n <= r^(-g n), by concavity of the logarithm: the better bound where g n is large.
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
    """For one sampled message: log moments at ORDERS, the larger of "add" and "remove", and the mass moved to delta."""
    nothing_proven = np.full(ORDERS.size, math.inf), 0.0
    if release.mechanism.trials == 0:
        return nothing_proven
    # Fixed-size batches need the third law, with and without sampling.
    triple = release.terms.sensitivity.relation is Relation.REPLACE
    try:
        rates = moment_rates(release.mechanism.law, release.shift + ROUNDING_SLACK_STEPS, tail, triple=triple)
    except AccountingError:
        return nothing_proven
    rate = release.terms.sampling.rate
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        moments, edge, drift = _message_log_moments(release, rates)
        if not edge < 1:
            return nothing_proven
        if rate == 1.0:
            total = moments[ORDERS]
        elif release.terms.sampling.scheme is Scheme.FIXED_SIZE:
            total = np.fmin(_without_replacement(moments, rate, edge), _mixed(moments, rate))
        else:
            mixed = _mixed(moments, rate)
            removed = np.fmin(_removed(moments, rate), mixed)
            added = np.fmin(_added(moments, rates, rate, edge, drift), mixed)
            total = np.maximum(removed, added)
    return np.where(np.isnan(total), math.inf, np.maximum(total, 0.0)), edge


def _totals(spent: Spent, delta: float) -> tuple[Floats, float]:
    """For everything spent: log moments at ORDERS, and the mass moved to delta."""
    coordinates = sum(rounds * release.terms.dimension for release, rounds in spent)
    # A power of ten below the allowed mass, so that similar queries share the cached moments.
    tail = 10.0 ** math.floor(math.log10(TAIL_FRACTION) + math.log10(delta) - math.log10(coordinates))
    tail = min(max(tail, LEAST_TAIL), MOST_TAIL)
    moments, edge = np.zeros(ORDERS.size), 0.0
    for release, rounds in spent:
        log_moments, left_out = _log_moments(release, tail)
        moments, edge = moments + rounds * log_moments, edge + rounds * left_out
    return moments, edge


def epsilon(spent: Spent, delta: float) -> float:
    """The smallest epsilon over all orders at `delta`; infinity if the tails alone weigh more than delta."""
    moments, edge = _totals(spent, delta)
    if not edge < delta:
        return math.inf
    figures = (moments - math.log(delta - edge) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)) / (ORDERS - 1)
    return max(0.0, float(np.min(figures)))


def delta(spent: Spent, epsilon: float) -> float:
    """The smallest delta over all orders at `epsilon`."""
    moments, edge = _totals(spent, 1e-9)
    logs = moments - (ORDERS - 1) * min(epsilon, 1e9) + (ORDERS - 1) * np.log1p(-1 / ORDERS) - np.log(ORDERS)
    return min(1.0, edge + math.exp(min(0.0, float(np.min(logs)))))


def delta_floor(spent: Spent, delta: float) -> float:
    """The mass of the tails that is part of `delta`."""
    return _totals(spent, delta)[1]
