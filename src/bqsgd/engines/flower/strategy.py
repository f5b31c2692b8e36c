"""The Strategy: Flower's round loop around `training.Server`. It carries answers and holds no algorithm."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from bqsgd.engines.flower.carrier import Carrier, Letter
from bqsgd.engines.flower.messages import FRAME, MODEL, clean, data_of, has_data, parcel, read_guarantee, word
from bqsgd.engines.flower.roster import Roster
from bqsgd.errors import FrameError, InvalidParameter
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.training.receipts import OK, Outcome, Receipt
from bqsgd.training.rounds import Answer, deliver, due
from bqsgd.training.server import Server

logger = logging.getLogger("flwr.bqsgd")
_GREETING_SECONDS = 5.0
"""How long a round waits for a newcomer to say who it is; it may still do so during the round."""


def model_record(model: npt.NDArray[np.float32]) -> ArrayRecord:
    """The model as Flower shows it: one plain float32 array."""
    return ArrayRecord({"model": Array(model)})


class FrameStrategy(Strategy):
    """Sends the server's message to every client and hands it their frames, in the order of client numbers.

    Args:
        server: the run's state.
        roster: the clients that have joined.
        carrier: the grid, wrapped; `start` must be given the same.
        run: the run's name in the clients' ledgers.
        seconds: how long a round waits for its answers.
    """

    def __init__(self, *, server: Server, roster: Roster, carrier: Carrier, run: str, seconds: float) -> None:
        self.server, self.roster, self.carrier = server, roster, carrier
        self.run, self.seconds = run, seconds
        self.outcome: Outcome | None = None
        """The round closed last."""
        self.guarantees: dict[int, Guarantee] = {}
        """What each client last stated of itself."""

    def summary(self) -> None:
        """Log what is run."""
        config = self.server.config
        logger.info(
            "run %s: %d clients, %d coordinates, rounds %d to %d",
            self.run, len(self.server.weights), self.server.model.size, self.server.round, config.rounds - 1,
        )  # fmt: skip
        if config.seed is not None:
            logger.warning("seeded noise: no privacy claim")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open a round: one message for every client that is there."""
        if grid is not self.carrier:
            raise InvalidParameter("start the strategy with the carrier it was made with: start(grid=carrier, ...)")
        online = set(grid.get_node_ids())
        if online - set(self.roster.nodes.values()):
            self.roster.greet(self.carrier, seconds=_GREETING_SECONDS)
        message = self.server.open_round()
        content = parcel(message, kind=MODEL, run=self.run, books=due(self.server.config, self.server.round + 1))
        group, ttl = (
            str(self.server.round),
            2 * self.seconds + 60,
        )  # an answer even later than that is not worth a spend
        messages = []
        for client, node in sorted(self.roster.nodes.items()):
            if node in online:
                messages.append(Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=group))
            else:
                self.server.missing(client, f"its node {node} is offline")
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand over the answers, close the round, and say what became of each client."""
        answers: list[tuple[bool, int, Answer]] = []
        for reply in replies:
            letter = self.carrier.letter_of(reply)
            if letter.kind == MessageType.QUERY:  # it said who it is too late for `greet`
                self.roster.admit(letter.node, reply, online=set(self.carrier.get_node_ids()))
                continue
            client = self.roster.client_at(letter.node)
            if client is None:
                logger.warning("node %d answered, but it is no client of this run any more", letter.node)
                continue
            late = letter.group != str(self.server.round)
            answers.append((late, client, self._read(client, letter, reply)))
        for late, client, answer in sorted(answers, key=lambda entry: entry[:2]):
            if late and answer.frame is None:
                logger.warning("client %d: no frame to an earlier round either: %s", client, answer.reason)
                continue
            deliver(self.server, answer)
        self.outcome = self.server.close_round()
        for receipt in self.outcome.receipts:
            if receipt.status != OK:
                _say(self.outcome.round, receipt)
        frames = sum(receipt.status == OK for receipt in self.outcome.receipts)
        stepped = "the model stepped" if self.outcome.stepped else "too few frames, the model stays as it is"
        logger.info(
            "round %d: %d of %d frames, %d bytes up; %s",
            self.outcome.round, frames, len(self.server.weights), self.outcome.bytes_up, stepped,
        )  # fmt: skip
        metrics = MetricRecord({"frames": frames, "bytes-up": self.outcome.bytes_up})
        return model_record(self.server.best_model), metrics

    def _read(self, client: int, letter: Letter, reply: Message) -> Answer:
        if reply.has_error():
            return Answer(client=client, reason=f"{clean(reply.error.reason or 'no reason')} (code {reply.error.code})")
        try:
            stated = word(reply, "guarantee", str)
            guarantee = None if stated is None else read_guarantee(stated)
            if guarantee is not None:
                self.guarantees[client] = guarantee
            if has_data(reply, kind=FRAME):
                return Answer(client=client, frame=data_of(reply, kind=FRAME), arrived=letter.arrived)
            reason = word(reply, "declined", str)
        except FrameError as error:
            return Answer(client=client, reason=f"refused: {error}")
        if reason is None:
            return Answer(client=client, reason="refused: its answer holds neither a frame nor a reason")
        return Answer(client=client, reason=clean(reason), declined=True)

    def epsilon(self, *, delta: float) -> float | None:
        """The largest that a client has stated of itself at this delta."""
        return max((found.epsilon for found in self.guarantees.values() if found.delta == delta), default=None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing is asked of the clients: accuracy on their data would be one more release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing was asked."""
        return None


def _say(round: int, receipt: Receipt) -> None:
    who = "somebody" if receipt.client is None else f"client {receipt.client}"
    logger.warning("round %d: %s %s: %s", round, who, receipt.status, clean(receipt.reason or "-"))
