"""The register: the ledgers of thousands of simulated clients in one file, as durable as one file per client.

`together` makes what many clients record in a round one durable write, before any of their messages is sent. Below it
are the names of ledgers in a folder, and how a run that begins or continues opens one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

from bqsgd._src.errors import InvalidParameter, LedgerError
from bqsgd._src.ledger._budget import Headroom, PrivacyBudget
from bqsgd._src.ledger._entries import first_entry
from bqsgd._src.ledger._store import REGISTER, LedgerFile, create_file
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.params import check_int
from bqsgd._src.storage import Closing, private_folder

SUFFIX = ".register"
"""The name of a register's file ends with this; that of a ledger does not."""


class Ledgers(Closing):
    """All ledgers in one file: one in a client's own file, many in a register.

    Raises:
        LedgerError: the file is neither a ledger nor a register, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LedgerFile(Path(path))
        # Shared, because clients with the same history have the same room left.
        self._headroom = Headroom()
        self._ledgers: dict[int, Ledger] = {}

    @property
    def clients(self) -> tuple[int, ...]:
        """The clients whose ledgers the file holds, in ascending order."""
        return self._file.clients

    def ledger(self, client: int) -> Ledger:
        """The ledger of one client, which stays open until the file is closed.

        Raises:
            LedgerError: the file holds no ledger of that client.
        """
        with self._file.lock:
            if client not in self._ledgers:
                self._ledgers[client] = Ledger.in_register(self._file, client, self._headroom)
            return self._ledgers[client]

    def close(self) -> None:
        """Give back the rounds that were reserved and not sent, in one write, and close the file.

        After a failed write nothing is given back: the file may count too much, never too little.
        """
        if not self._file.opened_here:
            return  # A forked child must not give back rounds that its parent will send.
        with self._file.lock:
            try:
                if not self._file.broken:
                    # A reader has nothing to give back. It must not wait for the write lock, or need to write at all.
                    unsent = any(ledger.has_unsent for ledger in self._ledgers.values())
                    with self._file.together() if unsent else contextlib.nullcontext():
                        for ledger in self._ledgers.values():
                            ledger.close()
            finally:
                self._ledgers.clear()
                self._file.close()


class Register(Ledgers):
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
        super().__init__(path)
        if not self._file.is_register:
            self.close()
            raise LedgerError(f"{path} is the ledger of client {self.clients[0]} alone, not a register")

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

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make what the ledgers record in the block one durable write. Send nothing before the block has ended.

        If the block raises, nothing was recorded, and the register must be opened again before it is used.
        """
        with self._file.together():
            yield


def ledger_path(folder: Path, client: int) -> Path:
    """The path of one client's ledger in a folder of ledgers."""
    return folder / f"client-{client:04}.ledger"


def register_path(folder: Path) -> Path:
    """The path of the register of all clients in a folder of ledgers."""
    return folder / f"clients{SUFFIX}"


def open_ledger(path: Path, *, client: int, budget: PrivacyBudget, own: PrivacyBudget | None, resuming: bool) -> Ledger:
    """Open a client's ledger. A run that begins makes the ledger if it does not exist.

    Args:
        path: the ledger's file.
        client: the client to whom the ledger must belong.
        budget: what the run asks for. A new ledger gets this budget, unless the client has set its own.
        own: the budget that the client has set for itself, if any. The ledger has this budget from now on.
        resuming: whether the run continues. The ledger must exist then: a new one would forget what was spent.

    Raises:
        LedgerError: the ledger is missing though the run continues, it belongs to another client, or a run that begins
            asks for another budget than it has.
    """
    if not resuming:
        private_folder(path.parent)
    elif own is None:
        # The owner may have changed the budget since the run began, so a run that continues takes the one it finds.
        return Ledger(path, client=client)
    wanted = budget if own is None else own
    return Ledger.open(
        path,
        client=client,
        budget_epsilon=wanted.epsilon,
        budget_delta=wanted.delta,
        create_missing=not resuming,
        change_reason=None if own is None else "the client's own limits",
    )
