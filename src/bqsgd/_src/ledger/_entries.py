"""What a ledger holds: an append-only list of entries, and the state that they add up to.

Everything here is pure. The state is never stored: opening a ledger adds up its entries again, so there is no second
copy that could disagree with them. Rounds are recorded ahead of time and ticked off in memory as they are sent:
`grants_for` decides what a reservation charges, and `entries_for` writes down a charge or what a clean end gives back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

from bqsgd._src.errors import InvalidParameter, LedgerError
from bqsgd._src.ledger._budget import PrivacyBudget
from bqsgd._src.params import check_int
from bqsgd._src.release import Release

MAX_ROUND = 2**53
MAX_RESERVED_ROUNDS = 1 << 20
MAX_LEDGER_ROUNDS = 1 << 21
"""How many rounds one ledger may name; opening it holds every one in memory."""
Grants = Mapping[tuple[str, int], "Grant"]
"""(run, round) -> the permission to send it."""


class EntryKind(StrEnum):
    """What an entry records."""

    BUDGET = "budget"
    SPEND = "spend"
    RETURN = "return"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One line of a ledger. What it means depends on its kind:

    budget: from here on the client's budget is `budget`, because of `reason`.
    spend: rounds first_round .. first_round + rounds - 1 of `run` count as released. `again` marks rounds that were
    counted before and are now counted once more, because a new noise draw is a new release.
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
        fields: dict[str, Any] = {"kind": str(self.kind), "time": self.time}
        if self.kind is EntryKind.BUDGET:
            assert self.budget is not None
            return fields | {"budget": asdict(self.budget), "reason": self.reason}
        assert self.release is not None
        spent = {name: getattr(self, name) for name in ("run", "first_round", "rounds", "seeded", "again")}
        return fields | spent | {"release": self.release.to_dict()}

    def to_json(self) -> str:
        """The stored form: one line, sorted keys, so that equal entries are equal bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LedgerEntry:
        """Read and check a stored entry.

        Raises:
            LedgerError: the text is not an entry, or one of its fields is out of range.
        """
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict):
                raise InvalidParameter("not a JSON object")
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
    """Cached, so that equal releases are one object: thousands of entries name the same few."""
    return Release.from_dict(json.loads(text))


@dataclass
class LedgerState:
    """What the entries add up to: the budget in force, how often each release was made, which rounds were recorded."""

    budget: PrivacyBudget | None = None
    rounds: dict[Release, int] = field(default_factory=dict)
    of_run: dict[str, dict[Release, int]] = field(default_factory=dict)
    """Run -> how often the run made each release."""
    seeded_rounds: int = 0
    recorded: dict[str, dict[int, tuple[Release, bool]]] = field(default_factory=dict)
    """Run -> round -> what it last released, and whether with seeded noise."""

    def add(self, entry: LedgerEntry) -> None:
        """Count one more entry.

        Raises:
            LedgerError: the entry returns more than was spent, or the ledger names too many rounds.
        """
        if entry.kind is EntryKind.BUDGET:
            self.budget = entry.budget
            return
        assert entry.release is not None
        sign = 1 if entry.kind is EntryKind.SPEND else -1
        self.seeded_rounds += sign * entry.rounds * entry.seeded
        for tally in (self.rounds, self.of_run.setdefault(entry.run, {})):
            total = tally.get(entry.release, 0) + sign * entry.rounds
            if total < 0 or self.seeded_rounds < 0:
                raise LedgerError("the ledger returns more rounds than it spent; restore the file from a backup")
            tally[entry.release] = total
            if total == 0:
                del tally[entry.release]
        # Before the loop below: a damaged file must not make it fill the memory.
        if sum(map(len, self.recorded.values())) + entry.rounds > MAX_LEDGER_ROUNDS:
            raise LedgerError(f"the ledger names more than {MAX_LEDGER_ROUNDS} rounds; start a new one for new data")
        recorded = self.recorded.setdefault(entry.run, {})
        for number in range(entry.first_round, entry.stop):
            if sign > 0:
                recorded[number] = entry.release, entry.seeded
            elif not entry.again:  # When a second attempt is returned, the first one was still sent.
                recorded.pop(number, None)

    @property
    def total_rounds(self) -> int:
        """How many messages count as released."""
        return sum(self.rounds.values())


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Permission to send one round.

    again: the round was recorded before, so this is a further release of it. charged: it counts as spent. Every round
    does, except one that repeats the same release with the same seeded noise.
    """

    release: Release
    seeded: bool
    again: bool
    charged: bool


def grants_for(
    state: LedgerState, release: Release, *, run: str, rounds: Iterable[int], seeded: bool, resume: bool
) -> dict[tuple[str, int], Grant]:
    """A grant for each of these rounds of `run`; `resume` allows rounds that were recorded before.

    Raises:
        LedgerError: a round was recorded before and `resume` is false.
    """
    recorded = state.recorded.get(run, {})
    grants = {}
    for number in rounds:
        before = recorded.get(number)
        if before is not None and not resume:
            raise LedgerError(
                f"round {number} of run {run!r} is already recorded. Sending the same frame again needs no call; to "
                "send newly noised values for it pass resume=True (it is counted again); a new training needs a new run"
            )
        same_bytes = seeded and before == (release, True)
        grants[run, number] = Grant(release=release, seeded=seeded, again=before is not None, charged=not same_bytes)
    return grants


def now() -> str:
    """The time that an entry is stamped with: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def first_entry(budget: PrivacyBudget) -> str:
    """The entry that every ledger begins with, in its stored form."""
    return LedgerEntry(kind=EntryKind.BUDGET, time=now(), budget=budget, reason="ledger made").to_json()


def entries_for(kind: EntryKind, grants: Grants) -> list[LedgerEntry]:
    """The entries that charge these grants (SPEND) or give them back (RETURN), one for each stretch of rounds."""
    time, groups = now(), dict[tuple[str, Grant], list[int]]()
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


def _stretches(rounds: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending rounds as stretches without gaps: (first, count)."""
    # Within a stretch, the difference between a round and its place in the list stays the same.
    for _, stretch in itertools.groupby(enumerate(rounds), key=lambda placed: placed[1] - placed[0]):
        numbers = [number for _, number in stretch]
        yield numbers[0], len(numbers)
