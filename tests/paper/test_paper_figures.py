"""Figures 1 and 2 against the encoder itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from experiments.paper.figures import FIGURE_1, draw_figure_1, draw_figure_2, indistinguishable_mass, outcome_law

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.encoder import encode
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism


@pytest.mark.parametrize("panel", FIGURE_1, ids=lambda panel: panel.title)
def test_the_drawn_law_is_that_of_the_encoder(panel) -> None:
    """Statistical: 5 standard errors a point, 12 points: false alarm below 1e-5; seeded, so it never flips."""
    samples = 40_000
    for value in panel.values:
        points, law = outcome_law(value, panel.mechanism)
        codes = encode(np.full(samples, value), panel.mechanism, range=1.0, rng=seeded_rng(seed=5))
        found = np.bincount(codes, minlength=panel.mechanism.code_count) / samples
        np.testing.assert_allclose(points, (np.arange(len(law)) - 10) / 10, atol=1e-12)
        assert law.sum() == pytest.approx(1)
        assert np.all(np.abs(found - law) <= 5 * np.sqrt(law * (1 - law) / samples) + 1e-12)


def test_figure_1_shows_the_papers_point(tmp_path: Path) -> None:
    """One interval: never told apart by what is possible; two: always; with noise: some outcomes are shared again."""
    assert [indistinguishable_mass(panel) for panel in FIGURE_1] == pytest.approx([1.0, 0.0, 0.25])
    fields = draw_figure_1(tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    assert fields["panels"][2]["laws"][0] == [
        pytest.approx([0.2, 0.35]),
        pytest.approx([0.3, 0.5]),
        pytest.approx([0.4, 0.15]),
    ]


def test_figure_2_is_a_density_of_the_stated_variance(tmp_path: Path) -> None:
    fields = draw_figure_2(tmp_path / "two.png", Mechanism(levels=2, trials=10))
    assert (tmp_path / "two.png").stat().st_size > 10_000
    error, density = np.array(fields["error"]), np.array(fields["bq"])
    assert np.trapezoid(density, error) == pytest.approx(1, abs=1e-3)
    assert np.trapezoid(density * error**2, error) == pytest.approx(fields["variance"], rel=0.01)
    assert fields["variance"] == pytest.approx((10 / 4 + 1 / 6) / 4)


def test_a_value_outside_the_clip_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="value must lie"):
        outcome_law(1.5, Mechanism(levels=10, trials=1))
