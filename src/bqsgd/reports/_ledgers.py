"""A run with the guarantee that its ledgers state. They have the last word: a summary says what one process knew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bqsgd.errors import AccountingError
from bqsgd.ledger.register import SUFFIX, opened_ledgers
from bqsgd.ledger.spending import guarantee_of, sorted_releases
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.records.folder import History, read_history
from bqsgd.records.record import RunFolderError, Summary

_MAX_LEDGERS = 100_000


def read_run(folder: str | Path) -> History:
    """Read a run folder; where it holds clients' ledgers, epsilon is what they come to now.

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
    found = dict(_spent(folder, delta=None if stated is None else stated.delta))
    if stated is not None and client is not None and client not in found:
        found[client] = stated  # its ledger is elsewhere, on its own machine
    if not found:
        return summary
    worst = max(found, key=lambda number: (found[number].epsilon, -number))
    claim = found[worst]
    if stated is not None:  # a ledger does not know what the run took as public
        claim = replace(claim, assumption=_both(claim.assumption, stated.assumption))
    return replace(summary, guarantee=claim, guarantee_client=worst, seeded=summary.seeded or claim.seeded)


def _both(*assumptions: str) -> str:
    parts = [part for text in assumptions for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


def _spent(folder: Path, *, delta: float | None) -> Iterator[tuple[int, Guarantee]]:
    """Client -> what its ledger counts as sent; clients with the same history share one computation."""
    if folder.is_symlink():
        raise RunFolderError(f"{folder} is a link; a run folder holds its ledgers itself")
    paths = sorted([*folder.glob("client-*.ledger"), *folder.glob(f"*{SUFFIX}")])
    if len(paths) > _MAX_LEDGERS:
        raise RunFolderError(f"{folder} holds more than {_MAX_LEDGERS} ledgers")
    for path in paths:
        with opened_ledgers(path) as ledgers:
            for client in ledgers.clients:
                ledger = ledgers.ledger(client)
                wanted = ledger.budget.delta if delta is None else delta
                releases, seeded = tuple(sorted_releases(ledger.released)), ledger.seeded_rounds > 0
                try:
                    guarantee = guarantee_of(releases, wanted, seeded)
                except AccountingError as error:
                    raise RunFolderError(f"{path}: no epsilon can be proven for what it counts ({error})") from error
                if guarantee is not None:
                    yield client, guarantee
