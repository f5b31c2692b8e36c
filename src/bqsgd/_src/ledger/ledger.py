"""The ledger: what one client has spent of its privacy budget, recorded durably before each message leaves.

    with Ledger.open(path, client=3, budget_epsilon=3.0, budget_delta=1e-5) as ledger:
        ledger.reserve(release, run="a7", first_round=0, rounds=50, seeded=False)
        for round in range(50):
            ledger.spend(release, run="a7", round=round, seeded=False)   # when it returns, the frame may be sent
            send(...)

`reserve` makes one durable entry for many rounds. `spend` then only ticks a round off in memory, if the same process
has reserved it. After a crash every reserved round counts, sent or not: the ledger may count too much, never too
little. A clean `close` gives back the rounds that were certainly not sent.

Sending a round twice. Privacy is spent by new noise, not by round numbers:
- Sending the *same bytes* again reveals nothing new. It needs no call.
- Drawing *new noise* for a recorded round is a new release of the same data, and is counted again. The caller must ask
  for that with `resume=True`; otherwise the ledger refuses a round that is already recorded.
- A seeded run that resumes makes the same bytes again, so it is not charged again. It has no privacy claim anyway.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd._src.ledger._budget import Headroom, PrivacyBudget, compose_all, guarantee_of
from bqsgd._src.ledger._entries import (
    MAX_RESERVED_ROUNDS,
    MAX_ROUND,
    EntryKind,
    Grant,
    LedgerEntry,
    LedgerState,
    entries_for,
    first_entry,
    grants_for,
    now,
)
from bqsgd._src.ledger._store import LEDGER, ChainEnd, LedgerFile, create_file
from bqsgd._src.params import check_int
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import Guarantee, as_given
from bqsgd._src.release import Release
from bqsgd._src.storage import Closing, closed_on_error


class Ledger(Closing):
    """One client's ledger; open it with `Ledger.open`.

    Several threads may share one. Several processes may use the same file if each opens it; a forked child may not use
    its parent's.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "client3.ledger"
    >>> with Ledger.open(path, client=3, budget_epsilon=3.0, budget_delta=1e-5) as ledger:
    ...     ledger.budget, ledger.spent_rounds, ledger.guarantee()
    (PrivacyBudget(epsilon=3.0, delta=1e-05), 0, None)
    """

    def __init__(self, path: str | Path, *, client: int | None = None) -> None:
        """Open an existing ledger for reading. For training use `Ledger.open`, which checks client and budget.

        client: whose ledger to open, needed if the file is a register.
        """
        with closed_on_error(LedgerFile(Path(path))) as file:
            if file.is_register and client is None:
                raise LedgerError(f"{path} is a register of {len(file.clients)} clients; say which client's is meant")
            self._take(file, file.clients[0] if client is None else client, Headroom())
        self._owns_file = True

    @classmethod
    def in_register(cls, file: LedgerFile, client: int, headroom: Headroom) -> Self:
        """The ledger of one client in an open register. Closing the ledger leaves the register open."""
        ledger = cls.__new__(cls)
        ledger._take(file, client, headroom)
        return ledger

    def _take(self, file: LedgerFile, client: int, headroom: Headroom) -> None:
        """Read the entries of one client in an open file."""
        file.check_client(client)
        self.path, self.client, self.closed = file.path, client, False
        self._file, self._lock, self._headroom, self._owns_file = file, file.lock, headroom, False
        self._state, self._entries = LedgerState(), list[LedgerEntry]()
        self._end = ChainEnd.of_empty_list(client)
        self._unsent: dict[tuple[str, int], Grant] = {}
        self._refresh()
        if self._state.budget is None:
            raise LedgerError(f"{file.path} holds no budget; restore it from a backup")

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

        Pass create_missing=False wherever a ledger must exist already (a resumed run): a lost ledger would otherwise be
        replaced by an empty one, with a fresh budget.

        change_reason: if the ledger has another budget, change it to this one and record this reason. Without a reason
        a ledger with another budget is refused. Only the owner of the ledger may decide this, never a run.

        Raises:
            LedgerError: the ledger belongs to another client, it has another budget, or the file is damaged or not a
                ledger.
        """
        budget = PrivacyBudget(epsilon=budget_epsilon, delta=budget_delta)
        check_int("client", client, 0, 2**63 - 1)
        where = Path(path)
        if create_missing and not where.exists():
            create_file(where, LEDGER, {client: first_entry(budget)})
        with closed_on_error(cls(where)) as ledger:
            ledger._file.check_client(client)
            if ledger.budget != budget and change_reason is not None:
                ledger.change_budget(epsilon=budget.epsilon, delta=budget.delta, reason=change_reason)
            elif ledger.budget != budget:
                raise LedgerError(
                    f"{where} has a budget of {ledger.budget}, not {budget}; ask for the budget that it has, or change "
                    f"it first: bqsgd.Ledger({str(where)!r}).change_budget(epsilon={as_given(budget.epsilon)}, "
                    f"delta={as_given(budget.delta)}, reason='...')"
                )
        return ledger

    @property
    def budget(self) -> PrivacyBudget:
        """The budget in force."""
        assert self._state.budget is not None
        return self._state.budget

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """Every entry, oldest first."""
        with self._up_to_date():
            return tuple(self._entries)

    @property
    def spent_rounds(self) -> int:
        """Rounds that count as released, reserved ones included."""
        with self._up_to_date() as state:
            return state.total_rounds

    @property
    def seeded_rounds(self) -> int:
        """How many of the spent rounds had seeded noise."""
        with self._up_to_date() as state:
            return state.seeded_rounds

    @property
    def has_unsent(self) -> bool:
        """Whether this process has reserved rounds that it has not sent."""
        return bool(self._unsent)

    def recorded(self, run: str) -> dict[int, tuple[Release, bool]]:
        """Rounds of `run` that count as released: round -> (its release, whether its noise was seeded)."""
        with self._up_to_date() as state:
            return dict(state.recorded.get(run, {}))

    @property
    def released(self) -> Counter[Release]:
        """How often each release counts as made, by any process. What this process reserved but did not send is left
        out; other processes' reservations cannot be told from what they sent, so they count."""
        with self._up_to_date() as state:
            released = Counter(state.rounds)
            released.subtract(grant.release for grant in self._unsent.values() if grant.charged)
            return +released  # drops the releases whose count is 0

    def check_process(self) -> None:
        """Raise LedgerError in a forked child; call it before work in threads, which do not survive a fork either."""
        self._file.check_process()

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
        """Record one round durably; when this returns, its message may be sent.

        For a round that this process has reserved this takes microseconds. Otherwise it reserves one round first.

        Raises:
            BudgetExhausted: the round would exceed the budget. Nothing was recorded and nothing may be sent.
            LedgerError: the round is already recorded and `resume` is false, or the entry could not be made durable.
        """
        with self._lock:
            self._file.check_process()
            grant = self._unsent.get((run, round))
            if grant is None:
                self.reserve(release, run=run, first_round=round, rounds=1, seeded=seeded, resume=resume, within=within)
            elif (grant.release is not release and grant.release != release) or grant.seeded != seeded:
                raise LedgerError(
                    f"round {round} of run {run!r} was reserved for another release or noise source; reserve it again "
                    "for what will be sent"
                )
            # Last: a round that is still in the list when the ledger is closed is given back as not sent.
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
        """Record `rounds` rounds ahead of time in one durable transaction: all of them or none.

        within: a budget for this run alone. Its messages must stay within it, and all messages within the client's.
        resume: count rounds that were recorded before once more, because they will have new noise. Rounds that repeat
        the same release with the same seeded noise are not counted again.

        Raises:
            BudgetExhausted: the rounds would exceed a budget; the message says how many are left.
            LedgerError: one of them is already recorded and `resume` is false, or it is reserved and not sent yet.
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
                    f"round {pending} of run {run!r} is already reserved and not sent yet; spend it first"
                )
            while True:
                with self._writing() as entries:
                    grants = grants_for(self._state, release, run=run, rounds=wanted, seeded=seeded, resume=resume)
                    charged = sum(grant.charged for grant in grants.values())
                    fits = self._fits(release, charged, run, within, ask=False)
                    if fits:
                        entries += entries_for(EntryKind.SPEND, grants)
                if fits:
                    self._unsent.update(grants)
                    return
                # The accountant is asked outside the transaction, because it may take seconds and other processes want
                # to write. They may spend meanwhile, so a yes only leads back to the check inside the transaction.
                if not self._fits(release, charged, run, within, ask=True):
                    raise BudgetExhausted(self._refusal(release, charged, run, within))

    def headroom(self, release: Release, *, run: str = "", within: PrivacyBudget | None = None) -> int:
        """How many more rounds of `release` fit into the client's budget, and into `within` for those of `run`."""
        with self._up_to_date():
            left: int | None = None
            # The run's budget first: it is usually the smaller one, and its answer often holds for the client's too.
            for content, budget in reversed(self._limits(run, within)):
                if left is None or not self._headroom.fits(content, release, left, budget):
                    left = self._headroom.most(content, release, budget)
            assert left is not None
            return left

    def change_budget(self, *, epsilon: float, delta: float, reason: str) -> None:
        """Change the budget from here on. The ledger keeps the change and its reason."""
        if not reason.strip():
            raise InvalidParameter("reason must say why the budget changes")
        budget = PrivacyBudget(epsilon=epsilon, delta=delta)
        with self._lock, self._writing() as entries:
            entries.append(LedgerEntry(kind=EntryKind.BUDGET, time=now(), budget=budget, reason=reason))

    def guarantee(self, *, delta: float | None = None) -> Guarantee | None:
        """What the client's messages so far guarantee (at the budget's delta by default); None if it sent nothing.

        Messages of different kinds (unit, relation, trust) are composed under the weakest terms among them. If any
        round was seeded, the guarantee says that there is no privacy claim.
        """
        with self._up_to_date() as state:
            return self._guarantee(compose_all(Accountant(), state.rounds), delta)

    def guarantees(self, *, delta: float | None = None) -> tuple[Guarantee, ...]:
        """One guarantee for each kind of message (unit, relation, trust), under the terms of that kind."""
        with self._up_to_date() as state:
            kinds = compose_all(Accountant(), state.rounds).kinds
            by_kind = [self._guarantee(kind, delta) for kind in kinds]
        return tuple(guarantee for guarantee in by_kind if guarantee is not None)

    def _guarantee(self, accountant: Accountant, delta: float | None) -> Guarantee | None:
        return guarantee_of(accountant, self.budget.delta if delta is None else delta, self._state.seeded_rounds > 0)

    def to_dict(self, *, delta: float | None = None) -> dict[str, Any]:
        """Client, budget, guarantees and every entry, in plain JSON types."""
        with self._lock:
            guarantee, kinds = self.guarantee(delta=delta), self.guarantees(delta=delta)
            return {
                "client": self.client,
                "budget": asdict(self.budget),
                "spent_rounds": self._state.total_rounds,
                "seeded_rounds": self._state.seeded_rounds,
                "guarantee": None if guarantee is None else guarantee.to_dict(),
                "guarantees_by_kind": [kind.to_dict() for kind in kinds],
                "entries": [entry.to_dict() for entry in self._entries],
            }

    def close(self) -> None:
        """Give back the reserved rounds that were not sent, and close the file."""
        with self._lock:
            if not self._file.opened_here:
                return  # A forked child must not give back rounds that its parent will send.
            try:
                returned = entries_for(EntryKind.RETURN, self._unsent)
                if returned:
                    with self._writing() as entries:
                        entries += returned
            finally:
                self._unsent.clear()
                if self._owns_file:
                    self._file.close()
                self.closed = True

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[LedgerState]:
        """The state, locked for this thread, with what other processes have written."""
        with self._lock:
            self._refresh()
            yield self._state

    def _refresh(self) -> None:
        bodies, end = self._file.read_after(self.client, self._end)
        self._add([LedgerEntry.from_json(body) for body in bodies], end)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[list[LedgerEntry]]:
        """Hold the write lock, with the state up to date. Entries that the block puts into the list are written."""
        added: list[LedgerEntry] = []
        with self._file.exclusive():
            self._refresh()
            yield added
            end = self._file.append(self.client, self._end, [entry.to_json() for entry in added])
        # Only after the transaction: an entry whose write failed must not count.
        self._add(added, end)

    def _add(self, entries: list[LedgerEntry], end: ChainEnd) -> None:
        for entry in entries:
            self._state.add(entry)
        self._entries += entries
        # Last: entries that could not be read or counted are read again next time, and raise again. Otherwise a caller
        # that goes on after the error would spend from a state that counts too little.
        self._end = end

    def _limits(self, run: str, within: PrivacyBudget | None) -> list[tuple[Mapping[Release, int], PrivacyBudget]]:
        """(what counts, its budget): all rounds against the client's budget, the run's rounds against `within`."""
        limits: list[tuple[Mapping[Release, int], PrivacyBudget]] = [(self._state.rounds, self.budget)]
        return limits if within is None else [*limits, (self._state.of_run.get(run, {}), within)]

    def _fits(self, release: Release, rounds: int, run: str, within: PrivacyBudget | None, *, ask: bool) -> bool:
        """Whether `rounds` more of `release` stay within the budgets.

        Without `ask` the accountant, which may take seconds, is not asked: False if earlier answers do not prove it.
        """
        fits = self._headroom.fits if ask else self._headroom.known_to_fit
        return rounds == 0 or all(
            fits(content, release, rounds, budget) for content, budget in self._limits(run, within)
        )

    def _refusal(self, release: Release, rounds: int, run: str, within: PrivacyBudget | None) -> str:
        left = self.headroom(release, run=run, within=within)
        guarantee = self.guarantee()
        spent = "nothing is spent" if guarantee is None else f"spent so far: {guarantee}"
        asked = "" if within is None else f", or the budget of run {run!r} ({_budget_text(within)})"
        return (
            f"{rounds} more round(s) would exceed the budget of client {self.client} ({_budget_text(self.budget)})"
            f"{asked}; {left} round(s) of this release are left; {spent}. Nothing was recorded, so send nothing: stop "
            "here, or raise the budget with change_budget(...)"
        )


def _budget_text(budget: PrivacyBudget) -> str:
    return f"epsilon {as_given(budget.epsilon)} at delta {budget.delta:g}"
