"""What a client keeps on its own disk: its ledger, its state of secure sums, and figures outside the guarantee."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bqsgd._src.client.client import PrivateLog
from bqsgd._src.ledger import Ledger, PrivacyBudget, Register
from bqsgd._src.ledger.register import ledger_path, open_ledger, register_path
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.storage import Appended, private_folder


def client_folder(folder: Path | None, limits: NodeLimits | None) -> Path | None:
    """Where a client keeps what must outlast its process: the folder in its limits if they name one, else the run's."""
    own = None if limits is None else limits.ledger_folder
    return own if own is not None or folder is None else folder / "ledgers"


def client_ledger(
    config: Config, folder: Path | None, *, number: int, resuming: bool, limits: NodeLimits | None = None
) -> Ledger | None:
    """The ledger of client `number`: its own if its limits name a folder, else that of the run in `folder`.

    The budget is the client's own if its limits name one; no run changes it. A run that continues must find the ledger
    it had.
    """
    place = client_folder(folder, limits)
    if place is None or config.privacy.noiseless:
        return None
    budget = config.privacy.budget(client=number, round=0).privacy
    own = None
    if limits is not None and limits.epsilon is not None and limits.delta is not None:
        own = PrivacyBudget(epsilon=limits.epsilon, delta=limits.delta)
    return open_ledger(ledger_path(place, number), client=number, budget=budget, own=own, resuming=resuming)


def run_register(config: Config, folder: Path | None, *, resuming: bool) -> Register | None:
    """The register of a run whose clients are many and all here; None if there is nothing to keep.

    A run that continues must find the one it had.
    """
    if folder is None or config.privacy.noiseless:
        return None
    path = register_path(folder / "ledgers")
    return Register(path) if resuming else made_register(config, path)


def made_register(config: Config, path: Path) -> Register:
    """The register of all clients of a run, made unless it is there."""
    private_folder(path.parent)
    budgets = {n: config.privacy.budget(client=n, round=0).privacy for n in range(config.clients.count)}
    return Register.open(path, budgets=budgets)


def client_log(config: Config, folder: Path | None, *, number: int) -> PrivateLog | None:
    """Where a client keeps figures outside the guarantee. None unless the settings ask for them."""
    if not config.privacy.private_metrics or folder is None:
        return None
    return private_log_at(folder / "private" / f"client-{number:04}.jsonl")


def private_log_at(path: Path) -> PrivateLog:
    """A file on the client's own disk, which nobody else can read, one JSON line per round."""
    private_folder(path.parent)

    def append(figures: dict[str, Any]) -> None:
        with Appended(path) as stream:
            stream.append(json.dumps(figures).encode() + b"\n")

    return append
