"""Dominating pairs on a grid of privacy losses: the one representation every step of the accountant works on.

A `Pair` stands for two laws P ("record in") and Q ("record out") through their privacy loss log(P/Q). Grid point i has
loss l_i = i * step, P-mass p_i and Q-mass q_i = p_i exp(-l_i). What P has and Q lacks is `p_only` (infinite loss), what
Q has and P lacks is `q_only`. For losses below 0 the Q-mass is the stored figure, for the others the P-mass: going to
the other law then only ever shrinks an error.

A pair dominates a mechanism when its hockey-stick curve H_e(P || Q) = sum (p - e^e q)_+ lies on or above the
mechanism's for every real e; domination survives composition and subsampling (docs/accounting.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from bqsgd.errors import AccountingError

Floats = npt.NDArray[np.float64]
MASS_TOLERANCE = 1e-9
"""How far a law's total mass may be from 1 before the accountant refuses to go on; the gap itself is charged."""
FLOAT_CHARGE = 1e-14
"""Added to delta for every composed round: above the error of the transforms (tests measure it), far below delta."""


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
        """The pair (Q, P): losses change sign. Mass at loss 0 is P-mass and Q-mass alike."""
        last = self.first + self.major.size - 1
        return Pair(step=self.step, first=-last, major=self.major[::-1], p_only=self.q_only, q_only=self.p_only)


def checked(pair: Pair) -> Pair:
    """The pair itself, or AccountingError when a mass is negative, not finite, or a law's total is not 1."""
    if not np.all(np.isfinite(pair.major)) or np.any(pair.major < 0) or min(pair.p_only, pair.q_only) < 0:
        raise AccountingError("a privacy loss distribution has negative or non-finite mass")
    for name, total in (("P", pair.p.sum() + pair.p_only), ("Q", pair.q.sum() + pair.q_only)):
        if not abs(total - 1.0) <= MASS_TOLERANCE:
            raise AccountingError(f"law {name} of a privacy loss distribution weighs {total!r}, not 1")
    return pair


def charged(pair: Pair, more: float = 0.0) -> Pair:
    """The pair with its float error paid: FLOAT_CHARGE, `more` and what a law lacks to 1 become infinite loss."""
    gaps = [max(0.0, 1.0 - float(law.sum()) - only) for law, only in ((pair.p, pair.p_only), (pair.q, pair.q_only))]
    p_only, q_only = (x + FLOAT_CHARGE + more for x in (pair.p_only + gaps[0], pair.q_only + gaps[1]))
    return replace(checked(pair), p_only=min(1.0, p_only), q_only=min(1.0, q_only))


def on_grid(loss: Floats, major: Floats, *, step: float, p_only: float, q_only: float) -> Pair:
    """Connect the dots: each atom is split over the two grid points beside it, keeping its P-mass and its Q-mass.

    With x = l - a the distance to the grid point a below, the P-mass goes to a in the share
    (e^-x - e^-h) / (1 - e^-h) and the Q-mass in the share (e^-x - e^-h) e^x / (1 - e^-h). The original pair is a
    post-processing of the gridded one, so the result dominates it; the error is of second order in h.
    """
    below = np.floor(loss / step)
    x = np.clip(loss - below * step, 0.0, step)
    index = below.astype(np.int64)
    # Shares of the atom's P-mass; what `major` stores on a grid point is its P-mass or its Q-mass, by the sign there.
    low_share = np.expm1(step - x) / np.expm1(step)
    high_share = -np.expm1(-x) / -np.expm1(-step)
    # log of the factor from the atom's stored mass to the grid point's stored mass: P = Q e^l on either side.
    low, high = below * step, (below + 1) * step
    low_factor = np.exp(np.minimum(loss, 0) - np.minimum(low, 0))
    high_factor = np.exp(np.minimum(loss, 0) - np.minimum(high, 0))
    first = int(index.min())
    stored = np.zeros(int(index.max()) + 2 - first)
    np.add.at(stored, index - first, major * low_share * low_factor)
    np.add.at(stored, index + 1 - first, major * high_share * high_factor)
    return Pair(step=step, first=first, major=stored, p_only=p_only, q_only=q_only)
