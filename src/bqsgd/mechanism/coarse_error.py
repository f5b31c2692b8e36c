"""The exact error of a mechanism whose codes may be coarsened, from the law of its code at each position.

Key: position r in {-s, ..., s}: the input as the first rounding leaves it, in quantiser steps; o ~ Bin(m, 1/2). All
figures hold for mechanisms that are not coarsened too, where they are those of Proposition 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bqsgd.mechanism.coarsen import DRAW_BITS, coarse_law, rounding_table
from bqsgd.noise import binomial_pmf
from bqsgd.params import Mechanism, check_int

Array = npt.NDArray[np.float64]


def position_law(mechanism: Mechanism, position: int) -> Array:
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

    What the noise throws beyond the window is cut back to its edge: a pull towards 0, of nothing before coarsening.
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

    This is what decides how many messages must be averaged, and what few bits are planned by: a narrow window makes
    the plain squared error small by sending next to nothing, which helps nobody. The share is least at +-C.
    """
    bias, square = _moments(mechanism)
    variance = _largest_between(square - bias**2, (1 + np.diff(bias)) ** 2) / mechanism.levels**2
    share = 1 - float(np.abs(bias).max()) / mechanism.levels
    return variance / share**2


def _largest_between(ends: Array, bend: Array) -> float:
    """The largest (1 - f) a + f a' + f (1 - f) bend over f in [0, 1] and all pairs (a, a') of neighbouring `ends`."""
    slope = np.diff(ends)
    with np.errstate(divide="ignore", invalid="ignore"):
        f = np.where(bend > 0, np.clip((slope + bend) / (2 * bend), 0, 1), slope > 0)
    return float((ends[:-1] + f * slope + f * (1 - f) * bend).max())


def variance_at_zero(mechanism: Mechanism) -> float:
    """Variance of the decoded value of 0, in squared quantiser steps: m/4, or what coarsening makes of it.

    Gradients are small beside their range, so this is the noise that most coordinates see.
    """
    if mechanism.coarsening is None:
        return mechanism.trials / 4
    value = mechanism.step * (np.arange(mechanism.code_count) - mechanism.centre)
    law = position_law(mechanism, 0)
    return float(law @ value**2 - (law @ value) ** 2)


def _moments(mechanism: Mechanism) -> tuple[Array, Array]:
    """Bias and mean squared error at the positions -s, ..., s, in quantiser steps."""
    if mechanism.coarsening is None:
        value = np.arange(mechanism.fine_code_count) - mechanism.centre
        square = value**2
    else:
        place = rounding_table(mechanism)
        below = (place >> np.uint64(DRAW_BITS)).astype(np.float64)
        up = place * 2.0**-DRAW_BITS - below
        value = mechanism.step * (below + up - mechanism.centre)
        square = value**2 + mechanism.step**2 * up * (1 - up)
    binomial, position = binomial_pmf(mechanism.trials), np.arange(-mechanism.levels, mechanism.levels + 1.0)
    met = slice(binomial.first, binomial.first + binomial.pmf.size + 2 * mechanism.levels)
    mean: Array = np.correlate(value[met], binomial.pmf, "valid")
    second: Array = np.correlate(square[met], binomial.pmf, "valid")
    return mean - position, second - 2 * position * mean + position**2
