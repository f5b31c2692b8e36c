"""What is public about a step of a private loop, and a progress line made of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from bqsgd._src.privacy.guarantee import Guarantee


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What may be published about a step: nothing in it depends on the data.

    number: steps taken so far, this one included. planned: steps that the budget is planned for.
    """

    number: int
    planned: int
    _guarantee: Callable[[], Guarantee | None] = field(repr=False, compare=False)

    @cached_property
    def guarantee(self) -> Guarantee | None:
        """What everything in the ledger guarantees when this is first asked for; it takes the accountant a moment."""
        return self._guarantee()

    @property
    def epsilon(self) -> float:
        """The epsilon of `guarantee`, 0 without one."""
        return 0.0 if self.guarantee is None else self.guarantee.epsilon

    def __str__(self) -> str:
        found = self.guarantee
        spent = "" if found is None else f", epsilon {found.epsilon_text} at delta {found.delta:g}"
        return f"step {self.number} of {self.planned}{spent}"


class Progress:
    """A line on stderr that says how far training is, at most once a second and after the last planned step."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, report: StepReport) -> None:
        last = report.number >= report.planned
        if last or time.monotonic() >= self._next:
            print(f"\r{report}", end="\n" if last else "", file=sys.stderr, flush=True)
            self._next = time.monotonic() + 1
