"""Coarsening: fewer bits after the noise, and the exact error that this costs.

A noised fine code is cut to a window and then rounded at random to one of K points. Key: fine code c in
{0, ..., 2s + m}; window of W codes around s + m/2; points k in {0, ..., K - 1}. The place of a code among the points is
(c - s - m/2 + W/2) (K - 1) / W, cut to [0, K - 1]. It is rounded up with the probability of its fraction, so that
inside the window the point equals the code on average.

This reads nothing but noised codes, so it is post-processing and costs no privacy (claim 7 in docs/accounting.md).

The error figures follow from the law of the code at each position r in {-s, ..., s}: the input in quantiser steps after
the first rounding, to which o ~ Bin(m, 1/2) is added. They hold without coarsening too, where they are those of
Proposition 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.noise import NoiseSource
from bqsgd._src.params import Codes, Mechanism, check_int, code_dtype
from bqsgd._src.runtime.compiling import njit

_DRAW_BITS = 32
"""Random bits of one rounding: its probability is the multiple of 2^-32 nearest to the fraction."""
_DRAWS_PER_BLOCK = 4
_BITS = np.uint64(_DRAW_BITS)

_Table = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)  # eight bytes per fine code, at most 24 MiB each
def rounding_table(mechanism: Mechanism) -> _Table:
    """The place of each fine code among the points, in units of 2^-32. Encoder and error figures both read it.

    >>> from bqsgd._src.params import Coarsening
    >>> table = rounding_table(Mechanism(levels=1, trials=2, coarsening=Coarsening(points=2, width=2)))
    >>> (table / 2**_DRAW_BITS).tolist()  # five fine codes; the window holds the middle three
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    coarsening = mechanism.coarsening
    if coarsening is None:
        raise InvalidParameter(f"{mechanism} has no coarsening")
    intervals, width, last = coarsening.points - 1, coarsening.width, mechanism.fine_code_count - 1
    doubled = 2 * np.arange(last + 1) - last + width  # in half codes, so that everything is exact in integers
    below, remainder = np.divmod(np.clip(doubled, 0, 2 * width) * intervals, 2 * width)
    # + width: the fraction is rounded to the nearest multiple of 2^-32, not down.
    table = ((below << _DRAW_BITS) + ((remainder << _DRAW_BITS) + width) // (2 * width)).astype(np.uint64)
    table.setflags(write=False)  # cached and shared
    return table


@njit(nogil=True, cache=True)
def _round_to_points(fine, draws, table, out):  # type: ignore[no-untyped-def]
    """out = the point below the place of the code, or the one above if adding the draw carries over."""
    for j in range(len(fine)):
        out[j] = (table[fine[j]] + np.uint64(draws[j])) >> _BITS


def draw_blocks(dimension: int) -> int:
    """Keystream blocks that the draws of `dimension` coordinates take."""
    return -(-dimension // _DRAWS_PER_BLOCK)


class PointRounding:
    """Rounds fine codes to points, in order and chunk by chunk, from the even coordinate `start` on.

    The draw of coordinate j has a fixed place in the keystream, which begins at `first_block`: the points do not depend
    on how the vector is cut into slices.
    """

    def __init__(self, mechanism: Mechanism, rng: NoiseSource, *, first_block: int, start: int) -> None:
        self._table = rounding_table(mechanism)
        self._fine = np.empty(0, code_dtype(mechanism.fine_code_count))
        self._keystream = rng.keystream(first_block + start // _DRAWS_PER_BLOCK)
        if start % _DRAWS_PER_BLOCK:  # an even start lies in the middle of a block: skip the two draws before it
            self._keystream.fill(np.empty(1, np.uint64))

    def room(self, count: int) -> Codes:
        """An array for the next `count` fine codes."""
        if self._fine.size < count:
            self._fine = np.empty(count, self._fine.dtype)
        return self._fine[:count]

    def write(self, fine: Codes, out: Codes) -> None:
        """Write the points of the next fine codes; only the last call may have an odd number of them."""
        words = np.empty((fine.size + 1) // 2, np.uint64)
        self._keystream.fill(words)
        _round_to_points(fine, words.view(np.uint32), self._table, out)


def coarse_law(mechanism: Mechanism, fine_law: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The law of the point if the fine code has the law `fine_law`, with rounding probabilities as they are drawn."""
    table = rounding_table(mechanism)
    below = (table >> _BITS).astype(np.int64)
    up = (table & np.uint64((1 << _DRAW_BITS) - 1)) * 2.0**-_DRAW_BITS
    # One place more than there are points: the last point has nothing above it, and `up` is 0 there.
    law = np.bincount(below, (1 - up) * fine_law, minlength=mechanism.code_count + 1).astype(np.float64, copy=False)
    law[1:] += np.bincount(below, up * fine_law, minlength=mechanism.code_count)
    return law[: mechanism.code_count]


def position_law(mechanism: Mechanism, position: int) -> npt.NDArray[np.float64]:
    """The probabilities of the codes 0 to code_count - 1 at a position, for the sampler's law of the noise.

    >>> from bqsgd._src.params import Coarsening
    >>> position_law(Mechanism(levels=1, trials=2, coarsening=Coarsening(points=2, width=2)), 0).tolist()
    [0.5, 0.5]
    """
    check_int("position", position, -mechanism.levels, mechanism.levels)
    law = np.zeros(mechanism.fine_code_count)
    noise = mechanism.law
    start = mechanism.levels + position + noise.first
    law[start : start + noise.pmf.size] = noise.pmf
    return law if mechanism.coarsening is None else coarse_law(mechanism, law)


def saturation_bias(mechanism: Mechanism) -> float:
    """The largest |E[decoded value] - value| over all inputs, in units of R.

    Codes that the noise carries beyond the window are cut to its edge, which pulls the mean towards 0. Without
    coarsening the bias is 0. Between two positions it is a weighted mean of theirs, so the largest is at a position.
    """
    return float(np.abs(_moments(mechanism)[0]).max()) / mechanism.levels


def mean_squared_error(mechanism: Mechanism) -> float:
    """E[r^2] in units of R^2 for an input uniform over [-R, R], bias included."""
    bias, square = _moments(mechanism)
    # The integral over f in [0, 1] of the formula in `worst_squared_error`.
    between = (square[:-1] + square[1:]) / 2 + (2 * np.diff(bias) + 1) / 6
    return float(between.mean()) / mechanism.levels**2


def worst_squared_error(mechanism: Mechanism) -> float:
    """The largest E[r^2] in units of R^2 over all inputs in [-R, R], bias included.

    For an input a fraction f of the way from one position to the next,
    E = (1 - f) a + f a' + f (1 - f) (1 + 2 (b' - b)), with mean squares a, a' and biases b, b' at the two positions.
    The result is the largest E over all f in [0, 1] and all positions.
    """
    bias, square = _moments(mechanism)
    return _largest_between(square, 1 + 2 * np.diff(bias)) / mechanism.levels**2


def noise_to_signal(mechanism: Mechanism) -> float:
    """The largest variance of a decoded value, divided by the squared fraction of a value R that survives on average.

    It says how many messages must be averaged, so the planner chooses coarse mechanisms by it. The plain squared error
    would favour a narrow window, which has little error because it sends next to nothing. The fraction is least at +-R.
    """
    bias, square = _moments(mechanism)
    variance = _largest_between(square - bias**2, (1 + np.diff(bias)) ** 2) / mechanism.levels**2
    surviving = 1 - float(np.abs(bias).max()) / mechanism.levels
    return variance / surviving**2


def _largest_between(ends: npt.NDArray[np.float64], bend: npt.NDArray[np.float64]) -> float:
    """The largest (1 - f) a + f a' + f (1 - f) bend over f in [0, 1] and all pairs (a, a') of neighbouring `ends`."""
    slope = np.diff(ends)
    # A parabola with bend > 0 has its top at (slope + bend) / (2 bend); otherwise the larger end is the largest.
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(bend > 0, np.clip((slope + bend) / (2 * bend), 0, 1), slope > 0)
    return float((ends[:-1] + f * slope + f * (1 - f) * bend).max())


def variance_at_zero(mechanism: Mechanism) -> float:
    """Variance of the decoded value of 0, in squared quantiser steps: m/4 for binomial noise without coarsening.

    Most coordinates of a gradient are small compared with the range, so this is the noise on most of them.
    """
    if mechanism.coarsening is None:
        return mechanism.law.variance
    value = mechanism.step * (np.arange(mechanism.code_count) - mechanism.centre)
    law = position_law(mechanism, 0)
    return float(law @ value**2 - (law @ value) ** 2)


def _moments(mechanism: Mechanism) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Bias and mean squared error at the positions -s, ..., s, in quantiser steps."""
    if mechanism.coarsening is None:
        value = np.arange(mechanism.fine_code_count) - mechanism.centre
        square = value**2
    else:
        place = rounding_table(mechanism)
        below = (place >> np.uint64(_DRAW_BITS)).astype(np.float64)
        up = place * 2.0**-_DRAW_BITS - below
        value = mechanism.step * (below + up - mechanism.centre)
        square = value**2 + mechanism.step**2 * up * (1 - up)
    noise, position = mechanism.law, np.arange(-mechanism.levels, mechanism.levels + 1.0)
    # Fine codes that occur at some position; sliding the noise's law over them gives the mean at each position.
    occurring = slice(noise.first, noise.first + noise.pmf.size + 2 * mechanism.levels)
    mean: npt.NDArray[np.float64] = np.correlate(value[occurring], noise.pmf, "valid")
    second: npt.NDArray[np.float64] = np.correlate(square[occurring], noise.pmf, "valid")
    return mean - position, second - 2 * position * mean + position**2
