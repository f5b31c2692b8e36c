"""Rounds recorded ahead and ticked off as they are sent: what is charged, and what a clean end gives back. All pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bqsgd.errors import LedgerError
from bqsgd.privacy.ledger_entries import Entry, Kind, State
from bqsgd.release import Release

Rounds = Mapping[tuple[str, int], "Grant"]
"""(run, round) -> its grant."""


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Leave to send one round.

    again: the round was recorded before, so this is a further release of it. charged: it counts as spent (all but a
    seeded round that will be made from the same noise once more).
    """

    release: Release
    seeded: bool
    again: bool
    charged: bool


def granted(
    state: State, release: Release, *, run: str, rounds: Iterable[int], seeded: bool, resume: bool
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


def spending(grants: Rounds, *, time: str) -> list[Entry]:
    """The entries that charge these grants."""
    return _entries(Kind.SPEND, grants, time=time)


def returning(unsent: Rounds, *, time: str) -> list[Entry]:
    """The entries that give back what was charged and not sent."""
    return _entries(Kind.RETURN, unsent, time=time)


def _entries(kind: Kind, grants: Rounds, *, time: str) -> list[Entry]:
    groups: dict[tuple[str, Grant], list[int]] = {}
    for (run, number), grant in grants.items():
        if grant.charged:
            groups.setdefault((run, grant), []).append(number)
    return [
        Entry(
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
