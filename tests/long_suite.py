"""Long lists of cases: a few in every run, all of them in `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_slow(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Cases of a parametrised test, a tuple where it has several arguments: those not in `quick` are marked slow."""
    found = [(case if isinstance(case, tuple) else (case,), case in quick) for case in cases]
    assert sum(kept for _, kept in found) == len(quick), "a quick case that is no case"
    return [pytest.param(*values, marks=[] if kept else pytest.mark.slow) for values, kept in found]
