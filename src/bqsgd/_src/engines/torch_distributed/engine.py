"""The engine on the serving rank: messages go out to ranks at once, answers come back as bytes, in order, in time."""

from __future__ import annotations

import logging
import queue
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from bqsgd._src.client.client import Client
from bqsgd._src.client.sum_setup import most_sum_bytes
from bqsgd._src.engines.engine import MakeEngine, Setup, check_known, make_client, read_guarantee
from bqsgd._src.engines.in_process import InProcess
from bqsgd._src.engines.torch_distributed._transport import MOST_BYTES, RankConnection, Received, greeting, read_reply
from bqsgd._src.engines.torch_distributed.client import share_of
from bqsgd._src.engines.torch_distributed.ranks import SERVER, Channel, MessageKind, PeerLost, RankGroup, as_tensor
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.record import one_line
from bqsgd._src.release import Unit
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.wire.reply import Reply

_log = logging.getLogger("bqsgd.engines.torch_distributed")
_PATIENCE_SECONDS = 1800.0
"""How long a round waits for a rank that is connected and silent, where the settings name no deadline."""
_REASON_BYTES = 500


def torch_distributed(group: RankGroup, *, limits: NodeLimits | None = None) -> MakeEngine:
    """The engine of a run on rank 0 of `group`; every other rank calls `work`. limits: of rank 0's own client."""
    if not group.serves:
        raise InvalidParameter(f"rank {group.rank} does not serve; it calls work")

    def make(setup: Setup) -> TorchDistributed:
        setup.check_separate()
        config, share = setup.config, share_of(setup.task, setup.config, group)
        client = make_client(setup, number=SERVER, model=setup.task.make_model(), share=share, limits=limits)
        channels = [group.channel(rank) for rank in range(1, group.size)]
        return TorchDistributed(
            client,
            channels,
            samples=_greet(channels, setup),
            # More than any frame takes: a rank that announces more is cut off before it is read.
            most_bytes=max(4096 + 8 * setup.dimension, most_sum_bytes(config)),
            deadline_seconds=config.server.deadline_seconds,
        )

    return make


def _greet(channels: Sequence[Channel], setup: Setup) -> dict[int, int]:
    """Tell every rank the run's name and settings; rank -> its number of samples, or what it counts as."""
    first = greeting(setup.config, setup.task, resuming=setup.resuming)
    for channel in channels:
        channel.send(MessageKind.GREETING, first)
    samples, refusals = {}, []
    for channel in channels:
        kind, body = channel.receive(most_bytes=MOST_BYTES)
        if kind is MessageKind.ACCEPTED:
            stated = read_reply(body, whole_client=setup.config.privacy.unit == Unit.CLIENT)
            samples[channel.peer] = setup.counted_samples(channel.peer, stated)
        else:
            refusals.append(f"rank {channel.peer} does not take part: {_words(body)}")
    if refusals:
        raise InvalidParameter("; ".join(refusals))
    return samples


class TorchDistributed:
    """An engine over the ranks of a process group; client number = rank.

    A rank whose connection closes is missing from then on; one that is late misses the round, and its frame is handed
    to the server when it comes, which refuses it. What a rank sends is bytes until the server has checked them.

    Args:
        client: the serving rank's own client.
        channels: to the other ranks.
        samples: how many samples each of the other ranks holds.
        deadline_seconds: after this a round continues without the ranks that have not answered.
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
        self.samples = dict(sorted(({client.client: client.public_size} | dict(samples)).items()))
        self.own = InProcess([client])
        self.claimed = True
        self.lost: dict[int, str] = {}
        """Rank -> why it is gone."""
        self._wait_seconds = _PATIENCE_SECONDS if deadline_seconds is None else deadline_seconds
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        self._connections = {
            channel.peer: RankConnection(channel, self._received, most_bytes=max(most_bytes, MOST_BYTES))
            for channel in channels
        }
        self._asked = 0
        self._late: list[Reply] = []
        self._guarantees: dict[int, Guarantee | None] = {}
        self._closed = False

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        """The messages to their ranks at once; the answers in the order of ranks, each with the time it came."""
        numbers = check_known(messages, self.samples)
        tensors = {id(message): as_tensor(message) for message in messages.values()}
        until = time.monotonic() + self._wait_seconds
        waiting = self._ask(MessageKind.MODEL, {number: tensors[id(messages[number])] for number in numbers})
        own = {number: messages[number] for number in self.own.clients if number in messages}
        replies = {
            reply.client: replace(reply, arrived=time.monotonic()) for reply in self.own.exchange(own, round=round)
        }
        if enough is not None:
            while waiting and _frames(replies) < enough and self._next(until, waiting, replies):
                pass
            until = time.monotonic() if _frames(replies) >= enough else until
        for number in numbers:
            while number in waiting and number not in replies and self._next(until, waiting, replies):
                pass
            while self._late:
                yield self._late.pop(0)
            reason = self.lost.get(number, f"no answer within {self._wait_seconds:g} s, or before enough others had")
            yield replies.pop(number, Reply(client=number, reason=reason))

    def _ask(self, kind: MessageKind, bodies: Mapping[int, bytes | Tensor]) -> set[int]:
        """Ask those of the ranks that are still there; returns them. It is one question, with one number."""
        self._asked += 1
        ready = {rank for rank in self._connections if rank in bodies and rank not in self.lost}
        for rank in ready:
            self._connections[rank].ask(self._asked, kind, bodies[rank])
        return ready

    def _next(self, until: float, waiting: set[int], replies: dict[int, Reply]) -> bool:
        """Take in one message; False when the time is up."""
        try:
            received = self._received.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        rank, current = received.rank, received.asked == self._asked
        reply = self._read(received)
        if current or rank in self.lost:
            waiting.discard(rank)
        if reply is not None and current:
            replies[rank] = reply
        elif reply is not None and reply.frame is not None:
            self._late.append(reply)
        return True

    def _read(self, received: Received) -> Reply | None:
        """The client's reply; None for a guarantee, which is kept, and for a rank that is lost."""
        rank, message = received.rank, received.message
        if isinstance(message, PeerLost):
            self._lose(rank, str(message))
            return None
        kind, body = message
        if kind is MessageKind.FRAME:
            return Reply(client=rank, frame=body, arrived=received.arrived)
        if kind is MessageKind.DECLINED:
            return Reply(client=rank, reason=_words(body), declined=True, arrived=received.arrived)
        if kind is MessageKind.GUARANTEE:
            self._guarantees[rank] = read_guarantee(bytes(body))
        else:
            self._lose(rank, f"rank {rank} answered with a message that is no answer")
        return None

    def _lose(self, rank: int, reason: str) -> None:
        self.lost[rank] = reason
        _log.warning("%s; the run continues without client %d while the quorum is met", reason, rank)

    def seconds(self) -> Mapping[str, float]:
        """Nothing: what a client's stages take depends on its batch, and stays with it."""
        return {}

    def guarantees(self, *, delta: float, wait_seconds: float = 60.0) -> dict[int, Guarantee | None]:
        """Client -> what its ledger says it has spent; of a client that is gone or late, what it said last."""
        self._guarantees |= self.own.guarantees(delta=delta)
        if not self._closed:
            waiting = self._ask(MessageKind.REPORT, dict.fromkeys(self._connections, struct.pack("<d", delta)))
            until = time.monotonic() + wait_seconds
            while waiting and self._next(until, waiting, {}):
                pass
            for rank in sorted((waiting | set(self.lost)) - set(self._guarantees)):
                _log.warning("client %d has not said what it has spent; its own ledger holds it", rank)
        return dict(self._guarantees)

    def close(self, *, wait_seconds: float = 10.0) -> None:
        """Tell the clients that the run is over and close the own ledger."""
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + wait_seconds
        for rank, connection in self._connections.items():
            if rank not in self.lost:
                connection.stop(wait_seconds=max(0.0, until - time.monotonic()))
        self.own.close()


def _frames(replies: Mapping[int, Reply]) -> int:
    return sum(reply.frame is not None for reply in replies.values())


def _words(body: memoryview) -> str:
    """A rank's reason, which may be anything, as one printable line."""
    return one_line(bytes(body[:_REASON_BYTES]).decode(errors="replace"))
