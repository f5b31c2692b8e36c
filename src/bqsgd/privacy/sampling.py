"""Sampling of the record, applied to a whole message's pair (never coordinate by coordinate: that under-reports).

With rate g the record takes part with probability g. "Remove" compares (1 - g) Q + g P with Q, "add" is its reverse;
both depend on (P, Q) only through its hockey-stick curve, monotonely, so a dominating pair stays dominating
(docs/accounting.md, Claim 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bqsgd.privacy.pair import Floats, Pair, on_grid

SPARE = 1e-13
"""Mass that only one law has, so small that it is the charge for float error and not a property of the mechanism."""
TRIM = 1e-16
"""P-mass of the far upper tail that becomes infinite loss rather than stretching the grid."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Atoms of a sampled message under "remove": losses ascending, `major` as in Pair."""

    loss: Floats
    major: Floats
    p_only: float
    q_only: float

    @property
    def loss_deviation(self) -> float:
        """Standard deviation of the finite loss under P."""
        p = self.major * np.exp(np.minimum(self.loss, 0))
        mean = float(p @ self.loss)
        return float(np.sqrt(max(0.0, float(p @ (self.loss - mean) ** 2))))

    def on_grid(self, step: float) -> Pair:
        """Connect the dots at the given step."""
        return on_grid(self.loss, self.major, step=step, p_only=self.p_only, q_only=self.q_only)


def _trimmed(loss: Floats, major: Floats, p_only: float, q_only: float) -> Sampled:
    """Drop empty grid points, and turn the far tails into infinite loss: above 0 P-mass, below 0 Q-mass."""
    beyond = np.cumsum(major[::-1])[::-1]
    before = np.cumsum(major)
    high, low = (beyond <= TRIM) & (loss > 0), (before <= TRIM) & (loss < 0)
    p_only, q_only = p_only + float(major[high].sum()), q_only + float(major[low].sum())
    kept = ~high & ~low & (major > 0)
    return Sampled(loss=loss[kept], major=major[kept], p_only=p_only, q_only=q_only)


def poisson(pair: Pair, rate: float) -> Sampled:
    """(1 - g) Q + g P against Q: a loss l becomes log(1 + g (e^l - 1)), the Q-mass stays."""
    loss, q = pair.loss, pair.q
    if rate == 1.0:
        return _trimmed(loss, pair.major, pair.p_only, pair.q_only)
    mild = np.minimum(loss, 30.0)
    sampled = np.where(loss > 30.0, loss + np.log(rate), np.log1p(rate * np.expm1(mild)))
    sampled = np.where(loss > 30.0, np.logaddexp(np.log1p(-rate), loss + np.log(rate)), sampled)
    major = np.where(loss < 0, pair.major, (1.0 - rate) * q + rate * pair.major)
    # What only Q has is seen with loss log(1 - g) once the record may be absent. Where that is float error far below
    # every other loss, taking its mass as infinite loss on either side costs less than a grid that reaches it.
    if pair.q_only <= SPARE and sampled.size and np.log1p(-rate) < 2 * sampled[0] - sampled[-1]:
        return _trimmed(sampled, major, rate * pair.p_only + (1.0 - rate) * pair.q_only, pair.q_only)
    loss = np.concatenate([[np.log1p(-rate)], sampled])
    major = np.concatenate([[pair.q_only], major])
    return _trimmed(loss, major, rate * pair.p_only, 0.0)


def fixed_size(pair: Pair, rate: float) -> Sampled:
    """Batches without replacement under replace-one: H at 1 + g (e^e - 1) is at most g H_e for e >= 0, symmetric below.

    The curve above 0 is that of `poisson`; below 0 it is its mirror image; loss 0 takes the remaining mass.
    """
    half = poisson(pair, rate)
    above = half.loss > 0
    loss, major = half.loss[above], half.major[above]
    rest = 1.0 - float(major.sum()) - half.p_only - float((major * np.exp(-loss)).sum())
    return Sampled(
        loss=np.concatenate([-loss[::-1], [0.0], loss]),
        major=np.concatenate([major[::-1], [max(0.0, rest)], major]),
        p_only=half.p_only,
        q_only=half.p_only,
    )
