"""A ledger's entries on disk and the state they add up to, kept in step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bqsgd.errors import LedgerError
from bqsgd.privacy.accountant import Accountant
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.privacy.headroom import Headroom, compose_all
from bqsgd.privacy.ledger_entries import Entry, PrivacyBudget, State
from bqsgd.privacy.ledger_store import Store
from bqsgd.release import Release


class Book:
    """An open ledger file with its entries and state; belongs to the process that opened it."""

    def __init__(self, path: Path) -> None:
        self._pid = os.getpid()
        self.store = Store(path)
        self.state = State()
        self.entries: list[Entry] = []
        self._headroom = Headroom(Accountant())
        try:
            self.refresh()
            if self.state.budget is None:
                raise LedgerError(f"{path} holds no budget; restore it from a backup")
        except BaseException:
            self.store.close()
            raise

    @property
    def mine(self) -> bool:
        """Whether this process opened the ledger (a forked child did not)."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise LedgerError in a forked child: SQLite and the reserved rounds are the parent's."""
        if not self.mine:
            raise LedgerError("a ledger does not survive a fork; open it again in the new process")

    @property
    def budget(self) -> PrivacyBudget:
        """The budget in force."""
        assert self.state.budget is not None
        return self.state.budget

    def refresh(self) -> None:
        """Take in what other processes have written."""
        self.check_process()
        for body in self.store.fresh():
            self._take(Entry.from_json(body))

    @contextlib.contextmanager
    def writing(self) -> Iterator[Callable[[list[Entry]], None]]:
        """Hold the write lock with the state up to date; what is appended becomes state only once it is durable."""
        added: list[Entry] = []

        def append(entries: list[Entry]) -> None:
            for entry in entries:
                self.store.append(entry.to_json())
            added.extend(entries)

        self.check_process()
        with self.store.exclusive():
            self.refresh()
            yield append
        for entry in added:
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        self.state.add(entry)
        self.entries.append(entry)

    def surely_fits(self, release: Release, rounds: int) -> bool:
        """Whether earlier answers already prove that `rounds` more of `release` fit; quick."""
        return rounds == 0 or self._headroom.known(self.state.rounds, release, rounds, self.budget) is True

    def fits(self, release: Release, rounds: int) -> bool:
        """Whether `rounds` more of `release` stay within the budget; may take the accountant seconds."""
        return self._headroom.fits(self.state.rounds, release, rounds, self.budget)

    def most(self, release: Release) -> int:
        """How many more rounds of `release` fit."""
        return self._headroom.most(self.state.rounds, release, self.budget)

    def guarantee(self, delta: float | None) -> Guarantee | None:
        """What everything counted guarantees, at the budget's delta unless given; None when nothing is."""
        if not self.state.rounds:
            return None
        accountant = compose_all(Accountant(), self.state.rounds)
        wanted = self.budget.delta if delta is None else delta
        return accountant.guarantee(delta=wanted, seeded=self.state.seeded_rounds > 0)
