"""Dominating pairs on a grid of privacy losses: the representation on which every step of the accountant works.

A `Pair` describes two laws P ("record in") and Q ("record out") by their privacy loss log(P/Q). Grid point i has loss
l_i = i * step, P-mass p_i and Q-mass q_i = p_i exp(-l_i). `p_only` is the mass of outcomes that only P has (infinite
loss), `q_only` that of outcomes that only Q has. A grid point stores one of its masses, the larger one: the Q-mass if
its loss is below 0, otherwise the P-mass. Computing the smaller mass from it then shrinks the float error.

A pair dominates a mechanism if its hockey-stick curve H_e(P || Q) = sum (p - e^e q)_+ lies on or above that of the
mechanism for every real e. Dominating pairs compose and can be subsampled ("Dominating pairs" and Claim 3 in
docs/accounting.md). The `envelope` of two pairs dominates both, so it does not matter which of them the data choose.
The grid is Claim 6.

Everything here rounds towards a higher curve: what is cut off, lost or uncertain becomes infinite loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import AccountingError

Floats = npt.NDArray[np.float64]
MASS_TOLERANCE = 1e-9
"""How far the total mass of a law may be from 1. A smaller gap is charged to delta; a larger one is an error."""
FLOAT_CHARGE = 1e-14
"""Added to delta for every composed round. It exceeds the error of the transforms, which the tests measure."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Grid points first, first + 1, ...; `major` is the P-mass where the loss is >= 0, the Q-mass where it is < 0."""

    step: float
    first: int
    major: Floats
    p_only: float
    q_only: float

    @property
    def loss(self) -> Floats:
        """The loss of each grid point."""
        points: Floats = (self.first + np.arange(self.major.size, dtype=np.float64)) * self.step
        return points

    @property
    def p(self) -> Floats:
        """P-mass of each grid point."""
        return self.major * np.exp(np.minimum(self.loss, 0))

    @property
    def q(self) -> Floats:
        """Q-mass of each grid point."""
        return self.major * np.exp(-np.maximum(self.loss, 0))

    def reversed(self) -> Pair:
        """The pair (Q, P). Losses change sign, and the stored masses stay: at loss 0 both laws have the same mass."""
        last = self.first + self.major.size - 1
        return Pair(step=self.step, first=-last, major=self.major[::-1], p_only=self.q_only, q_only=self.p_only)


def checked(pair: Pair) -> Pair:
    """Return the pair. Raises AccountingError if a mass is negative or not finite, or the total of a law is not 1."""
    if not np.all(np.isfinite(pair.major)) or np.any(pair.major < 0) or min(pair.p_only, pair.q_only) < 0:
        raise AccountingError("a privacy loss distribution has negative or non-finite mass")
    for name, total in (("P", pair.p.sum() + pair.p_only), ("Q", pair.q.sum() + pair.q_only)):
        if not abs(total - 1.0) <= MASS_TOLERANCE:
            raise AccountingError(f"law {name} of a privacy loss distribution weighs {total!r}, not 1")
    return pair


def charged(pair: Pair, more: float = 0.0) -> Pair:
    """The pair with infinite loss added: FLOAT_CHARGE, `more`, and whatever a law lacks to a total of 1."""
    # A law that lacks mass has lost it beyond the window or to rounding. We do not know at which loss: take the worst.
    gaps = [max(0.0, 1.0 - float(law.sum()) - only) for law, only in ((pair.p, pair.p_only), (pair.q, pair.q_only))]
    p_only, q_only = (x + FLOAT_CHARGE + more for x in (pair.p_only + gaps[0], pair.q_only + gaps[1]))
    return replace(checked(pair), p_only=min(1.0, p_only), q_only=min(1.0, q_only))


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """A pair that is not on a grid yet: ascending losses, both masses of each, and the masses of one law only."""

    loss: Floats
    p: Floats
    q: Floats
    p_only: float
    q_only: float

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the finite loss under P."""
        mean = float(self.p @ self.loss)
        return math.sqrt(max(0.0, float(self.p @ (self.loss - mean) ** 2)))

    def on_grid(self, step: float) -> Pair:
        """Connect the dots: split each atom between its neighbouring grid points, keeping its P-mass and its Q-mass.

        With h the step and x = l - a the distance to the grid point a below, a gets a fraction
        (e^-x - e^-h) / (1 - e^-h) of the P-mass and a fraction (e^-x - e^-h) e^x / (1 - e^-h) of the Q-mass. The
        original pair is a post-processing of the result, so the result dominates it (Claim 6). The error is of second
        order in h.
        """
        loss, major = self.loss, np.where(self.loss < 0, self.q, self.p)
        below = np.floor(loss / step)
        x = np.clip(loss - below * step, 0.0, step)  # rounding may leave it just outside
        index = below.astype(np.int64)
        # The fractions of the P-mass, written with expm1 so that they keep their digits for small steps.
        low_share = np.expm1(step - x) / np.expm1(step)
        high_share = -np.expm1(-x) / -np.expm1(-step)
        # An atom and its grid points may store different masses (P or Q, by the sign of the loss). The factors convert
        # from what the atom stores to what the grid point stores, with P = Q e^l on both.
        low, high = below * step, (below + 1) * step
        low_factor = np.exp(np.minimum(loss, 0) - np.minimum(low, 0))
        high_factor = np.exp(np.minimum(loss, 0) - np.minimum(high, 0))
        first = int(index.min())
        stored = np.zeros(int(index.max()) + 2 - first)
        np.add.at(stored, index - first, major * low_share * low_factor)
        np.add.at(stored, index + 1 - first, major * high_share * high_factor)
        return Pair(step=step, first=first, major=stored, p_only=self.p_only, q_only=self.q_only)


TIE = 5e-16
"""Two curves closer than this fraction of the remaining mass count as equal, so that rounding does not make them cross
again and again. The fraction is charged to delta."""
SHORT = 1 << 16
SHORT_TIE = 16 * float(np.finfo(np.longdouble).eps)
"""The same for pairs of up to SHORT grid points, which are compared in extended precision: the envelope of one
coordinate is one of them, and its charge is paid by up to d / 32 coordinates."""


def _winner(difference: Floats, tolerance: Floats) -> npt.NDArray[np.intp]:
    """1 where the second curve is higher, 0 where the first is. A tie goes to the winner of the grid point before."""
    clear = np.abs(difference) > tolerance
    last_clear = np.maximum.accumulate(np.where(clear, np.arange(difference.size), 0))
    return (difference[last_clear] > 0).astype(np.intp)


def _after(mass: Floats) -> Floats:
    """Sum of all later entries, added up from the far end so that small tails keep their digits."""
    total = np.zeros_like(mass)
    total[:-1] = np.cumsum(mass[:0:-1])[::-1]
    return total


def envelope(one: Pair, other: Pair) -> Pair:
    """The pair whose curve is max(H(one), H(other)) on grid points, and straight (in z = e^e) between them.

    Curves are convex and piecewise straight in z, so the chord over a crossing lies above both. Away from crossings the
    atoms of the higher curve are copied; only the grid points beside a crossing are computed from slopes. At losses
    from 0 up the curve is H = T_P - z T_Q with tail masses T. Below 0 the function compared is
    G = H - (1 - z) = z L_Q - L_P with head masses L. Neither finds a small number by subtracting numbers near 1.
    """
    if one.step != other.step:
        raise AccountingError("an envelope needs two pairs on the same grid")
    step = one.step
    first = min(one.first, other.first, -1) - 1
    size = max(one.first + one.major.size, other.first + other.major.size, 2) + 1 - first
    zero = -first
    number: Any = np.longdouble if size <= SHORT else np.float64
    tie = SHORT_TIE if size <= SHORT else TIE
    loss = (first + np.arange(size, dtype=number)) * step
    to_p, to_q = np.exp(np.minimum(loss, 0)), np.exp(-np.maximum(loss, 0))
    majors, curves, tails, heads = [], [], [], []
    for pair in (one, other):
        major = np.zeros(size, dtype=number)
        major[pair.first - first : pair.first - first + pair.major.size] = pair.major
        p, q = major * to_p, major * to_q
        tail_p, tail_q = _after(p) + pair.p_only, _after(q)
        head_p, head_q = _after(p[::-1])[::-1], _after(q[::-1])[::-1] + pair.q_only
        majors.append(major)
        # Beyond e^700 every tail is empty to the last digit; the cap only avoids inf * 0.
        upper, lower = tail_p - np.exp(np.minimum(loss, 700)) * tail_q, to_p * head_q - head_p
        curves.append(np.where(loss >= 0, upper, lower))
        tails.append(tail_p)  # T_P of the segment (i, i + 1)
        heads.append(head_q + q)  # L_Q of the segment (i, i + 1)
    wins = _winner(curves[1] - curves[0], tie * np.where(loss >= 0, tails[0] + tails[1], heads[0] + heads[1]))

    def winner(choices: list[Floats]) -> Floats:
        return np.where(wins == 1, choices[1], choices[0])

    major, height, tail, head = winner(majors), winner(curves), winner(tails), winner(heads)
    turns = np.flatnonzero(wins[:-1] != wins[1:])
    for i in turns.tolist():  # the chord over the crossing in the segment (i, i + 1)
        if i >= zero:  # T_P = H_i + z_i T_Q with T_Q (z_{i+1} - z_i) = H_i - H_{i+1}
            chord = height[i] + (height[i] - height[i + 1]) / np.expm1(step)
            tail[i] = np.clip(chord, *sorted((tails[0][i], tails[1][i])))
        else:  # L_Q is the slope of G
            chord = (height[i + 1] - height[i]) / (np.exp(loss[i]) * np.expm1(step))
            head[i] = np.clip(chord, *sorted((heads[0][i], heads[1][i])))
    q_only = (one.q_only, other.q_only)[wins[0]]
    for i in sorted({j for turn in turns.tolist() for j in (turn, turn + 1)}):
        if i > zero:
            mass = tail[i - 1] - tail[i]
        elif i < zero:
            mass = head[i] - (head[i - 1] if i else q_only)
        else:  # loss 0 holds the Q-mass the two sides leave: 1 - L_Q below - T_Q above, T_Q = T_P - H at z = 1
            mass = 1.0 - head[i - 1] - (tail[i] - height[i])
        major[i] = max(0.0, mass)
    p_only = float(height[-1])  # beyond the last grid point only infinite loss is left
    return checked(
        Pair(
            step=step,
            first=first,
            major=major.astype(np.float64),
            p_only=min(1.0, p_only + 2 * tie),
            q_only=min(1.0, q_only + 2 * tie),
        )
    )
