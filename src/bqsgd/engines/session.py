"""One run in this process from start to end: clients with their ledgers, the server, the checkpoint, the way back.

    task = Task(make_model=Net, shares=[(x0, y0), (x1, y1)], test=(x, y))
    with Session.start(task, Config(clients=2, ...), folder="runs/one") as session:
        for record in session.rounds():
            print(record["round"], record["test_accuracy"])
    print(session.result())

kill -9 it at any point and `Session.resume` goes on from the last checkpoint. Rounds that are made again are counted
again when their noise is new; with seeded noise they are the same bytes, and the final model is the same bit for bit.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from bqsgd.engines.inprocess import InProcess
from bqsgd.engines.task import PrivateLogs, Task, make_client
from bqsgd.errors import InvalidParameter
from bqsgd.paper.nominal import nominal_epsilon_after
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.training.checkpoint import CheckpointError, load_checkpoint, round_of, save_checkpoint
from bqsgd.training.config import Config
from bqsgd.training.rounds import rounds
from bqsgd.training.server import Server
from bqsgd.training.vector import to_vector

__all__ = ["Result", "Session", "Task", "named"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """What a run came to. `guarantee` is that of the client with the largest epsilon, None when nothing was sent."""

    model: npt.NDArray[np.float32]
    rounds: int
    guarantee: Guarantee | None
    client: int | None
    seeded: bool


class Session:
    """A run; use `Session.start` or `Session.resume`. `folder` holds ledgers and checkpoint; without one nothing is
    kept, which only a seeded or noiseless run may do."""

    def __init__(
        self,
        task: Task,
        config: Config,
        *,
        folder: Path | None,
        resuming: bool,
        private_log: PrivateLogs | None = None,
    ) -> None:
        if len(task.shares) != config.clients:
            raise InvalidParameter(f"clients={config.clients}, but the task has {len(task.shares)} shares of data")
        self.config, self.folder, self.task = config, folder, task
        self.started = time.monotonic()
        models = _models(task.make_model, min(config.workers, config.clients))
        self._evaluate = task.evaluator(models[0])
        initial = to_vector(models[0])
        clients = [
            make_client(
                task,
                config,
                number=number,
                model=models[number % len(models)],
                share=share,
                folder=folder,
                run=config.run or "run",
                resuming=resuming,
                private_logs=private_log,
            )
            for number, share in enumerate(task.shares)
        ]
        self.server = Server(
            model=initial, weights={client.client: len(client.inputs) for client in clients}, config=config
        )
        self.engine = InProcess(clients, workers=config.workers)
        self._nominal = nominal_epsilon_after(config, clients[0].situation)

    @classmethod
    def start(cls, task: Task, config: Config, *, folder: str | Path | None = None, **options: Any) -> Self:
        """Begin a run. The folder must not hold a checkpoint; ledgers in it must be of these clients."""
        place = None if folder is None else Path(folder)
        if place is not None:
            (place / "ledgers").mkdir(parents=True, exist_ok=True)
            if load_checkpoint(place) is not None:
                raise CheckpointError(f"{place} holds a run already; resume it or name another folder")
        return cls(task, named(config), folder=place, resuming=False, **options)

    @classmethod
    def resume(cls, task: Task, config: Config, *, folder: str | Path, **options: Any) -> Self:
        """Go on from the checkpoint in `folder`, or from round 0 when there is none; `config` is the run's own."""
        place = Path(folder)
        if config.run is None:
            raise InvalidParameter("only a run with a name can be resumed: use the config.toml of its folder")
        session = cls(task, config, folder=place, resuming=True, **options)
        found = load_checkpoint(place)
        if found is not None:
            arrays, state = found
            if state.get("run") != config.run:
                raise CheckpointError(f"the checkpoint in {place} is of run {state.get('run')!r}, not {config.run!r}")
            session.server.restore(arrays, round=round_of(state))
            session.started -= float(state.get("elapsed_seconds", 0.0))
        return session

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run what is left, yielding a record a round; checkpoints come every `checkpoint_every` rounds and last.

        The checkpoint follows the record: whoever writes records down has the line before the state moves past it.
        """
        loop = rounds(self.server, self.engine, evaluate=self._evaluate, started=self.started, nominal=self._nominal)
        for record in loop:
            yield record
            if self.server.round % self.config.checkpoint_every == 0 or self.server.round == self.config.rounds:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Write the state down, durably."""
        if self.folder is not None:
            elapsed = time.monotonic() - self.started
            state = {"round": self.server.round, "run": self.config.run, "elapsed_seconds": elapsed}
            save_checkpoint(self.folder, self.server.arrays(), state)

    def evaluate(self) -> tuple[float, float] | None:
        """Accuracy and loss of the model as it stands, on the test data."""
        return None if self._evaluate is None else self._evaluate(self.server.best_model)

    def result(self) -> Result:
        """The model and what it cost, from the clients' books."""
        found = [
            (guarantee.epsilon, number, guarantee)
            for number, guarantee in self.engine.guarantees(delta=self.config.delta).items()
            if guarantee is not None
        ]
        worst = max(found, key=lambda entry: entry[0], default=None)
        return Result(
            model=self.server.best_model,
            rounds=self.server.round,
            guarantee=None if worst is None else worst[2],
            client=None if worst is None else worst[1],
            seeded=self.config.seed is not None,
        )

    def close(self) -> None:
        """Close the ledgers."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def named(config: Config) -> Config:
    """The same settings with a name for the ledgers, drawn at random where there is none."""
    return config if config.run is not None else replace(config, run=f"run-{secrets.token_hex(8)}")


def _models(make_model: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    """One model a worker. Their own initial weights do not matter but for the first, which is the run's start."""
    torch.set_num_threads(1)  # each client's sums must not depend on how many cores this machine has
    return [make_model() for _ in range(count)]
