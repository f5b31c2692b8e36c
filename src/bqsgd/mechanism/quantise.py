"""The uniform stochastic quantiser alone (plain QSGD): compression without noise, and without privacy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd.mechanism.bq import decode, encode
from bqsgd.noise import NoiseSource
from bqsgd.params import Clip, Mechanism, check_int


def levels_of_bits(bits: int) -> int:
    """Levels of the b-bit form, s = 2^(b-1) - 1: one bit of sign, b - 1 of magnitude.

    >>> levels_of_bits(8)
    127
    """
    return (1 << (check_int("bits", bits, 2, 21) - 1)) - 1


def quantise(
    values: Any, levels: int, *, clip: Clip, rng: NoiseSource, clamp: bool = False, threads: int = 1
) -> npt.NDArray[np.int32]:
    """The signed integers sigma*rho in {-s, ..., s} of paper Eqs. 8 and 9: x s / C, rounded at random without bias.

    This is the BQ encoder with no trials, less its shift by s; see `bq.encode` for arguments and errors.
    """
    codes = encode(values, Mechanism(levels=levels, trials=0), clip=clip, rng=rng, clamp=clamp, threads=threads)
    signed = codes.astype(np.int32)
    signed -= levels
    return signed


def dequantise(integers: npt.NDArray[np.integer], levels: int, *, clip: Clip) -> npt.NDArray[np.float64]:
    """The quantised values (C/s) sigma*rho of paper Eq. 10.

    >>> dequantise(np.array([-4, 0, 1]), 4, clip=2.0).tolist()
    [-2.0, 0.0, 0.5]
    """
    return decode(integers + levels, Mechanism(levels=levels, trials=0), clip=clip)
