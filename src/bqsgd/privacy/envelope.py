"""The upper envelope of two hockey-stick curves, as a pair: what dominates both dominates whichever the data choose."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.errors import AccountingError
from bqsgd.privacy.pair import Floats, Pair, checked

TIE = 5e-16
"""Curves closer than this share of the mass in sight count as equal, so that rounding does not make them cross; the
share of both masses is charged to delta."""
SHORT = 1 << 16
SHORT_TIE = 16 * float(np.finfo(np.longdouble).eps)
"""The same for pairs of up to SHORT grid points, which are compared in extended precision. The envelope of one
coordinate is such a pair, and up to d / 32 coordinates pay its charge."""


def _winner(difference: Floats, tolerance: Floats) -> npt.NDArray[np.intp]:
    """1 where the second curve is higher, 0 where the first is; ties go with the grid point before."""
    clear = np.abs(difference) > tolerance
    last_clear = np.maximum.accumulate(np.where(clear, np.arange(difference.size), 0))
    return (difference[last_clear] > 0).astype(np.intp)


def _after(mass: Floats) -> Floats:
    """Sum over the later entries, added from the far end so that small tails keep their digits."""
    total = np.zeros_like(mass)
    total[:-1] = np.cumsum(mass[:0:-1])[::-1]
    return total


def envelope(one: Pair, other: Pair) -> Pair:
    """The pair whose curve is max(H(one), H(other)) on the grid and straight (in z = e^e) between grid points.

    A curve is convex and piecewise straight in z, so the chord over a crossing lies above both curves. Away from
    crossings the atoms are those of the dominating curve, untouched; only the grid points beside a crossing are
    computed from slopes. From loss 0 up the curve is H = T_P - z T_Q with tail masses T; below 0 it is compared through
    G = H - (1 - z) = z L_Q - L_P with head masses L. Neither subtracts numbers near 1 to find a small one.
    """
    if one.step != other.step:
        raise AccountingError("only pairs on one grid have an envelope on that grid")
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
        # Beyond e^700 every tail is empty to the last digit, so the cap changes nothing but avoids inf * 0.
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
    p_only = float(height[-1])  # nothing lies beyond the last grid point
    return checked(
        Pair(
            step=step,
            first=first,
            major=major.astype(np.float64),
            p_only=min(1.0, p_only + 2 * tie),
            q_only=min(1.0, q_only + 2 * tie),
        )
    )
