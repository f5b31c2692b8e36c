"""What an engine is: it carries bytes between the server and its clients, and answers for their guarantees.

An engine holds no algorithm: who is asked, with which bytes, and in how many steps a round goes is decided above it, in
`bqsgd._src.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from bqsgd._src.client.client import Client
from bqsgd._src.client.files import client_folder, client_ledger, client_log
from bqsgd._src.client.objective import Objective
from bqsgd._src.client.sum_setup import SumSetup
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger, Register
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.server.aggregation import client_weights
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.tasks.task import Samples, Task
from bqsgd._src.wire.reply import Reply

_MOST_JSON = 1 << 16


class Engine(Protocol):
    """What a run needs of an engine."""

    @property
    def samples(self) -> Mapping[int, int]:
        """Client -> how many samples it holds, or counts as (`client_plan.public_size`): the clients of the run."""

    @property
    def claimed(self) -> bool:
        """Whether `samples` is what clients say of themselves. No weight rests on that."""

    @property
    def lost(self) -> Mapping[int, str]:
        """Client -> why it can never answer again."""

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterable[Reply]:
        """Carry these bytes to these clients and yield their answers in the order of client numbers.

        enough: once so many have sent bytes, the others are not waited for.

        A client that cannot be reached has an answer too, with the reason. What comes late for an earlier exchange is
        yielded as well: its bytes say what it is. A message that many clients share is one object.
        """

    def seconds(self) -> Mapping[str, float]:
        """What the clients spent on the last exchange, by stage, where the engine knows; else empty."""

    def guarantees(self, *, delta: float) -> Mapping[int, Guarantee | None]:
        """Client -> what its ledger says it has spent, None when it has sent nothing private."""

    def close(self) -> None:
        """End the run on every client; ledgers held here are closed."""


def check_known(asked: Iterable[int], clients: Container[int]) -> list[int]:
    """The clients that are asked, in order. Raises InvalidParameter if a client does not belong to this run."""
    numbers = sorted(asked)
    foreign = next((number for number in numbers if number not in clients), None)
    if foreign is not None:
        raise InvalidParameter(f"client {foreign} is not among the clients of this run")
    return numbers


def read_guarantee(text: str | bytes) -> Guarantee | None:
    """What a client states of itself, or None when it is not a guarantee at all. The server cannot verify it."""
    try:
        return Guarantee.from_dict(json.loads(text)) if len(text) <= _MOST_JSON else None
    except (ValueError, RecursionError):  # InvalidParameter is a ValueError
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What an engine is made from.

    folder: where ledgers go, None to keep none. resuming: the ledgers must exist. sizes: client -> samples as whoever
    serves has them, None without. sums: what the run's secure sums need, where it has them.
    """

    task: Task
    config: Config
    folder: Path | None
    resuming: bool
    dimension: int
    sizes: Mapping[int, int] | None = None
    sums: SumSetup | None = None

    def check_separate(self) -> None:
        """Raise where clients in processes of their own cannot be trusted with what one process can.

        Weights would rest on what clients say of themselves, or clients take keys for granted that no roster names.
        """
        client_weights(self.config.server.weights, {}, claimed=True, sizes=self.sizes)
        if self.sums is not None and self.sums.simulated:
            raise InvalidParameter(
                "secure sums between processes need a roster of the clients' identity keys, and each client its own "
                "key: give roster and identity (bqsgd secure keygen, bqsgd secure roster)"
            )

    def counted_samples(self, client: int, claimed: int | None) -> int:
        """How many samples a client counts as; raise where it is not on the list of sizes or claims more than it says.

        claimed: None where the guarantee hides the whole client, which then claims nothing.
        """
        listed = None if self.sizes is None else self.sizes.get(client)
        if self.sizes is not None and listed is None:
            raise InvalidParameter(f"client {client} is not on the list of sizes")
        if claimed is not None and listed is not None and claimed > listed:
            raise InvalidParameter(f"client {client} claims {claimed} samples, the list of sizes has {listed}")
        return self.config.privacy.batch_size if claimed is None else claimed

    @property
    def run(self) -> str:
        """The run's name in the ledgers."""
        return self.config.run.name or "run"


MakeEngine = Callable[[Setup], Engine]
FEW = 100
"""More simulated clients than these share one register of ledgers."""


def make_client(
    setup: Setup,
    *,
    number: int,
    model: nn.Module,
    share: Samples,
    limits: NodeLimits | None = None,
    register: Register | None = None,
    objective: Objective | None = None,
) -> Client:
    """Client `number` with its ledger open and, where the settings ask for it, its private log.

    limits: of a client that need not trust whoever serves. register: where its ledger is among those of many.
    """
    config, place = setup.config, client_folder(setup.folder, limits)
    if register is not None:
        ledger: Ledger | None = register.ledger(number)
    else:
        ledger = client_ledger(config, setup.folder, number=number, resuming=setup.resuming, limits=limits)
    sums = None if setup.sums is None else setup.sums.client(number, folder=place, seed=config.privacy.seed)
    return Client(
        client=number,
        model=model,
        loss_fn=setup.task.loss_fn,
        samples=share,
        forward=setup.task.forward,
        sample=setup.task.sample,
        config=config,
        ledger=ledger,
        run=setup.run,
        resume=setup.resuming,
        private_log=client_log(config, setup.folder, number=number),
        limits=limits,
        sums=sums,
        objective=objective,
    )
