"""What happens, once in a billion draws, when the first bits of a draw do not decide between an entry and its alias."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from bqsgd.noise import NOISE_BITS, ROUND_BITS, AliasTable


def resolve_ties(
    words: npt.NDArray[np.uint64],
    table: AliasTable,
    codes: npt.NDArray[np.unsignedinteger],
    *,
    refinement: Callable[[int], int],
) -> int:
    """Decide the coordinates whose draw ties with its threshold; returns how many there were.

    The kernel gave them the alias. `refinement(j)` is a fresh uniform 64-bit word of coordinate j: below the table's
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
