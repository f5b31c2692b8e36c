"""The round loop, the same on every engine: open, exchange, close, evaluate, record.

An engine carries bytes between the server and its clients and holds no algorithm. What a round produced is a plain
record, one line of rounds.jsonl; every figure in it is public (test split, sizes, exact epsilon) except the seconds,
which an engine that runs the clients itself adds for simulations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bqsgd.persample.functional import LossFunction
from bqsgd.training.config import Config
from bqsgd.training.receipts import OK, Outcome, Receipt
from bqsgd.training.server import Server
from bqsgd.training.vector import load_vector
from bqsgd.wire.frame import Buffer

_EVALUATION_BATCH = 2048


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
    """What the loop needs of an engine."""

    def exchange(self, message: bytes, *, round: int) -> Iterable[Answer]:
        """Carry the message to every client and yield the answers in the order of client numbers."""

    def seconds(self) -> Mapping[str, float]:
        """What the clients spent on the last round, by stage, where the engine knows; else empty."""

    def epsilon(self, *, delta: float) -> float | None:
        """The largest exact epsilon that any client's messages so far amount to; None when nothing private was sent."""


Evaluate = Callable[[npt.NDArray[np.float32]], tuple[float, float]]
"""Model vector -> (accuracy, loss) on public test data."""


def evaluator(model: nn.Module, loss: LossFunction, inputs: Tensor, targets: Tensor) -> Evaluate:
    """Accuracy (share of largest outputs at the target) and mean loss over a public test split."""

    def evaluate(vector: npt.NDArray[np.float32]) -> tuple[float, float]:
        load_vector(model, vector)
        right, total = 0, 0.0
        with torch.no_grad():
            for x, y in zip(
                torch.split(inputs, _EVALUATION_BATCH), torch.split(targets, _EVALUATION_BATCH), strict=True
            ):
                outputs = model(x)
                total += float(loss(outputs, y).sum())
                right += int((outputs.argmax(dim=1) == y).sum())
        return right / len(inputs), total / len(inputs)

    return evaluate


def deliver(server: Server, answer: Answer) -> Receipt:
    """Hand one answer to the open round."""
    if answer.frame is not None:
        return server.receive(answer.frame, sender=answer.client, arrived=answer.arrived)
    if answer.declined:
        return server.decline(answer.client, answer.reason or "declined")
    return server.missing(answer.client, answer.reason or "no answer")


def run_round(server: Server, engine: Engine) -> Outcome:
    """One round of Algorithm 1 over an engine."""
    started = time.perf_counter()
    message = server.open_round()
    writing = time.perf_counter() - started
    for answer in engine.exchange(message, round=server.round):
        deliver(server, answer)
    outcome = server.close_round()
    seconds = dict(engine.seconds())
    for stage, elapsed in {**outcome.seconds, "frame": writing}.items():
        seconds[stage] = seconds.get(stage, 0.0) + elapsed
    return Outcome(**{**{name: getattr(outcome, name) for name in outcome.__dataclass_fields__}, "seconds": seconds})


def rounds(
    server: Server,
    engine: Engine,
    *,
    evaluate: Evaluate | None = None,
    started: float | None = None,
    nominal: Callable[[int], float | None] = lambda rounds: None,
) -> Iterator[dict[str, Any]]:
    """Run the rounds that are left, yielding one record after each; stop by not asking for the next.

    Accuracy and exact epsilon are computed every `evaluate_every` rounds and after the last one, else null.
    """
    config = server.config
    began = time.monotonic() if started is None else started
    while server.round < config.rounds:
        outcome = run_round(server, engine)
        yield record_of(server, outcome, evaluate=evaluate, epsilon=engine.epsilon, started=began, nominal=nominal)


def due(config: Config, rounds_done: int) -> bool:
    """Whether accuracy and exact epsilon are computed after this many rounds."""
    return rounds_done % config.evaluate_every == 0 or rounds_done == config.rounds


def record_of(
    server: Server,
    outcome: Outcome,
    *,
    evaluate: Evaluate | None,
    epsilon: Callable[..., float | None],
    started: float,
    nominal: Callable[[int], float | None] = lambda rounds: None,
) -> dict[str, Any]:
    """The record of a round that was just closed."""
    done = outcome.round + 1
    now = due(server.config, done)
    accuracy, loss = evaluate(server.best_model) if evaluate is not None and now else (None, None)
    return record(
        outcome,
        dimension=server.model.size,
        elapsed=time.monotonic() - started,
        accuracy=accuracy,
        loss=loss,
        epsilon=epsilon(delta=server.config.delta) if now else None,
        nominal=nominal(done),
    )


def record(
    outcome: Outcome,
    *,
    dimension: int,
    elapsed: float,
    accuracy: float | None,
    loss: float | None,
    epsilon: float | None,
    nominal: float | None,
) -> dict[str, Any]:
    """One line of rounds.jsonl."""
    received = sum(receipt.status == OK for receipt in outcome.receipts)
    return {
        "round": outcome.round,
        "time": elapsed,
        "test_accuracy": accuracy,
        "test_loss": loss,
        "epsilon_max": epsilon,
        "nominal_epsilon": nominal,
        "bytes_up": outcome.bytes_up,
        "bytes_down": outcome.bytes_down,
        "bytes_up_float32": 4 * dimension * received,
        "clients": [asdict(receipt) for receipt in outcome.receipts if receipt.client is not None],
        "seconds": dict(outcome.seconds),
        "stepped": outcome.stepped,
        "seeded": outcome.seeded,
    }
