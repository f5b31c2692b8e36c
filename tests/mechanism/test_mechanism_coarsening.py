"""Coarsened codes: the exact law by enumeration, samples against it, the stated errors, and nothing left un-noised.

Statistical checks pass at p > 1e-9 or within 6.1 standard errors, so a false alarm is below 1e-7 over the file when
seeds change; the seeds are fixed.
"""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.mechanism import coarsening, properties
from bqsgd._src.mechanism.coarsening import rounding_table
from bqsgd._src.mechanism.encoder import Encoding, decode, encode
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Coarsening, Mechanism

SAMPLES = 400_000
MECHANISMS = [(2, 6, 4, 6), (3, 20, 2, 9), (1, 7, 5, 9), (10, 189, 16, 45), (10, 189, 4, 29), (20, 900, 16, 170)]


def coarse(levels: int, trials: int, points: int, width: int) -> Mechanism:
    return Mechanism(levels=levels, trials=trials, coarsening=Coarsening(points=points, width=width))


def law_by_hand(levels: int, trials: int, points: int, width: int, position: int) -> list[Fraction]:
    """Every binomial outcome, cut and shared out between two points, in exact fractions."""
    law = [Fraction(0)] * points
    for outcome in range(trials + 1):
        code = levels + position + outcome
        inside = min(max(code - levels - Fraction(trials, 2) + Fraction(width, 2), 0), width)
        place = Fraction(inside) * (points - 1) / width
        below = min(place.numerator // place.denominator, points - 2)
        chance = Fraction(comb(trials, outcome), 2**trials)
        law[below] += chance * (1 - (place - below))
        law[below + 1] += chance * (place - below)
    return law


coarsenings = st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(2, 12), st.integers(1, 42)).filter(
    lambda p: max(p[2], p[3]) <= 2 * p[0] + p[1]
)


@given(coarsenings, st.data())
def test_law_bias_and_errors_by_enumeration(parameters: tuple[int, int, int, int], data: st.DataObject) -> None:
    mechanism, s = coarse(*parameters), parameters[0]
    step = Fraction(parameters[3], parameters[2] - 1)
    value = [step * (k - Fraction(parameters[2] - 1, 2)) for k in range(parameters[2])]
    laws = {r: law_by_hand(*parameters, r) for r in range(-s, s + 1)}
    for r, law in laws.items():
        assert coarsening.position_law(mechanism, r) == pytest.approx([float(p) for p in law], abs=1e-9)
        bias = sum(p * v for p, v in zip(law, value, strict=True)) - r
        assert coarsening._moments(mechanism)[0][s + r] == pytest.approx(float(bias), abs=1e-8 * s)
        assert abs(bias) / s <= coarsening.saturation_bias(mechanism) + 1e-8

    def squared_error(x: Fraction) -> float:
        low = min(x.numerator // x.denominator, s - 1)
        mixed = [(1 - (x - low)) * a + (x - low) * b for a, b in zip(laws[low], laws[low + 1], strict=True)]
        return float(sum(p * (v - x) ** 2 for p, v in zip(mixed, value, strict=True))) / s**2

    worst = coarsening.worst_squared_error(mechanism)
    grid = [squared_error(Fraction(k, 16)) for k in range(-16 * s, 16 * s + 1)]
    assert max(grid) <= worst + 1e-8
    assert worst <= max(grid) * 1.02 + 1e-8
    x = Fraction(data.draw(st.integers(-1000 * s, 1000 * s)), 1000)
    assert squared_error(x) <= worst + 1e-8
    simpson = (grid[0] + grid[-1] + 4 * sum(grid[1::2]) + 2 * sum(grid[2:-1:2])) / (3 * (len(grid) - 1))
    assert properties.noise_variance(mechanism) == pytest.approx(simpson, rel=1e-6)  # quadratic between positions
    at_zero = sum(p * v**2 for p, v in zip(laws[0], value, strict=True))
    assert coarsening.variance_at_zero(mechanism) == pytest.approx(float(at_zero), abs=1e-7)


@pytest.mark.parametrize(("levels", "trials"), [(1, 4), (10, 189), (3, 64)])
def test_without_coarsening_the_figures_are_those_of_proposition_1(levels: int, trials: int) -> None:
    mechanism = Mechanism(levels=levels, trials=trials)
    assert coarsening.mean_squared_error(mechanism) == pytest.approx(properties.noise_variance(mechanism))
    halfway = (trials + 1) / (4 * levels**2)  # m/4 of the noise and 1/4 of a rounding halfway between two levels
    assert coarsening.worst_squared_error(mechanism) == pytest.approx(halfway)
    assert coarsening.noise_to_signal(mechanism) == pytest.approx(halfway)
    assert coarsening.saturation_bias(mechanism) == pytest.approx(0, abs=1e-12)
    assert coarsening.variance_at_zero(mechanism) == trials / 4


@pytest.mark.parametrize("parameters", MECHANISMS)
@pytest.mark.parametrize("position", [0, -1, "last"])
def test_samples_follow_the_law_and_the_bias(parameters: tuple[int, int, int, int], position: int | str) -> None:
    mechanism = coarse(*parameters)
    r = mechanism.levels if position == "last" else int(position)
    codes = encode(np.full(SAMPLES, r / mechanism.levels), mechanism, range=1.0, rng=seeded_rng(seed=r + 100))
    expected = coarsening.position_law(mechanism, r) * SAMPLES
    seen, often = np.bincount(codes, minlength=mechanism.code_count), expected >= 20
    cells = [np.append(c[often], c[~often].sum()) for c in (seen, expected)]
    cells = [c if cells[1][-1] >= 1 else c[:-1] for c in cells]
    assert stats.chisquare(cells[0], cells[1] * cells[0].sum() / cells[1].sum()).pvalue > 1e-9
    values = decode(codes, mechanism, range=1.0)
    tolerance = 6.1 * values.std() / np.sqrt(SAMPLES)
    measured = values.mean() - r / mechanism.levels
    bias = coarsening._moments(mechanism)[0][mechanism.levels + r] / mechanism.levels
    assert measured == pytest.approx(bias, abs=tolerance)
    assert abs(measured) <= coarsening.saturation_bias(mechanism) + tolerance


def test_a_window_over_all_codes_leaves_every_input_unbiased() -> None:
    mechanism = coarse(4, 40, 7, 48)
    assert coarsening.saturation_bias(mechanism) < 1e-9
    values = np.linspace(-1, 1, 9)
    codes = encode(np.repeat(values, SAMPLES // 9), mechanism, range=1.0, rng=seeded_rng(seed=8))
    found = decode(codes, mechanism, range=1.0).reshape(9, -1)
    assert np.all(np.abs(found.mean(axis=1) - values) < 6.1 * found.std(axis=1) / np.sqrt(SAMPLES // 9))


@pytest.mark.parametrize("parameters", MECHANISMS)
@pytest.mark.parametrize("d", [1, 2, 7, 16_385, 50_003])
def test_codes_do_not_depend_on_slices(parameters: tuple[int, int, int, int], d: int) -> None:
    mechanism, values = coarse(*parameters), np.random.default_rng(d).uniform(-1, 1, d)
    codes = encode(values, mechanism, range=1.0, rng=seeded_rng(seed=5))
    assert codes.dtype == np.uint8
    encoding, pieces = Encoding(values, mechanism, range=1.0, rng=seeded_rng(seed=5)), np.zeros_like(codes)
    starts = [0, *range(2, d, 4998)]  # even, but not on a whole block of draws
    for start, stop in reversed(list(zip(starts, [*starts[1:], d], strict=True))):
        encoding.write(start, stop, pieces[start:stop])
    assert np.array_equal(codes, pieces)


def test_the_rounding_is_that_of_the_fine_codes_of_the_same_noise() -> None:
    mechanism, values = coarse(10, 189, 16, 45), np.random.default_rng(1).uniform(-1, 1, 9999)
    fine = encode(values, mechanism.fine, range=1.0, rng=seeded_rng(seed=2))
    codes = encode(values, mechanism, range=1.0, rng=seeded_rng(seed=2))
    place = rounding_table(mechanism)[fine] / 2**32
    assert np.all((codes == np.floor(place)) | (codes == np.ceil(place)))


def test_the_draws_are_fresh_and_independent_of_the_noise() -> None:
    mechanism, rng = coarse(1, 7, 2, 1), seeded_rng(seed=3)
    values = np.zeros(SAMPLES)
    first, second = (encode(values, mechanism, range=1.0, rng=rng).astype(float) - 0.5 for _ in range(2))
    fine = encode(values, mechanism.fine, range=1.0, rng=seeded_rng(seed=3)).astype(float) - 4.5
    assert abs(np.mean(first * second)) < 6.1 * 0.25 / np.sqrt(SAMPLES)
    middle = np.abs(fine) < 0.6  # both sides of an odd window's middle: the point is the sign of the noise
    assert np.array_equal(first[middle] > 0, fine[middle] > 0)
    even = coarse(1, 8, 2, 2)
    noise = encode(values, even.fine, range=1.0, rng=seeded_rng(seed=3))
    drawn = encode(values, even, range=1.0, rng=seeded_rng(seed=3))[noise == 5].astype(float) - 0.5
    assert abs(drawn.mean()) < 6.1 * 0.5 / np.sqrt(drawn.size)
    assert abs(np.mean(drawn[1:] * drawn[:-1])) < 6.1 * 0.25 / np.sqrt(drawn.size)


@pytest.mark.parametrize("bad", [np.nan, 3.0])
def test_a_refused_vector_leaves_no_code_without_noise_behind(bad: float) -> None:
    mechanism, values = coarse(10, 189, 16, 45), np.full(20_000, 1.0)
    values[17_000] = bad
    out = np.full(values.size, 9, dtype=np.uint8)
    with pytest.raises(BqsgdError):
        Encoding(values, mechanism, range=1.0, rng=privacy_rng()).write(0, out.size, out)
    assert not out[1 << 14 :].any()
    assert np.unique(out[: 1 << 14]).size > 4


@settings(max_examples=30)
@given(coarsenings)
def test_decode_is_linear_around_the_middle_point(parameters: tuple[int, int, int, int]) -> None:
    mechanism = coarse(*parameters)
    values = decode(np.arange(mechanism.code_count), mechanism, range=2.0)
    assert values == pytest.approx(-values[::-1])
    assert values[-1] == pytest.approx(2.0 * mechanism.reach)
    assert values[-1] == pytest.approx(parameters[3] / 2 * 2.0 / parameters[0])
    per_coordinate = decode(np.arange(mechanism.code_count), mechanism, range=np.full(mechanism.code_count, 2.0))
    assert values == pytest.approx(per_coordinate)


def test_what_does_not_apply_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="before coarsening"):
        properties.noise_density(0.0, coarse(1, 7, 2, 3), range=1.0)
    with pytest.raises(InvalidParameter, match="no coarsening"):
        rounding_table(Mechanism(levels=1, trials=7))
    with pytest.raises(InvalidParameter, match="position"):
        coarsening.position_law(coarse(1, 7, 2, 3), 2)
