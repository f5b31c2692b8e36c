"""Figure 1: what quantisation and BQ make of two neighbouring values (s = 10, m = 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bqsgd.paper.figures import draw_figure_1

NAME, FIGURES = "figure1", ("figure1.png",)


def reproduce(*, figures: Path, **unused: Any) -> dict[str, Any]:
    """Draw it; the law of every outcome is exact."""
    return draw_figure_1(figures / FIGURES[0])
