"""The engine on the serving rank: it asks all ranks at once and yields their replies in order, within a deadline."""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from bqsgd._src.client.client import Client
from bqsgd._src.client.sums import most_sum_bytes
from bqsgd._src.engines.engine import Engine, MakeEngine, Setup, check_known, make_client, read_guarantee
from bqsgd._src.engines.torch_distributed.client import MOST_BYTES, Message, greeting, read_reply, share_of
from bqsgd._src.engines.torch_distributed.ranks import SERVER, Channel, MessageKind, PeerLost, RankGroup, as_tensor
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.text import one_line
from bqsgd._src.wire.reply import Reply

_log = logging.getLogger("bqsgd.engines.torch_distributed")
_PATIENCE_SECONDS = 1800.0
"""How long a round waits for a rank that is connected and silent, if the settings have no deadline."""
_REASON_BYTES = 500
_Question = tuple[int, MessageKind, bytes | Tensor]
"""(number, kind, body)"""


def torch_distributed(group: RankGroup, *, limits: NodeLimits | None = None) -> MakeEngine:
    """The engine of a run on rank 0 of `group`; every other rank calls `work`. limits: of the client on rank 0."""
    if not group.serves:
        raise InvalidParameter(f"rank {group.rank} is not the server (rank {SERVER} is); call work() on it")

    def make(setup: Setup) -> TorchDistributed:
        setup.check_separate()
        config, share = setup.config, share_of(setup.task, setup.config, group)
        client = make_client(setup, number=SERVER, model=setup.task.make_model(), share=share, limits=limits)
        channels = [group.channel(rank) for rank in range(1, group.size)]
        return TorchDistributed(
            client,
            channels,
            samples=_greet(channels, setup),
            # More than any frame needs. A rank that announces more is cut off before any of it is read.
            most_bytes=max(4096 + 8 * setup.dimension, most_sum_bytes(config)),
            deadline_seconds=config.server.deadline_seconds,
        )

    return make


def _greet(channels: Sequence[Channel], setup: Setup) -> dict[int, int]:
    """Tell every rank the run's name and settings; returns rank -> the number of samples that it counts as."""
    first = greeting(setup.config, setup.task, resuming=setup.resuming)
    for channel in channels:
        channel.send(MessageKind.GREETING, first)
    samples, refusals = {}, []
    for channel in channels:
        kind, body = channel.receive(most_bytes=MOST_BYTES)
        if kind is MessageKind.ACCEPTED:
            samples[channel.peer] = setup.counted_samples(channel.peer, read_reply(body))
        else:
            refusals.append(f"rank {channel.peer} does not take part: {_words(body)}")
    if refusals:
        raise InvalidParameter("; ".join(refusals))
    return samples


@dataclass(frozen=True)
class _Received:
    """One message from a rank, its bytes not yet checked; or the loss of the rank.

    asked: the number of the question that it answers.
    """

    rank: int
    asked: int
    message: Message | PeerLost
    arrived: float


class TorchDistributed(Engine):
    """An engine over the ranks of a process group; client number = rank.

    A rank whose connection closes is missing from then on. A rank that is late misses the round; its frame goes to the
    server when it comes, which refuses it. What a rank sends is bytes until the server has checked them.

    Args:
        client: the client on the serving rank.
        channels: to the other ranks.
        samples: the number of samples of each other rank.
        most_bytes: the longest message that a rank may send.
        deadline_seconds: after this time a round continues without the ranks that have not replied.
    """

    def __init__(
        self,
        client: Client,
        channels: Sequence[Channel],
        *,
        samples: Mapping[int, int],
        most_bytes: int,
        deadline_seconds: float | None = None,
    ) -> None:
        self.samples = {SERVER: client.public_size, **samples}
        self.client = client
        self.lost: dict[int, str] = {}
        """Rank -> why it is gone."""
        self._wait_seconds = _PATIENCE_SECONDS if deadline_seconds is None else deadline_seconds
        self._most_bytes = max(most_bytes, MOST_BYTES)
        self._received: queue.SimpleQueue[_Received] = queue.SimpleQueue()
        self._questions: dict[int, queue.SimpleQueue[_Question | None]] = {}
        """Rank -> the questions that wait until the rank is free; None ends the run."""
        self._threads: list[threading.Thread] = []
        for channel in channels:
            self._questions[channel.peer] = queue.SimpleQueue()
            # Daemons: a thread may wait for a silent rank for ever, and must not keep the process alive.
            thread = threading.Thread(target=self._carry, args=(channel,), name=f"rank-{channel.peer}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._asked = 0
        self._late: list[Reply] = []
        self._guarantees: dict[int, Guarantee | None] = {}
        self._closed = False

    def _carry(self, channel: Channel) -> None:
        """Send one question at a time to a rank, and put its answers into the queue of all ranks.

        A rank that is still at work gets no second question. When it is done it gets the latest one.
        """
        questions, number = self._questions[channel.peer], -1
        try:
            while (question := questions.get()) is not None:
                if not questions.empty():
                    continue  # a later question has come meanwhile
                number, kind, body = question
                channel.send(kind, body)
                message = channel.receive(most_bytes=self._most_bytes)
                self._received.put(_Received(channel.peer, number, message, time.monotonic()))
            channel.send(MessageKind.STOP)
        except PeerLost as error:
            self._received.put(_Received(channel.peer, number, error, time.monotonic()))

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """Send all messages at once and yield the replies in the order of ranks, each with the time when it came."""
        numbers = check_known(messages, self.samples)
        # One tensor per message object: many ranks are sent the same model, and each tensor is a copy.
        tensors = {id(message): as_tensor(message) for message in messages.values()}
        until = time.monotonic() + self._wait_seconds
        waiting = self._ask(MessageKind.MODEL, {number: tensors[id(messages[number])] for number in numbers})
        replies: dict[int, Reply] = {}
        if SERVER in messages:  # after the questions are out, so that all ranks compute at the same time
            reply = self.client.answer(messages[SERVER])
            replies[SERVER] = replace(reply, arrived=time.monotonic())
        if enough is not None:
            while waiting and _frames(replies) < enough and self._next(until, waiting, replies):
                pass
            # Enough have replied: take what is in the queue already, and wait for no other rank.
            until = time.monotonic() if _frames(replies) >= enough else until
        for number in numbers:
            while number in waiting and self._next(until, waiting, replies):
                pass
            while self._late:
                yield self._late.pop(0)
            reason = self.lost.get(
                number, f"no answer within {self._wait_seconds:g} s, or before enough others had answered"
            )
            yield replies.pop(number, Reply(client=number, reason=reason))

    def _ask(self, kind: MessageKind, bodies: Mapping[int, bytes | Tensor]) -> set[int]:
        """Ask the ranks that are still connected, and return them. All get the same question number."""
        self._asked += 1
        ready = {rank for rank in self._questions if rank in bodies and rank not in self.lost}
        for rank in ready:
            self._questions[rank].put((self._asked, kind, bodies[rank]))
        return ready

    def _next(self, until: float, waiting: set[int], replies: dict[int, Reply]) -> bool:
        """Process one message; False if none came in time."""
        try:
            received = self._received.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        # A rank that was late answers an old question; its answer must not pass for one to the present question.
        rank, current = received.rank, received.asked == self._asked
        reply = self._read(received)
        if current or rank in self.lost:
            waiting.discard(rank)
        if reply is not None and current:
            replies[rank] = reply
        elif reply is not None and reply.frame is not None:
            self._late.append(reply)  # answers an earlier question: the server refuses it, and records why
        return True

    def _read(self, received: _Received) -> Reply | None:
        """The client's reply; None for a guarantee, which is stored, and for a rank that is lost."""
        rank, message = received.rank, received.message
        if not isinstance(message, PeerLost):
            kind, body = message
            if kind is MessageKind.FRAME:
                return Reply(client=rank, frame=body, arrived=received.arrived)
            if kind is MessageKind.DECLINED:
                return Reply(client=rank, reason=_words(body), declined=True, arrived=received.arrived)
            if kind is MessageKind.GUARANTEE:
                self._guarantees[rank] = read_guarantee(bytes(body))
                return None
            message = PeerLost(f"rank {rank} sent a message of kind {kind.name}, which is not an answer")
        self.lost[rank] = str(message)
        _log.warning("%s; the run continues without client %d while the quorum is met", message, rank)
        return None

    def guarantees(self, *, delta: float, wait_seconds: float = 60.0) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent; for a client that is gone or late, what it said last."""
        self._guarantees[SERVER] = self.client.spending.guarantee(delta=delta)
        if not self._closed:
            waiting = self._ask(MessageKind.REPORT, dict.fromkeys(self._questions, struct.pack("<d", delta)))
            until = time.monotonic() + wait_seconds
            while waiting and self._next(until, waiting, {}):
                pass
            for rank in sorted((waiting | set(self.lost)) - set(self._guarantees)):
                _log.warning("client %d has not reported what it has spent; look into its ledger", rank)
        return dict(self._guarantees)

    def close(self, *, wait_seconds: float = 10.0) -> None:
        """Tell the clients that the run is over, and close the ledger of the client on this rank."""
        if self._closed:
            return
        # First: `guarantees` must not ask ranks that are about to end.
        self._closed = True
        until = time.monotonic() + wait_seconds  # for all ranks together; those still at work then are left behind
        for questions in self._questions.values():
            questions.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if self.client.spending.ledger is not None:
            self.client.spending.ledger.close()


def _frames(replies: Mapping[int, Reply]) -> int:
    return sum(reply.frame is not None for reply in replies.values())


def _words(body: memoryview) -> str:
    """A rank's reason as one printable line. It may be any bytes, also control codes for a terminal."""
    return one_line(bytes(body[:_REASON_BYTES]).decode(errors="replace"))
