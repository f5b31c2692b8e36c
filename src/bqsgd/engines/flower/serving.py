"""The ServerApp: gather the clients, go on from the checkpoint if there is one, run the rounds, keep the records."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from torch import nn

from bqsgd.engines.flower.answering import MakeModel
from bqsgd.engines.flower.carrier import Carrier
from bqsgd.engines.flower.roster import Roster
from bqsgd.engines.flower.settings import Service, read_settings
from bqsgd.engines.flower.strategy import FrameStrategy, model_record
from bqsgd.engines.session import named
from bqsgd.engines.task import Pair
from bqsgd.persample.functional import LossFunction
from bqsgd.training.checkpoint import CheckpointError, load_checkpoint, round_of, save_checkpoint
from bqsgd.training.config import Config
from bqsgd.training.rounds import Evaluate, evaluator, record_of
from bqsgd.training.server import Server
from bqsgd.training.vector import to_vector

logger = logging.getLogger("flwr.bqsgd")
LoadTest = Callable[[Config], Pair]
ROUNDS_FILE, RESULT_FILE = "rounds.jsonl", "result.json"


def server_app(
    *, make_model: MakeModel, load_test: LoadTest | None = None, loss: LossFunction | None = None
) -> ServerApp:
    """A ServerApp that trains with private clients.

    Args:
        make_model: the settings -> the initial model; the same function as the clients'.
        load_test: the settings -> public test inputs and targets; without it no accuracy is computed.
        loss: as the clients'; cross-entropy when left out.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        config, service = read_settings(context.run_config)
        model = make_model(config)
        evaluate = None
        if load_test is not None:
            inputs, targets = (torch.as_tensor(part) for part in load_test(config))
            evaluate = evaluator(model, loss or nn.CrossEntropyLoss(reduction="none"), inputs, targets)
        serve(grid, config, service, model=model, evaluate=evaluate)

    return app


def serve(
    grid: Grid, config: Config, service: Service, *, model: nn.Module, evaluate: Evaluate | None
) -> FrameStrategy:
    """Run what is left of the run, over any Flower grid."""
    config = _stored_name(config, service.folder)
    assert config.run is not None
    carrier, initial = Carrier(grid), to_vector(model)
    roster = Roster(config, dimension=initial.size)
    roster.gather(carrier, seconds=service.join_seconds)
    server = Server(model=initial, weights=roster.samples, config=config)
    keeper = _Keeper(service.folder, server)
    keeper.resume()
    limit = config.deadline_seconds or service.round_seconds
    strategy = FrameStrategy(server=server, roster=roster, carrier=carrier, run=config.run, seconds=limit)

    def after(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if strategy.outcome is None:  # Flower asks before the first round too
            return None
        record = record_of(
            server, strategy.outcome, evaluate=evaluate, epsilon=strategy.epsilon, started=keeper.started
        )
        keeper.keep(record)
        accuracy = record["test_accuracy"]
        return None if accuracy is None else MetricRecord({"accuracy": accuracy, "loss": record["test_loss"]})

    left = config.rounds - server.round
    if left:
        strategy.start(
            grid=carrier, initial_arrays=model_record(initial), num_rounds=left, timeout=limit, evaluate_fn=after
        )
    for letter in carrier.waiting.values():
        logger.warning("node %d has not answered round %s", letter.node, letter.group)
    keeper.finish(strategy, None if evaluate is None else evaluate(server.best_model))
    return strategy


def _stored_name(config: Config, folder: Path | None) -> Config:
    """The name of the run: a folder that holds a checkpoint belongs to the run that wrote it."""
    if folder is None:
        return named(config)
    folder.mkdir(parents=True, exist_ok=True)
    found = load_checkpoint(folder)
    if found is not None and config.run is None:
        raise CheckpointError(
            f"{folder} holds run {found[1].get('run')!r}; set `run` to that name to go on with it, or another folder"
        )
    if found is not None and found[1].get("run") != config.run:
        raise CheckpointError(f"{folder} holds run {found[1].get('run')!r}, not {config.run!r}; name another folder")
    return named(config)


class _Keeper:
    """The server's folder: checkpoint, one JSON line a round, the result. Without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, server: Server) -> None:
        self.folder, self.server = folder, server
        self.started = time.monotonic()

    def resume(self) -> None:
        """Go on from the checkpoint; lines of rounds after it are made again."""
        found = None if self.folder is None else load_checkpoint(self.folder)
        if self.folder is None or found is None:
            if self.folder is not None:
                (self.folder / ROUNDS_FILE).write_text("")
            return
        arrays, state = found
        round = round_of(state)
        self.server.restore(arrays, round=round)
        path = self.folder / ROUNDS_FILE
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        path.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["round"] < round))
        logger.warning("resumed from the checkpoint: %d rounds were done", round)

    def keep(self, record: dict[str, Any]) -> None:
        """The record first, then the state that moves past it."""
        if self.folder is None:
            return
        with (self.folder / ROUNDS_FILE).open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        config = self.server.config
        if self.server.round % config.checkpoint_every == 0 or self.server.round == config.rounds:
            save_checkpoint(self.folder, self.server.arrays(), {"round": self.server.round, "run": config.run})

    def finish(self, strategy: FrameStrategy, final: tuple[float, float] | None) -> None:
        """What the run came to."""
        model = self.server.best_model
        worst = max(strategy.guarantees.items(), key=lambda item: item[1].epsilon, default=None)
        result = {
            "run": strategy.run,
            "rounds": self.server.round,
            "accuracy": None if final is None else final[0],
            "loss": None if final is None else final[1],
            "guarantee": None if worst is None else worst[1].to_dict(),
            "guarantee_client": None if worst is None else worst[0],
            "seeded": self.server.config.seed is not None,
            "model_sha256": hashlib.sha256(model.astype("<f4").tobytes()).hexdigest(),
        }
        logger.info("result: %s", json.dumps(result))
        if self.folder is not None:
            (self.folder / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
