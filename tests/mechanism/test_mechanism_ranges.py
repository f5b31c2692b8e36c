"""The two ways into the range: both end within the range, exactly, and refuse what is not finite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.mechanism.encoder import clamp, scale

vectors = st.one_of(
    hnp.arrays(np.float64, st.integers(1, 20), elements=st.floats(-1e100, 1e100)),
    hnp.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2.0**99), 2.0**99, width=32)),
)
limits = st.floats(1e-6, 1e6)


@given(vectors, limits, st.booleans())
@settings(max_examples=300)
def test_both_end_within_the_range_and_keep_dtype_and_sign(values: np.ndarray, limit: float, vector: bool) -> None:
    bound = limit * np.linspace(1, 2, values.size) if vector else limit
    for result in (scale(values, bound), clamp(values, bound)):
        assert result.dtype == values.dtype
        assert np.all(np.abs(result.astype(np.float64)) <= bound)
        assert np.all(result * np.sign(values) >= 0)


@given(vectors, limits)
def test_what_is_within_the_range_is_left_alone(values: np.ndarray, limit: float) -> None:
    small = (values / (np.abs(values).max() + 1) * limit / 2).astype(values.dtype)
    assert np.array_equal(scale(small, limit), small)
    assert np.array_equal(clamp(small, limit), small)


@given(vectors, limits)
def test_clamp_is_the_projection(values: np.ndarray, limit: float) -> None:
    wide = values.astype(np.float64)
    np.testing.assert_allclose(clamp(values, limit), np.clip(wide, -limit, limit), rtol=2e-7)


@given(vectors, limits)
def test_scale_keeps_the_direction_and_reaches_the_range(values: np.ndarray, limit: float) -> None:
    largest = np.abs(values.astype(np.float64)).max()
    expected = values.astype(np.float64) / max(1.0, largest / limit)
    tolerance = 1e-12 if values.dtype == np.float64 else 3e-7
    np.testing.assert_allclose(scale(values, limit), expected, rtol=tolerance, atol=1e-40)


def test_scale_and_clamp_by_hand() -> None:
    values, each = np.array([4.0, -1.0, 0.5]), np.array([1.0, 1.0, 0.25])
    assert scale(values, 2.0).tolist() == [2.0, -0.5, 0.25]
    assert clamp(values, 2.0).tolist() == [2.0, -1.0, 0.5]
    assert scale(values, each).tolist() == [1.0, -0.25, 0.125]
    assert clamp(values, each).tolist() == [1.0, -1.0, 0.25]


@pytest.mark.parametrize("function", [scale, clamp])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(function, bad: float) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NonFiniteInput, match=r"values\[1\]"):
        function(np.array([0.0, bad]), 1.0)


@pytest.mark.parametrize("function", [scale, clamp])
@pytest.mark.parametrize("limit", [0.0, -1.0, np.inf, np.nan, np.ones(3), np.array([1.0, -1.0]), "1", True])
def test_a_value_that_is_no_range_is_refused(function, limit: object) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidParameter, match="range"):
        function(np.array([0.0, 1.0]), limit)


def test_a_range_too_small_for_the_values_is_refused_rather_than_giving_zeros() -> None:
    with pytest.raises(InvalidParameter, match="overflows"):
        scale(np.array([1e200]), 1e-200)
