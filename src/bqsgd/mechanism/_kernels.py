"""The compiled inner loops: stochastic rounding, binomial noise, coarsening, decoding and accumulation.

Rounding and noise are two loops over one cache-resident chunk: the first then compiles to vector instructions, which
a single loop with a table look-up in it does not. No branch depends on a value or on the noise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import njit

from bqsgd.noise import NOISE_BITS, ROUND_BITS, AliasTable

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
    """out = s + x s / C rounded up or down at random, for one C; returns 1 if some |x| is above its limit or NaN.

    The limit is max(C slack, least_limit); x is cut to [-C, C] in any case, so that no input can overflow a code.
    """
    limit = max(bound * slack, least_limit)
    per_unit = levels * _ONE_STEP / bound
    shift = levels * _ONE_STEP + 0.5
    bad = _ZERO
    for j in range(len(values)):
        x = np.float64(values[j])
        bad |= _ZERO if abs(x) <= limit else _ONE
        x = x if x < bound else bound  # NaN becomes C: the conversion below is defined for every input
        x = x if x > -bound else -bound
        y = np.uint64(np.int64(x * per_unit + shift))
        # Adding (2^24 - 1 - draw) carries into the integer part exactly when draw < fraction.
        out[j] = (y + (~words[j] & _FRACTION)) >> _ROUND
    return bad


@njit(nogil=True, cache=True)
def round_vector(values, bounds, levels, slack, least_limit, words, out):  # type: ignore[no-untyped-def]
    """`round_scalar` with one C_j per coordinate."""
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

    A tied coordinate gets the alias; `resolve_ties` then reads its refinement word.
    """
    to_index = _WORD - index_bits
    rest_mask = (_ONE << (_NOISE - index_bits)) - _ONE
    tie = _ZERO
    for j in range(len(words)):
        word = words[j]
        index = word >> to_index
        rest = (word >> _ROUND) & rest_mask
        entry = packed[index]
        threshold = entry >> _ALIAS
        tie |= _ONE if rest == threshold else _ZERO
        out[j] += (index if rest < threshold else entry & _ALIAS_MASK) + first
    return tie


@njit(nogil=True, cache=True)
def decode_scalar(codes, step, centre, out):  # type: ignore[no-untyped-def]
    """out = step (code - centre)."""
    for j in range(len(codes)):
        out[j] = step * (np.float64(codes[j]) - centre)


@njit(nogil=True, cache=True)
def decode_vector(codes, bounds, per_bound, centre, out):  # type: ignore[no-untyped-def]
    """out_j = per_bound C_j (code_j - centre)."""
    for j in range(len(codes)):
        out[j] = per_bound * bounds[j] * (np.float64(codes[j]) - centre)


@njit(nogil=True, cache=True)
def accumulate_scalar(codes, step, centre, total):  # type: ignore[no-untyped-def]
    """total += step (code - centre)."""
    for j in range(len(codes)):
        total[j] += step * (np.float64(codes[j]) - centre)


@njit(nogil=True, cache=True)
def accumulate_vector(codes, bounds, per_bound, centre, total):  # type: ignore[no-untyped-def]
    """total_j += per_bound C_j (code_j - centre)."""
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

    `add_noise` gave them the alias. `refinement(j)` is a fresh uniform 64-bit word of coordinate j: below the table's
    `refine` the entry itself is kept, so that entry i has exactly the probability (threshold + refine 2^-64) of the
    table, not a rounded one.
    """
    rest_bits = NOISE_BITS - table.index_bits
    index = words >> np.uint64(64 - table.index_bits)
    rest = (words >> np.uint64(ROUND_BITS)) & np.uint64((1 << rest_bits) - 1)
    tied = np.flatnonzero(rest == table.threshold[index])
    for j in tied:
        i = int(index[j])
        if refinement(int(j)) < int(table.refine[i]):
            codes[j] = int(codes[j]) - int(table.alias[i]) + i
    return len(tied)
