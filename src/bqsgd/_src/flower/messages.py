"""What travels: a model down and a frame up, each as opaque bytes of a named kind, with a few plain fields beside it.

Flower's own readers never interpret these bytes (they refuse a foreign `stype`), and nothing is unpickled: the bytes go
to `read_model` and `read_frame`, which check all of them before they use any.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from bqsgd._src.errors import FrameError
from bqsgd._src.text import one_line

FRAME, MODEL = "bqsgd.frame.v1", "bqsgd.model.v1"
_FIELDS = "fields"
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
    """Whether the message holds bytes of that kind; `data_of` checks them."""
    return kind in message.content.array_records


def data_of(message: Message, *, kind: str) -> bytes:
    """The bytes of a message. Raises FrameError unless their type, shape and kind are what `pack` writes."""
    record = message.content.array_records.get(kind)
    if record is None or list(record) != [kind]:
        raise FrameError(f"the message holds no {kind}")
    array = record[kind]
    # The sender wrote all three, so the shape may disagree with the bytes.
    declared = (array.dtype, tuple(array.shape), array.stype)
    if declared != ("uint8", (len(array.data),), kind):
        raise FrameError(f"a {kind} is ('uint8', ({len(array.data)},), '{kind}'), got {one_line(str(declared))}")
    return array.data


def field_of(message: Message, name: str, kind: type) -> Any:
    """One of the plain fields beside the bytes; None if it is missing. Raises FrameError if it has another type."""
    record = message.content.config_records.get(_FIELDS)
    value = None if record is None else record.get(name)
    if value is not None and type(value) is not kind:  # not isinstance: True is an int too
        raise FrameError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
    return value


class Answer(NamedTuple):
    """An answer, what Flower knows about the message that it answers, and when it came.

    An answer belongs to the node to which its question was sent, whatever the answer says. late: it came after the
    `send_and_receive` that sent its question.
    """

    question: Metadata
    reply: Message
    arrived: float
    late: bool


def _frames(answers: Iterable[Answer]) -> int:
    """How many answers in time hold a frame."""
    return sum(not late and not reply.has_error() and has_data(reply, kind=FRAME) for _, reply, _, late in answers)


class TrackedGrid:
    """Flower's grid, with a note of whom each message was sent to and when its answer came. It fetches late answers."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Metadata] = {}
        """Messages that have no answer yet, by their ids."""
        self.batches = 0
        """How many times messages were sent."""

    def send_and_receive(
        self, messages: Sequence[Message], *, timeout: float, enough: int | None = None
    ) -> list[Answer]:
        """Send, then wait until all are answered, `enough` of them with a frame, or `timeout` seconds have passed.

        Also returns answers to earlier messages that came meanwhile. Without messages it does not wait.
        """
        end = time.monotonic() + timeout
        sent = set[str]()
        if messages:
            self.batches += 1
            sent = set(self.grid.push_messages(messages))  # without those that the SuperLink did not accept
            self.waiting |= {m.metadata.message_id: m.metadata for m in messages if m.metadata.message_id in sent}
        answers: list[Answer] = []
        while True:
            # All that wait, not only these: late answers to earlier messages are fetched here too.
            for reply in self.grid.pull_messages(list(self.waiting)):
                question = self.waiting.pop(reply.metadata.reply_to_message_id, None)
                if question is not None:
                    late = question.message_id not in sent
                    answers.append(Answer(question, reply, time.monotonic(), late))
            left = end - time.monotonic()
            if not sent & self.waiting.keys() or left <= 0 or (enough is not None and _frames(answers) >= enough):
                return answers
            time.sleep(min(_POLL_SECONDS, left))

    def get_node_ids(self) -> set[int]:
        """The nodes that the SuperLink has heard from lately."""
        return set(self.grid.get_node_ids())
