"""What travels: the model down and a frame up, each as opaque bytes of a named kind, and a few plain fields beside.

Flower's own readers are never asked to interpret either (they refuse a foreign `stype`), and nothing is unpickled: the
bytes go to `read_model` and `read_frame`, which check them whole before using any of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from bqsgd._src.errors import FrameError
from bqsgd._src.records.record import one_line

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


class Answer(NamedTuple):
    """An answer with what Flower knows of the message it answers, and when it came.

    An answer belongs to the node its question was sent to, whatever it says of itself. late: it came after the
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
    """Flower's grid, which knows to whom each message went, when each answer came, and fetches late answers."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Metadata] = {}
        """Messages that have no answer yet."""
        self.batches = 0
        """How many times messages were sent."""
        self.kept: list[Answer] = []
        """Answers put back because they are for somebody else: the next `send_and_receive` returns them."""

    def send_and_receive(
        self, messages: Sequence[Message], *, timeout: float | None = None, enough: int | None = None
    ) -> list[Answer]:
        """Send, then wait until all of these are answered, `enough` of them with a frame, or `timeout` seconds are
        over.

        Returns, with their answers, those to earlier messages that have come in the meantime. Without messages it
        returns what has come, and does not wait.
        """
        end = None if timeout is None else time.monotonic() + timeout
        own = set[str]()
        if messages:
            self.batches += 1
            own = set(self.grid.push_messages(messages))  # one that the SuperLink would not take is not among them
            self.waiting |= {m.metadata.message_id: m.metadata for m in messages if m.metadata.message_id in own}
        answers, self.kept = self.kept, []
        while True:
            for reply in self.grid.pull_messages(list(self.waiting)):
                question = self.waiting.pop(reply.metadata.reply_to_message_id, None)
                if question is not None:
                    late = question.message_id not in own
                    answers.append(Answer(question, reply, time.monotonic(), late))
            left = _POLL_SECONDS if end is None else end - time.monotonic()
            if not own & self.waiting.keys() or left <= 0 or (enough is not None and _frames(answers) >= enough):
                return answers
            time.sleep(min(_POLL_SECONDS, left))

    def get_node_ids(self) -> set[int]:
        """The nodes that the SuperLink has heard of lately."""
        return set(self.grid.get_node_ids())
