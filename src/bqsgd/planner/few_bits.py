"""Few bits a coordinate: a pair planned with more of them for its privacy, coarsened to the points that fit.

With few bits 2s + m + 1 <= 2^b leaves so few trials that a binomial's ends weigh far more than delta. But what is
computed from noised codes costs nothing (docs/accounting.md), so privacy is planned at 8 bits or more and the window of
the coarsening is chosen for the error alone.
"""

from __future__ import annotations

from bqsgd.mechanism.coarsening import noise_to_signal
from bqsgd.params import Coarsening, Mechanism

LEAST_FINE_BITS = 8
"""Pairs to be coarsened are planned with at least so many bits; more gain next to nothing."""
_TRIED = 32
"""Widths tried over the range that is left, until it is tried whole."""


def fine_bits(needed: int) -> int:
    """Bits of the pair that is coarsened: the first of 8, 10, 12, ... that are enough."""
    return max(LEAST_FINE_BITS, needed + needed % 2)


def largest_reach(bits: int) -> float:
    """The largest |value| in units of C that codes of a budget of so many bits may stand for, coarsened or not.

    At one level, b bits reach (2^b - 1) / 2. A coarsened pair gets no more than 8 bits would.
    """
    return ((1 << max(bits, LEAST_FINE_BITS)) - 1) / 2


def coarsened(pair: Mechanism, *, bits: int) -> Mechanism:
    """`pair` with 2^bits points over the window of least `noise_to_signal`; the pair itself if its codes fit already.

    >>> coarsened(Mechanism(levels=10, trials=189), bits=4).coarsening
    Coarsening(points=16, width=45)
    """
    points = 2**bits
    if pair.code_count <= points:
        return pair

    def at(width: int) -> Mechanism:
        coarsening = Coarsening(points=points, width=width)
        return Mechanism(levels=pair.levels, trials=pair.trials, coarsening=coarsening)

    low, high = 1, min(pair.code_count - 1, int(2 * largest_reach(bits) * pair.levels))
    while True:  # the noise falls, then rises with the width, but for whole-number effects
        stride = max(1, (high - low) // _TRIED)
        best = min(range(low, high + 1, stride), key=lambda width: noise_to_signal(at(width)))
        if stride == 1:
            return at(best)
        low, high = max(low, best - 2 * stride), min(high, best + 2 * stride)
