"""The compiled inner loops: stochastic rounding, binomial noise and the sum of decoded codes.

Rounding and noise are two loops over a chunk that stays in the cache: the first then compiles to vector instructions,
which a single loop with a table look-up in it does not. No branch depends on a value or on the noise: the conditional
expressions below compile to selections. Do not set numba's `fastmath`: ROUNDING_SLACK_STEPS in `bqsgd._src.noise`
bounds the error of the operations as they are written, in their order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bqsgd._src.noise import NOISE_BITS, ROUND_BITS, AliasTable
from bqsgd._src.runtime.compiling import njit

ALIAS_BITS = 16
"""Low bits of a packed table entry: the alias. The threshold sits above them."""

_ONE_STEP = float(1 << ROUND_BITS)
_FRACTION = np.uint64((1 << ROUND_BITS) - 1)
_ROUND = np.uint64(ROUND_BITS)
_NOISE = np.uint64(NOISE_BITS)
_ALIAS = np.uint64(ALIAS_BITS)
_ALIAS_MASK = np.uint64((1 << ALIAS_BITS) - 1)
_WORD = np.uint64(64)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


@njit(nogil=True, cache=True)
def round_scalar(values, bound, levels, slack, least_limit, words, out):  # type: ignore[no-untyped-def]
    """out = s + x s / R rounded at random without bias, for one R; returns 1 if some |x| exceeds its limit or is NaN.

    The limit is max(R slack, least_limit). x is cut to [-R, R] in any case, so that no input can overflow a code.
    """
    limit = max(bound * slack, least_limit)
    per_unit = levels * _ONE_STEP / bound
    shift = levels * _ONE_STEP + 0.5
    bad = _ZERO
    for j in range(len(values)):
        x = np.float64(values[j])
        bad |= _ZERO if abs(x) <= limit else _ONE  # written so that NaN, which compares false, is bad
        # In this order NaN becomes R, and the conversion below, undefined for NaN, is defined for every input.
        x = x if x < bound else bound
        x = x if x > -bound else -bound
        # x in units of 2^-24 steps, shifted to be positive; the 0.5 makes the conversion round to the nearest.
        y = np.uint64(np.int64(x * per_unit + shift))
        # ~draw is 2^24 - 1 - draw: adding it carries into the integer part exactly when draw < fraction.
        out[j] = (y + (~words[j] & _FRACTION)) >> _ROUND
    return bad


@njit(nogil=True, cache=True)
def round_vector(values, bounds, levels, slack, least_limit, words, out):  # type: ignore[no-untyped-def]
    """`round_scalar` with one R_j per coordinate."""
    per_unit = levels * _ONE_STEP
    shift = levels * _ONE_STEP + 0.5
    bad = _ZERO
    for j in range(len(values)):
        x = np.float64(values[j])
        bound = bounds[j]
        bad |= _ZERO if abs(x) <= max(bound * slack, least_limit) else _ONE
        x = x if x < bound else bound
        x = x if x > -bound else -bound
        y = np.uint64(np.int64(x / bound * per_unit + shift))
        out[j] = (y + (~words[j] & _FRACTION)) >> _ROUND
    return bad


@njit(nogil=True, cache=True)
def add_noise(words, packed, index_bits, first, out):  # type: ignore[no-untyped-def]
    """out += Bin(m, 1/2) from the packed alias table; returns 1 if some draw ties with its threshold.

    A tied coordinate gets the alias, and `resolve_ties` corrects it.
    """
    # A word is, from its high end: the index of a table entry, the draw, the bits that `round_scalar` has used.
    to_index = _WORD - index_bits
    draw_mask = (_ONE << (_NOISE - index_bits)) - _ONE
    tie = _ZERO
    for j in range(len(words)):
        word = words[j]
        index = word >> to_index
        draw = (word >> _ROUND) & draw_mask
        entry = packed[index]
        threshold = entry >> _ALIAS
        tie |= _ONE if draw == threshold else _ZERO
        out[j] += (index if draw < threshold else entry & _ALIAS_MASK) + first
    return tie


@njit(nogil=True, cache=True)
def accumulate_scalar(codes, step, centre, total):  # type: ignore[no-untyped-def]
    """total += step (code - centre)."""
    for j in range(len(codes)):
        total[j] += step * (np.float64(codes[j]) - centre)


@njit(nogil=True, cache=True)
def accumulate_vector(codes, bounds, per_bound, centre, total):  # type: ignore[no-untyped-def]
    """total_j += per_bound R_j (code_j - centre)."""
    for j in range(len(codes)):
        total[j] += per_bound * bounds[j] * (np.float64(codes[j]) - centre)


def resolve_ties(
    words: npt.NDArray[np.uint64],
    table: AliasTable,
    codes: npt.NDArray[np.unsignedinteger],
    *,
    refinement: Callable[[int], int],
) -> int:
    """Decide the coordinates whose draw ties with its threshold (about one in a billion); returns how many there were.

    `add_noise` gave them the alias. `refinement(j)` is a fresh uniform 64-bit word of coordinate j. If it is below the
    table's `refine`, entry i is kept: so i has exactly the probability (threshold + refine 2^-64) of the table.
    """
    draw_bits = NOISE_BITS - table.index_bits
    index = words >> np.uint64(64 - table.index_bits)
    draw = (words >> np.uint64(ROUND_BITS)) & np.uint64((1 << draw_bits) - 1)
    tied = np.flatnonzero(draw == table.threshold[index])
    for j in tied:
        i = int(index[j])
        if refinement(int(j)) < int(table.refine[i]):
            codes[j] = int(codes[j]) - int(table.alias[i]) + i
    return len(tied)
