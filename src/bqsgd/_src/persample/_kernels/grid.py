"""Sums that add exactly: every clipped gradient is rounded to whole steps of a grid, and whole steps are added.

Whole numbers below 2^53 add without error in float64, and below 2^31 in int32, in any order and grouping. So the sum
over a batch with a sample is the sum without it plus that sample's own steps, to the last bit.

The step is the same fraction of the clip's bound for all data: 2^-22 to 2^-21 of it, the smallest power of two at which
float32 can still round to whole steps by one addition. Clips aim inside their bound by more than a step, so that
rounding to the grid cannot carry a gradient beyond it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

STEPS = 2.0**22
"""Steps a bound has at most; at least half as many."""
SHRINK = 2.0**-20
"""How far inside their bound clips aim, as a share of it, besides what the grid itself may add to a Euclidean norm."""
MOST_SAMPLES = 2**30
"""Samples whose steps stay below 2^53 together, and whose mean is rounded by less than the clips leave room for."""
MOST_COORDINATES = 2**30
"""Coordinates over which a norm in float64 is exact enough for what the clips leave."""


@dataclass(frozen=True)
class Grid:
    """Steps for coordinates of at most `bound`."""

    bound: float

    @property
    def step(self) -> float:
        """A power of two: multiplying and dividing by it is exact."""
        mantissa, exponent = math.frexp(self.bound)
        return math.ldexp(1.0, exponent - (mantissa == 0.5)) / STEPS

    def rounding(self, coordinates: int) -> float:
        """What a Euclidean norm may grow by as rounding moves each coordinate by up to half a step."""
        return math.sqrt(coordinates) * self.step / 2


def held_to(bound: float | None) -> float:
    """What coordinates are clamped to for this bound, so that rounding them to the grid stays within it."""
    return math.inf if bound is None else bound * (1 - SHRINK)
