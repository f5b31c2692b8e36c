"""What a ledger holds: an append-only list of entries, and the state they add up to.

Everything here is pure. The state is never stored: it is folded from the entries each time a ledger is opened, so there
is no second copy that could disagree with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from bqsgd.errors import InvalidParameter, LedgerError
from bqsgd.params import check_int, check_positive
from bqsgd.release import Release

MAX_ROUND = 2**53
MAX_RESERVED_ROUNDS = 1 << 20


class Kind(StrEnum):
    """What an entry records."""

    BUDGET = "budget"
    SPEND = "spend"
    RETURN = "return"


@dataclass(frozen=True, kw_only=True)
class PrivacyBudget:
    """The most a client may spend: epsilon at delta, over the whole life of its ledger."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", check_positive("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_positive("delta", self.delta))
        if self.delta >= 1:
            raise InvalidParameter(f"delta must be below 1, got {self.delta}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a ledger.

    budget: from here on the budget is `budget`, because of `reason`.
    spend: rounds first_round .. first_round + rounds - 1 of `run` count as released; `again` marks rounds of the run
    that were counted before and are now counted once more (a new noise draw is a new release).
    return: these rounds of an earlier spend were certainly not sent and no longer count.
    """

    kind: Kind
    time: str
    budget: PrivacyBudget | None = None
    reason: str = ""
    release: Release | None = None
    run: str = ""
    first_round: int = 0
    rounds: int = 0
    seeded: bool = False
    again: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))
        if self.kind is Kind.BUDGET:
            if self.budget is None:
                raise InvalidParameter("a budget entry needs a budget")
            return
        if self.release is None or not self.run:
            raise InvalidParameter(f"a {self.kind} entry needs a release and a run")
        check_int("first_round", self.first_round, 0, MAX_ROUND)
        check_int("rounds", self.rounds, 1, MAX_RESERVED_ROUNDS)
        for name in ("seeded", "again"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(f"{name} must be true or false, got {getattr(self, name)!r}")

    @property
    def stop(self) -> int:
        """One past the last round."""
        return self.first_round + self.rounds

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; only the fields this kind uses."""
        if self.kind is Kind.BUDGET:
            assert self.budget is not None
            return {"kind": str(self.kind), "time": self.time, "budget": asdict(self.budget), "reason": self.reason}
        assert self.release is not None
        return {
            "kind": str(self.kind),
            "time": self.time,
            "run": self.run,
            "first_round": self.first_round,
            "rounds": self.rounds,
            "seeded": self.seeded,
            "again": self.again,
            "release": self.release.to_dict(),
        }

    def to_json(self) -> str:
        """The stored form: one line, sorted keys, so that equal entries are equal bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """Read and check a stored entry; anything unexpected raises LedgerError."""
        try:
            fields = json.loads(text)
            if "budget" in fields:
                fields["budget"] = PrivacyBudget(**fields["budget"])
            if "release" in fields:
                fields["release"] = Release.from_dict(fields["release"])
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise LedgerError(
                f"an entry of the ledger cannot be read ({error}); restore the file from a backup"
            ) from error


@dataclass
class State:
    """What the entries add up to: the budget in force, how often each release was made, which rounds are taken."""

    budget: PrivacyBudget | None = None
    rounds: dict[Release, int] = field(default_factory=dict)
    seeded_rounds: int = 0
    taken: dict[str, dict[int, tuple[Release, bool]]] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Fold one entry in; a return of more than was spent raises LedgerError."""
        if entry.kind is Kind.BUDGET:
            self.budget = entry.budget
            return
        assert entry.release is not None
        sign = 1 if entry.kind is Kind.SPEND else -1
        total = self.rounds.get(entry.release, 0) + sign * entry.rounds
        self.seeded_rounds += sign * entry.rounds * entry.seeded
        if total < 0 or self.seeded_rounds < 0:
            raise LedgerError("the ledger gives back more rounds than it spent; restore the file from a backup")
        self.rounds[entry.release] = total
        if total == 0:
            del self.rounds[entry.release]
        taken = self.taken.setdefault(entry.run, {})
        for number in range(entry.first_round, entry.stop):
            if sign > 0:
                taken[number] = (entry.release, entry.seeded)
            elif not entry.again:  # a returned second attempt leaves the first one standing
                taken.pop(number, None)

    @property
    def total_rounds(self) -> int:
        """Messages that count as released."""
        return sum(self.rounds.values())

    def clash(self, *, run: str, first_round: int, rounds: int) -> int | None:
        """The first of these rounds that is already recorded, or None."""
        taken: Mapping[int, object] = self.taken.get(run, {})
        return next((r for r in range(first_round, first_round + rounds) if r in taken), None)
