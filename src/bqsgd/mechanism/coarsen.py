"""Fewer bits after the noise: a noised fine code is cut to a window and rounded at random to one of its points.

Key: fine code c in {0, ..., 2s + m}, window of W codes around s + m/2, points k in {0, ..., K - 1}. A code's place
among the points is (c - s - m/2 + W/2) (K - 1) / W, cut to [0, K - 1]. It is rounded up with the probability of its
fraction, so that inside the window the point is the code on average. Only noised codes are read
here: nothing else of the input.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numba import njit

from bqsgd.errors import InvalidParameter
from bqsgd.noise import NoiseSource
from bqsgd.params import Mechanism, code_dtype

DRAW_BITS = 32
"""Random bits of one rounding: its probability is a multiple of 2^-32, at most half of that from the fraction."""
_DRAWS_A_BLOCK = 4
_BITS = np.uint64(DRAW_BITS)

Codes = npt.NDArray[np.unsignedinteger]
Table = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)  # eight bytes a fine code, at most 24 MiB each
def rounding_table(mechanism: Mechanism) -> Table:
    """For each fine code its place among the points, in units of 2^-32: the one description of the rounding.

    >>> from bqsgd.params import Coarsening
    >>> table = rounding_table(Mechanism(levels=1, trials=2, coarsening=Coarsening(points=2, width=2)))
    >>> (table / 2**DRAW_BITS).tolist()  # five fine codes; the window holds the middle three
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    coarsening = mechanism.coarsening
    if coarsening is None:
        raise InvalidParameter(f"{mechanism} has no coarsening")
    intervals, width, last = coarsening.points - 1, coarsening.width, mechanism.fine_code_count - 1
    doubled = 2 * np.arange(last + 1) - last + width  # in half codes, so that all of it is exact in integers
    below, rest = np.divmod(np.clip(doubled, 0, 2 * width) * intervals, 2 * width)
    table = ((below << DRAW_BITS) + ((rest << DRAW_BITS) + width) // (2 * width)).astype(np.uint64)
    table.setflags(write=False)  # cached and shared
    return table


@njit(nogil=True, cache=True)
def _round_to_points(fine, draws, table, out):  # type: ignore[no-untyped-def]
    """out = the point below the code's place, or the one above when the draw carries over."""
    for j in range(len(fine)):
        out[j] = (table[fine[j]] + np.uint64(draws[j])) >> _BITS


def draw_blocks(dimension: int) -> int:
    """Keystream blocks that the draws of so many coordinates take."""
    return -(-dimension // _DRAWS_A_BLOCK)


class Rounding:
    """The rounding of fine codes from an even coordinate `start` on, in order, chunk by chunk.

    Coordinate j's draw lies at a fixed place of the keystream from `first_block` on.
    """

    def __init__(self, mechanism: Mechanism, rng: NoiseSource, *, first_block: int, start: int) -> None:
        self._table = rounding_table(mechanism)
        self._fine = np.empty(0, code_dtype(mechanism.fine_code_count))
        self._keystream = rng.keystream(first_block + start // _DRAWS_A_BLOCK)
        if start % _DRAWS_A_BLOCK:
            self._keystream.fill(np.empty(1, np.uint64))

    def room(self, count: int) -> Codes:
        """Where `count` fine codes are to be written."""
        if self._fine.size < count:
            self._fine = np.empty(count, self._fine.dtype)
        return self._fine[:count]

    def write(self, fine: Codes, out: Codes) -> None:
        """Write the points of the next fine codes; an odd number of them only at the end."""
        words = np.empty((fine.size + 1) // 2, np.uint64)
        self._keystream.fill(words)
        _round_to_points(fine, words.view(np.uint32), self._table, out)


def coarse_law(mechanism: Mechanism, fine_law: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The law of the point when the fine code has the law `fine_law`, rounding of probabilities to 2^-32 included."""
    table = rounding_table(mechanism)
    below = (table >> _BITS).astype(np.int64)
    up = (table & np.uint64((1 << DRAW_BITS) - 1)) * 2.0**-DRAW_BITS
    law = np.bincount(below, (1 - up) * fine_law, minlength=mechanism.code_count + 1).astype(np.float64, copy=False)
    law[1:] += np.bincount(below, up * fine_law, minlength=mechanism.code_count)
    return law[: mechanism.code_count]
