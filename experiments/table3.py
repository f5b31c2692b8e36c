"""Table 3: privacy fixed, bits varied. Eight runs per seed and clip: `python -m experiments.reproduce table3`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.tables import table

NAME = "table3"


def reproduce(
    *, seeds: Sequence[int] = (0, 1, 2), workers: int = 1, quick: bool = False, train: bool = True, **unused: Any
) -> dict[str, Any]:
    """Every row of Table 3 with both clips."""
    return table(3, seeds=seeds, workers=workers, quick=quick, train=train)
