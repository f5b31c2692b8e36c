"""Statements of the paper that only its errata and the paper map need; no command computes them.

Letters: d dimension, s levels, m trials, L batch size, D data-set size, b bits, T rounds.
"""

from __future__ import annotations

import math

from bqsgd._src.paper.nominal import NominalSetting, privacy_level
from bqsgd._src.params import check_int, check_positive


def peak_probability_normal(trials: int) -> float:
    """P_max under the normal approximation, 1 / sqrt(2 pi sigma^2) with sigma^2 = m/4 (Eq. 15).

    The paper states it for m > 10. It lies above the exact P_max for every m >= 1, so 6.4 / sqrt(m) never gives a
    smaller nominal epsilon than Lemma 1; it is therefore accepted from m = 1 on.
    """
    return 1 / math.sqrt(2 * math.pi * check_int("trials", trials, 1, 2**53) / 4)


def fewest_bits(epsilon: float, setting: NominalSetting) -> float:
    """Bits below which no (s, m) reaches a nominal epsilon: 2 log2(6.4 d L / D^2) - 2 log2(epsilon delta).

    From s >= 1 and m < 2^b in Eq. 18. Remark 2 prints the factors as 1/2 (see `fewest_bits_as_printed`); solving
    6.4 d L / (D^2 sqrt(m) delta) <= epsilon for m gives 2. It is negative when the budget is generous.

    >>> setting = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-4)
    >>> round(fewest_bits(1.72, setting), 2)
    7.98
    """
    return -2 * math.log2(privacy_level(epsilon, setting))


def fewest_bits_as_printed(epsilon: float, setting: NominalSetting) -> float:
    """Remark 2 as printed: (1/2) log2(6.4 d L / D^2) - (1/2) log2(epsilon delta), four times too small."""
    return -math.log2(privacy_level(epsilon, setting)) / 2


def communication_bits(*, rounds: int, dimension: int, bits: float) -> float:
    """Bits one client sends in T rounds: T d b (Theorem 1, Communication); frame headers are not counted.

    >>> communication_bits(rounds=10, dimension=100, bits=8)
    8000.0
    """
    check_int("rounds", rounds, 1, 2**53)
    check_int("dimension", dimension, 1, 2**53)
    return float(rounds * dimension * check_positive("bits", bits))


def communication_saving_bits(*, rounds: int, dimension: int, bits: float, float_bits: int = 32) -> float:
    """Bits saved against floats of `float_bits` (32 or 64): T d (b_init - b). Negative when the code is wider."""
    check_int("float_bits", float_bits, 1, 2**16)
    sent = communication_bits(rounds=rounds, dimension=dimension, bits=bits)
    return communication_bits(rounds=rounds, dimension=dimension, bits=float_bits) - sent
