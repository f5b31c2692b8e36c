"""One message under an L2 bound as well: the pair that dominates every shift vector u, ||u||_2 <= D2, |u_j| <= U.

This is Claim 10 in docs/accounting.md; "step" below means a step of its proof. A *shape* says how a shift vector spends
its squared norm: on which shifts, and in which of the orders A and B. The curve of a message is a sum over points s of
a vertical line of M(s), the moments of its likelihood ratio (step 4), and log M is linear in the shape (step 5). All
log M lie close together, so the curve is nearly linear in the shape as well. Its largest value over the corners (shapes
with all coordinates alike) plus a computed remainder of second order bounds every shape (step 6).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import AccountingError
from bqsgd._src.laws import NoiseLaw, mirror_distance
from bqsgd._src.privacy._message import shifted_laws
from bqsgd._src.privacy._pairs import Atoms, Floats, Pair, charged

Complexes = npt.NDArray[np.complex128]
TAIL = 1e-15
"""Mass of one message that the caps on likelihood ratios may move to delta (step 3), if the law allows it."""
MOST_MOVED = 0.1
"""If the caps must move more than this, the bound would be worthless: AccountingError, and another route decides."""
WIDE_GAP, NARROW_GAP = 0.05, 0.01
"""Neighbouring shifts u of the grid differ by a factor of 1 + WIDE_GAP, or 1 + NARROW_GAP D2 / u if that is less."""
SERIES_FRACTION = 1 / 200
"""Shifts below this fraction of D2 are covered by a series in the shift, not by the grid."""
MOST_STEPS = 600.0
"""Longest shift of a coordinate, in quantiser steps. The grid holds every whole number up to it."""
LINE_END, LINE_STEP = 45.0, 0.4
"""Length and spacing of the line Re s = a, in units of 1 / mu; mu is D2 over the standard deviation of the noise."""
TILTS = np.geomspace(0.5, 11.0, 20)
"""(a - 1) mu of the lines that are tried; each z takes the smallest bound."""
SMOOTHINGS = (0.004, 0.01)
"""Log-variances of Y in step 4, in units of mu^2: smoothing lets the sum over the line end early. The best is taken."""
FEW_TRIALS = 64
"""Below this the shapes differ so much that they are cut into blocks (step 8), on lines of their own:"""
FEW_LINE_END, FEW_LINE_STEP = 60.0, 0.1
"""Ratios of likelihoods reach far beyond e^mu, so terms n != 0 of step 4 vanish only with a finer step."""
FEW_SMOOTHINGS = (0.004, 0.01, 0.03, 0.06, 0.1, 0.3, 1.0)
"""Curves fall slowly in their tails, so Y may vary more: that damps the far points, where shapes differ most."""
BLOCKS = (12, 4)
"""Into so many blocks the shapes are cut along the direction in which they differ most, and along the next one."""
NEAR_LINES = 2
"""Blocks are computed on the line that is best without them and on so many neighbours of it on either side."""
CURVE_STEP, CURVE_END = 0.02, 24.0
"""The grid of the curve in log z, in units of mu: its step, and how far it extends beyond mu / 2."""
LARGEST_LOG_Z = 709.0
"""Where the curve may end at most: mu is then some 20.7."""
COORDINATE_STEP, MOST_ATOMS = 0.05, 600
"""A coordinate with more atoms than this is put on a grid of losses with this step, in standard deviations."""
EPSILON = 2.0**-52
"""Unit of rounding of a float64."""


@dataclass(frozen=True, kw_only=True)
class _Corners:
    """Every shift of the grid as two capped pairs, A and B, and the score that the series below the grid needs.

    losses, masses: for each shift A, then B; masses are those of Q. score: B_1/B_0 - 1, capped; score_mass is B_0.
    first: the largest shift of the series. spent: the squared norm, with what mixing two shifts of the grid costs
    (step 2). moved: the most that the caps move to delta in one message (step 3).
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
    """Shifts from `least` to `largest`, with every whole number between: P(u) is affine only between whole numbers."""
    if largest <= least:
        return np.zeros(0)
    points = [largest]
    while points[-1] > least:
        gap = min(WIDE_GAP, NARROW_GAP * length / points[-1])
        points.append(max(least, points[-1] / (1 + gap)))
    return np.unique(np.concatenate([points, np.arange(math.ceil(least), largest)]))


@dataclass(frozen=True, kw_only=True)
class _Ratio:
    """A pair of laws on a list of outcomes: P/Q - 1 (0 where Q is 0), and both masses."""

    excess: Floats
    p: Floats
    q: Floats


def _orders(noise: NoiseLaw, shift: float) -> tuple[_Ratio, _Ratio]:
    """A = (P(shift), P(0)) and B = (P(0), P(shift)) on the outcomes that either can produce."""
    law = noise.pmf
    whole = math.ceil(shift) - 1  # a whole shift counts as the upper end of its cell
    moved, still = shifted_laws(law, whole, shift - whole)
    both = (moved > 0) & (still > 0)
    up, down = np.where(still > 0, -1.0, 0.0), np.where(moved > 0, -1.0, 0.0)
    if whole == 0:  # this form keeps its digits for small shifts
        up[: law.size] = shift * (np.concatenate([[0.0], law[:-1] / law[1:]]) - 1.0)
        down[both] = -up[both] * (still[both] / moved[both])
    else:
        up[both] = moved[both] / still[both] - 1.0
        down[both] = still[both] / moved[both] - 1.0
    return _Ratio(excess=up, p=moved, q=still), _Ratio(excess=down, p=still, q=moved)


def _capped(pair: _Ratio, allowed: float) -> tuple[Floats, Floats, float]:
    """Cap P/Q - 1 (step 3): the capped excess, the Q-masses, and the mass moved (at most `allowed`, if possible).

    The mass of P above the cap, or where Q has none, is moved. The ratio is then raised everywhere by the moved mass,
    so that its mean is 1 again.
    """
    seen = pair.q > 0
    lost = float(pair.p[~seen].sum())
    excess, q = pair.excess[seen], pair.q[seen]
    order = np.argsort(excess, kind="stable")
    excess, q = excess[order], q[order]
    above, mass_above = np.cumsum((q * excess)[::-1])[::-1], np.cumsum(q[::-1])[::-1]
    cut = np.maximum(above - excess * mass_above, 0.0)  # the mass moved by a cap at the ratio of each outcome
    cut[-1] = 0.0  # a cap at the largest ratio moves nothing, whatever rounding says
    at = int(np.argmax(lost + cut <= max(allowed, lost)))
    moved = lost + float(cut[at])
    return np.minimum(excess, excess[at]) + moved, q, moved


def _few_atoms(excess: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Losses and Q-masses of a capped pair; if there are many, on a grid, which dominates (Claim 6)."""
    seen = excess > -1.0
    loss, q = np.log1p(excess[seen]), q[seen]
    if loss.size <= MOST_ATOMS:
        return loss, q
    p = q * np.exp(loss)
    mean = float(p @ loss)
    deviation = math.sqrt(float(p @ (loss - mean) ** 2))
    near = np.abs(loss - mean) < 15 * deviation
    pair = Atoms(loss=loss[near], p=p[near], q=q[near], p_only=0.0, q_only=0.0).on_grid(COORDINATE_STEP * deviation)
    used = pair.major > 0
    return np.concatenate([loss[~near], pair.loss[used]]), np.concatenate([q[~near], pair.q[used]])


def _corners(noise: NoiseLaw, largest: float, length: float, dimension: int) -> _Corners:
    mu = length / math.sqrt(noise.variance)
    sum_of_shifts = math.sqrt(dimension) * length
    first = min(largest, SERIES_FRACTION * length, mu, 0.5)
    shifts = _grid(first, largest, length)
    linear = TAIL / (4 * sum_of_shifts)
    score, score_mass, moved = _capped(_orders(noise, 1.0)[0], linear)
    linear, square = max(linear, moved / (1 - first)), 0.0
    losses, masses = [], []
    for u in shifts.tolist():
        for pair in _orders(noise, u):
            excess, q, moved = _capped(pair, linear * u + TAIL / 4 * (u / length) ** 2)
            square = max(square, (moved - linear * u) / u**2)
            loss, q = _few_atoms(excess, q)
            losses.append(loss)
            masses.append(q)
    # A coordinate moves at most linear u + square u^2 of P; below the grid, B gives up at most linear u of Q. Summed
    # over coordinates by Cauchy-Schwarz.
    moved_in_all = linear * sum_of_shifts
    if not moved_in_all < MOST_MOVED:
        raise AccountingError(
            f"outcomes that only one neighbour can produce weigh {moved_in_all:.3g}, too much for the L2 route"
        )
    mixing = float(np.max(np.diff(shifts) ** 2 / (4 * shifts[1:] * shifts[:-1]), initial=0.0))
    spent = min(length**2 * (1 + mixing), dimension * largest**2)
    # A coordinate moves P or Q, never both, and p + q / (1 - q) <= (p + q) / (1 - q). With more trials the linear part
    # is next to nothing; it is counted twice where that is more, so that plans do not get a smaller figure than before.
    moved = (moved_in_all + square * spent) / (1 - moved_in_all)
    if noise.pmf.size > FEW_TRIALS:
        moved = max(moved, moved_in_all + square * length**2 + moved_in_all / (1 - moved_in_all))
    return _Corners(
        shifts=shifts,
        losses=tuple(losses),
        masses=tuple(masses),
        score=score,
        score_mass=score_mass,
        first=first,
        spent=spent,
        moved=moved,
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """What is known about log M of all shapes at the points s of one line.

    corners: log M of the corners, one row each. log M of any shape is a weighted mean of these up to `error`, and its
    real part is at most `top`. rounding: the float error of M, in units of its largest value.
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
    """log M per unit of squared norm for shifts up to `first`: the ends of its segments for A and B, and the error.

    M = E[(1 + u S)^s] = 1 + C(s, 2) u^2 E[S^2] + C(s, 3) u^3 E[S^3] + ..., with 1 - s for s in order B (step 5).
    """
    first, score, mass = corners.first, corners.score, corners.score_mass
    second, third = float(mass @ score**2), float(mass @ score**3)
    ends, error = [], np.zeros(s.size)
    for power in (s, 1 - s):
        growth = np.maximum(1.0, (1 + first * score) ** (float(power[0].real) - 4.0))
        c2, c3 = _choose(power, 2) * second, _choose(power, 3) * third
        remainder = np.abs(_choose(power, 4)) * float(mass @ (score**4 * growth))
        size = np.abs(c2) + first * np.abs(c3) + first**2 * remainder  # |M - 1| <= u^2 size
        size = np.where(first**2 * size <= 0.5, size, np.inf)  # |log(1 + y) - y| <= |y|^2 needs |y| <= 1/2
        error = np.maximum(error, first**2 * (remainder + size**2))
        ends += [c2, c2 + first * c3]
    return np.array(ends), error


def _log_moments(corners: _Corners, orders: Floats, t: Floats) -> Complexes:
    """log M of one coordinate for each shift of the grid, A and B, indexed [line, corner, point]."""
    logs = np.empty((orders.size, len(corners.losses), t.size), dtype=np.complex128)
    for i, (loss, mass) in enumerate(zip(corners.losses, corners.masses, strict=True)):
        weights = mass * np.exp(np.outer(orders, loss))
        angle = np.outer(loss, t)
        logs[:, i] = np.log(weights @ np.cos(angle) + 1j * (weights @ np.sin(angle)))
    return logs


def _line(corners: _Corners, s: Complexes, log: Complexes, variance: float) -> _Line:
    squares = np.repeat(corners.shifts**2, 2)[:, None]
    # Any branch of the logarithm will do, since M is a product of such factors. The one nearest to that of a Gaussian
    # keeps the corners close together, and so the remainder small.
    log = log - 2j * np.pi * np.round((log - squares * s * (s - 1) / (2 * variance)).imag / (2 * np.pi))
    ends, error = _series(corners, s)
    mixed, slack = np.zeros(s.size), 0.0
    if corners.shifts.size > 1:  # a shift between two grid shifts is a mixture of both (steps 2 and 5)
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
    """(e^v - 1 - v) / v^2. For any v >= Re x, |e^x - 1 - x| is at most |x|^2 times this."""
    small = np.abs(v) < 1e-2
    other = np.where(small, 1.0, v)
    result: Floats = np.where(small, 0.5 + v / 6 + v**2 / 20, (np.expm1(other) - other) / other**2)
    return result


def _weights(s: Complexes, smoothing: float) -> tuple[Complexes, float]:
    """The factors of M(s) z^(1-s) in the sum of step 4, and a bound on the sum beyond the end of the line."""
    a, step, end = float(s[0].real), float(s[1].imag), float(s[-1].imag)
    weight = np.where(np.arange(s.size) == 0, 1.0, 2.0) * step / (2 * np.pi) / (s * (s - 1))
    # NumPy's exp, because it may overflow: the line is then passed over.
    beyond = float(np.exp(smoothing * (a * (a - 1) - end**2) / 2)) / (math.pi * end)
    return weight * np.exp(smoothing * s * (s - 1) / 2), beyond


def _middle(corners: Complexes) -> Complexes:
    real, imag = corners.real, corners.imag
    result: Complexes = (real.max(axis=0) + real.min(axis=0) + 1j * (imag.max(axis=0) + imag.min(axis=0))) / 2
    return result


def _heights(line: _Line, log_z: Floats, turns: Complexes, smoothing: float) -> Floats:
    """An upper bound on the curves of all shapes at each z (steps 4 and 6); `turns` is z^(-i t)."""
    weight, beyond = _weights(line.s, smoothing)
    centre = _middle(line.corners)
    away = line.corners - centre
    scale = float(line.top[0])
    far_off = np.abs(away).max(axis=0) + line.error
    first_and_second = line.error + far_off**2 * _second_order(away.real.max(axis=0) + line.error)
    by_expansion, by_size = np.exp(centre.real - scale) * first_and_second, np.exp(line.top - scale)
    near = by_expansion < by_size  # at the other points only the size of M is used
    remainder = float(np.abs(weight) @ (np.where(near, by_expansion, by_size) + line.rounding)) + beyond
    main = weight[near] * np.exp(centre[near] - scale)
    linear = (turns[:, near] @ (main * (1 + away[:, near])).T).real.max(axis=1)
    result: Floats = np.exp(scale + (1 - line.s[0].real) * log_z) * (linear + remainder)
    return result


def _block_heights(line: _Line, log_z: Floats, turns: Complexes, smoothing: float) -> Floats:
    """The same as `_heights`, block by block (step 8): the largest bound of the blocks that cover all shapes."""
    weight, beyond = _weights(line.s, smoothing)
    # The places of each corner, from 0 to 1, along the directions in which the corners differ most. Any would do.
    size = np.abs(weight) * np.exp(line.corners.real.mean(axis=0) - line.top[0])
    away = (line.corners - line.corners.mean(axis=0)) * np.sqrt(size / size.sum())
    if not np.all(np.isfinite(away)):  # moments overflowed
        return np.full(log_z.size, math.inf)
    try:
        places = np.linalg.eigh((away @ away.conj().T).real)[1][:, : -1 - len(BLOCKS) : -1].T
    except np.linalg.LinAlgError:  # the bound without blocks stands
        return np.full(log_z.size, math.inf)
    places = places - places.min(axis=1, keepdims=True)
    places = places / np.maximum(places.max(axis=1, keepdims=True), 1e-300)
    centred = places - places.mean(axis=1, keepdims=True)
    along = centred @ line.corners / np.maximum((centred**2).sum(axis=1, keepdims=True), 1e-300)
    left = line.corners - places.T @ along
    start = _middle(left)
    left = left - start
    scale, halves = float(line.top[0]), 0.5 / np.array(BLOCKS)
    most = halves @ np.abs(along.real) + left.real.max(axis=0) + line.error
    far_off = halves @ np.abs(along) + np.abs(left).max(axis=0) + line.error
    first_and_second = line.error + far_off**2 * _second_order(most)
    highest = np.full(log_z.size, -math.inf)
    for middle in itertools.product(*((np.arange(blocks) + 0.5) / blocks for blocks in BLOCKS)):
        centre = start + np.array(middle) @ along
        by_expansion = np.exp(centre.real - scale) * first_and_second
        by_size = np.exp(np.minimum(line.top, centre.real + most) - scale)
        near = by_expansion < by_size
        remainder = float(np.abs(weight) @ (np.where(near, by_expansion, by_size) + line.rounding)) + beyond
        main = weight[near] * np.exp(centre[near] - scale)
        seen = turns[:, near]
        linear = (seen @ main).real + np.abs((seen @ (main * along[:, near]).T).real) @ halves
        linear = linear + (seen @ (main * left[:, near]).T).real.max(axis=1)
        highest = np.maximum(highest, linear + remainder)  # NaN, if any, stays and is passed over in the end
    result: Floats = np.exp(scale + (1 - line.s[0].real) * log_z) * highest
    return result


def _symmetric(step: float, heights: Floats) -> Pair:
    """The pair whose curve is the lower convex hull of the points (e^(i step), heights[i]) and of their mirror images.

    A convex curve that is below the points is below the hull, also between them (step 7). If the slope at z = 1 is too
    steep for the mirror image to join, the chord to the mirror image of a later point replaces the first point: it is
    lower, and a bound as well.
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


def _lowest(
    corners: _Corners, log_z: Floats, t: Floats, smoothings: tuple[float, ...], variance: float, *, blocks: bool = False
) -> Floats:
    """The least bound on the curves of all shapes at each z, over lines with the points t and over smoothings."""
    mu = math.sqrt(corners.spent / variance)
    turns = np.exp(-1j * np.outer(log_z, t))
    orders = 1 + TILTS / mu
    heights = np.full((orders.size, len(smoothings), log_z.size), np.inf)
    with np.errstate(all="ignore"):  # a line on which moments overflow gives NaN or infinity, which fmin passes over
        lines = []
        for i, (a, log) in enumerate(zip(orders, _log_moments(corners, orders, t), strict=True)):
            line = _line(corners, a + 1j * t, log, variance)
            lines += [line] if blocks else []
            for j, smoothing in enumerate(smoothings):
                heights[i, j] = np.fmin(heights[i, j], _heights(line, log_z, turns, smoothing * mu**2))
        best = np.argmin(heights.min(axis=1), axis=0)
        for i, line in enumerate(lines):
            at = np.abs(best - i) <= NEAR_LINES
            for j, smoothing in enumerate(smoothings if at.any() else ()):
                bound = _block_heights(line, log_z[at], turns[at], smoothing * mu**2)
                heights[i, j, at] = np.fmin(heights[i, j, at], bound)
    result: Floats = heights.min(axis=(0, 1))
    return result


@lru_cache(maxsize=64)
def shaped_pair(noise: NoiseLaw, largest: float, length: float, dimension: int) -> Pair:
    """The pair that dominates a message whose shift vector has norm `length` and coordinates up to `largest` steps.

    Raises:
        AccountingError: the shift is too long for this route, or the caps would move too much mass.
    """
    largest = min(largest, length)
    if largest > min(MOST_STEPS, noise.pmf.size - 1):
        raise AccountingError(f"a shift of {largest:.3g} steps is too long for {noise} in L2")
    variance = noise.variance
    corners = _corners(noise, largest, length, dimension)
    mu = math.sqrt(corners.spent / variance)
    step, points = CURVE_STEP * mu, math.ceil((mu / 2 + CURVE_END) / CURVE_STEP)
    # Checked before arrays of this size are made. Beyond, z itself is larger than a float.
    if step * points > LARGEST_LOG_Z:
        raise AccountingError(f"a shift of {mu:.3g} standard deviations reveals too much for the L2 route")
    log_z: Floats = step * np.arange(points, dtype=np.float64)
    lowest = _lowest(corners, log_z, np.arange(0.0, LINE_END, LINE_STEP) / mu, SMOOTHINGS, variance)
    if noise.pmf.size <= FEW_TRIALS:
        t = np.arange(0.0, FEW_LINE_END, FEW_LINE_STEP) / mu
        lowest = np.fmin(lowest, _lowest(corners, log_z, t, FEW_SMOOTHINGS, variance, blocks=True))
    least = np.minimum.accumulate(np.minimum(1.0, lowest + corners.moved))
    # The claims are proven for a symmetric law, and the sampler's is not quite ("The mechanism and its law").
    uneven = 4 * dimension * mirror_distance(noise)
    return charged(_symmetric(step, least), uneven)
