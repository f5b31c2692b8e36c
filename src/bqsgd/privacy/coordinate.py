"""One coordinate of the BQ mechanism: the two orders that are worst over all data.

A value x (in quantiser steps) becomes floor(x) + Bernoulli(frac x) + Bin(m, 1/2), with law
P(x) = (1 - f) B_l + f B_{l+1}. For every x, y with |x - y| <= Delta the hockey-stick divergence of (P(x), P(y)) is at
most that of A = (P(Delta), P(0)) or of B = (P(0), P(Delta)): docs/accounting.md, Claim 1. B is A reversed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bqsgd.noise import binomial_pmf
from bqsgd.privacy.pair import Floats


@dataclass(frozen=True, kw_only=True)
class Atoms:
    """A pair as exact atoms: losses ascending, P- and Q-mass of each, and the masses only one law has."""

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


def coordinate_atoms(trials: int, shift: float) -> Atoms:
    """The pair A = (P(shift), P(0)) of one coordinate, atom by atom, for any shift > 0."""
    law = binomial_pmf(trials).pmf
    if shift >= law.size:
        return Atoms(loss=np.empty(0), p=np.empty(0), q=np.empty(0), p_only=1.0, q_only=1.0)
    whole, part = int(shift), shift - int(shift)
    # Both laws on one support: Q = law on the first entries, P moved up by `whole` and split over one entry more.
    q = np.concatenate([law, np.zeros(whole + 1)])
    p = np.zeros_like(q)
    p[whole : whole + law.size] += (1.0 - part) * law
    p[whole + 1 : whole + 1 + law.size] += part * law
    both = (p > 0) & (q > 0)
    if whole == 0:  # log(P/Q) = log(1 + f (b_{k-1}/b_k - 1)) keeps its digits for the small shifts of large batches
        ratio = np.concatenate([[0.0], law[:-1] / law[1:]])
        loss = np.log1p(part * (ratio - 1.0))
        both = both[: law.size] & np.isfinite(loss)
        p_head, q_head = p[: law.size], q[: law.size]
    else:
        p_head, q_head = p, q
        loss = np.log(np.divide(p, q, out=np.ones_like(p), where=both))
    p_kept, q_kept, loss = p_head[both], q_head[both], loss[both]
    # Log-concavity makes the loss ascend with the outcome, so no sorting is needed.
    return Atoms(
        loss=loss,
        p=p_kept,
        q=q_kept,
        p_only=float(p[q == 0].sum()),
        q_only=float(q[p == 0].sum()),
    )
