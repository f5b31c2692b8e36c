"""One message under an L2 bound as well: the pair that dominates every shift vector of norm D2 with coordinates to U.

A shape says how a shift vector spends its squared norm on shifts u and on the two orders A and B. The curve of a
message is a sum over points s of a vertical line of M(s), the moments of its likelihood ratio, and log M is linear in
the shape. All log M lie close together, so the curve is nearly linear in the shape too: its largest value over the
corners (all coordinates alike), plus a remainder of second order that is computed, bounds every shape
(docs/accounting.md, Claim 10).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bqsgd.errors import AccountingError
from bqsgd.noise import binomial_pmf, mirror_distance
from bqsgd.privacy._pairs import Floats, Pair, charged, on_grid

Complexes = npt.NDArray[np.complex128]
TAIL = 1e-15
"""Mass of one message that caps on likelihood ratios may move to delta; MOST_MOVED is more than it can be worth."""
MOST_MOVED = 0.1
WIDE_GAP, NARROW_GAP = 0.05, 0.01
"""Neighbouring shifts u of the grid differ by a share of WIDE_GAP, or of NARROW_GAP D2 / u where that is less."""
SERIES_SHARE = 1 / 200
"""Shifts below D2 times this are covered by a series in the shift instead of the grid."""
MOST_STEPS = 600.0
"""Longest shift of a coordinate, in steps, that is looked at: the grid holds every whole number."""
LINE_END, LINE_STEP = 45.0, 0.4
"""Length and spacing of the line Re s = a, in units of 1 / mu; mu is D2 over the deviation of the noise."""
TILTS = np.geomspace(0.5, 11.0, 20)
"""(a - 1) mu of the lines that are tried; each z takes the best."""
SMOOTHINGS = (0.004, 0.01)
"""Shares of mu^2 that are spent on smoothing the curve, so that the sum over the line ends early; likewise."""
CURVE_STEP, CURVE_END = 0.02, 24.0
"""Grid of the curve in log z, in units of mu: its step, and how far it goes beyond mu / 2."""
COORDINATE_STEP, MOST_ATOMS = 0.05, 600
"""A coordinate of more atoms than this is put on a grid of losses with this step, in deviations of the loss."""
EPSILON = 2.0**-52


@dataclass(frozen=True, kw_only=True)
class _Corners:
    """Every shift of the grid in both orders, as capped pairs, and the score that the series below the grid needs.

    losses, masses: of each shift order A, then order B; masses under Q. score: B_1/B_0 - 1, capped, under B_0.
    first: the largest shift of the series. spent: the squared norm with what mixing two shifts of the grid costs.
    moved: the most that caps move to delta in one message.
    """

    shifts: Floats
    losses: tuple[Floats, ...]
    masses: tuple[Floats, ...]
    score: Floats
    score_mass: Floats
    first: float
    spent: float
    moved: float


def _grid(least: float, largest: float, length: float) -> Floats:
    """Shifts from `least` to `largest` and every whole number between: P(u) is affine between whole numbers."""
    if largest <= least:
        return np.zeros(0)
    points = [largest]
    while points[-1] > least:
        share = min(WIDE_GAP, NARROW_GAP * length / points[-1])
        points.append(max(least, points[-1] / (1 + share)))
    return np.unique(np.concatenate([points, np.arange(math.ceil(least), largest)]))


@dataclass(frozen=True, kw_only=True)
class _Ratio:
    """A pair of laws on a list of outcomes: P/Q - 1 (0 where Q is 0), and both masses."""

    excess: Floats
    p: Floats
    q: Floats


def _orders(trials: int, shift: float) -> tuple[_Ratio, _Ratio]:
    """A = (P(shift), P(0)) and B = (P(0), P(shift)) on the outcomes that either can produce."""
    law = binomial_pmf(trials).pmf
    whole = math.ceil(shift) - 1  # a whole shift is the upper end of its cell
    part = shift - whole
    moved, still = np.zeros(law.size + whole + 1), np.zeros(law.size + whole + 1)
    still[: law.size] = law
    moved[whole : whole + law.size] += (1 - part) * law
    moved[whole + 1 :] += part * law
    both = (moved > 0) & (still > 0)
    up = np.where(still > 0, -1.0, 0.0)
    if whole == 0:  # keeps the digits of small shifts
        up[: law.size] = shift * (np.concatenate([[0.0], law[:-1] / law[1:]]) - 1.0)
        down = np.where(moved > 0, -1.0, 0.0)
        down[both] = -up[both] * (still[both] / moved[both])
    else:
        up[both] = moved[both] / still[both] - 1.0
        down = np.where(moved > 0, -1.0, 0.0)
        down[both] = still[both] / moved[both] - 1.0
    return _Ratio(excess=up, p=moved, q=still), _Ratio(excess=down, p=still, q=moved)


def _capped(pair: _Ratio, allowed: float) -> tuple[Floats, Floats, float]:
    """P/Q - 1 with a cap on it, the Q-masses, and the mass moved to delta, at most `allowed` if that can be.

    What P has above the cap, or without Q, is moved; the ratio is then raised everywhere by the moved mass, so that its
    mean is 1 again.
    """
    seen = pair.q > 0
    lost = float(pair.p[~seen].sum())
    excess, q = pair.excess[seen], pair.q[seen]
    order = np.argsort(excess, kind="stable")
    excess, q = excess[order], q[order]
    above, mass_above = np.cumsum((q * excess)[::-1])[::-1], np.cumsum(q[::-1])[::-1]
    cut = np.maximum(above - excess * mass_above, 0.0)  # what a cap at each outcome's ratio moves
    cut[-1] = 0.0
    at = int(np.argmax(lost + cut <= max(allowed, lost)))
    moved = lost + float(cut[at])
    return np.minimum(excess, excess[at]) + moved, q, moved


def _few_atoms(excess: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Losses and Q-masses of a capped pair; where they are many, on a grid (connecting the dots dominates)."""
    seen = excess > -1.0
    loss, q = np.log1p(excess[seen]), q[seen]
    if loss.size <= MOST_ATOMS:
        return loss, q
    p = q * np.exp(loss)
    mean = float(p @ loss)
    deviation = math.sqrt(float(p @ (loss - mean) ** 2))
    near = np.abs(loss - mean) < 15 * deviation
    major = np.where(loss < 0, q, p)
    pair = on_grid(loss[near], major[near], step=COORDINATE_STEP * deviation, p_only=0.0, q_only=0.0)
    used = pair.major > 0
    return np.concatenate([loss[~near], pair.loss[used]]), np.concatenate([q[~near], pair.q[used]])


def _corners(trials: int, largest: float, length: float, dimension: int) -> _Corners:
    mu = length / math.sqrt(trials / 4)
    sum_of_shifts = math.sqrt(dimension) * length
    first = min(largest, SERIES_SHARE * length, mu, 0.5)
    shifts = _grid(first, largest, length)
    linear = TAIL / (4 * sum_of_shifts)
    score, score_mass, moved = _capped(_orders(trials, 1.0)[0], linear)
    linear, square = max(linear, moved / (1 - first)), 0.0
    losses, masses = [], []
    for u in shifts.tolist():
        for pair in _orders(trials, u):
            excess, q, moved = _capped(pair, linear * u + TAIL / 4 * (u / length) ** 2)
            square = max(square, (moved - linear * u) / u**2)
            loss, q = _few_atoms(excess, q)
            losses.append(loss)
            masses.append(q)
    # A coordinate moves at most linear u + square u^2 of P; below the grid order B gives up a share linear u of Q.
    share = linear * sum_of_shifts
    if not share < MOST_MOVED:
        raise AccountingError(f"outcomes that only one neighbour has weigh {share:.3g}, too much for the L2 route")
    mixing = float(np.max(np.diff(shifts) ** 2 / (4 * shifts[1:] * shifts[:-1]), initial=0.0))
    return _Corners(
        shifts=shifts,
        losses=tuple(losses),
        masses=tuple(masses),
        score=score,
        score_mass=score_mass,
        first=first,
        spent=min(length**2 * (1 + mixing), dimension * largest**2),
        moved=share + square * length**2 + share / (1 - share),
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """What is known of log M of every shape at the points s of one line.

    corners: log M of the corners, row by row; of a shape it is a mean of these up to `error`, its real part at most
    `top`. rounding: the float error of M, in units of its largest value.
    """

    s: Complexes
    corners: Complexes
    error: Floats
    top: Floats
    rounding: Floats


def _choose(s: Complexes, j: int) -> Complexes:
    """The binomial coefficient of s over j."""
    result = np.ones_like(s)
    for i in range(j):
        result = result * (s - i) / (i + 1)
    return result


def _series(corners: _Corners, s: Complexes) -> tuple[Complexes, Floats]:
    """log M a unit of squared norm for shifts up to `first`: the ends of its segment in both orders, and the error.

    M = E[(1 + u S)^s] = 1 + C(s, 2) u^2 E[S^2] + C(s, 3) u^3 E[S^3] + ..., with 1 - s for s in order B.
    """
    first, score, mass = corners.first, corners.score, corners.score_mass
    second, third = float(mass @ score**2), float(mass @ score**3)
    ends, error = [], np.zeros(s.size)
    for power in (s, 1 - s):
        growth = np.maximum(1.0, (1 + first * score) ** (float(power[0].real) - 4.0))
        c2, c3 = _choose(power, 2) * second, _choose(power, 3) * third
        rest = np.abs(_choose(power, 4)) * float(mass @ (score**4 * growth))
        size = np.abs(c2) + first * np.abs(c3) + first**2 * rest  # |M - 1| <= u^2 size
        size = np.where(first**2 * size <= 0.5, size, np.inf)  # |log(1 + y) - y| <= |y|^2 needs |y| <= 1/2
        error = np.maximum(error, first**2 * (rest + size**2))
        ends += [c2, c2 + first * c3]
    return np.array(ends), error


def _log_moments(corners: _Corners, orders: Floats, t: Floats) -> Complexes:
    """log M of one coordinate at each shift of the grid and order, indexed [line, corner, point]."""
    logs = np.empty((orders.size, len(corners.losses), t.size), dtype=np.complex128)
    for i, (loss, mass) in enumerate(zip(corners.losses, corners.masses, strict=True)):
        weights = mass * np.exp(np.outer(orders, loss))
        angle = np.outer(loss, t)
        logs[:, i] = np.log(weights @ np.cos(angle) + 1j * (weights @ np.sin(angle)))
    return logs


def _line(corners: _Corners, s: Complexes, log: Complexes, variance: float) -> _Line:
    squares = np.repeat(corners.shifts**2, 2)[:, None]
    # Any branch will do, for M is a product of such factors: take the one nearest to the Gaussian's.
    log = log - 2j * np.pi * np.round((log - squares * s * (s - 1) / (2 * variance)).imag / (2 * np.pi))
    ends, error = _series(corners, s)
    mixed, slack = np.zeros(s.size), 0.0
    if corners.shifts.size > 1:  # a shift between two of the grid is a mixture of both
        low, high = squares[:-2], squares[2:]
        gap = np.abs(log[:-2] - log[2:])
        bend = gap**2 * np.exp(gap) / 2
        bend = np.where(bend < 2, bend / (1 - np.minimum(bend, 2) / 4), np.inf)
        mixed = np.max(bend / (np.sqrt(low) + np.sqrt(high)) ** 2, axis=0)
        slack = float(np.max((high - low) ** 2 / (8 * low)))
    rate = (log / squares).real.max(axis=0, initial=-1e100)
    largest = np.maximum(rate + slack * rate**2, ends.real.max(axis=0) + error)
    return _Line(
        s=s,
        corners=np.concatenate([log / squares, ends]) * complex(corners.spent),
        error=corners.spent * np.maximum(error, mixed),
        top=corners.spent * largest,
        rounding=corners.spent * EPSILON * (MOST_ATOMS / corners.first**2 + 8 * np.abs(s) / corners.first),
    )


def _second_order(v: Floats) -> Floats:
    """(e^v - 1 - v) / v^2: |e^x - 1 - x| is at most |x|^2 times this for any v >= Re x."""
    small = np.abs(v) < 1e-2
    other = np.where(small, 1.0, v)
    result: Floats = np.where(small, 0.5 + v / 6 + v**2 / 20, (np.expm1(other) - other) / other**2)
    return result


def _heights(line: _Line, log_z: Floats, turns: Complexes, smoothing: float) -> Floats:
    """An upper bound on the curves of all shapes at each z; `turns` is z^(-i t)."""
    s = line.s
    a, step, end = float(s[0].real), float(s[1].imag), float(s[-1].imag)
    real, imag = line.corners.real, line.corners.imag
    centre = (real.max(axis=0) + real.min(axis=0) + 1j * (imag.max(axis=0) + imag.min(axis=0))) / 2
    away = line.corners - centre
    scale = float(line.top[0])
    far_off = np.abs(away).max(axis=0) + line.error
    first_and_second = line.error + far_off**2 * _second_order(away.real.max(axis=0) + line.error)
    near_rest, far_rest = np.exp(centre.real - scale) * first_and_second, np.exp(line.top - scale)
    near = near_rest < far_rest  # elsewhere nothing is known but the size of M
    weight = np.where(np.arange(s.size) == 0, 1.0, 2.0) * step / (2 * np.pi) / (s * (s - 1))
    weight = weight * np.exp(smoothing * s * (s - 1) / 2)
    rest = float(np.abs(weight) @ (np.where(near, near_rest, far_rest) + line.rounding))
    rest += math.exp(smoothing * (a * (a - 1) - end**2) / 2) / (math.pi * end)  # beyond the end of the line
    main = weight[near] * np.exp(centre[near] - scale)
    linear = (turns[:, near] @ (main * (1 + away[:, near])).T).real.max(axis=1)
    result: Floats = np.exp(scale + (1 - a) * log_z) * (linear + rest)
    return result


def _symmetric(step: float, heights: Floats) -> Pair:
    """The pair whose curve is the lower hull of the points (e^(i step), heights[i]), and its own mirror image.

    A convex curve below the points is below the hull, between them too. Where the slope at z = 1 is too steep for the
    mirror image to join, the chord to the mirror image of a point is lower than the first point and as good.
    """
    z = np.exp(step * np.arange(heights.size))
    kept: list[int] = []
    for i in range(heights.size):
        while len(kept) >= 2:
            j, k = kept[-2], kept[-1]
            if (heights[k] - heights[j]) * (z[i] - z[k]) <= (heights[i] - heights[k]) * (z[k] - z[j]):
                break
            kept.pop()
        kept.append(i)
    chord = (2 * heights + z - 1) / (z + 1)  # at z = 1, to the mirror image (1/z, 1 - 1/z + H/z)
    while len(kept) > 2:
        k, after = kept[1], kept[2]
        low = min(heights[0], chord[k])
        if (low - heights[k]) / (z[k] - 1) >= (heights[k] - heights[after]) / (z[after] - z[k]):
            break
        kept.pop(1)
    at = np.array(kept)
    curve = heights[at]
    curve[0] = min(heights[0], chord[at[1]])
    slope = np.append((curve[:-1] - curve[1:]) / np.diff(z[at]), 0.0)
    mass = np.zeros(heights.size)
    mass[at[1:]] = np.maximum(slope[:-1] - slope[1:], 0.0) * z[at[1:]]
    middle = max(0.0, 1.0 - float(curve[0]) - 2 * float(slope[0]))
    major = np.concatenate([mass[:0:-1], [middle], mass[1:]])
    edge = float(curve[-1])
    return Pair(step=step, first=1 - heights.size, major=major, p_only=edge, q_only=edge)


@lru_cache(maxsize=64)
def shaped_pair(trials: int, largest: float, length: float, dimension: int) -> Pair:
    """The pair that dominates a message whose shift vector has norm `length` and coordinates up to `largest` steps.

    Raises:
        AccountingError: the shift is too long to look at.
    """
    largest = min(largest, length)
    if largest > min(MOST_STEPS, binomial_pmf(trials).pmf.size - 1):
        raise AccountingError(f"a shift of {largest:.3g} steps is too long for {trials} trials in L2")
    variance = trials / 4
    corners = _corners(trials, largest, length, dimension)
    mu = math.sqrt(corners.spent / variance)
    t = np.arange(0.0, LINE_END, LINE_STEP) / mu
    step = CURVE_STEP * mu
    log_z: Floats = step * np.arange(math.ceil((mu / 2 + CURVE_END) / CURVE_STEP), dtype=np.float64)
    turns = np.exp(-1j * np.outer(log_z, t))
    heights = np.ones(log_z.size)
    orders = 1 + TILTS / mu
    with np.errstate(all="ignore"):  # a line on which moments overflow gives nan or infinity, and is passed over
        for a, log in zip(orders, _log_moments(corners, orders, t), strict=True):
            line = _line(corners, a + 1j * t, log, variance)
            for share in SMOOTHINGS:
                heights = np.fmin(heights, _heights(line, log_z, turns, share * mu**2) + corners.moved)
    uneven = 4 * dimension * mirror_distance(trials)  # the law is not quite symmetric: claim 1
    return charged(_symmetric(step, np.minimum.accumulate(heights)), uneven)
