"""Moments of one coordinate's likelihood ratio, bounded over every shift at once: what an L2 sensitivity needs.

With a shift vector u, ||u||_2 <= D2 and |u_j| <= U, the k-th moment M_k = E_Q[(P/Q)^k] of a message is a product over
coordinates, so log M_k = sum_j psi_k(u_j) <= D2^2 sup_{0 < u <= U} psi_k(u) / u^2: a search in one dimension, certified
here on intervals (docs/accounting.md, Claim 5). Outcomes in the far tails, where the ratio explodes, are first moved to
delta: `tail` is the mass left out a coordinate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import AccountingError
from bqsgd.noise import binomial_pmf
from bqsgd.privacy.pair import Floats

MAX_ORDER = 1 << 15
_DENSE = 128
ORDERS = np.concatenate(
    [np.arange(2, _DENSE + 1), np.unique(np.geomspace(_DENSE, MAX_ORDER, 41).round().astype(np.int64))[1:]]
)
"""The orders whose moments are computed: every integer to 128, then ever fewer. Small epsilons need the large ones."""
RATIO, FINE_RATIO = 1.02, 1.002
COARSE_RATIO = 1.1
"""For laws too wide for RATIO: a chord is then at most 0.3 % above its curve."""
FINE_CELLS, MOST_CELLS = 1_000_000, 4_000_000
"""Shifts times outcomes up to which RATIO and every order are used, and above which L2 accounting is refused."""
THIN_ORDERS = ORDERS[(ORDERS <= 16) | (np.arange(ORDERS.size) % 3 == 0) | (ORDERS == MAX_ORDER)]
SMALLEST = 1e-3
"""Shifts below U * SMALLEST are covered by a Taylor bound instead of the grid."""
MOST_STEPS = 500.0
"""Longer shifts are not accounted in L2: their smallest shifts would leave the range of the Taylor bound."""


@dataclass(frozen=True, kw_only=True)
class MomentRates:
    """per_square[i] bounds psi_k(u) / u^2, k = ORDERS[i], for both orders of laws and all shifts.

    psi_3 >= cubic psi_2 and psi_4 <= quartic psi_2 for every shift, but for the tails. `tail` is the mass moved to
    delta a coordinate, `drift` what cutting the tails adds to psi_k in first order: at most k * drift * u.
    """

    per_square: Floats
    cubic: float
    quartic: float
    tail: float
    drift: float


@dataclass(frozen=True, kw_only=True)
class _Window:
    """The outcomes of one coordinate that are kept: `cut` of 0 .. m + R (R = ceil U) are lost on either side.

    A pair between integers is kept on one outcome less a side, so that its moments are bounded at both ends of its
    cell; three laws at once (`triple`) on R less again (Claims 4 and 5). `left_out` is the mass of what is lost then.
    """

    law: Floats
    reach: int
    cut: int
    left_out: float

    @classmethod
    def of(cls, trials: int, largest: float, tail: float, *, triple: bool) -> _Window:
        law = binomial_pmf(trials).pmf
        reach = math.ceil(largest)
        more = reach if triple else 0
        below = np.cumsum(law)
        cut = max(reach, int(np.searchsorted(below, tail / 2, side="right")) - 1 - more)
        if 2 * (cut + more) >= law.size:
            raise AccountingError(f"a shift of {largest:.3g} steps leaves nothing of {trials} trials to account in L2")
        return cls(law=law, reach=reach, cut=cut, left_out=2 * float(below[cut + more]))

    @property
    def outcomes(self) -> npt.NDArray[np.int64]:
        return np.arange(self.cut, self.law.size + self.reach - self.cut)

    @property
    def base(self) -> Floats:
        """P(0) on the kept outcomes."""
        return self.law[self.outcomes]

    def moved(self, shifts: Floats) -> Floats:
        """P(u) on the kept outcomes, a row for each shift."""
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
    """sum P^k Q^(1-k) - 1 for each shift: order A is sum P(0) r^k; order B, P(0)^k P(u)^(1-k), is sum P(0) r^(1-k)."""
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is infinite, and so not used
        return np.expm1(order * log_ratio) @ base, np.expm1((1 - order) * log_ratio) @ base


def _intervals(largest: float, ratio: float) -> Floats:
    """Shifts from U * SMALLEST to U, geometric, with every integer between as a break, and three more beside U."""
    count = math.ceil(math.log(1 / SMALLEST) / math.log(ratio)) + 1
    grid = np.geomspace(largest * SMALLEST, largest, count)
    last = np.linspace(max(grid[0], math.ceil(largest) - 1.0), largest, 4)  # the last cell has at least three intervals
    return np.unique(np.concatenate([grid, last, np.arange(1.0, math.floor(largest) + 1)]))


def _chord_bound(u: Floats, y: Floats) -> float:
    """sup of log(1 + y(u)) / u^2 when y is convex between breaks: y is below its chord a + b u there."""
    y1, y2, u1, u2 = y[:-1], y[1:], u[:-1], u[1:]
    slope = (y2 - y1) / (u2 - u1)
    start = y1 - slope * u1
    best = np.maximum(y1 / u1**2, y2 / u2**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = -2 * start / slope
        inside = np.isfinite(peak) & (peak > u1) & (peak < u2)
        best = np.where(inside, np.maximum(best, slope**2 / (-4 * start)), best)
    least = np.minimum(y1, y2)
    shrink = np.where(least > 1e-12, np.log1p(least) / np.maximum(least, 1e-300), 1.0)
    return float(np.max(best * shrink))


def _second_difference(order: int, x: Floats) -> Floats:
    """((1 + x)^order - 1 - order x) / x^2 for x > -1; where that cancels, half the largest second derivative."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        direct = (np.expm1(order * np.log1p(x)) - order * x) / x**2
        bound = order * (order - 1) / 2 * np.maximum(1.0, np.exp((order - 2) * np.log1p(x)))
    result: Floats = np.where(np.abs(order * x) > 0.01, direct, bound)
    return result


def _below_the_first_break(order: int, least: float, score: Floats, base: Floats) -> float:
    """sup over 0 < u <= least of (moment - 1 - its first-order term) / u^2, the larger of the two orders of laws.

    With S = B_1/B_0 - 1 >= -1 the moments are E[(1 + uS)^k] and E[(1 + uS)^(1-k)]. The second difference of x^k grows
    with x, that of x^(1-k) falls, so each outcome is at its largest at u = least or in the limit u = 0.
    """
    limit = order * (order - 1) / 2
    up = np.where(score > 0, _second_difference(order, least * score), limit)
    down = np.where(score < 0, _second_difference(1 - order, least * score), limit)
    square = base * score**2
    return float(max(up @ square, down @ square))


def _least_between(u: Floats, y: Floats) -> Floats:
    """A lower bound on each interval of a function convex between integers: the neighbours' chords, extended."""
    width, slope = np.diff(u), np.diff(y) / np.diff(u)
    inner = u[1:-1] != np.floor(u[1:-1])  # the break is no integer: the intervals beside it share a cell
    from_left = np.full(width.size, -math.inf)
    from_left[1:] = np.where(inner, y[1:-1] + np.minimum(slope[:-1], 0.0) * width[1:], -math.inf)
    from_right = np.full(width.size, -math.inf)
    from_right[:-1] = np.where(inner, y[1:-1] - np.maximum(slope[1:], 0.0) * width[:-1], -math.inf)
    result: Floats = np.maximum(from_left, from_right)
    return result


def _third_and_fourth(breaks: Floats, log_ratio: Floats, base: Floats, score: Floats) -> tuple[float, float]:
    """(cubic, quartic): the least psi_3 / psi_2 and the largest psi_4 / psi_2 over all shifts and both orders of laws.

    On an interval a convex function is at most its larger end and at least its neighbours' chords. Below the first
    break both are ratios of Taylor polynomials with remainder (Claim 5). M_3 >= M_2^2 always, so cubic is at least 2;
    quartic is infinite where the tails that were cut outweigh the moments.
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
def moment_rates(trials: int, largest: float, tail: float, *, triple: bool = False) -> MomentRates:
    """Certified rates for every order in ORDERS and every shift in (0, largest].

    Raises:
        AccountingError: the shift is too long for the trials, or the search would take too long.
    """
    if not largest < MOST_STEPS:
        raise AccountingError(f"a shift of {largest:.3g} steps is too large to account in L2")
    window = _Window.of(trials, largest, tail, triple=triple)
    base = window.base
    breaks = _intervals(largest, RATIO)
    orders = ORDERS
    if breaks.size * base.size > FINE_CELLS:
        breaks, orders = _intervals(largest, COARSE_RATIO), THIN_ORDERS
    if breaks.size * base.size > MOST_CELLS:
        raise AccountingError(f"a shift of {largest:.3g} steps with {trials} trials takes too long to account in L2")
    log_ratio = _log_ratio(window.moved(breaks), base)
    unit = min(1.0, largest)
    score = (window.moved(np.array([unit]))[0] / base - 1.0) / unit
    rates = np.full(orders.size, math.inf)
    for row, order in enumerate(orders.tolist()):
        excess = np.maximum(np.maximum(*_excess(log_ratio, base, order)), 0.0)
        if not np.all(np.isfinite(excess)):
            break  # larger orders are infinite as well
        with np.errstate(over="ignore", invalid="ignore"):
            rates[row] = max(_below_the_first_break(order, float(breaks[0]), score, base), _chord_bound(breaks, excess))
    fine = _intervals(largest, FINE_RATIO)
    if fine.size * base.size > MOST_CELLS:
        fine = breaks
    cubic, quartic = _third_and_fourth(fine, _log_ratio(window.moved(fine), base), base, score)
    return MomentRates(
        # The largest log-moment is convex in the order, so chords bound the orders that were left out.
        per_square=chords(orders, rates, ORDERS),
        cubic=cubic,
        quartic=quartic,
        tail=window.left_out,
        drift=float(abs(base @ score)),
    )


def chords(orders: npt.NDArray[np.int64], bounds: Floats, wanted: npt.NDArray[Any]) -> Floats:
    """Bounds at the `wanted` orders of a function convex in the order, from those at `orders`; infinite beyond."""
    with np.errstate(invalid="ignore"):
        between: Floats = np.interp(wanted, orders, bounds)
    between[np.isnan(between) | (wanted > orders[-1])] = math.inf
    known = np.isin(wanted, orders)
    between[known] = bounds[np.searchsorted(orders, wanted[known])]
    between[np.isnan(between)] = math.inf
    return between
