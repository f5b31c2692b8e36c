"""The engine on the serving rank: messages go out to ranks at once, answers come back as bytes, in order, in time."""

from __future__ import annotations

import json
import logging
import queue
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from bqsgd.engines.engine import Answer, MakeEngine, Setup, check_known, make_client
from bqsgd.engines.in_process import InProcess
from bqsgd.engines.torch_distributed._transport import (
    MOST_BYTES,
    SERVER,
    Channel,
    MessageKind,
    RankConnection,
    RankGroup,
    Reply,
    as_tensor,
    greeting,
    read_reply,
)
from bqsgd.engines.torch_distributed.client import share_of
from bqsgd.errors import InvalidParameter
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Unit
from bqsgd.training.client import Client
from bqsgd.training.node_limits import NodeLimits
from bqsgd.training.sums import most_sum_bytes

_log = logging.getLogger("bqsgd.engines.torch_distributed")
_PATIENCE_SECONDS = 1800.0
"""How long a round waits for a rank that is connected and silent, where the settings name no deadline."""
_REASON_BYTES = 500


def torch_distributed(group: RankGroup, *, limits: NodeLimits | None = None) -> MakeEngine:
    """The engine of a run on rank 0 of `group`; every other rank calls `work`. limits: of rank 0's own client."""
    if not group.serves:
        raise InvalidParameter(f"rank {group.rank} does not serve; it calls work")

    def make(setup: Setup) -> TorchDistributed:
        setup.check_weights()
        setup.check_roster()
        config, share = setup.config, share_of(setup.task, setup.config, group)
        client = make_client(setup, number=SERVER, model=setup.task.make_model(), share=share, limits=limits)
        channels = [group.channel(rank) for rank in range(1, group.size)]
        return TorchDistributed(
            client,
            channels,
            samples=_greet(channels, setup),
            most_bytes=max(_most_frame_bytes(setup.dimension), most_sum_bytes(config)),
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
            setup.check_samples(channel.peer, stated)
            samples[channel.peer] = setup.config.privacy.batch_size if stated is None else stated
        else:
            refusals.append(f"rank {channel.peer} does not take part: {bytes(body[:500]).decode(errors='replace')}")
    if refusals:
        raise InvalidParameter("; ".join(refusals))
    return samples


def _most_frame_bytes(dimension: int) -> int:
    """More than any frame of this dimension takes: a rank that announces more is cut off before it is read."""
    return 4096 + 8 * dimension


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
        self.samples = dict(sorted(({client.client: client.setting.dataset_size} | dict(samples)).items()))
        self.own = InProcess([client])
        self.numbers = sorted([client.client, *(channel.peer for channel in channels)])
        if len(set(self.numbers)) != len(self.numbers):
            raise InvalidParameter(f"each rank is one client, got {self.numbers}")
        self.claimed = True
        self.lost: dict[int, str] = {}
        """Rank -> why it is gone."""
        self._wait_seconds = _PATIENCE_SECONDS if deadline_seconds is None else deadline_seconds
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._connections = {
            channel.peer: RankConnection(channel, self._replies, most_bytes=max(most_bytes, 1 << 16))
            for channel in channels
        }
        self._asked = 0
        self._late: list[Answer] = []
        self._guarantees: dict[int, Guarantee | None] = {}
        self._closed = False

    def exchange(self, messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Answer]:
        """The messages to their ranks at once; the answers in the order of ranks, each with the time it came."""
        numbers = check_known(messages, self.numbers)
        tensors = {id(message): as_tensor(message) for message in messages.values()}
        until = time.monotonic() + self._wait_seconds
        waiting = self._ask(MessageKind.MODEL, {number: tensors[id(messages[number])] for number in numbers})
        own = {number: messages[number] for number in self.own.clients if number in messages}
        answers = {
            answer.client: Answer(**{**vars(answer), "arrived": time.monotonic()})
            for answer in self.own.exchange(own, round=round)
        }
        if enough is not None:
            while waiting and _frames(answers) < enough and self._next(until, waiting, answers):
                pass
            until = time.monotonic() if _frames(answers) >= enough else until
        for number in numbers:
            while number in waiting and number not in answers and self._next(until, waiting, answers):
                pass
            yield from self._taken_late()
            yield answers.pop(number) if number in answers else self._missing(number)

    def _missing(self, number: int) -> Answer:
        reason = self.lost.get(number, f"no answer within {self._wait_seconds:g} s, or before enough others had")
        return Answer(client=number, reason=reason)

    def _taken_late(self) -> Iterator[Answer]:
        late, self._late = self._late, []
        yield from late

    def _ask(self, kind: MessageKind, bodies: Mapping[int, bytes | Tensor]) -> set[int]:
        """Ask those of the ranks that are still there; returns them. It is one question, with one number."""
        self._asked += 1
        ready = {rank for rank in self._connections if rank in bodies and rank not in self.lost}
        for rank in ready:
            self._connections[rank].ask(self._asked, kind, bodies[rank])
        return ready

    def _next(self, until: float, waiting: set[int], answers: dict[int, Answer]) -> bool:
        """Take in one reply; False when the time is up."""
        try:
            reply = self._replies.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return False
        if reply.lost is not None:
            self._lose(reply.rank, reply.lost)
            waiting.discard(reply.rank)
            return True
        answer = partial(Answer, client=reply.rank, arrived=reply.arrived)
        if reply.kind is MessageKind.FRAME:
            found = answer(frame=reply.body)
        elif reply.kind is MessageKind.DECLINED:
            found = answer(reason=bytes(reply.body[:_REASON_BYTES]).decode(errors="replace"), declined=True)
        elif reply.kind is MessageKind.GUARANTEE:
            self._guarantees[reply.rank] = _guarantee(reply.body)
            if reply.asked == self._asked:
                waiting.discard(reply.rank)
            return True
        else:
            self._lose(reply.rank, f"rank {reply.rank} answered with a message that is no answer")
            waiting.discard(reply.rank)
            return True
        if reply.asked == self._asked:
            answers[reply.rank] = found
            waiting.discard(reply.rank)
        elif found.frame is not None:
            self._late.append(found)
        return True

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


def _frames(answers: Mapping[int, Answer]) -> int:
    return sum(answer.frame is not None for answer in answers.values())


def _guarantee(body: memoryview | bytes) -> Guarantee | None:
    """What a client states of itself, checked; None when it has sent nothing or says nothing that can be read."""
    try:
        fields = json.loads(bytes(body)) if len(body) else None
        return None if fields is None else Guarantee.from_dict(fields)
    except (ValueError, TypeError, RecursionError):
        return None
