"""What the operator of a client decides: its number, where its ledger is kept, and what it never agrees to.

It comes from `flower-supernode --node-config`, so no server and no run can change it:

    --node-config 'client=3 ledger-folder="/var/lib/bqsgd" epsilon=3.0 delta=1e-5'

In a simulation Flower gives `partition-id` instead. Simulated clients belong to whoever simulates: they agree to any
settings, and their ledgers begin anew with every run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bqsgd.engines.engine import client_ledger, ledger_path
from bqsgd.errors import InvalidParameter
from bqsgd.ledger import Ledger
from bqsgd.params import check_int
from bqsgd.training.node_limits import NodeLimits
from bqsgd.training.settings import Config

LEDGER_FOLDER_VARIABLE = "BQSGD_LEDGER_FOLDER"
_DEFAULT_FOLDER = "~/.bqsgd/ledgers"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One client as its operator set it up.

    limits: what it agrees to. options: the whole node configuration, for keys of your own.
    """

    client: int
    ledger_folder: Path
    simulated: bool
    limits: NodeLimits
    options: Mapping[str, Any]

    @classmethod
    def of(cls, node_config: Mapping[str, Any]) -> Node:
        """Read the node configuration."""
        simulated = "client" not in node_config
        number = node_config.get("partition-id" if simulated else "client")
        if number is None:
            raise InvalidParameter(
                "start the SuperNode with --node-config 'client=N ...', N being this client's number"
            )
        limits = NodeLimits.unlimited() if simulated else NodeLimits.of(node_config)
        folder = limits.ledger_folder or os.environ.get(LEDGER_FOLDER_VARIABLE, _DEFAULT_FOLDER)
        return cls(
            client=check_int("client", number, 0, 2**63 - 1),
            ledger_folder=Path(folder).expanduser().resolve(),
            simulated=simulated,
            limits=limits,
            options=dict(node_config),
        )

    def refusal(self, config: Config) -> str | None:
        """Why this client does not take part in the run, or None."""
        return self.limits.refusal(config, client=self.client)

    def folder(self, *, run: str) -> Path:
        """A real client's ledger continues from run to run; a simulated one's holds one run."""
        return self.ledger_folder / f"simulated-{run}" if self.simulated else self.ledger_folder

    def private_path(self, *, run: str) -> Path:
        """Where its private figures go, beside its ledger."""
        return self.folder(run=run) / f"client-{self.client:04}.private.jsonl"

    def ledger(self, config: Config, *, run: str) -> Ledger | None:
        """This client's ledger, made on first use; None when the messages have no noise and so nothing to count."""
        folder = self.folder(run=run)
        there = ledger_path(folder, self.client).exists()
        limits = replace(self.limits, ledger_folder=folder)
        return client_ledger(config, None, number=self.client, resuming=there, limits=limits)
