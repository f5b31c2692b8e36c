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

import numpy as np
from scipy.special import comb

from bqsgd.errors import AccountingError
from bqsgd.noise import binomial_pmf
from bqsgd.privacy.pair import Floats

MAX_ORDER = 128
RATIO, FINE_RATIO = 1.02, 1.002
SMALLEST = 1e-3
"""Shifts below U * SMALLEST are covered by a Taylor bound instead of the grid."""


@dataclass(frozen=True, kw_only=True)
class MomentRates:
    """per_square[k] bounds psi_k(u) / u^2 for both orders and all shifts; cubic, quartic bound psi_3, psi_4 by psi_2.

    psi_3 >= cubic * psi_2 and psi_4 <= quartic * psi_2 for every shift. `tail` is the mass moved to delta a coordinate,
    `drift` what cutting the tails adds to psi_k in first order: at most k * drift * u.
    """

    per_square: Floats
    cubic: float
    quartic: float
    tail: float
    drift: float


def _laws(trials: int, largest: float, tail: float, shifts: Floats) -> tuple[Floats, Floats, float]:
    """P(u) for each shift (rows) and P(0) on the kept outcomes, and the mass left out a coordinate.

    Outcomes 0 .. m + R (R = ceil U) lose `cut` on either side. A pair between integers is kept on one outcome less a
    side, so that its moments are bounded at both ends of its cell (Claim 5): hence the mass up to and including `cut`.
    """
    law = binomial_pmf(trials).pmf
    reach = math.ceil(largest)
    below = np.cumsum(law)
    cut = max(reach, int(np.searchsorted(below, tail / 2, side="right")) - 1)
    if 2 * cut >= law.size:
        raise AccountingError(f"a shift of {largest:.3g} steps leaves nothing of {trials} trials to account in L2")
    outcome = np.arange(cut, law.size + reach - cut)
    padded = np.concatenate([np.zeros(reach + 1), law])
    whole = np.floor(shifts).astype(np.int64)[:, None]
    part = (shifts - np.floor(shifts))[:, None]
    index = outcome[None, :] + reach + 1 - whole
    return (1 - part) * padded[index] + part * padded[index - 1], law[outcome], 2 * float(below[cut])


def _excess(moved: Floats, base: Floats, orders: range) -> Floats:
    """max over both orders of sum P^k Q^(1-k) - 1, indexed [order, shift]."""
    with np.errstate(divide="ignore"):
        log_ratio = np.where(moved > 0, np.log1p((moved - base) / base), 0.0)
    # Order A is sum P(0) r^k; order B is sum P(0)^k P(u)^(1-k) = sum P(0) r^(1-k).
    with np.errstate(over="ignore", invalid="ignore"):  # orders that overflow are infinite, and so left out
        rows = [np.maximum(np.expm1(k * log_ratio) @ base, np.expm1((1 - k) * log_ratio) @ base) for k in orders]
    return np.maximum(np.asarray(rows, dtype=np.float64), 0.0)


def _intervals(largest: float, ratio: float) -> Floats:
    """Shifts from U * SMALLEST to U, geometric, with every integer between as a break."""
    count = math.ceil(math.log(1 / SMALLEST) / math.log(ratio)) + 1
    grid = np.geomspace(largest * SMALLEST, largest, count)
    return np.unique(np.concatenate([grid, np.arange(1.0, math.floor(largest) + 1)]))


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


@lru_cache(maxsize=256)
def moment_rates(trials: int, largest: float, tail: float) -> MomentRates:
    """Certified rates for every order up to MAX_ORDER and every shift in (0, largest]."""
    orders = range(2, MAX_ORDER + 1)
    breaks = _intervals(largest, RATIO)
    moved, base, left_out = _laws(trials, largest, tail, breaks)
    excess = _excess(moved, base, orders)
    # Below the first break: (1 + u S)^k and (1 + u S)^(1-k), S = B_1/B_0 - 1 >= -1, expanded in u; E[S] = 0 but for
    # the tails, whose share is of the size of `left_out`.
    least = float(breaks[0])
    if least >= 0.5:
        raise AccountingError(f"a shift of {largest:.3g} steps is too large to account in L2")
    unit = min(1.0, largest)
    score = (_laws(trials, largest, tail, np.array([unit]))[0][0] / base - 1.0) / unit
    powers = [abs(float(base @ score**j)) for j in range(MAX_ORDER + 1)]
    rates = np.zeros(MAX_ORDER + 1)
    for row, k in enumerate(orders):
        up = sum(float(comb(k, j)) * least ** (j - 2) * powers[j] for j in range(2, k + 1))
        down = k * (k - 1) / 2 * powers[2] * (1 - least) ** -(k + 1)
        small = max(up, down) if math.isfinite(up) else math.inf
        with np.errstate(over="ignore", invalid="ignore"):
            rates[k] = max(small, _chord_bound(breaks, excess[row])) if np.all(np.isfinite(excess[row])) else math.inf
    fine = _intervals(largest, FINE_RATIO)
    moved, base, _ = _laws(trials, largest, tail, fine)
    with np.errstate(divide="ignore"):
        log_ratio = np.where(moved > 0, np.log1p((moved - base) / base), 0.0)
    ratios = {}
    for k in (2, 3, 4):
        ratios[k] = [np.log1p(np.expm1(n * log_ratio) @ base) for n in (k, 1 - k)]
    cubic = min(float(np.min(three[:-1] / two[1:])) for two, three in zip(ratios[2], ratios[3], strict=True))
    quartic = max(float(np.max(four[1:] / two[:-1])) for two, four in zip(ratios[2], ratios[4], strict=True))
    # Below the first break psi_3 / psi_2 = 3 and psi_4 / psi_2 = 6 up to at most 7 u E[S^3] / E[S^2] and terms in u^2.
    wobble = 10 * least * (powers[3] / powers[2] + 1.0)
    return MomentRates(
        per_square=rates,
        cubic=min(cubic, 3.0 - wobble),
        quartic=max(quartic, 6.0 + wobble),
        tail=left_out,
        drift=powers[1],
    )
