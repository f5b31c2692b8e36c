"""The table of "Few bits" in docs/accounting.md, computed anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from bqsgd._src.mechanism.coarsening import noise_to_signal, saturation_bias, worst_squared_error
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.search import coarsened

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"


def rows() -> list[list[str]]:
    text = PAGE.read_text().split("## Few bits")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| levels")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_both_mechanisms_and_all_bits() -> None:
    assert [row[1] for row in rows()] == ["2", "3", "4", "6"] * 2


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]} at {row[1]} bits")
def test_each_figure_is_the_computed_one(row: list[str]) -> None:
    levels, trials = map(int, row[0].split(","))
    coarse = coarsened(Mechanism(levels=levels, trials=trials), bits=int(row[1]))
    cost = noise_to_signal(coarse) / noise_to_signal(coarse.fine)
    errors = (saturation_bias(coarse), worst_squared_error(coarse), worst_squared_error(coarse.fine))
    assert row[2:] == [str(coarse.coarsening.width), f"{cost:.3f}", *(f"{error:.4f}" for error in errors)]
