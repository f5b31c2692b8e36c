"""A bound on the CPU time of planning: whoever sets the run decides how long it takes, whoever plans how long it may.

The search looks at the clock before each question to the accountant, whose own time and memory are bounded
(docs/accounting.md, Claim 6). So it ends at most one answer late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from bqsgd.errors import BqsgdError

_limit: ContextVar[tuple[float, float] | None] = ContextVar("_limit", default=None)
"""(the process's CPU time at which planning must end, the seconds that were allowed)."""


class PlanningTooLong(BqsgdError, RuntimeError):
    """Planning took more CPU seconds than it was allowed; nothing was recorded."""


@contextmanager
def cpu_seconds(allowed: float | None) -> Iterator[None]:
    """Planning inside the block raises PlanningTooLong after so many CPU seconds; None allows any number."""
    token = _limit.set(None if allowed is None else (time.process_time() + allowed, allowed))
    try:
        yield
    finally:
        _limit.reset(token)


def check_time() -> None:
    """Raise where the time allowed is used up."""
    found = _limit.get()
    if found is not None and time.process_time() > found[0]:
        raise PlanningTooLong(f"planning takes more than the {found[1]:g} CPU seconds that this client allows")
