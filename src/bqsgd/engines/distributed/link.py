"""One thread a rank on each side, so that no wait of ours ends in a timeout of gloo, which would cut off every rank."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass

from torch import Tensor

from bqsgd.engines.distributed.transport import Channel, Kind, PeerLost


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back from one rank: a message, or the reason why nothing ever will.

    asked: the number of the question it answers.
    """

    rank: int
    asked: int
    kind: Kind | None = None
    body: memoryview | bytes = b""
    arrived: float = 0.0
    lost: str | None = None


class Link:
    """The server's end of one rank: questions go out one at a time, replies land in a queue shared by all links.

    A rank that is still at work gets no second question; when it is done it gets the latest one, and those between
    are dropped.
    """

    def __init__(self, channel: Channel, replies: queue.SimpleQueue[Reply], *, most_bytes: int) -> None:
        self.rank = channel.peer
        self._channel, self._replies, self._most_bytes = channel, replies, most_bytes
        self._questions: queue.SimpleQueue[tuple[int, Kind, bytes | Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"rank-{self.rank}", daemon=True)
        self._thread.start()

    def ask(self, number: int, kind: Kind, body: bytes | Tensor = b"") -> None:
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
                answered, content = self._channel.receive(most_bytes=self._most_bytes)
                self._replies.put(
                    Reply(rank=self.rank, asked=number, kind=answered, body=content, arrived=time.monotonic())
                )
            self._channel.send(Kind.STOP)
        except PeerLost as error:
            self._replies.put(Reply(rank=self.rank, asked=number, lost=str(error)))

    def _latest(self) -> tuple[int, Kind, bytes | Tensor] | None:
        question = self._questions.get()
        while question is not None and not self._questions.empty():
            question = self._questions.get()
        return question


class Listener:
    """A client's end: messages of the server, read by a thread so that signals reach the waiting main thread."""

    def __init__(self, channel: Channel, *, most_bytes: int) -> None:
        self._channel, self._most_bytes = channel, most_bytes
        self._messages: queue.SimpleQueue[tuple[Kind, memoryview] | PeerLost] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="server", daemon=True).start()

    def get(self, *, seconds: float) -> tuple[Kind, memoryview] | None:
        """The next message, or None when none came in time.

        Raises:
            PeerLost: the server is gone.
        """
        try:
            found = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, PeerLost):
            raise found
        return found

    def _work(self) -> None:
        try:
            while True:
                message = self._channel.receive(most_bytes=self._most_bytes)
                self._messages.put(message)
                if message[0] is Kind.STOP:
                    return
        except PeerLost as error:
            self._messages.put(error)
