"""Coarsening: fewer bits after the noise, and the exact error that this costs.

A noised fine code is cut to a window and rounded at random to one of its points. Key: fine code c in {0, ..., 2s + m},
window of W codes around s + m/2, points k in {0, ..., K - 1}. A code's place among the points is
(c - s - m/2 + W/2) (K - 1) / W, cut to [0, K - 1]. It is rounded up with the probability of its fraction, so that
inside the window the point equals the code on average. Only noised codes are read here, nothing else of the input.

The error figures follow from the law of the code at each position r in {-s, ..., s}: the input as the first rounding
leaves it, in quantiser steps, with o ~ Bin(m, 1/2). They hold for mechanisms without coarsening too, where they are
those of Proposition 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from numba import njit

from bqsgd.errors import InvalidParameter
from bqsgd.noise import NoiseSource, binomial_pmf
from bqsgd.params import Codes, Mechanism, check_int, code_dtype

_DRAW_BITS = 32
"""Random bits of one rounding: its probability is a multiple of 2^-32, at most half of one away from the fraction."""
_DRAWS_PER_BLOCK = 4
_BITS = np.uint64(_DRAW_BITS)

_Table = npt.NDArray[np.uint64]


@lru_cache(maxsize=8)  # eight bytes per fine code, at most 24 MiB each
def rounding_table(mechanism: Mechanism) -> _Table:
    """For each fine code its place among the points, in units of 2^-32: the one description of the rounding.

    >>> from bqsgd.params import Coarsening
    >>> table = rounding_table(Mechanism(levels=1, trials=2, coarsening=Coarsening(points=2, width=2)))
    >>> (table / 2**_DRAW_BITS).tolist()  # five fine codes; the window holds the middle three
    [0.0, 0.0, 0.5, 1.0, 1.0]
    """
    coarsening = mechanism.coarsening
    if coarsening is None:
        raise InvalidParameter(f"{mechanism} has no coarsening")
    intervals, width, last = coarsening.points - 1, coarsening.width, mechanism.fine_code_count - 1
    doubled = 2 * np.arange(last + 1) - last + width  # in half codes, so that all of it is exact in integers
    below, rest = np.divmod(np.clip(doubled, 0, 2 * width) * intervals, 2 * width)
    table = ((below << _DRAW_BITS) + ((rest << _DRAW_BITS) + width) // (2 * width)).astype(np.uint64)
    table.setflags(write=False)  # cached and shared
    return table


@njit(nogil=True, cache=True)
def _round_to_points(fine, draws, table, out):  # type: ignore[no-untyped-def]
    """out = the point below the code's place, or the one above when the draw carries over."""
    for j in range(len(fine)):
        out[j] = (table[fine[j]] + np.uint64(draws[j])) >> _BITS


def draw_blocks(dimension: int) -> int:
    """Keystream blocks that the draws of `dimension` coordinates take."""
    return -(-dimension // _DRAWS_PER_BLOCK)


class PointRounding:
    """The rounding of fine codes from an even coordinate `start` on, in order, chunk by chunk.

    Coordinate j's draw has a fixed position in the keystream from `first_block` on.
    """

    def __init__(self, mechanism: Mechanism, rng: NoiseSource, *, first_block: int, start: int) -> None:
        self._table = rounding_table(mechanism)
        self._fine = np.empty(0, code_dtype(mechanism.fine_code_count))
        self._keystream = rng.keystream(first_block + start // _DRAWS_PER_BLOCK)
        if start % _DRAWS_PER_BLOCK:
            self._keystream.fill(np.empty(1, np.uint64))

    def room(self, count: int) -> Codes:
        """An array for the next `count` fine codes."""
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
    up = (table & np.uint64((1 << _DRAW_BITS) - 1)) * 2.0**-_DRAW_BITS
    law = np.bincount(below, (1 - up) * fine_law, minlength=mechanism.code_count + 1).astype(np.float64, copy=False)
    law[1:] += np.bincount(below, up * fine_law, minlength=mechanism.code_count)
    return law[: mechanism.code_count]


def position_law(mechanism: Mechanism, position: int) -> npt.NDArray[np.float64]:
    """The probabilities of the codes 0 to code_count - 1 at a position, as the sampler has them.

    >>> from bqsgd.params import Coarsening
    >>> position_law(Mechanism(levels=1, trials=2, coarsening=Coarsening(points=2, width=2)), 0).tolist()
    [0.5, 0.5]
    """
    check_int("position", position, -mechanism.levels, mechanism.levels)
    law = np.zeros(mechanism.fine_code_count)
    binomial = binomial_pmf(mechanism.trials)
    start = mechanism.levels + position + binomial.first
    law[start : start + binomial.pmf.size] = binomial.pmf
    return law if mechanism.coarsening is None else coarse_law(mechanism, law)


def saturation_bias(mechanism: Mechanism, position: int | None = None) -> float:
    """E[decoded value] - value at a position, in units of C; without one, the largest |bias| over all inputs.

    What the noise throws beyond the window is cut back to its edge: a pull towards 0, which is nil without coarsening.
    Between two positions the bias is a weighted mean of theirs, so the largest one is at a position.
    """
    if position is None:
        return float(np.abs(_moments(mechanism)[0]).max()) / mechanism.levels
    check_int("position", position, -mechanism.levels, mechanism.levels)
    return float(_moments(mechanism)[0][mechanism.levels + position]) / mechanism.levels


def mean_squared_error(mechanism: Mechanism) -> float:
    """E[r^2] in units of C^2 for an input uniform over [-C, C], bias included."""
    bias, square = _moments(mechanism)
    # The integral over f of what `worst_squared_error` says between two positions.
    between = (square[:-1] + square[1:]) / 2 + (2 * np.diff(bias) + 1) / 6
    return float(between.mean()) / mechanism.levels**2


def worst_squared_error(mechanism: Mechanism) -> float:
    """The largest E[r^2] in units of C^2 over all inputs in [-C, C], bias included.

    A fraction f of the way from position r to the next, with b the bias and a the mean square there and a', b' at the
    next: E = (1 - f) a + f a' + f (1 - f) (1 + 2 (b' - b)), of which the largest f in [0, 1] is taken.
    """
    bias, square = _moments(mechanism)
    return _largest_between(square, 1 + 2 * np.diff(bias)) / mechanism.levels**2


def noise_to_signal(mechanism: Mechanism) -> float:
    """Largest variance of the decoded value over the squared share of a value C that is left on average.

    This decides how many messages must be averaged, and coarse plans are chosen by it: a narrow window makes the
    plain squared error small by sending next to nothing, which helps nobody. The share is least at +-C.
    """
    bias, square = _moments(mechanism)
    variance = _largest_between(square - bias**2, (1 + np.diff(bias)) ** 2) / mechanism.levels**2
    share = 1 - float(np.abs(bias).max()) / mechanism.levels
    return variance / share**2


def _largest_between(ends: npt.NDArray[np.float64], bend: npt.NDArray[np.float64]) -> float:
    """The largest (1 - f) a + f a' + f (1 - f) bend over f in [0, 1] and all pairs (a, a') of neighbouring `ends`."""
    slope = np.diff(ends)
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(bend > 0, np.clip((slope + bend) / (2 * bend), 0, 1), slope > 0)
    return float((ends[:-1] + f * slope + f * (1 - f) * bend).max())


def variance_at_zero(mechanism: Mechanism) -> float:
    """Variance of the decoded value of 0, in squared quantiser steps: m/4 without coarsening.

    Gradients are small beside their range, so this is the noise that most coordinates see.
    """
    if mechanism.coarsening is None:
        return mechanism.trials / 4
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
    binomial, position = binomial_pmf(mechanism.trials), np.arange(-mechanism.levels, mechanism.levels + 1.0)
    met = slice(binomial.first, binomial.first + binomial.pmf.size + 2 * mechanism.levels)
    mean: npt.NDArray[np.float64] = np.correlate(value[met], binomial.pmf, "valid")
    second: npt.NDArray[np.float64] = np.correlate(square[met], binomial.pmf, "valid")
    return mean - position, second - 2 * position * mean + position**2
