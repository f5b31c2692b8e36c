"""What travels: the model down and a frame up, each as opaque bytes of a named kind, and a few plain fields beside.

Flower's own readers are never asked to interpret either (they refuse a foreign `stype`), and nothing is unpickled: the
bytes go to `read_model` and `read_frame`, which check them whole before using any of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from bqsgd.errors import BqsgdError, FrameError
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.records.record import one_line

FRAME, MODEL = "bqsgd.frame.v1", "bqsgd.model.v1"
_FIELDS = "fields"
_MAX_JSON = 1 << 16
_POLL_SECONDS = 0.25

Plain = str | int | float | bool


def pack(data: bytes | bytearray | None, *, kind: str, **fields: Plain) -> RecordDict:
    """The content of one message: `data` under the name of its kind, and the plain `fields`."""
    content = RecordDict({_FIELDS: ConfigRecord(dict(fields))})
    if data is not None:
        array = Array(dtype="uint8", shape=(len(data),), stype=kind, data=bytes(data))
        content[kind] = ArrayRecord({kind: array})
    return content


def has_data(message: Message, *, kind: str) -> bool:
    """Whether the message holds bytes of that kind, to be checked by `data_of`."""
    return kind in message.content.array_records


def data_of(message: Message, *, kind: str) -> bytes:
    """The bytes of a message; their type, shape and kind must be what `pack` writes."""
    record = message.content.array_records.get(kind)
    if record is None or list(record) != [kind]:
        raise FrameError(f"the message holds no {kind}")
    array = record[kind]
    found = (array.dtype, tuple(array.shape), array.stype)
    if found != ("uint8", (len(array.data),), kind):
        raise FrameError(f"a {kind} is ('uint8', ({len(array.data)},), '{kind}'), got {one_line(str(found))}")
    return array.data


def field_of(message: Message, name: str, kind: type) -> Any:
    """One of the plain fields beside the bytes, of exactly that type; None when it is not there.

    Raises:
        FrameError: it is there with another type.
    """
    record = message.content.config_records.get(_FIELDS)
    found = None if record is None else record.get(name)
    if found is not None and type(found) is not kind:
        raise FrameError(f"{name} must be {kind.__name__}, got {type(found).__name__}")
    return found


def write_guarantee(guarantee: Guarantee) -> str:
    """A client's own guarantee, for the server to show."""
    return json.dumps(guarantee.to_dict())


def read_guarantee(text: str) -> Guarantee | None:
    """What a client states of itself, or None when it is not a guarantee at all. The server cannot verify it."""
    if len(text) > _MAX_JSON:
        return None
    try:
        return Guarantee.from_dict(json.loads(text))
    except (BqsgdError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A message that was sent; `arrived` is when its answer came, `batch` which messages went out together with it."""

    node: int
    kind: str
    group: str
    batch: int
    arrived: float = 0.0


def _frames(replies: Iterable[Message], own: set[str]) -> int:
    """How many answers to our own messages hold a frame."""
    return sum(
        reply.metadata.reply_to_message_id in own and not reply.has_error() and has_data(reply, kind=FRAME)
        for reply in replies
    )


class TrackedGrid(Grid):
    """Flower's grid, which knows to whom each message went, when each answer came, and fetches late answers.

    An answer belongs to the node its question was sent to, whatever it says of itself.

    `send_and_receive` waits for the answers to its own messages and returns, with them, those to earlier messages that
    have come in the meantime; `sent_for` says which is which.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Sent] = {}
        self.batches = 0
        """How many times messages were sent."""
        self._answered: dict[str, Sent] = {}
        self._kept: list[Message] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None, enough: int | None = None
    ) -> list[Message]:
        """Send, then wait until all of these are answered, `enough` of them with a frame, or `timeout` seconds are
        over."""
        outgoing = list(messages)
        if not outgoing:
            return []
        self.batches += 1
        end = None if timeout is None else time.monotonic() + timeout
        pushed = set(self.grid.push_messages(outgoing))
        own = set()
        for message in outgoing:
            data = message.metadata
            if data.message_id in pushed:  # else the SuperLink would not take it: it is missing like an unanswered one
                own.add(data.message_id)
                sent = Sent(node=data.dst_node_id, kind=data.message_type, group=data.group_id, batch=self.batches)
                self.waiting[data.message_id] = sent
        replies, self._kept = self._kept, []
        while True:
            replies += self._pull()
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            if not own & self.waiting.keys() or left <= 0 or (enough is not None and _frames(replies, own) >= enough):
                return replies
            time.sleep(min(_POLL_SECONDS, left))

    def arrived(self) -> list[Message]:
        """What has come since, without waiting."""
        replies, self._kept = self._kept, []
        return replies + self._pull()

    def _pull(self) -> list[Message]:
        found = []
        for reply in self.grid.pull_messages(list(self.waiting)):
            question = reply.metadata.reply_to_message_id
            sent = self.waiting.pop(question, None)
            if sent is not None:
                self._answered[question] = replace(sent, arrived=time.monotonic())
                found.append(reply)
        return found

    def sent_for(self, reply: Message) -> Sent:
        """The message that this is the answer to; ask once."""
        return self._answered.pop(reply.metadata.reply_to_message_id)

    def keep(self, reply: Message, sent: Sent) -> None:
        """Put an answer back that is for somebody else: the next `send_and_receive` returns it."""
        self._answered[reply.metadata.reply_to_message_id] = sent
        self._kept.append(reply)

    def set_run(self, run: Any) -> None:
        """As the grid inside."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid inside."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Superseded in Flower by the constructor of `Message`; the same here."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that the SuperLink has heard of lately."""
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid inside."""
        return self.grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid inside."""
        return self.grid.pull_messages(message_ids)
