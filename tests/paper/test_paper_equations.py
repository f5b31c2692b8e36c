"""Equations of the paper that are special cases of a function tested elsewhere."""

import numpy as np
import pytest

from bqsgd._src.mechanism.properties import noise_density
from bqsgd._src.params import Mechanism


@pytest.mark.parametrize(("levels", "clip"), [(1, 1.0), (2, 0.0015), (10, 3.0)])
def test_eq_24_without_trials_the_noise_is_the_rounding_error(levels, clip):
    """s/C - (s/C)^2 |r| on [-C/s, C/s], nothing outside."""
    step = clip / levels
    error = np.linspace(-step, step, 201)[:-1]
    density = noise_density(error, Mechanism(levels=levels, trials=0), range=clip)
    np.testing.assert_allclose(density, 1 / step - np.abs(error) / step**2, atol=1e-12 / step)
    assert noise_density([1.01 * step, -1.01 * step], Mechanism(levels=levels, trials=0), range=clip).tolist() == [0, 0]


@pytest.mark.parametrize("levels", [1, 2, 10])
def test_eq_23_is_eq_24_in_units_of_the_clip(levels):
    """s - s^2 |phi| on [-1/s, 1/s]."""
    phi = np.linspace(-1 / levels, 1 / levels, 101)[:-1]
    density = noise_density(phi, Mechanism(levels=levels, trials=0), range=1.0)
    np.testing.assert_allclose(density, levels - levels**2 * np.abs(phi), atol=1e-12 * levels)
