"""Proposition 1 against enumeration of every outcome, against quadrature and against samples."""

import numpy as np
import pytest
from scipy import stats

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.coarsening import worst_squared_error
from bqsgd._src.mechanism.encoder import decode, encode
from bqsgd._src.mechanism.properties import noise_density, noise_variance
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism

SMALL = [(1, 0), (1, 1), (1, 2), (2, 3), (3, 7), (2, 64)]
RANGE = 1.5


def moments_at(x: float, s: int, m: int) -> tuple[float, float]:
    """Exact mean and variance of the error of one input, over every rounding and every binomial outcome."""
    steps = x * s / RANGE
    low, up = np.floor(steps), steps - np.floor(steps)
    outcomes = [
        (RANGE / s * (low + carry + k - m / 2) - x, p * law)
        for carry, p in ((0, 1 - up), (1, up))
        for k, law in enumerate(stats.binom(m, 0.5).pmf(np.arange(m + 1)))
    ]
    mean = sum(p * r for r, p in outcomes)
    return mean, sum(p * (r - mean) ** 2 for r, p in outcomes)


@pytest.mark.parametrize(("s", "m"), SMALL)
def test_mean_and_both_variances_by_enumeration(s: int, m: int) -> None:
    mechanism = Mechanism(levels=s, trials=m)
    grid = (np.arange(-200 * s, 200 * s) + 0.5) / (200 * s) * RANGE  # midpoints: uniform over every step
    means, variances = np.array([moments_at(x, s, m) for x in grid]).T
    assert np.abs(means).max() < 1e-12
    assert variances.mean() == pytest.approx(RANGE**2 * noise_variance(mechanism), rel=1e-5, abs=1e-5)
    at_half = moments_at(0.5 * RANGE / s, s, m)[1]
    assert at_half == pytest.approx(RANGE**2 * worst_squared_error(mechanism))
    assert variances.max() <= RANGE**2 * worst_squared_error(mechanism) * (1 + 1e-12)


@pytest.mark.parametrize(("s", "m"), SMALL)
def test_the_density_is_the_binomial_spread_to_triangles(s: int, m: int) -> None:
    mechanism = Mechanism(levels=s, trials=m)
    r = np.linspace(-(m + 2) * RANGE / s, (m + 2) * RANGE / s, 4001)
    k = np.arange(m + 1)
    triangles = np.maximum(0, 1 - np.abs(r[:, None] * s / RANGE + m / 2 - k))
    expected = (triangles * stats.binom(m, 0.5).pmf(k)).sum(axis=1) * s / RANGE
    np.testing.assert_allclose(noise_density(r, mechanism, range=RANGE), expected, atol=1e-12)


@pytest.mark.parametrize(("s", "m"), SMALL)
def test_the_density_has_the_stated_moments(s: int, m: int) -> None:
    # On each piece the density is linear, so Simpson's rule is exact for moments up to the second.
    mechanism, step = Mechanism(levels=s, trials=m), RANGE / s
    left = (np.arange(-1, m + 1) - m / 2) * step
    inner = 1e-9 * step  # the ends belong to two pieces; stay inside one
    points = np.stack([left + inner, left + step / 2, left + step - inner])
    weights = step / 6 * np.array([1, 4, 1])[:, None] * noise_density(points, mechanism, range=RANGE)
    assert weights.sum() == pytest.approx(1, abs=1e-7)
    assert (weights * points).sum() == pytest.approx(0, abs=1e-6)
    assert (weights * points**2).sum() == pytest.approx(RANGE**2 * noise_variance(mechanism), rel=1e-6)


def test_samples_follow_the_density() -> None:
    # Chi-square over 40 bins at p > 1e-9: false-alarm rate 1e-9, and the seed is fixed.
    mechanism, n = Mechanism(levels=2, trials=7), 10**6
    x = np.random.default_rng(1).uniform(-RANGE, RANGE, n)
    error = decode(encode(x, mechanism, range=RANGE, rng=seeded_rng(seed=2)), mechanism, range=RANGE) - x
    edges = np.linspace(-3.5, 3.5, 41)
    fine = np.linspace(-3.5, 3.5, 40 * 250 + 1)
    middles = (fine[1:] + fine[:-1]) / 2
    mass = (noise_density(middles, mechanism, range=RANGE) * np.diff(fine)).reshape(40, 250).sum(axis=1)
    observed = np.histogram(error, edges)[0]
    expected = np.append(mass, 1 - mass.sum()) * n
    observed = np.append(observed, n - observed.sum())
    keep = expected > 10
    keep[-1] = False
    merged = (np.append(observed[keep], observed[~keep].sum()), np.append(expected[keep], expected[~keep].sum()))
    assert stats.chisquare(*merged).pvalue > 1e-9
    assert error.var() == pytest.approx(RANGE**2 * noise_variance(mechanism), rel=6 * np.sqrt(2 / n))


def test_the_density_of_nan_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="finite"):
        noise_density(np.nan, Mechanism(levels=1, trials=2), range=1.0)
