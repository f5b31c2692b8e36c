"""Flower as an engine: who is on which node, messages out, answers back. It holds no algorithm."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping

from flwr.app import Message, MessageType, Metadata

from bqsgd._src.engines.engine import MakeEngine, Setup, check_known, read_guarantee
from bqsgd._src.errors import BqsgdError, FrameError, InvalidParameter
from bqsgd._src.flower.messages import FRAME, MODEL, Answer, Plain, TrackedGrid, data_of, field_of, has_data, pack
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.record import one_line
from bqsgd._src.release import Scheme, Unit
from bqsgd._src.wire.reply import Reply

logger = logging.getLogger("flwr.bqsgd")
_ATTEMPTS = 3
_JOIN_SECONDS = 120.0
"""Nodes that have not said who they are, are asked again once nobody has answered for so long."""
_LOOK_SECONDS = 1.0
_MOST_NAMED = 10
_GREETING_SECONDS = 5.0
"""How long a round waits for a newcomer to say who it is; it may still do so during the round."""


class NoQuorum(BqsgdError, RuntimeError):
    """Fewer clients have joined than a round needs."""


class _Roster:
    """The clients of a run and the nodes they live on.

    A number belongs to the node that claimed it first and passes on only when that node is gone (a node that restarts
    without a key of its own comes back under another identity).
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config = setup, setup.config
        self.nodes: dict[int, int] = {}
        """Client -> node."""
        self.samples: dict[int, int] = {}
        """Client -> how many samples it says it holds; the batch size for each where the guarantee hides that."""
        self.refused: dict[int, str] = {}
        """Node -> why it takes no part: it declined, or what it said of itself does not fit the run."""
        self.roster_digest = "" if setup.sums is None else setup.sums.agreement.roster.digest.hex()
        """Of the clients' identity keys, where the run has secure sums."""
        self._asked: dict[int, int] = {}
        self._heard = 0.0
        """When a node was last asked who it is, or said so."""
        self._closed = False

    @property
    def _whole_clients(self) -> bool:
        """Whether the guarantee hides everything that a client holds, how many samples it has included."""
        return self.config.privacy.unit == Unit.CLIENT

    @property
    def _fewest(self) -> int:
        sums, quorum = self.setup.sums, self.config.server.quorum
        return quorum if sums is None else max(quorum, sums.agreement.rule.fewest)

    def client_at(self, node: int) -> int | None:
        """The client on a node, None for a node that never joined or was replaced."""
        return next((client for client, known in self.nodes.items() if known == node), None)

    def gather(self, grid: TrackedGrid, *, seconds: float) -> None:
        """Wait until every client has joined, at most `seconds`; the run then has the clients that are there.

        It waits no longer once as many nodes as the run has clients are there and each of them has joined or will not.

        Raises:
            NoQuorum: not even the quorum.
        """
        started = time.monotonic()
        end = started + seconds
        while len(self.nodes) < self.config.clients.count and time.monotonic() < end and not self._all_said(grid):
            left = end - time.monotonic()
            if not self.greet(grid, seconds=min(_JOIN_SECONDS, left), lasting=left):
                time.sleep(_LOOK_SECONDS)
        waited = time.monotonic() - started
        absent = sorted(set(range(self.config.clients.count)) - set(self.nodes))
        if len(self.nodes) < self._fewest:
            why = "; ".join(f"node {node}: {reason}" for node, reason in sorted(self.refused.items())[:_MOST_NAMED])
            raise NoQuorum(
                f"{len(self.nodes)} of {self.config.clients.count} clients joined within {waited:.0f} s and a round "
                f"needs {self._fewest}; missing: {absent[:20]}. "
                + (f"Refused: {why}" if why else "Start their SuperNodes or raise join_seconds")
            )
        if absent:
            logger.warning("starting without clients %s: they did not join within %.0f s", absent[:20], waited)
        self._closed = True

    def _all_said(self, grid: TrackedGrid) -> bool:
        """Whether nobody who is there could still join, and enough nodes are there that nobody else need come."""
        online, known = grid.get_node_ids(), set(self.nodes.values())
        return len(online) >= self.config.clients.count and all(
            node in known or (node in self.refused and self._asked.get(node, 0) >= _ATTEMPTS) for node in online
        )

    def greet(self, grid: TrackedGrid, *, seconds: float, lasting: float | None = None) -> bool:
        """Ask nodes that are not known yet who they are and wait `seconds` for them; False when there was none to ask.

        lasting: how long an answer is good for, by default `seconds`. Of thousands of nodes on one machine the last
        answers long after the first: none is asked again while others answer.
        """
        answering = time.monotonic() - self._heard < _JOIN_SECONDS
        owing = {asked.dst_node_id for asked in grid.waiting.values() if answering and _is_query(asked)}
        known = owing | set(self.nodes.values())
        new = [
            node for node in sorted(grid.get_node_ids()) if node not in known and self._asked.get(node, 0) < _ATTEMPTS
        ]
        for node in new:
            self._asked[node] = self._asked.get(node, 0) + 1
            self._heard = time.monotonic()
        content = pack(None, kind=MODEL, run=self.setup.run, roster=self.roster_digest)
        ttl = (seconds if lasting is None else lasting) + 60
        messages = [Message(content, node, MessageType.QUERY, ttl=ttl) for node in new]
        answers = grid.send_and_receive(messages, timeout=seconds)
        online = grid.get_node_ids() if answers else set()
        for answer in answers:
            if _is_query(answer.question):
                self._heard = max(self._heard, answer.arrived)
                self.admit(answer, online=online)
            else:
                grid.kept.append(answer)  # a frame that came late: the round's business
        return bool(new)

    def admit(self, answer: Answer, *, online: set[int]) -> None:
        """Take in one answer; what does not fit this run is logged and left out."""
        node, reply = answer.question.dst_node_id, answer.reply
        if reply.has_error():
            logger.warning("node %d did not say who it is: %s", node, one_line(reply.error.reason or "no reason"))
            return
        try:
            declined = field_of(reply, "declined", str)
            if declined is not None:
                self.refused[node] = one_line(declined)
                logger.warning("node %d declines the run: %s", node, self.refused[node])
                return
            client, samples, dimension = (field_of(reply, name, int) for name in ("client", "samples", "dimension"))
            if self._whole_clients:
                samples = None  # hidden by the guarantee, whatever it says
            counted = self._check(node, client, samples, dimension, online)
        except (FrameError, InvalidParameter) as error:
            self.refused[node] = one_line(str(error))
            logger.warning("node %d refused: %s", node, self.refused[node])
            return
        self.refused.pop(node, None)
        if self.nodes.get(client) == node:
            return  # asked twice, answered twice
        self.nodes[client] = node
        self.samples.setdefault(client, counted)
        stated = "" if samples is None else f" with {samples} samples"
        logger.info("client %d joined on node %d%s", client, node, stated)

    def _check(
        self, node: int, client: int | None, samples: int | None, dimension: int | None, online: set[int]
    ) -> int:
        """How many samples the client counts as."""
        if client is None or not 0 <= client < self.config.clients.count:
            raise FrameError(f"it calls itself client {client}; this run has 0 to {self.config.clients.count - 1}")
        expected = self.setup.dimension
        if dimension != expected:
            raise FrameError(f"client {client} has a model of {dimension} coordinates, the server {expected}")
        fewest = self.config.privacy.batch_size if self.config.privacy.scheme is Scheme.FIXED_SIZE else 1
        if not self._whole_clients and (samples is None or not fewest <= samples < 2**40):
            raise FrameError(f"client {client} has {samples} samples; this run needs {fewest}")
        counted = self.setup.counted_samples(client, samples)
        if self.nodes.get(client, node) != node and self.nodes[client] in online:
            raise FrameError(f"client {client} is on node {self.nodes[client]} already")
        if self._closed and client not in self.samples:
            raise FrameError(f"client {client} came after the run began; it can take part in the next run")
        return counted


def flower(grid: TrackedGrid, *, join_seconds: float, round_seconds: float) -> MakeEngine:
    """The engine of a run over a Flower grid; it waits up to `join_seconds` for the clients to join."""

    def make(setup: Setup) -> FlowerEngine:
        setup.check_separate()
        roster = _Roster(setup)
        roster.gather(grid, seconds=join_seconds)
        return FlowerEngine(grid, roster, seconds=setup.config.server.deadline_seconds or round_seconds)

    return make


class FlowerEngine:
    """Sends the server's messages to the clients' nodes and yields their answers, in the order of client numbers.

    Args:
        grid: Flower's, tracked.
        roster: the clients that have joined.
        seconds: how long a round waits for its answers.
    """

    def __init__(self, grid: TrackedGrid, roster: _Roster, *, seconds: float) -> None:
        self.grid, self.roster, self.round_seconds = grid, roster, seconds
        self.lost: Mapping[int, str] = {}
        self.claimed = True
        self._stated: dict[int, Guarantee] = {}

    @property
    def samples(self) -> Mapping[int, int]:
        """Client -> how many samples it says it holds, or counts as."""
        return dict(sorted(self.roster.samples.items()))

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """The messages to those nodes that are online; the answers by client, then late frames of earlier exchanges."""
        numbers = check_known(messages, range(self.roster.config.clients.count))
        online = self.grid.get_node_ids()
        if online - set(self.roster.nodes.values()):
            self.roster.greet(self.grid, seconds=_GREETING_SECONDS)
        report = self.roster.config.run.evaluated_after(round + 1)
        fields: dict[str, Plain] = {"run": self.roster.setup.run, "roster": self.roster.roster_digest, "report": report}
        contents = {id(message): pack(message, kind=MODEL, **fields) for message in messages.values()}
        ttl = 2 * self.round_seconds + 60  # an answer even later than that is not worth a spend
        outgoing, replies = list[Message](), dict[int, Reply]()
        for client in numbers:
            node = self.roster.nodes.get(client)
            if node is None:
                replies[client] = Reply(client=client, reason="it did not join the run")
            elif node in online:
                content = contents[id(messages[client])]
                outgoing.append(Message(content, node, MessageType.TRAIN, ttl=ttl, group_id=str(round)))
            else:
                replies[client] = Reply(client=client, reason=f"its node {node} is offline")
        late: list[Reply] = []
        for answer in self.grid.send_and_receive(outgoing, timeout=self.round_seconds, enough=enough):
            node = answer.question.dst_node_id
            if _is_query(answer.question):  # it said who it is too late for `greet`
                self.roster.admit(answer, online=self.grid.get_node_ids())
                continue
            number = self.roster.client_at(node)
            if number is None:
                logger.warning("node %d answered, but it is no longer a client of this run", node)
                continue
            reply = self._read(number, answer)
            if not answer.late:
                replies[number] = reply
            elif reply.frame is not None:
                late.append(reply)
            else:
                logger.warning("client %d: no frame for an earlier round either: %s", number, reply.reason)
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

    def seconds(self) -> Mapping[str, float]:
        """Nothing: what a client's stages take depends on its batch, and stays with it."""
        return {}

    def guarantees(self, *, delta: float) -> Mapping[int, Guarantee | None]:
        """What each client last stated of itself at this delta; the server cannot verify it."""
        return {client: found for client, found in self._stated.items() if found.delta == delta}

    def close(self) -> None:
        """Name the nodes that never answered."""
        for asked in self.grid.waiting.values():
            logger.warning("node %d has not answered round %s", asked.dst_node_id, asked.group_id)


def _is_query(question: Metadata) -> bool:
    return question.message_type == MessageType.QUERY
