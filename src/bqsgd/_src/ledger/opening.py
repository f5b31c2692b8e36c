"""The names of ledgers in a folder, and how a run that begins or continues opens one."""

from __future__ import annotations

from pathlib import Path

from bqsgd._src.ledger._budget import PrivacyBudget
from bqsgd._src.ledger.ledger import Ledger
from bqsgd._src.ledger.register import SUFFIX
from bqsgd._src.storage import private_folder


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
