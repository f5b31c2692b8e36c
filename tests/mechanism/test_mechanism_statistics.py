"""Samples of the encoder against the exact law of its codes.

Every check passes at p > 1e-9 (or |z| < 6.1, the same rate), so the whole file raises a false alarm with probability
below 1e-7 when seeds change; the seeds are fixed.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bqsgd._src.laws import Binomial
from bqsgd._src.mechanism._kernels import round_scalar, round_vector
from bqsgd._src.mechanism.encoder import encode
from bqsgd._src.noise import ROUND_BITS, ROUNDING_SLACK_STEPS, seeded_rng
from bqsgd._src.params import MAX_LEVELS, Mechanism

FALSE_ALARM = 1e-9
SAMPLES = 2_000_000


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """p-value after merging the cells that expect fewer than 20 into one."""
    rare = expected < 20
    cells = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    cells = [cell if cells[1][-1] >= 1 else cell[:-1] for cell in cells]
    return float(stats.chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue)


def code_law(mechanism: Mechanism, steps: float) -> np.ndarray:
    """The law of the code of an input `steps` above -C, in quantiser steps."""
    law, low = Binomial(mechanism.trials), int(np.floor(steps))
    codes = np.zeros(mechanism.code_count + 1)
    span = slice(low + law.first, low + law.first + len(law.pmf))
    codes[span] += (1 - (steps - low)) * law.pmf
    codes[span.start + 1 : span.stop + 1] += (steps - low) * law.pmf
    return codes[:-1]


@pytest.mark.parametrize("trials", [1, 2, 7, 64, 251, 1003, 4079, 16279])
@pytest.mark.parametrize("steps", [1.0, 0.3])
def test_codes_follow_their_exact_law(trials: int, steps: float) -> None:
    mechanism = Mechanism(levels=1, trials=trials)
    codes = encode(np.full(SAMPLES, steps - 1), mechanism, range=1.0, rng=seeded_rng(seed=trials))
    observed = np.bincount(codes, minlength=mechanism.code_count)
    assert chi_square(observed, code_law(mechanism, steps) * SAMPLES) > FALSE_ALARM


@pytest.mark.parametrize("trials", [0, 7, 251])
def test_neighbouring_coordinates_are_independent(trials: int) -> None:
    mechanism = Mechanism(levels=1, trials=trials)
    codes = encode(np.full(SAMPLES, 0.25), mechanism, range=1.0, rng=seeded_rng(seed=4)).astype(np.float64)
    centred = (codes - codes.mean()) / codes.std()
    for lag in (1, 2, 16384):
        assert abs(np.mean(centred[lag:] * centred[:-lag])) < 6.1 / np.sqrt(SAMPLES)


@pytest.mark.parametrize(("levels", "trials"), [(2, 251), (52, 16279), (1000, 64)])
def test_the_mean_code_is_unbiased(levels: int, trials: int) -> None:
    mechanism = Mechanism(levels=levels, trials=trials)
    for x in (-0.999, -0.3, 0.0, 0.77):
        codes = encode(np.full(SAMPLES, x), mechanism, range=1.0, rng=seeded_rng(seed=6))
        error = codes.mean() - (levels * (1 + x) + trials / 2)
        assert abs(error) < 6.1 * np.sqrt((trials + 1) / 4 / SAMPLES)


def probability_up(x: float, limit: float, levels: int, vector: bool) -> Fraction:
    """The exact mean of the rounded value in steps above -C, read off the kernel by bisection over its 2^24 draws."""
    values, out = np.array([x]), np.empty(1, np.uint32)

    def rounded(draw: int) -> int:
        words = np.array([draw], np.uint64)
        if vector:
            round_vector(values, np.array([limit]), float(levels), 1.0, 0.0, words, out)
        else:
            round_scalar(values, limit, float(levels), 1.0, 0.0, words, out)
        return int(out[0])

    low = rounded((1 << ROUND_BITS) - 1)
    below, above = 0, 1 << ROUND_BITS  # draws below the fraction round up
    while below < above:
        middle = (below + above) // 2
        if rounded(middle) > low:
            below = middle + 1
        else:
            above = middle
    return low + Fraction(below, 1 << ROUND_BITS)


@given(st.integers(1, MAX_LEVELS), st.floats(1e-20, 1e20), st.floats(-1, 1), st.floats(-1, 1), st.booleans())
@settings(max_examples=300)
def test_rounding_to_the_grid_moves_two_inputs_apart_by_less_than_the_slack(
    levels: int, limit: float, first: float, second: float, vector: bool
) -> None:
    inputs = [x * limit for x in (first, second)]
    exact = [levels * (1 + Fraction(x) / Fraction(limit)) for x in inputs]
    encoded = [probability_up(x, limit, levels, vector) for x in inputs]
    assert abs(encoded[0] - encoded[1]) <= abs(exact[0] - exact[1]) + Fraction(ROUNDING_SLACK_STEPS)
    for mean, truth in zip(encoded, exact, strict=True):
        assert abs(mean - truth) <= Fraction(ROUNDING_SLACK_STEPS) / 2
