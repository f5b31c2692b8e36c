"""What a ledger held before a run began: how much is spent, by which runs and when, in words for its owner."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bqsgd._src.ledger._budget import PrivacyBudget
from bqsgd._src.ledger._entries import EntryKind, LedgerEntry
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.privacy.guarantee import Guarantee, as_given, rounded_down
from bqsgd._src.release import Release
from bqsgd._src.text import one_line

_MOST_RUNS = 5
"""How many runs are named, the latest first."""


@dataclass(frozen=True, kw_only=True)
class EarlierRun:
    """The rounds of one run that count as sent, and the times of its first and last entry."""

    name: str
    rounds: int
    began: str
    ended: str

    def __str__(self) -> str:
        began, ended = (time.removesuffix("+00:00").replace("T", " ") for time in (self.began, self.ended))
        when = began if began == ended else f"{began} to {ended}"
        return one_line(f"run {self.name}: {self.rounds} rounds, {when} UTC")


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What a client has spent before: in total, and run by run. first: what the first message revealed,
    None if the ledger holds only releases made elsewhere."""

    guarantee: Guarantee
    budget: PrivacyBudget
    runs: tuple[EarlierRun, ...]
    first: Release | None

    @classmethod
    def of(cls, ledger: Ledger | None) -> Earlier | None:
        """What the ledger holds; None if that is nothing."""
        guarantee = None if ledger is None else ledger.guarantee()
        if ledger is None or guarantee is None:
            return None
        entries = [entry for entry in ledger.entries if entry.release is not None]
        own = (entry.release for entry in entries if entry.release is not None and entry.release.event is None)
        runs = tuple(run for run in _runs(entries) if run.rounds)
        return cls(guarantee=guarantee, budget=ledger.budget, runs=runs, first=next(own, None))

    @property
    def left(self) -> float:
        """Epsilon of the budget that is not spent."""
        return max(0.0, self.budget.epsilon - self.guarantee.epsilon)

    def __str__(self) -> str:
        runs = "; ".join(str(run) for run in reversed(self.runs[-_MOST_RUNS:]))
        more = len(self.runs) - _MOST_RUNS
        left = f"about {rounded_down(self.left, 2)} is left" if self.left else "nothing is left"
        return (
            f"{self.guarantee} is already spent of a budget of epsilon {as_given(self.budget.epsilon)}, and {left} "
            f"({runs}{f'; and {more} earlier runs' * (more > 0)})"
        )

    def compared(self, shift: float) -> str:
        """The noise beside that of the first message, if one record moves a message by `shift` standard deviations."""
        if self.first is None:
            return "the ledger holds no message yet, only releases made elsewhere"
        more = shift_of(self.first) / max(shift, 1e-300)
        return f"a step has {more:.2g} times the noise of a step of the first run"


def _runs(entries: Iterable[LedgerEntry]) -> Iterable[EarlierRun]:
    by_run: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run, []).append(entry)
    for name, own in by_run.items():
        rounds = sum(entry.rounds if entry.kind is EntryKind.SPEND else -entry.rounds for entry in own)
        yield EarlierRun(name=name, rounds=rounds, began=own[0].time, ended=own[-1].time)


def shift_of(release: Release) -> float:
    """How far one record can move the message, in standard deviations of its noise: comparable across ranges."""
    return release.shift_l2 / (math.sqrt(noise_variance(release.mechanism)) * release.mechanism.levels)
