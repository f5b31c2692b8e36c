"""Charts as numbers: ticks, places, thinning, stacking."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import Mechanism
from bqsgd._src.reports._chart import Axis, Chart, Quantity, Series, short, thin
from bqsgd._src.reports._figures import noise_chart

sizes = st.floats(1e-12, 1e12)
values = sizes | sizes.map(lambda x: -x) | st.just(0.0)


@given(st.lists(values, min_size=1), st.booleans(), st.booleans())
def test_a_linear_axis_covers_its_values_with_a_few_round_ticks(data: list[float], zero: bool, tight: bool) -> None:
    axis = Axis.over(data, from_zero=zero, tight=tight)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in data)
    assert all(-1e-9 <= axis.place(tick) <= 1 + 1e-9 for tick in axis.ticks)
    assert 2 <= len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(set(axis.ticks))
    if zero:
        assert axis.low <= 0 or tight


@given(st.lists(sizes, min_size=1), st.booleans())
def test_a_logarithmic_axis_covers_its_values(data: list[float], tight: bool) -> None:
    axis = Axis.over(data, log=True, tight=tight)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in data)
    assert axis.place(math.sqrt(axis.low * axis.high)) == pytest.approx(0.5)
    assert len(axis.ticks) <= 8


def test_ticks_by_hand() -> None:
    assert Axis.over([0.1, 0.97], from_zero=True).ticks == (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert Axis.over([1, 400], tight=True).ticks == (100, 200, 300, 400)
    assert Axis.over([0.3, 250], log=True).ticks == (0.1, 1, 10, 100, 1000)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=900).map(sorted), st.integers(4, 400))
def test_thinning_keeps_ends_extremes_and_order(points: list[tuple[float, float]], limit: int) -> None:
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 1)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert kept == sorted(kept, key=lambda point: point[0])


def chart(*curves: list[tuple[float, float]], **options: object) -> Chart:
    series = [Series(label=f"curve {i}", points=points, colour=i) for i, points in enumerate(curves)]
    return Chart(key="k", title="T", note="", x_label="x", y_label="y", series=series, **options)  # type: ignore[arg-type]


def test_a_line_is_drawn_where_its_values_are() -> None:
    drawing = chart([(0, 0), (5, 10), (10, 5)]).drawing()
    assert drawing is not None
    assert drawing["curves"][0]["line"] == "M0.0 1000.0L500.0 0.0L1000.0 500.0"
    assert drawing["alt"] == "T. y against x. curve 0: 0 at 0, 5 at 10, lowest 0, highest 10."
    assert drawing["hidden"] == 0


def test_values_that_cannot_be_drawn_are_counted_not_hidden_in_silence() -> None:
    drawing = chart([(1, math.inf), (2, math.nan), (3, 1.0), (4, 10.0), (5, 0.0)], log_y=True).drawing()
    assert drawing is not None
    assert drawing["hidden"] == 3
    assert chart([(1, math.inf)], []).drawing() is None


def test_stacked_series_add_up_and_must_match() -> None:
    drawing = chart([(0, 1), (1, 2)], [(0, 3), (1, 2)], stacked=True).drawing()
    assert drawing is not None
    assert drawing["curves"][1]["line"] == "M0.0 0.0L1000.0 0.0"
    assert drawing["hover"]["curves"][1]["data"] == [[0, 3], [1, 2]]
    with pytest.raises(InvalidParameter, match="same x"):
        chart([(0, 1)], [(1, 1)], stacked=True).drawing()


@pytest.mark.parametrize("mechanism", [Mechanism(levels=1, trials=1), Mechanism(levels=8, trials=239)])
def test_the_noise_densities_hold_all_mass(mechanism: Mechanism) -> None:
    for series in noise_chart(mechanism).series:
        xs, ys = zip(*series.points, strict=True)
        mass = sum((xs[i + 1] - xs[i]) * (ys[i] + ys[i + 1]) / 2 for i in range(len(xs) - 1))
        assert mass == pytest.approx(1, abs=2e-3), series.label


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (61788, Quantity.BYTES, "61.8 kB"),
        (0, Quantity.BYTES, "0 B"),
        (999, Quantity.BYTES, "999 B"),
        (2.5e9, Quantity.BYTES, "2.5 GB"),
        (0.97123, Quantity.PERCENT, "97.1 %"),
        (1e308, Quantity.PERCENT, "∞ %"),
        (0.0042, Quantity.SECONDS, "4.2 ms"),
        (125.2, Quantity.SECONDS, "2 min 5 s"),
        (120, Quantity.SECONDS, "2 min"),
        (12345, Quantity.COUNT, "12,345"),
        (1e-5, Quantity.NUMBER, "1e-5"),
        (-2.5, Quantity.NUMBER, "−2.5"),
        (1200, Quantity.NUMBER, "1200"),
        (math.inf, Quantity.NUMBER, "∞"),
        (math.nan, Quantity.NUMBER, "not a number"),
        (None, Quantity.BYTES, "–"),
    ],
)
def test_figures_are_short_and_carry_their_unit(value: float | None, unit: Quantity, shown: str) -> None:
    assert short(value, unit) == shown
