"""Flower as an engine: which client is on which node, messages out, replies back. It contains no algorithm."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from flwr.app import Message, MessageType, Metadata

from bqsgd._src.engines.engine import Engine, MakeEngine, Setup, check_known, read_guarantee
from bqsgd._src.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd._src.flower.messages import FRAME, MODEL, Answer, Plain, TrackedGrid, data_of, field_of, has_data, pack
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.text import one_line
from bqsgd._src.wire.reply import Reply

logger = logging.getLogger("flwr.bqsgd")
_ATTEMPTS = 3
_JOIN_SECONDS = 120.0
"""A node that has not said who it is is asked again once no node has answered for this long."""
_LOOK_SECONDS = 1.0
_MOST_NAMED = 10
_GREETING_SECONDS = 5.0
"""How long a round waits for a new node to say who it is. The node may still do so later in the round."""


class NoQuorum(BqsgdError, RuntimeError):
    """Fewer clients have joined than a round needs."""


def flower(grid: TrackedGrid, *, join_seconds: float, round_seconds: float) -> MakeEngine:
    """The engine of a run over a Flower grid; it waits up to `join_seconds` for the clients to join.

    round_seconds: how long a round waits for replies, if the settings have no deadline.
    """

    def make(setup: Setup) -> FlowerEngine:
        setup.check_separate()
        engine = FlowerEngine(grid, setup, seconds=setup.config.server.deadline_seconds or round_seconds)
        engine.gather(seconds=join_seconds)
        return engine

    return make


class FlowerEngine(Engine):
    """Sends the server's messages to the clients' nodes and yields their replies, in the order of client numbers.

    A client number belongs to the node that claimed it first. Another node gets it only when that node is offline: a
    node that restarts without a key of its own comes back under another identity.

    Args:
        grid: Flower's, tracked.
        setup: of the run.
        seconds: how long a round waits for replies.
    """

    def __init__(self, grid: TrackedGrid, setup: Setup, *, seconds: float) -> None:
        self.grid, self.setup, self.config, self.round_seconds = grid, setup, setup.config, seconds
        self.nodes: dict[int, int] = {}
        """Client -> its node."""
        self.samples: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        """Node -> why it does not take part: it declined, or what it said about itself does not fit the run."""
        digest = "" if setup.sums is None else setup.sums.roster.digest.hex()
        self._common: dict[str, Plain] = {"run": setup.run, "roster": digest}
        """Fields of every message."""
        self._attempts: Counter[int] = Counter()
        self._heard = 0.0
        """When a node was last asked who it is, or said so."""
        self._started = False
        self._late: list[Reply] = []
        self._stated: dict[int, Guarantee] = {}

    def gather(self, *, seconds: float) -> None:
        """Wait until every client has joined, at most `seconds`; the run then has the clients that have.

        The wait ends early if there are as many nodes as clients, and each of them has joined or will not.

        Raises:
            NoQuorum: fewer clients have joined than a round needs.
        """
        count, quorum, sums = self.config.clients.count, self.config.server.quorum, self.setup.sums
        fewest = quorum if sums is None else self.config.fewest_clients
        started = time.monotonic()
        end = started + seconds
        while len(self.nodes) < count and time.monotonic() < end and not self._all_said():
            left = end - time.monotonic()
            if not self._greet(seconds=min(_JOIN_SECONDS, left), lasting=left):
                time.sleep(_LOOK_SECONDS)
        waited = time.monotonic() - started
        absent = sorted(set(range(count)) - set(self.nodes))
        if len(self.nodes) < fewest:
            why = "; ".join(f"node {node}: {reason}" for node, reason in sorted(self.refused.items())[:_MOST_NAMED])
            raise NoQuorum(
                f"{len(self.nodes)} of {count} clients joined within {waited:.0f} s and a round needs {fewest}; "
                f"missing: {absent[:20]}. "
                + (f"Refused: {why}" if why else "Start their SuperNodes or raise join_seconds")
            )
        if absent:
            logger.warning("starting without clients %s: they did not join within %.0f s", absent[:20], waited)
        # Clients joined in any order, and a run must not depend on it.
        self.samples = dict(sorted(self.samples.items()))
        self._started = True

    def _all_said(self) -> bool:
        """Whether there are as many nodes as clients, and every node has joined or been refused for good."""
        online, known = self.grid.get_node_ids(), set(self.nodes.values())
        return len(online) >= self.config.clients.count and all(
            node in known or (node in self.refused and self._attempts[node] >= _ATTEMPTS) for node in online
        )

    def _greet(self, *, seconds: float, lasting: float) -> bool:
        """Ask unknown nodes who they are and wait `seconds` for them; False if there was none to ask.

        lasting: for how many seconds the SuperLink keeps the question.
        """
        # With thousands of nodes on one machine the last answers long after the first, so no node is asked again while
        # others still answer.
        answering = time.monotonic() - self._heard < _JOIN_SECONDS
        pending = {question.dst_node_id for question in self.grid.waiting.values() if answering and _is_query(question)}
        known = pending | set(self.nodes.values())
        new = [node for node in sorted(self.grid.get_node_ids() - known) if self._attempts[node] < _ATTEMPTS]
        if new:
            self._attempts.update(new)
            self._heard = time.monotonic()
        content = pack(None, kind=MODEL, **self._common)
        self._receive([Message(content, node, MessageType.QUERY, ttl=lasting + 60) for node in new], seconds=seconds)
        return bool(new)

    def _receive(self, messages: Sequence[Message], *, seconds: float, enough: int | None = None) -> dict[int, Reply]:
        """Send, wait, and take in all that comes; returns the replies to these messages, by client.

        Nodes that say who they are join, at any time. Late frames wait for the next exchange.
        """
        replies: dict[int, Reply] = {}
        answers = self.grid.send_and_receive(messages, timeout=seconds, enough=enough)
        online = self.grid.get_node_ids() if answers else set()
        for answer in answers:
            node = answer.question.dst_node_id
            if _is_query(answer.question):
                self._heard = max(self._heard, answer.arrived)
                self._admit(answer, online=online)
                continue
            # The node that was asked decides whose reply this is: a node must not reply for another client.
            client = next((client for client, known in self.nodes.items() if known == node), None)
            if client is None:
                logger.warning("node %d answered, but it is no longer a client of this run", node)
                continue
            reply = self._read(client, answer)
            if not answer.late:
                replies[client] = reply
            elif reply.frame is not None:
                self._late.append(reply)
            else:
                logger.warning("client %d: no frame for an earlier round either: %s", client, reply.reason)
        return replies

    def _admit(self, answer: Answer, *, online: set[int]) -> None:
        """Let a node join, or log why it cannot."""
        node, reply = answer.question.dst_node_id, answer.reply
        if reply.has_error():
            logger.warning("node %d did not say who it is: %s", node, one_line(reply.error.reason or "no reason"))
            return
        try:
            verb, refusal = "declines the run", field_of(reply, "declined", str)
            if refusal is None:
                client, samples = self._checked(node, reply, online)
        except (FrameError, InvalidParameter) as error:
            verb, refusal = "refused", str(error)
        if refusal is not None:
            self.refused[node] = one_line(refusal)
            logger.warning("node %d %s: %s", node, verb, self.refused[node])
            return
        self.refused.pop(node, None)
        if self.nodes.get(client) != node:  # a node that was asked twice answers twice
            self.nodes[client] = node
            # A node that takes a client over does not change its samples: the weights depend on them.
            self.samples.setdefault(client, samples)
            logger.info("client %d joined on node %d; it counts as %d samples", client, node, samples)

    def _checked(self, node: int, reply: Message, online: set[int]) -> tuple[int, int]:
        """(client, samples that it counts as), if the node may join as that client."""
        client, samples, dimension = (field_of(reply, name, int) for name in ("client", "samples", "dimension"))
        if client is None or not 0 <= client < self.config.clients.count:
            raise FrameError(f"it calls itself client {client}; this run has 0 to {self.config.clients.count - 1}")
        if dimension != self.setup.dimension:
            raise FrameError(
                f"client {client} has a model of {dimension} coordinates, the server has {self.setup.dimension}"
            )
        counted = self.setup.counted_samples(client, samples)
        # Without this check, any node could take over a client that is at work.
        holder = self.nodes.get(client, node)
        if holder != node and holder in online:
            raise FrameError(f"client {client} is on node {holder} already")
        # The weights were computed when the run began.
        if self._started and client not in self.samples:
            raise FrameError(f"client {client} came after the run began; it can take part in the next run")
        return client, counted

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """Send the messages to the nodes that are online; yield the replies by client, then late frames."""
        numbers = check_known(messages, range(self.config.clients.count))
        online = self.grid.get_node_ids()
        if online - set(self.nodes.values()):
            self._greet(seconds=_GREETING_SECONDS, lasting=_GREETING_SECONDS)
        # The record of a round after which the model is evaluated shows the clients' epsilon.
        report = self.config.run.evaluated_after(round + 1)
        # One content per message object: many clients are sent the same model.
        contents = {
            id(message): pack(message, kind=MODEL, report=report, **self._common) for message in messages.values()
        }
        ttl = 2 * self.round_seconds + 60  # a client that starts even later would spend for nothing
        outgoing, replies = list[Message](), dict[int, Reply]()
        for client in numbers:
            node = self.nodes.get(client)
            if node is None:
                replies[client] = Reply(client=client, reason="it did not join the run")
            elif node in online:
                content = contents[id(messages[client])]
                outgoing.append(Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(round)))
            else:
                replies[client] = Reply(client=client, reason=f"its node {node} is offline")
        replies |= self._receive(outgoing, seconds=self.round_seconds, enough=enough)
        # Taken only now: frames of earlier rounds may have come while this exchange waited.
        late, self._late = self._late, []
        yield from (replies[number] for number in sorted(replies))
        yield from sorted(late, key=lambda reply: reply.client)

    def _read(self, client: int, answer: Answer) -> Reply:
        reply = answer.reply
        if reply.has_error():
            return Reply(
                client=client, reason=f"{one_line(reply.error.reason or 'no reason')} (code {reply.error.code})"
            )
        try:
            stated = field_of(reply, "guarantee", str)
            guarantee = None if stated is None else read_guarantee(stated)
            if guarantee is not None:
                self._stated[client] = guarantee
            if has_data(reply, kind=FRAME):
                return Reply(client=client, frame=data_of(reply, kind=FRAME), arrived=answer.arrived)
            reason = field_of(reply, "declined", str)
        except FrameError as error:
            return Reply(client=client, reason=f"refused: {error}")
        if reason is None:
            return Reply(client=client, reason="refused: its answer holds neither a frame nor a reason")
        return Reply.decline(client, one_line(reason))

    def guarantees(self, *, delta: float) -> Mapping[int, Guarantee | None]:
        """What each client last stated about itself at this delta; the server cannot verify it."""
        return {client: stated for client, stated in self._stated.items() if stated.delta == delta}

    def close(self) -> None:
        """Name the nodes that never answered."""
        for question in self.grid.waiting.values():
            logger.warning("node %d has not answered round %s", question.dst_node_id, question.group_id)


def _is_query(question: Metadata) -> bool:
    return question.message_type == MessageType.QUERY
