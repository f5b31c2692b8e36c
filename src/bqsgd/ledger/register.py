"""The register: ledgers of thousands of simulated clients in one file, as durable as a file each.

What many clients record in one round can be one durable write (`together`), before any of their messages leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bqsgd.errors import InvalidParameter, LedgerError
from bqsgd.ledger._budget import Headroom, PrivacyBudget
from bqsgd.ledger._entries import EntryKind, LedgerEntry
from bqsgd.ledger._store import LedgerFile, create_register
from bqsgd.ledger.ledger import Ledger
from bqsgd.params import check_int
from bqsgd.privacy.accountant import Accountant

SUFFIX = ".register"
"""How the name of a register ends; a ledger's ends otherwise."""


class Ledgers(Protocol):
    """Ledgers that were opened for reading, one or many."""

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose, in order."""

    def ledger(self, client: int) -> Ledger:
        """That of one client."""


class Register:
    """The ledgers of many clients in one file: a simulation's; clients on machines of their own have a ledger each.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "clients.register"
    >>> budget = PrivacyBudget(epsilon=3.0, delta=1e-5)
    >>> with Register.open(path, budgets=dict.fromkeys(range(1000), budget)) as register:
    ...     register.ledger(7).budget, len(register.clients)
    (PrivacyBudget(epsilon=3.0, delta=1e-05), 1000)
    """

    def __init__(self, path: str | Path) -> None:
        """Open what is there, as it is."""
        self._file = LedgerFile(Path(path))
        if not self._file.many:
            self._file.close()
            raise LedgerError(f"{path} is the ledger of client {self._file.clients[0]} alone, not a register")
        self._headroom = Headroom(Accountant())
        """Shared: what fits one client's history fits another's that is the same."""
        self._ledgers: dict[int, Ledger] = {}

    @classmethod
    def open(cls, path: str | Path, *, budgets: Mapping[int, PrivacyBudget]) -> Self:
        """Open the register of these clients, or make it.

        Raises:
            LedgerError: a register of other clients, a damaged or foreign file.
        """
        where = Path(path)
        if not where.exists():
            made = datetime.now(UTC).isoformat(timespec="seconds")
            first = {
                check_int("client", client, 0, 2**63 - 1): LedgerEntry(
                    kind=EntryKind.BUDGET, time=made, budget=budget, reason="ledger made"
                ).to_json()
                for client, budget in sorted(budgets.items())
            }
            if not first:
                raise InvalidParameter("a register is made for at least one client")
            create_register(where, first)
        register = cls(where)
        if set(register.clients) != set(budgets):
            register.close()
            raise LedgerError(f"{where} is a register of {len(register.clients)} other clients, not {len(budgets)}")
        return register

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._file.path

    @property
    def clients(self) -> tuple[int, ...]:
        """Whose ledgers it holds, in order."""
        return self._file.clients

    def ledger(self, client: int) -> Ledger:
        """The ledger of one client, which stays open until the register is closed.

        Raises:
            LedgerError: it holds none of that client.
        """
        with self._file.lock:
            if client not in self._ledgers:
                self._ledgers[client] = Ledger.within(self._file, client, self._headroom)
            return self._ledgers[client]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What its ledgers record inside the block is one durable write, and none of it is before the block has ended.

        After a block that failed the register takes nothing more: open it again.
        """
        with self._file.together():
            yield

    def close(self) -> None:
        """Give back what was reserved and not sent, in one write, and close the file.

        After a write that failed nothing is given back.
        """
        if not self._file.mine:
            return  # the parent's file and the parent's rounds
        with self._file.lock:
            try:
                if not self._file.broken:
                    with self.together():
                        for ledger in self._ledgers.values():
                            ledger.close()
            finally:
                self._ledgers.clear()
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Single:
    """A ledger file as a register of one client."""

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
    """The ledgers in a file, for a reader who does not know whether it is a ledger or a register.

    Raises:
        LedgerError: it is neither, or damaged.
    """
    if Path(path).suffix == SUFFIX:
        with Register(path) as register:
            yield register
    else:
        with Ledger(path) as ledger:
            yield _Single(ledger)
