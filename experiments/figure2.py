"""Figure 2: the density of BQ's noise against the binomial law and the Gaussian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bqsgd.paper.figures import draw_figure_2

NAME, FIGURES = "figure2", ("figure2.png",)


def reproduce(*, figures: Path, **unused: Any) -> dict[str, Any]:
    """Draw it, for s = 2 and m = 10: few enough trials to see the steps (the paper does not name its own)."""
    return draw_figure_2(figures / FIGURES[0])
