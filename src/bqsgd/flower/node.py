"""What the operator of a client decides: its number, where its ledger is kept, and what it never agrees to.

It comes from `flower-supernode --node-config`, so no server and no run can change it:

    --node-config 'client=3 ledger-folder="/var/lib/bqsgd" epsilon=3.0 delta=1e-5'

In a simulation Flower gives `partition-id` instead; the ledgers of simulated clients begin anew with every run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.ledger import Ledger
from bqsgd.params import check_int, check_positive
from bqsgd.privacy.guarantee import as_given
from bqsgd.storage import private_folder
from bqsgd.training.settings import Config

LEDGER_FOLDER_VARIABLE = "BQSGD_LEDGER_FOLDER"
_DEFAULT_FOLDER = "~/.bqsgd/ledgers"


@dataclass(frozen=True, kw_only=True)
class Node:
    """One client as its operator set it up.

    epsilon, delta: the most a run may ask of it, None for whatever its ledger allows. allow_no_privacy: take part in
    runs whose noise is seeded or absent. options: the whole node configuration, for keys of your own.
    """

    client: int
    ledger_folder: Path
    simulated: bool
    epsilon: float | None
    delta: float | None
    allow_no_privacy: bool
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
        allow = node_config.get("allow-no-privacy", simulated)
        if not isinstance(allow, bool):
            raise InvalidParameter(f"allow-no-privacy must be true or false, got {allow!r}")
        folder = node_config.get("ledger-folder", os.environ.get(LEDGER_FOLDER_VARIABLE, _DEFAULT_FOLDER))
        limits = {name: node_config.get(name) for name in ("epsilon", "delta")}
        for name, limit in limits.items():
            if limit is not None:
                check_positive(name, limit)
        return cls(
            client=check_int("client", number, 0, 2**63 - 1),
            ledger_folder=Path(str(folder)).expanduser().resolve(),
            simulated=simulated,
            allow_no_privacy=allow,
            options=dict(node_config),
            **limits,
        )

    def refusal(self, config: Config) -> str | None:
        """Why this client does not take part in the run, or None."""
        noiseless = config.privacy.noiseless
        if not self.allow_no_privacy and (noiseless or config.privacy.seed is not None):
            what = "has no noise" if noiseless else "has seeded noise, which whoever knows the seed can remove"
            return f"the run {what}; this node takes part in it only with allow-no-privacy=true"
        if config.clients.packed_rows and self.options.get("allow-packed-rows") is not True:
            return (
                "the run packs rows, which rests on an assumption about kernels; allow it with allow-packed-rows=true"
            )
        if self.client >= config.clients.count:
            return f"the run has clients 0 to {config.clients.count - 1}, this is client {self.client}"
        for name, limit in (("epsilon", self.epsilon), ("delta", self.delta)):
            asked = getattr(config.privacy.budget(client=self.client, round=0), name)
            if limit is not None and asked > limit:
                return f"the run asks for {name} {as_given(asked)}, this node allows {as_given(limit)}"
        return None

    def folder(self, *, run: str) -> Path:
        """A real client's ledger continues from run to run; a simulated one's holds one run."""
        return self.ledger_folder / f"simulated-{run}" if self.simulated else self.ledger_folder

    def private_path(self, *, run: str) -> Path:
        """Where its private figures go, beside its ledger."""
        return self.folder(run=run) / f"client-{self.client:04}.private.jsonl"

    def ledger(self, config: Config, *, run: str) -> Ledger | None:
        """This client's ledger, made on first use; None when the messages have no noise and so nothing to count."""
        if config.privacy.noiseless:
            return None
        folder = self.folder(run=run)
        private_folder(folder)
        budget = config.privacy.budget(client=self.client, round=0)
        return Ledger.open(
            folder / f"client-{self.client:04}.ledger",
            client=self.client,
            budget_epsilon=budget.epsilon,
            budget_delta=budget.delta,
        )
