"""Table 2: bits fixed, privacy varied. Ten runs per seed and clip: `python -m experiments.reproduce table2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.tables import table

NAME = "table2"


def reproduce(
    *, seeds: Sequence[int] = (0, 1, 2), workers: int = 1, quick: bool = False, train: bool = True, **unused: Any
) -> dict[str, Any]:
    """Every row of Table 2 with both clips."""
    return table(2, seeds=seeds, workers=workers, quick=quick, train=train)
