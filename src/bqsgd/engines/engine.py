"""What an engine is: it carries bytes between the server and its clients, and answers for their guarantees.

An engine holds no algorithm: who is asked, with which bytes, and in how many steps a round goes is decided above it, in
`bqsgd.run`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from bqsgd.errors import InvalidParameter, LedgerError
from bqsgd.ledger import Ledger, PrivacyBudget, Register
from bqsgd.ledger.register import SUFFIX
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.secure.client import SumClient
from bqsgd.storage import Appended, private_folder
from bqsgd.training.aggregation import client_weights
from bqsgd.training.client import Client, PrivateLog
from bqsgd.training.node_limits import NodeLimits
from bqsgd.training.objective import Objective
from bqsgd.training.settings import Config
from bqsgd.training.sums import SumSetup
from bqsgd.training.task import Samples, Task
from bqsgd.wire.frame import Buffer


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One client's answer as the engine got it: a frame, or the reason why there is none.

    declined: the client itself said that it sends nothing; otherwise it is missing (crashed, late, unreachable).
    arrived: when it came, on the monotonic clock; None for now.
    """

    client: int
    frame: Buffer | None = None
    reason: str | None = None
    declined: bool = False
    arrived: float | None = None


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

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterable[Answer]:
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
    """The clients that are asked, in order; raise InvalidParameter where one is none of the run's."""
    numbers = sorted(asked)
    foreign = next((number for number in numbers if number not in clients), None)
    if foreign is not None:
        raise InvalidParameter(f"client {foreign} is not among the clients of this run")
    return numbers


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

    def check_weights(self) -> None:
        """Raise where the weights would rest on what clients say of themselves."""
        client_weights(self.config.server.weights, {}, claimed=True, sizes=self.sizes)

    def check_roster(self) -> None:
        """Raise where clients in processes of their own would take keys for granted that no roster names."""
        if self.sums is not None and self.sums.simulated:
            raise InvalidParameter(
                "secure sums between processes need a roster of the clients' identity keys, and each client its own "
                "key: give roster and identity (bqsgd secure keygen, bqsgd secure roster)"
            )

    def check_samples(self, client: int, samples: int | None) -> None:
        """Raise InvalidParameter where a client is not on the list of sizes or claims more than it says.

        samples: None where the guarantee hides the whole client, which then claims nothing.
        """
        if self.sizes is None:
            return
        if client not in self.sizes:
            raise InvalidParameter(f"client {client} is not on the list of sizes")
        if samples is not None and samples > self.sizes[client]:
            listed = self.sizes[client]
            raise InvalidParameter(f"client {client} claims {samples} samples, the list of sizes has {listed}")

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
    if register is not None:
        ledger: Ledger | None = register.ledger(number)
    else:
        ledger = client_ledger(setup.config, setup.folder, number=number, resuming=setup.resuming, limits=limits)
    return Client(
        client=number,
        model=model,
        loss=setup.task.loss,
        samples=share,
        forward=setup.task.forward,
        sample=setup.task.sample,
        config=setup.config,
        ledger=ledger,
        run=setup.run,
        resume=setup.resuming,
        private_log=_private_log(setup.config, setup.folder, number=number),
        limits=limits,
        sums=_client_sums(setup, number=number, limits=limits),
        objective=objective,
    )


def _client_sums(setup: Setup, *, number: int, limits: NodeLimits | None) -> SumClient | None:
    if setup.sums is None:
        return None
    place = _ledger_folder(setup.folder, limits)
    if place is not None:
        private_folder(place)
    return setup.sums.client(number, folder=place, seed=setup.config.privacy.seed)


def _ledger_folder(folder: Path | None, limits: NodeLimits | None) -> Path | None:
    """Where a client keeps what must outlast its process: its own folder where its limits name one."""
    own = None if limits is None else limits.ledger_folder
    return own if own is not None or folder is None else folder / "ledgers"


def run_register(setup: Setup) -> Register | None:
    """The register of a run whose clients are many and all here; None where there is nothing to keep.

    A run that continues must find the one it had.
    """
    if setup.folder is None or setup.config.privacy.noiseless:
        return None
    path = register_path(setup.folder / "ledgers")
    return Register(path) if setup.resuming else made_register(setup.config, path)


def made_register(config: Config, path: Path) -> Register:
    """The register of all clients of a run, made unless it is there."""
    private_folder(path.parent)
    budgets = {}
    for number in range(config.clients.count):
        budget = config.privacy.budget(client=number, round=0)
        budgets[number] = PrivacyBudget(epsilon=budget.epsilon, delta=budget.delta)
    return Register.open(path, budgets=budgets)


def register_path(folder: Path) -> Path:
    """Where the ledgers of many clients are in a folder of ledgers."""
    return folder / f"clients{SUFFIX}"


def client_ledger(
    config: Config, folder: Path | None, *, number: int, resuming: bool, limits: NodeLimits | None = None
) -> Ledger | None:
    """The ledger of client `number`: its own where its limits say so, else that of the run in `folder`.

    A run that continues must find the one it had. The budget is the client's own where it has one; no run changes it.
    """
    place = _ledger_folder(folder, limits)
    if place is None or config.privacy.noiseless:
        return None
    path = ledger_path(place, number)
    if not resuming:
        private_folder(place)
    if limits is not None and limits.epsilon is not None and limits.delta is not None:
        return Ledger.open(
            path,
            client=number,
            budget_epsilon=limits.epsilon,
            budget_delta=limits.delta,
            create_missing=not resuming,
            change_reason="the client's own limits",
        )
    if not resuming:
        budget = config.privacy.budget(client=number, round=0)
        return Ledger.open(path, client=number, budget_epsilon=budget.epsilon, budget_delta=budget.delta)
    ledger = Ledger(path)
    if ledger.client != number:
        ledger.close()
        raise LedgerError(f"{path} is the ledger of client {ledger.client}, not {number}")
    return ledger


def ledger_path(folder: Path, number: int) -> Path:
    """Where client `number` has its ledger in a folder of ledgers."""
    return folder / f"client-{number:04}.ledger"


def _private_log(config: Config, folder: Path | None, *, number: int) -> PrivateLog | None:
    """Where a client keeps figures outside the guarantee: on its own disk. None unless the settings ask for them."""
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch at one thread, so that no sum depends on how many cores this machine has; then as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Each Ctrl-C or SIGTERM calls `note` with its number, until the end of the block.

    Only the main thread can listen for signals; in any other they are left to whoever does.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
