"""The ledger: what one client has spent of its privacy budget, recorded durably before each message leaves.

    with Ledger.open(path, client=3, budget_epsilon=3.0, budget_delta=1e-5) as ledger:
        ledger.reserve(release, run="a7", first_round=0, rounds=50, seeded=False)
        for round in range(50):
            ledger.spend(release, run="a7", round=round, seeded=False)   # returns: now the frame may be sent
            send(...)

`reserve` makes one durable entry for many rounds, and `spend` inside a reservation of the same process only ticks a
round off in memory. A crash therefore leaves every reserved round counted, sent or not: an over-count, never an
under-count. A clean `close` gives back what was certainly not sent.

Sending twice. What is private is the frame, not the round number:
- Sending the *same bytes* again reveals nothing new. It needs no call.
- Drawing *new noise* for a round that was recorded before is a new release of the same data and is counted again. It
  must be asked for with `resume=True`; otherwise a recorded round is refused.
- A seeded run that resumes draws the same bytes again, so it is not charged again; it has no privacy claim anyway.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bqsgd.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd.ledger._budget import Headroom, PrivacyBudget, compose_all
from bqsgd.ledger._entries import (
    MAX_RESERVED_ROUNDS,
    MAX_ROUND,
    EntryKind,
    Grant,
    LedgerEntry,
    LedgerState,
    granted,
    returning,
    spending,
)
from bqsgd.ledger._store import LedgerFile, Store, create_ledger
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee, as_given
from bqsgd.release import Release


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Book:
    """A client's entries in an open file and the state they add up to, kept in step; it belongs to one process."""

    def __init__(self, file: LedgerFile, client: int, headroom: Headroom) -> None:
        self.store = Store(file, client)
        self.state = LedgerState()
        self.entries: list[LedgerEntry] = []
        self._headroom = headroom
        self.refresh()
        if self.state.budget is None:
            raise LedgerError(f"{file.path} holds no budget; restore it from a backup")

    def check_process(self) -> None:
        """Raise LedgerError in a forked child: SQLite and the reserved rounds are the parent's."""
        if not self.store.file.mine:
            raise LedgerError("a ledger does not survive a fork; open it again in the new process")

    @property
    def budget(self) -> PrivacyBudget:
        """The budget in force."""
        assert self.state.budget is not None
        return self.state.budget

    def refresh(self) -> None:
        """Read what other processes have written."""
        self.check_process()
        for body in self.store.fresh():
            self._take(LedgerEntry.from_json(body))

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[list[LedgerEntry]], None]]:
        """Hold the write lock with the state up to date; what is appended becomes state only once it is durable."""
        added: list[LedgerEntry] = []

        def append(entries: list[LedgerEntry]) -> None:
            for entry in entries:
                self.store.append(entry.to_json())
            added.extend(entries)

        self.check_process()
        with self.store.exclusive():
            self.refresh()
            yield append
        for entry in added:
            self._take(entry)

    def _take(self, entry: LedgerEntry) -> None:
        self.state.add(entry)
        self.entries.append(entry)

    def _limits(self, run: str, within: PrivacyBudget | None) -> list[tuple[Mapping[Release, int], PrivacyBudget]]:
        """What counts against which budget: everything against the client's, the run's own against what it asks for."""
        own = self.state.of_run.get(run, {})
        return [(self.state.rounds, self.budget), *([] if within is None else [(own, within)])]

    def surely_fits(self, release: Release, rounds: int, run: str, within: PrivacyBudget | None) -> bool:
        """Whether earlier answers already prove that `rounds` more of `release` fit; quick."""
        return rounds == 0 or all(
            self._headroom.known(content, release, rounds, budget) is True
            for content, budget in self._limits(run, within)
        )

    def fits(self, release: Release, rounds: int, run: str, within: PrivacyBudget | None) -> bool:
        """Whether `rounds` more of `release` stay within the budgets; may take the accountant seconds."""
        return all(
            self._headroom.fits(content, release, rounds, budget) for content, budget in self._limits(run, within)
        )

    def most(self, release: Release, run: str, within: PrivacyBudget | None) -> int:
        """How many more rounds of `release` fit."""
        left: int | None = None
        for content, budget in reversed(self._limits(run, within)):  # the run's first: it asks for less
            if left is None or not self._headroom.fits(content, release, left, budget):
                left = self._headroom.most(content, release, budget)
        assert left is not None
        return left

    def accountant(self) -> Accountant:
        """The tally of everything counted."""
        return compose_all(Accountant(), self.state.rounds)


class Ledger:
    """One client's ledger; use `Ledger.open`. Safe to use from several threads, and from several processes that each
    open it themselves; not across a fork.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "client3.ledger"
    >>> with Ledger.open(path, client=3, budget_epsilon=3.0, budget_delta=1e-5) as ledger:
    ...     ledger.budget, ledger.spent_rounds, ledger.guarantee()
    (PrivacyBudget(epsilon=3.0, delta=1e-05), 0, None)
    """

    def __init__(self, path: str | Path, *, client: int | None = None) -> None:
        """Open what is there, as it is (for reading); training uses `Ledger.open`, which checks whose ledger it is.

        client: whose ledger in a register.
        """
        file = LedgerFile(Path(path))
        try:
            if file.many and client is None:
                raise LedgerError(f"{path} is a register of {len(file.clients)} clients; say whose ledger is meant")
            number = file.clients[0] if client is None else client
            self._hold(_Book(file, number, Headroom(Accountant())), owns_file=True)
        except BaseException:
            file.close()
            raise

    @classmethod
    def within(cls, file: LedgerFile, client: int, headroom: Headroom) -> Self:
        """The ledger of one client in an open register, whose file stays open when the ledger is closed."""
        ledger = cls.__new__(cls)
        ledger._hold(_Book(file, client, headroom), owns_file=False)
        return ledger

    def _hold(self, book: _Book, *, owns_file: bool) -> None:
        self._book, self._lock, self._owns_file = book, book.store.file.lock, owns_file
        self._unsent: dict[tuple[str, int], Grant] = {}
        self.closed = False

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        client: int,
        budget_epsilon: float,
        budget_delta: float,
        create_missing: bool = True,
        change_reason: str | None = None,
    ) -> Self:
        """Open client `client`'s ledger, or make it.

        change_reason: a ledger with another budget is given this one, for that reason; only its owner may say so.

        Pass create_missing=False wherever a ledger must exist already (a resumed run): a lost ledger would otherwise be
        replaced by an empty one, with a fresh budget.

        Raises:
            LedgerError: another client's ledger, another budget than the one in force (use `change_budget`), a damaged
                or foreign file.
        """
        budget = PrivacyBudget(epsilon=budget_epsilon, delta=budget_delta)
        check_int("client", client, 0, 2**63 - 1)
        where = Path(path)
        if create_missing and not where.exists():
            entry = LedgerEntry(kind=EntryKind.BUDGET, time=_now(), budget=budget, reason="ledger made")
            create_ledger(where, client=client, first_body=entry.to_json())
        ledger = cls(where)
        try:
            if ledger.client != client:
                raise LedgerError(
                    f"{where} is the ledger of client {ledger.client}, not {client}; give each its own file"
                )
            if ledger.budget != budget and change_reason is not None:
                ledger.change_budget(epsilon=budget.epsilon, delta=budget.delta, reason=change_reason)
            elif ledger.budget != budget:
                raise LedgerError(
                    f"{where} has the budget {ledger.budget}, not {budget}; open it with its own budget and call "
                    "change_budget(...) if it is meant to change"
                )
        except BaseException:
            ledger.close()
            raise
        return ledger

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._book.store.file.path

    @property
    def client(self) -> int:
        """Whose ledger this is."""
        return self._book.store.client

    @property
    def budget(self) -> PrivacyBudget:
        """The budget in force."""
        return self._book.budget

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every entry, oldest first."""
        with self._lock:
            self._book.refresh()
            return tuple(self._book.entries)

    @property
    def spent_rounds(self) -> int:
        """Rounds that count as released, reserved ones included."""
        with self._lock:
            self._book.refresh()
            return self._book.state.total_rounds

    @property
    def seeded_rounds(self) -> int:
        """How many of them had seeded noise."""
        with self._lock:
            self._book.refresh()
            return self._book.state.seeded_rounds

    def recorded(self, run: str) -> dict[int, tuple[Release, bool]]:
        """Rounds of `run` that count as released: round -> its release, and whether its noise was seeded."""
        with self._lock:
            self._book.refresh()
            return dict(self._book.state.taken.get(run, {}))

    @property
    def released(self) -> Counter[Release]:
        """How often each release counts as made, by whatever process; this one's unsent reservations do not count."""
        with self._lock:
            self._book.refresh()
            counted = Counter(self._book.state.rounds)
            counted.subtract(grant.release for grant in self._unsent.values() if grant.charged)
            return +counted

    def spend(
        self,
        release: Release,
        *,
        run: str,
        round: int,
        seeded: bool,
        resume: bool = False,
        within: PrivacyBudget | None = None,
    ) -> None:
        """Record one round durably; when this returns, its message may leave.

        Inside a reservation of this process it takes microseconds; otherwise it is a reservation of one round.

        Raises:
            BudgetExhausted: the round would pass the budget; nothing was recorded and nothing may be sent.
            LedgerError: the round is already recorded and `resume` was not given, or it could not be made durable.
        """
        with self._lock:
            self._book.check_process()
            grant = self._unsent.get((run, round))
            if grant is None:
                self.reserve(release, run=run, first_round=round, rounds=1, seeded=seeded, resume=resume, within=within)
            elif (grant.release is not release and grant.release != release) or grant.seeded != seeded:
                raise LedgerError(
                    f"round {round} of run {run!r} was reserved for another release or noise source than the one to be "
                    "sent; reserve again for what is really sent"
                )
            del self._unsent[run, round]

    def reserve(
        self,
        release: Release,
        *,
        run: str,
        first_round: int,
        rounds: int,
        seeded: bool,
        resume: bool = False,
        within: PrivacyBudget | None = None,
    ) -> None:
        """Record `rounds` rounds ahead, in one durable transaction: all of them or none.

        within: what the run itself asks for; its own messages stay within that, and all messages within the budget.
        With `resume`, rounds recorded before are counted once more (new noise), except those that the same release made
        from seeded noise before and will make again.

        Raises:
            BudgetExhausted: they would pass the budget; the message says how many rounds are left.
            LedgerError: one of them is recorded already and `resume` was not given.
        """
        if not isinstance(run, str) or not run:
            raise InvalidParameter(f"run must be a non-empty name, got {run!r}")
        check_int("first_round", first_round, 0, MAX_ROUND)
        check_int("rounds", rounds, 1, MAX_RESERVED_ROUNDS)
        with self._lock:
            wanted = range(first_round, first_round + rounds)
            pending = next((number for number in wanted if (run, number) in self._unsent), None)
            if pending is not None:
                raise LedgerError(
                    f"round {pending} of run {run!r} is reserved already and not sent yet; spend it first"
                )
            while True:
                with self._book.writing() as append:
                    grants = granted(self._book.state, release, run=run, rounds=wanted, seeded=seeded, resume=resume)
                    charged = sum(grant.charged for grant in grants.values())
                    fits = self._book.surely_fits(release, charged, run, within)
                    if fits:
                        append(spending(grants, time=_now()))
                if fits:
                    self._unsent.update(grants)
                    return
                # The accountant is asked outside the transaction: it may take seconds and others want to write.
                if not self._book.fits(release, charged, run, within):
                    raise BudgetExhausted(self._refusal(release, charged, run, within))

    def headroom(self, release: Release, *, run: str = "", within: PrivacyBudget | None = None) -> int:
        """How many more rounds of `release` fit into what is left of the budget, and of what `run` asks for."""
        with self._lock:
            self._book.refresh()
            return self._book.most(release, run, within)

    def change_budget(self, *, epsilon: float, delta: float, reason: str) -> None:
        """Put another budget in force from here on; the change and its reason stay in the ledger."""
        if not reason.strip():
            raise InvalidParameter("reason must say why the budget changes")
        entry = LedgerEntry(
            kind=EntryKind.BUDGET, time=_now(), budget=PrivacyBudget(epsilon=epsilon, delta=delta), reason=reason
        )
        with self._lock, self._book.writing() as append:
            append([entry])

    def guarantee(self, *, delta: float | None = None) -> Guarantee | None:
        """What the client's messages so far guarantee (at the budget's delta by default); None if it sent nothing.

        Messages of different kinds (unit, relation, trust) are composed under the weakest terms among them. Seeded
        rounds make it say "seeded noise: no privacy claim".
        """
        with self._lock:
            self._book.refresh()
            return self._guarantee(self._book.accountant(), delta) if self._book.state.rounds else None

    def guarantees(self, *, delta: float | None = None) -> tuple[Guarantee, ...]:
        """The same for each kind of message by itself, under its own terms; one where all are of one kind."""
        with self._lock:
            self._book.refresh()
            return tuple(self._guarantee(part, delta) for part in self._book.accountant().kinds)

    def _guarantee(self, accountant: Accountant, delta: float | None) -> Guarantee:
        wanted = self.budget.delta if delta is None else delta
        return accountant.guarantee(delta=wanted, seeded=self._book.state.seeded_rounds > 0)

    def to_dict(self, *, delta: float | None = None) -> dict[str, Any]:
        """Whose ledger, the budget, the guarantee and every entry, in plain JSON types."""
        with self._lock:
            guarantee, kinds = self.guarantee(delta=delta), self.guarantees(delta=delta)
            return {
                "client": self.client,
                "budget": {"epsilon": self.budget.epsilon, "delta": self.budget.delta},
                "spent_rounds": self._book.state.total_rounds,
                "seeded_rounds": self._book.state.seeded_rounds,
                "guarantee": None if guarantee is None else guarantee.to_dict(),
                "guarantees_by_kind": [kind.to_dict() for kind in kinds],
                "entries": [entry.to_dict() for entry in self._book.entries],
            }

    def close(self) -> None:
        """Give back the reserved rounds that were not sent, and close the file. After a crash nothing is given back."""
        with self._lock:
            if not self._book.store.file.mine:
                return  # the parent's file and the parent's rounds
            try:
                self._give_back()
            finally:
                self._unsent.clear()
                if self._owns_file:
                    self._book.store.file.close()
                self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _give_back(self) -> None:
        entries = returning(self._unsent, time=_now())
        if entries:
            with self._book.writing() as append:
                append(entries)

    def _refusal(self, release: Release, rounds: int, run: str, within: PrivacyBudget | None) -> str:
        left = self._book.most(release, run, within)
        guarantee = self.guarantee()
        spent = "nothing is spent" if guarantee is None else f"spent so far: {guarantee}"
        asked = (
            ""
            if within is None
            else f", or the epsilon {as_given(within.epsilon)} at {within.delta:g} that run {run!r} asks for"
        )
        return (
            f"{rounds} more round(s) would pass the budget of epsilon {as_given(self.budget.epsilon)} at delta "
            f"{self.budget.delta:g} of client {self.client}{asked}; {left} round(s) of this release are left; {spent}. "
            "Nothing was recorded: send nothing, stop here or raise the budget with change_budget(...)"
        )
