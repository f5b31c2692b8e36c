"""What server and clients of the torch.distributed engine say to each other, over the channels of `ranks`.

One thread per rank waits on each side, so that no wait of ours ends in a timeout of gloo, which would cut off every
rank. The first message each way is JSON of bounded size: run, settings, number of samples.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bqsgd._src.engines.torch_distributed.ranks import Channel, MessageKind, PeerLost
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import short_repr
from bqsgd._src.records.record import one_line
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Received:
    """One message as a rank's channel gave it, before anybody has looked at its bytes; or the loss of the rank.

    asked: the number of the question that it answers.
    """

    rank: int
    asked: int
    message: tuple[MessageKind, memoryview] | PeerLost
    arrived: float


class RankConnection:
    """The server's end of one rank: questions go out one at a time, messages land in a queue shared by all ranks.

    A rank that is still at work gets no second question; when it is done it gets the latest one, and those between
    are dropped.
    """

    def __init__(self, channel: Channel, received: queue.SimpleQueue[Received], *, most_bytes: int) -> None:
        self.rank = channel.peer
        self._channel, self._received, self._most_bytes = channel, received, most_bytes
        self._questions: queue.SimpleQueue[tuple[int, MessageKind, bytes | Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"rank-{self.rank}", daemon=True)
        self._thread.start()

    def ask(self, number: int, kind: MessageKind, body: bytes | Tensor = b"") -> None:
        """Send a question when the rank is free."""
        self._questions.put((number, kind, body))

    def stop(self, *, wait_seconds: float) -> None:
        """Tell the rank that the run is over; a rank that is still at work is left behind after the wait."""
        self._questions.put(None)
        self._thread.join(wait_seconds)

    def _work(self) -> None:
        number = -1
        try:
            while (question := self._latest()) is not None:
                number, kind, body = question
                self._channel.send(kind, body)
                self._put(number, self._channel.receive(most_bytes=self._most_bytes))
            self._channel.send(MessageKind.STOP)
        except PeerLost as error:
            self._put(number, error)

    def _put(self, number: int, message: tuple[MessageKind, memoryview] | PeerLost) -> None:
        self._received.put(Received(rank=self.rank, asked=number, message=message, arrived=time.monotonic()))

    def _latest(self) -> tuple[int, MessageKind, bytes | Tensor] | None:
        question = self._questions.get()
        while question is not None and not self._questions.empty():
            question = self._questions.get()
        return question


class ServerConnection:
    """A client's end: messages of the server, read by a thread so that signals reach the waiting main thread."""

    def __init__(self, channel: Channel, *, most_bytes: int) -> None:
        self._channel, self._most_bytes = channel, most_bytes
        self._messages: queue.SimpleQueue[tuple[MessageKind, memoryview] | PeerLost] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="server", daemon=True).start()

    def get(self, *, seconds: float | None = None) -> tuple[MessageKind, memoryview]:
        """The next message; waits for it without end if no seconds are given.

        Raises:
            queue.Empty: none came in time.
            PeerLost: the server is gone.
        """
        message = self._messages.get(timeout=seconds)
        if isinstance(message, PeerLost):
            raise message
        return message

    def _work(self) -> None:
        try:
            while True:
                message = self._channel.receive(most_bytes=self._most_bytes)
                self._messages.put(message)
                if message[0] is MessageKind.STOP:
                    return
        except PeerLost as error:
            self._messages.put(error)


_FORMAT = "bqsgd.distributed.v1"
MOST_BYTES = 1 << 16
_OWN = ("run", "workers", "private_metrics", "sizes", "roster", "identity", "data.data_folder")
"""Settings that may differ between ranks: each has its own disk."""


class SettingsDiffer(InvalidParameter):
    """A rank was started with other settings than the server; it has sent nothing."""


def greeting(config: Config, task: Task, *, resuming: bool) -> bytes:
    """The server's first message: the run's name, whether it is resumed, and the settings all ranks must share."""
    return _bytes({"format": _FORMAT, "run": config.run.name, "resuming": resuming, "settings": _shared(config, task)})


def reply_to_greeting(*, samples: int | None) -> bytes:
    """A client's answer: how many samples it holds; None where the guarantee hides the whole client and says nothing
    of it."""
    return _bytes({"format": _FORMAT} | ({} if samples is None else {"samples": samples}))


def read_greeting(message: memoryview, config: Config, task: Task) -> tuple[str, bool]:
    """(run name, whether it is resumed), once the server's settings are known to equal this rank's."""
    fields = _object(message)
    settings, run, resuming = fields.get("settings"), fields.get("run"), fields.get("resuming")
    if not isinstance(settings, dict) or not isinstance(run, str) or not run or not isinstance(resuming, bool):
        raise PeerLost("the server's first message does not name run, settings and whether it is resumed")
    own = _shared(config, task)
    differing = sorted(name for name in own.keys() | settings.keys() if own.get(name) != settings.get(name))
    if differing:
        raise SettingsDiffer(
            f"this rank was started with other settings than the server: {one_line(', '.join(differing))}; start all "
            "ranks with the same options"
        )
    if config.run.name is not None and config.run.name != run:
        raise SettingsDiffer(f"this rank's folder holds run {config.run.name!r}, the server's run {run!r}")
    return run, resuming


def read_reply(message: memoryview, *, whole_client: bool) -> int | None:
    """The number of samples a client holds; None where the guarantee hides the whole client, whatever it says."""
    samples = _object(message).get("samples")
    if whole_client:
        return None
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= 2**53:
        raise PeerLost(f"a client said it holds {short_repr(samples)} samples")
    return samples


def _shared(config: Config, task: Task) -> dict[str, Any]:
    """The settings that must be the same on every rank: the run's, and those of a named task."""
    named = {} if task.source is None else {f"data.{name}": value for name, value in vars(task.source).items()}
    plain: dict[str, Any] = json.loads(json.dumps(config.flat() | named, default=vars))
    return {name: value for name, value in plain.items() if name not in _OWN}


def _bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, allow_nan=False).encode()


def _object(message: memoryview) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(message))
    except (ValueError, RecursionError) as error:
        raise PeerLost("the first message is not JSON") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise PeerLost(f"the first message is not of format {_FORMAT}")
    return fields
