"""What a run learns, as every engine is given it, and a client made from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.errors import LedgerError
from bqsgd.ledger import Ledger
from bqsgd.persample.functional import LossFunction
from bqsgd.training.client import Client, PrivateLog
from bqsgd.training.config import Config
from bqsgd.training.rounds import Evaluate, evaluator

Pair = tuple[Tensor | npt.NDArray[Any], Tensor | npt.NDArray[Any]]
PrivateLogs = Callable[[int], PrivateLog]
"""Client number -> where its private figures go."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is learnt: the model, each client's data, public test data, the loss (one number a sample)."""

    make_model: Callable[[], nn.Module]
    shares: Sequence[Pair]
    test: Pair | None = None
    loss: LossFunction = field(default_factory=lambda: nn.CrossEntropyLoss(reduction="none"))

    def evaluator(self, model: nn.Module) -> Evaluate | None:
        """Accuracy and loss on the test data, computed with this model object; None without test data."""
        if self.test is None:
            return None
        inputs, targets = (torch.as_tensor(part) for part in self.test)
        return evaluator(model, self.loss, inputs, targets)


def make_client(
    task: Task,
    config: Config,
    *,
    number: int,
    model: nn.Module,
    share: Pair,
    folder: Path | None,
    run: str,
    resuming: bool,
    private_logs: PrivateLogs | None,
) -> Client:
    """Client `number` with its ledger open in `folder`."""
    return Client(
        client=number,
        model=model,
        loss=task.loss,
        inputs=share[0],
        targets=share[1],
        config=config,
        ledger=client_ledger(config, folder, number=number, resuming=resuming),
        run=run,
        resume=resuming,
        private_log=None if private_logs is None else private_logs(number),
    )


def client_ledger(config: Config, folder: Path | None, *, number: int, resuming: bool) -> Ledger | None:
    """The ledger of client `number` in `folder`; a run that goes on must find the one it had."""
    if folder is None:
        return None
    if config.mechanism is not None and config.mechanism.trials == 0:
        return None  # no noise, no privacy, nothing to count
    path = folder / "ledgers" / f"client-{number:04}.ledger"
    if not resuming:
        path.parent.mkdir(parents=True, exist_ok=True)
        budget = config.budget(client=number, round=0)
        return Ledger.open(path, client=number, budget_epsilon=budget.epsilon, budget_delta=budget.delta)
    ledger = Ledger(path)
    if ledger.client != number:
        ledger.close()
        raise LedgerError(f"{path} is the ledger of client {ledger.client}, not {number}")
    return ledger


def private_log_at(path: Path) -> PrivateLog:
    """A file on the client's own disk, one JSON line a round."""

    def append(figures: dict[str, Any]) -> None:
        with path.open("a") as stream:
            stream.write(json.dumps(figures) + "\n")

    return append
