"""The register: the ledgers of thousands of simulated clients in one file, as durable as one file per client.

`together` makes what many clients record in a round one durable write, before any of their messages is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from bqsgd._src.errors import InvalidParameter, LedgerError
from bqsgd._src.ledger._budget import Headroom, PrivacyBudget
from bqsgd._src.ledger._entries import first_entry
from bqsgd._src.ledger._store import REGISTER, LedgerFile, create_file
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.params import check_int
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.storage import Closing

SUFFIX = ".register"
"""A register's file name ends with this; a ledger's does not."""


class Ledgers(Protocol):
    """One or many ledgers, opened for reading."""

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients, in ascending order."""

    def ledger(self, client: int) -> Ledger:
        """The ledger of one client."""


class Register(Closing):
    """The ledgers of many clients in one file, for a simulation. Clients on their own machines have a ledger each.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "clients.register"
    >>> budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    >>> with Register.open(path, budgets=dict.fromkeys(range(1000), budget)) as register:
    ...     register.ledger(7).budget, len(register.clients)
    (PrivacyBudget(epsilon=3.0, delta=1e-05), 1000)
    """

    def __init__(self, path: str | Path) -> None:
        """Open an existing register; `Register.open` also makes one and checks its clients."""
        self._file = LedgerFile(Path(path))
        if not self._file.is_register:
            self._file.close()
            raise LedgerError(f"{path} is the ledger of client {self._file.clients[0]} alone, not a register")
        self._headroom = Headroom(Accountant())
        """Shared, because clients with the same history have the same room left."""
        self._ledgers: dict[int, Ledger] = {}

    @classmethod
    def open(cls, path: str | Path, *, budgets: Mapping[int, PrivacyBudget]) -> Self:
        """Open the register of these clients, or make it. The budgets are for a new register only.

        Raises:
            LedgerError: the register holds other clients, or the file is damaged or not a register.
        """
        where = Path(path)
        if not where.exists():
            if not budgets:
                raise InvalidParameter("a register needs at least one client, but no budgets were given")
            first_entries = {
                check_int("client", client, 0, 2**63 - 1): first_entry(budget)
                for client, budget in sorted(budgets.items())
            }
            create_file(where, REGISTER, first_entries)
        register = cls(where)
        if set(register.clients) != set(budgets):
            register.close()
            raise LedgerError(f"{where} is a register of {len(register.clients)} other clients; choose another path")
        return register

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._file.path

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients whose ledgers it holds, in ascending order."""
        return self._file.clients

    def ledger(self, client: int) -> Ledger:
        """The ledger of one client, which stays open until the register is closed.

        Raises:
            LedgerError: the register holds no ledger of that client.
        """
        with self._file.lock:
            if client not in self._ledgers:
                self._ledgers[client] = Ledger.in_register(self._file, client, self._headroom)
            return self._ledgers[client]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make what the ledgers record in the block one durable write. Send nothing before the block has ended.

        If the block raises, nothing was recorded, and the register must be opened again before it is used.
        """
        with self._file.together():
            yield

    def close(self) -> None:
        """Give back the rounds that were reserved and not sent, in one write, and close the file.

        After a failed write nothing is given back: the register may count too much, never too little.
        """
        if not self._file.opened_here:
            return  # A forked child must not give back rounds that its parent will send.
        with self._file.lock:
            try:
                if not self._file.broken:
                    with self.together():
                        for ledger in self._ledgers.values():
                            ledger.close()
            finally:
                self._ledgers.clear()
                self._file.close()


@dataclass(frozen=True)
class _Single:
    """A ledger file, read like a register of one client."""

    opened: Ledger

    @property
    def clients(self) -> tuple[int, ...]:
        return (self.opened.client,)

    def ledger(self, client: int) -> Ledger:
        if client != self.opened.client:
            raise LedgerError(f"{self.opened.path} is the ledger of client {self.opened.client}, not {client}")
        return self.opened


@contextlib.contextmanager
def opened_ledgers(path: str | Path) -> Iterator[Ledgers]:
    """Open a ledger or a register for reading; the file's name tells which it is.

    Raises:
        LedgerError: the file is neither, or it is damaged.
    """
    if Path(path).suffix == SUFFIX:
        with Register(path) as register:
            yield register
    else:
        with Ledger(path) as ledger:
            yield _Single(ledger)
