"""Plain QSGD: the encoder without trials is the quantiser alone."""

import numpy as np
import pytest

from bqsgd._src.errors import InvalidParameter, OutOfRange
from bqsgd._src.mechanism.encoder import decode, encode
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism


def quantise(values: np.ndarray, levels: int, **options) -> np.ndarray:
    """The signed integers of Eqs. 8 and 9: codes of a mechanism without trials, less the shift by s."""
    return encode(values, Mechanism(levels=levels, trials=0), **options).astype(np.int32) - levels


def dequantise(integers: np.ndarray, levels: int, **options) -> np.ndarray:
    return decode(integers + levels, Mechanism(levels=levels, trials=0), **options)


def test_quantiser_points_are_kept_and_signed() -> None:
    values = np.array([-2.0, -1.5, -0.5, 0.0, 0.5, 2.0])
    integers = quantise(values, 4, range=2.0, rng=privacy_rng())
    assert integers.tolist() == [-4, -3, -1, 0, 1, 4]
    assert dequantise(integers, 4, range=2.0).tolist() == values.tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_values_between_points_go_to_either_neighbour_without_bias(sign: int) -> None:
    # sigma(mean) = sqrt(p (1 - p) / n): with |z| < 6 a false alarm has probability 2e-9 (and the seed is fixed).
    n, p = 10**6, 0.3
    integers = quantise(np.full(n, sign * 2.3), 10, range=10.0, rng=seeded_rng(seed=11))
    assert sorted(set(integers.tolist())) == sorted({sign * 2, sign * 3})
    assert abs(np.abs(integers).mean() - 2.3) < 6 * np.sqrt(p * (1 - p) / n)


def test_the_error_is_below_one_step_and_per_coordinate_ranges_are_used() -> None:
    values, limit = np.linspace(-1, 1, 1000), np.linspace(1, 3, 1000)
    levels = 127  # of 8 bits: one for the sign, seven for the magnitude
    back = dequantise(quantise(values, levels, range=limit, rng=privacy_rng()), levels, range=limit)
    assert np.all(np.abs(back - values) <= limit / levels)
    assert not np.array_equal(back, values)


def test_values_beyond_the_range_are_refused() -> None:
    with pytest.raises(OutOfRange):
        quantise(np.array([1.1]), 4, range=1.0, rng=privacy_rng())
    assert quantise(np.array([1.1]), 4, range=1.0, rng=privacy_rng(), clamp=True).tolist() == [4]
    with pytest.raises(InvalidParameter, match="codes"):
        dequantise(np.array([5]), 4, range=1.0)
