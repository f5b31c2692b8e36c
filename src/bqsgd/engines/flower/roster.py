"""Which node is which client. A node says its number once, before its first round."""

from __future__ import annotations

import logging
import time

from flwr.app import Message, MessageType

from bqsgd.engines.flower.carrier import Carrier
from bqsgd.engines.flower.messages import MODEL, clean, parcel, word
from bqsgd.errors import BqsgdError, FrameError
from bqsgd.training.config import Config

logger = logging.getLogger("flwr.bqsgd")
_ATTEMPTS = 3
_HELLO_SECONDS = 120.0
_LOOK_SECONDS = 1.0


class TooFewClients(BqsgdError, RuntimeError):
    """Fewer clients have joined than a round needs."""


class Roster:
    """The clients of a run and the nodes they live on.

    A number belongs to the node that claimed it first and passes on only when that node is gone (a node that restarts
    without a key of its own comes back under another identity).
    """

    def __init__(self, config: Config, *, dimension: int) -> None:
        self.config, self.dimension = config, dimension
        self.nodes: dict[int, int] = {}
        """Client -> node."""
        self.samples: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._closed = False

    def client_at(self, node: int) -> int | None:
        """The client on a node, None for a node that never joined or was replaced."""
        return next((client for client, place in self.nodes.items() if place == node), None)

    def gather(self, carrier: Carrier, *, seconds: float) -> None:
        """Wait until every client has joined, at most `seconds`; the run then has the clients that are there.

        Raises:
            TooFewClients: not even the quorum.
        """
        end = time.monotonic() + seconds
        while len(self.nodes) < self.config.clients and time.monotonic() < end:
            if not self.greet(carrier, seconds=min(_HELLO_SECONDS, end - time.monotonic())):
                time.sleep(_LOOK_SECONDS)
        absent = sorted(set(range(self.config.clients)) - set(self.nodes))
        if len(self.nodes) < self.config.quorum:
            raise TooFewClients(
                f"{len(self.nodes)} of {self.config.clients} clients joined within {seconds:g} s and a round needs "
                f"{self.config.quorum}; missing: {absent[:20]}. Start their SuperNodes or raise join_seconds"
            )
        if absent:
            logger.warning("beginning without the clients %s: they did not join within %g s", absent[:20], seconds)
        self._closed = True

    def greet(self, carrier: Carrier, *, seconds: float = _HELLO_SECONDS) -> bool:
        """Ask nodes that are not known yet who they are; False when there was none to ask."""
        known = set(self.nodes.values())
        new = [
            node
            for node in sorted(carrier.get_node_ids())
            if node not in known and self._asked.get(node, 0) < _ATTEMPTS
        ]
        for node in new:
            self._asked[node] = self._asked.get(node, 0) + 1
        messages = [Message(parcel(None, kind=MODEL), node, MessageType.QUERY, ttl=seconds + 60) for node in new]
        for reply in carrier.send_and_receive(messages, timeout=seconds):
            letter = carrier.letter_of(reply)
            if letter.kind == MessageType.QUERY:
                self.admit(letter.node, reply, online=set(carrier.get_node_ids()))
            else:
                carrier.keep(reply, letter)  # a frame that came late: the round's business
        return bool(new)

    def admit(self, node: int, reply: Message, *, online: set[int]) -> None:
        """Take in one answer; what does not fit this run is logged and left out."""
        if reply.has_error():
            logger.warning("node %d did not say who it is: %s", node, clean(reply.error.reason or "no reason"))
            return
        try:
            declined = word(reply, "declined", str)
            if declined is not None:
                logger.warning("node %d declines the run: %s", node, clean(declined))
                return
            client, samples, dimension = (word(reply, name, int) for name in ("client", "samples", "dimension"))
            self._check(node, client, samples, dimension, online)
        except FrameError as error:
            logger.warning("node %d refused: %s", node, error)
            return
        if self.nodes.get(client) == node:
            return  # asked twice, answered twice
        self.nodes[client] = node
        self.samples.setdefault(client, samples)
        logger.info("client %d joined on node %d with %d samples", client, node, samples)

    def _check(
        self, node: int, client: int | None, samples: int | None, dimension: int | None, online: set[int]
    ) -> None:
        if client is None or not 0 <= client < self.config.clients:
            raise FrameError(f"it calls itself client {client}; this run has 0 to {self.config.clients - 1}")
        if dimension != self.dimension:
            raise FrameError(f"client {client} has a model of {dimension} coordinates, the server {self.dimension}")
        if samples is None or not self.config.batch_size <= samples < 2**40:
            raise FrameError(f"client {client} has {samples} samples; batch_size is {self.config.batch_size}")
        if self.nodes.get(client, node) != node and self.nodes[client] in online:
            raise FrameError(f"client {client} is on node {self.nodes[client]} already")
        if self._closed and client not in self.samples:
            raise FrameError(f"client {client} came after the run began; it can take part in the next run")
