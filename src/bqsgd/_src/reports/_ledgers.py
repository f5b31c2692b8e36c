"""Read a run with the guarantee of its ledgers. They are authoritative: a summary knows only what one process spent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bqsgd._src.errors import AccountingError
from bqsgd._src.ledger.register import SUFFIX, Ledgers
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.folder import History, read_history
from bqsgd._src.records.record import RunFolderError, Summary

_MAX_LEDGERS = 100_000


def read_run(folder: str | Path) -> History:
    """Read a run folder. If it holds clients' ledgers, epsilon is computed from what they count now.

    Raises:
        RunFolderError: the folder does not follow the schema.
        LedgerError: one of its ledgers is damaged.
    """
    history = read_history(folder)
    if history.summary is None:
        return history
    return replace(history, summary=_from_ledgers(history.summary, Path(folder) / "ledgers"))


def _from_ledgers(summary: Summary, folder: Path) -> Summary:
    stated, client = summary.guarantee, summary.guarantee_client
    guarantees = dict(_spent(folder, delta=None if stated is None else stated.delta))
    if stated is not None and client is not None and client not in guarantees:
        guarantees[client] = stated  # its ledger is on the client's own machine
    if not guarantees:
        return summary
    # Of equal epsilons the smallest client number, so that the page does not depend on the order of files.
    worst = max(guarantees, key=lambda number: (guarantees[number].epsilon, -number))
    claim = guarantees[worst]
    if stated is not None:  # a ledger does not know which data the run assumed to be public
        claim = replace(claim, assumption=_both(claim.assumption, stated.assumption))
    return replace(summary, guarantee=claim, guarantee_client=worst, seeded=summary.seeded or claim.seeded)


def _both(*assumptions: str) -> str:
    parts = [part for text in assumptions for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def _spent(folder: Path, *, delta: float | None) -> Iterator[tuple[int, Guarantee]]:
    """Client -> the guarantee of all that its ledger counts. Clients with the same history share a computation."""
    # A run folder from somebody else could otherwise make us read ledgers anywhere on this machine.
    if folder.is_symlink():
        raise RunFolderError(f"{folder} is a link; the ledgers must be in the run folder itself")
    paths = sorted([*folder.glob("client-*.ledger"), *folder.glob(f"*{SUFFIX}")])
    if len(paths) > _MAX_LEDGERS:
        raise RunFolderError(f"{folder} holds more than {_MAX_LEDGERS} ledgers")
    for path in paths:
        with Ledgers(path) as ledgers:
            for client in ledgers.clients:
                try:
                    guarantee = ledgers.ledger(client).guarantee(delta=delta)
                except AccountingError as error:
                    raise RunFolderError(f"{path}: no epsilon can be proven for what it counts ({error})") from error
                if guarantee is not None:
                    yield client, guarantee
