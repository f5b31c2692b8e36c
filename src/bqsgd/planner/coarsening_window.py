"""Few bits per coordinate: a mechanism planned with more bits for its privacy, coarsened to the points that fit.

With few bits 2s + m + 1 <= 2^b leaves so few trials that the ends of the binomial weigh far more than delta. But
whatever is computed from noised codes costs no privacy (docs/accounting.md). So privacy is planned with 8 bits or more,
and the window of the coarsening is chosen for the error alone.
"""

from __future__ import annotations

from bqsgd.mechanism.coarsening import noise_to_signal
from bqsgd.params import Coarsening, Mechanism

LEAST_FINE_BITS = 8
"""A mechanism that will be coarsened is planned with at least this many bits; more gain next to nothing."""
_TRIED = 32
"""How many widths are tried across the remaining range, until every one in it can be tried."""


def fine_bits(needed: int) -> int:
    """Bits of the mechanism before coarsening: the first of 8, 10, 12, ... that is enough."""
    return max(LEAST_FINE_BITS, needed + needed % 2)


def largest_reach(bits: int) -> float:
    """The largest |value| in units of C that a code may stand for under a budget of `bits`, coarsened or not.

    At one level, b bits reach (2^b - 1) / 2. A coarsened mechanism reaches no further than 8 bits would.
    """
    return ((1 << max(bits, LEAST_FINE_BITS)) - 1) / 2


def coarsened(fine: Mechanism, *, bits: int) -> Mechanism:
    """`fine` with 2^bits points over the window of least `noise_to_signal`; `fine` itself if its codes fit already.

    >>> coarsened(Mechanism(levels=10, trials=189), bits=4).coarsening
    Coarsening(points=16, width=45)
    """
    points = 2**bits
    if fine.code_count <= points:
        return fine

    def at(width: int) -> Mechanism:
        coarsening = Coarsening(points=points, width=width)
        return Mechanism(levels=fine.levels, trials=fine.trials, coarsening=coarsening)

    low, high = 1, min(fine.code_count - 1, int(2 * largest_reach(bits) * fine.levels))
    while True:  # as the width grows the noise falls, then rises, apart from integer effects
        stride = max(1, (high - low) // _TRIED)
        best = min(range(low, high + 1, stride), key=lambda width: noise_to_signal(at(width)))
        if stride == 1:
            return at(best)
        low, high = max(low, best - 2 * stride), min(high, best + 2 * stride)
