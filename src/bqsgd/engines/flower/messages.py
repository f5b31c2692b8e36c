"""What travels: the model down and a frame up, each as opaque bytes of a named kind, and a few plain words beside.

Flower's own readers are never asked to interpret either (they refuse a foreign `stype`), and nothing is unpickled: the
bytes go to `read_model` and `read_frame`, which check them whole before using any of them.
"""

from __future__ import annotations

import json
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from bqsgd.errors import BqsgdError, FrameError
from bqsgd.privacy.guarantee import Guarantee

FRAME, MODEL = "bqsgd.frame.v1", "bqsgd.model.v1"
_WORDS = "words"
_MAX_TEXT = 300
_MAX_JSON = 1 << 16

Word = str | int | float | bool


def parcel(data: bytes | bytearray | None, *, kind: str, **words: Word) -> RecordDict:
    """The content of one message: `data` under the name of its kind, and `words`."""
    content = RecordDict({_WORDS: ConfigRecord(dict(words))})
    if data is not None:
        array = Array(dtype="uint8", shape=(len(data),), stype=kind, data=bytes(data))
        content[kind] = ArrayRecord({kind: array})
    return content


def has_data(message: Message, *, kind: str) -> bool:
    """Whether the message holds bytes of that kind, to be checked by `data_of`."""
    return kind in message.content.array_records


def data_of(message: Message, *, kind: str) -> bytes:
    """The bytes of a message; their type, shape and kind must be what `parcel` writes."""
    record = message.content.array_records.get(kind)
    if record is None or list(record) != [kind]:
        raise FrameError(f"the message holds no {kind}")
    array = record[kind]
    found = (array.dtype, tuple(array.shape), array.stype)
    if found != ("uint8", (len(array.data),), kind):
        raise FrameError(f"a {kind} is ('uint8', ({len(array.data)},), '{kind}'), got {clean(str(found))}")
    return array.data


def word(message: Message, name: str, kind: type) -> Any:
    """One of the plain words beside the bytes, of exactly that type; None when it is not there.

    Raises:
        FrameError: it is there with another type.
    """
    record = message.content.config_records.get(_WORDS)
    found = None if record is None else record.get(name)
    if found is not None and type(found) is not kind:
        raise FrameError(f"{name} must be {kind.__name__}, got {type(found).__name__}")
    return found


def clean(text: str) -> str:
    """Text of somebody else for our log: one printable line of at most 300 characters."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text[: 4 * _MAX_TEXT]).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."


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
