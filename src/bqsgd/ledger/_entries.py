"""What a ledger holds: an append-only list of entries, and the state they add up to.

Everything here is pure. The state is never stored: it is folded from the entries each time a ledger is opened, so there
is no second copy that could disagree with them. Rounds are recorded ahead and ticked off as they are sent: `granted`
says what is charged, `returning` what a clean end gives back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from bqsgd.errors import InvalidParameter, LedgerError
from bqsgd.ledger._budget import PrivacyBudget
from bqsgd.params import check_int
from bqsgd.release import Release

MAX_ROUND = 2**53
MAX_RESERVED_ROUNDS = 1 << 20
MAX_LEDGER_ROUNDS = 1 << 21
"""Rounds that one ledger may name: each is held in memory."""
Rounds = Mapping[tuple[str, int], "Grant"]
"""(run, round) -> its grant."""


class EntryKind(StrEnum):
    """What an entry records."""

    BUDGET = "budget"
    SPEND = "spend"
    RETURN = "return"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One line of a ledger.

    budget: from here on the budget is `budget`, because of `reason`.
    spend: rounds first_round .. first_round + rounds - 1 of `run` count as released; `again` marks rounds of the run
    that were counted before and are now counted again (a new noise draw is a new release).
    return: these rounds of an earlier spend were certainly not sent, and no longer count.
    """

    kind: EntryKind
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
        object.__setattr__(self, "kind", EntryKind(self.kind))
        for name in ("time", "reason", "run"):
            if not isinstance(getattr(self, name), str):
                raise InvalidParameter(f"{name} must be text")
        if self.kind is EntryKind.BUDGET:
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
        if self.kind is EntryKind.BUDGET:
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
    def from_json(cls, text: str) -> LedgerEntry:
        """Read and check a stored entry; anything unexpected raises LedgerError."""
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise InvalidParameter("it is not a table")
            if "budget" in fields:
                fields["budget"] = PrivacyBudget(**fields["budget"])
            if "release" in fields:
                fields["release"] = _release(json.dumps(fields["release"], sort_keys=True))
            return cls(**fields)
        except (TypeError, ValueError, RecursionError) as error:
            raise LedgerError(
                f"an entry of the ledger cannot be read ({str(error)[:200]}); restore the file from a backup"
            ) from error


@lru_cache(maxsize=4096)
def _release(text: str) -> Release:
    """Equal releases are one object: thousands of entries name the same few."""
    return Release.from_dict(json.loads(text))


@dataclass
class LedgerState:
    """What the entries add up to: the budget in force, how often each release was made, which rounds are taken."""

    budget: PrivacyBudget | None = None
    rounds: dict[Release, int] = field(default_factory=dict)
    of_run: dict[str, dict[Release, int]] = field(default_factory=dict)
    """The same of each run by itself."""
    seeded_rounds: int = 0
    taken: dict[str, dict[int, tuple[Release, bool]]] = field(default_factory=dict)

    def add(self, entry: LedgerEntry) -> None:
        """Fold one entry in; a return of more than was spent raises LedgerError."""
        if entry.kind is EntryKind.BUDGET:
            self.budget = entry.budget
            return
        assert entry.release is not None
        sign = 1 if entry.kind is EntryKind.SPEND else -1
        self.seeded_rounds += sign * entry.rounds * entry.seeded
        for tally in (self.rounds, self.of_run.setdefault(entry.run, {})):
            total = tally.get(entry.release, 0) + sign * entry.rounds
            if total < 0 or self.seeded_rounds < 0:
                raise LedgerError("the ledger gives back more rounds than it spent; restore the file from a backup")
            tally[entry.release] = total
            if total == 0:
                del tally[entry.release]
        if sum(map(len, self.taken.values())) + entry.rounds > MAX_LEDGER_ROUNDS:
            raise LedgerError(f"the ledger names more than {MAX_LEDGER_ROUNDS} rounds; begin another for new data")
        taken, made = self.taken.setdefault(entry.run, {}), (entry.release, entry.seeded)
        for number in range(entry.first_round, entry.stop):
            if sign > 0:
                taken[number] = made
            elif not entry.again:  # a returned second attempt leaves the first one standing
                taken.pop(number, None)

    @property
    def total_rounds(self) -> int:
        """Messages that count as released."""
        return sum(self.rounds.values())


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Permission to send one round.

    again: the round was recorded before, so this is a further release of it. charged: it counts as spent (every round
    except a seeded one that will be made from the same noise again).
    """

    release: Release
    seeded: bool
    again: bool
    charged: bool


def granted(
    state: LedgerState, release: Release, *, run: str, rounds: Iterable[int], seeded: bool, resume: bool
) -> dict[tuple[str, int], Grant]:
    """A grant for each of these rounds; a round recorded before is refused unless `resume` is given."""
    taken = state.taken.get(run, {})
    grants = {}
    for number in rounds:
        before = taken.get(number)
        if before is not None and not resume:
            raise LedgerError(
                f"round {number} of run {run!r} is already recorded. Sending the same frame again needs no call; to "
                "send newly noised values for it pass resume=True (it is counted again); a new training needs a new run"
            )
        same_bytes = seeded and before == (release, True)
        grants[run, number] = Grant(release=release, seeded=seeded, again=before is not None, charged=not same_bytes)
    return grants


def spending(grants: Rounds, *, time: str) -> list[LedgerEntry]:
    """The entries that charge these grants."""
    return _entries(EntryKind.SPEND, grants, time=time)


def returning(unsent: Rounds, *, time: str) -> list[LedgerEntry]:
    """The entries that give back what was charged and not sent."""
    return _entries(EntryKind.RETURN, unsent, time=time)


def _entries(kind: EntryKind, grants: Rounds, *, time: str) -> list[LedgerEntry]:
    groups: dict[tuple[str, Grant], list[int]] = {}
    for (run, number), grant in grants.items():
        if grant.charged:
            groups.setdefault((run, grant), []).append(number)
    return [
        LedgerEntry(
            kind=kind,
            time=time,
            release=grant.release,
            run=run,
            first_round=first,
            rounds=count,
            seeded=grant.seeded,
            again=grant.again,
        )
        for (run, grant), numbers in groups.items()
        for first, count in _stretches(sorted(numbers))
    ]


def _stretches(rounds: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending rounds as (first, count) stretches."""
    found: list[tuple[int, int]] = []
    for number in rounds:
        if found and number == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
