"""The server's message of one round: the model as plain float32 bytes after a checked header.

Layout, little-endian: magic "BQSM", version u16, dtype u16 (1 = float32), round u64, dimension u64, checksum u64
(xxh3_64 of the header before it and of the data), then 4 * dimension bytes. With dtype 2 the memory of the server's
optimizer follows as float64; how many numbers that are is known to both sides.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter, ModelMessageError
from bqsgd._src.params import check_finite, check_int
from bqsgd._src.wire.frame import checksum_of

_HEAD = struct.Struct("<4sHHQQ")
_CHECKSUM = struct.Struct("<Q")
MODEL_HEADER_BYTES = _HEAD.size + _CHECKSUM.size
_MAGIC, _VERSION, _FLOAT32, _WITH_MEMORY = b"BQSM", 1, 1, 2
Memory = npt.NDArray[np.float64]
NOT_SENT = "the model holds NaN or infinity; it was not sent. Lower the learning rate and resume"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelMessage:
    """The model of one round.

    memory: what the server's optimizer remembers, flat; None if it is unknown, or if clients do not need it.
    """

    round: int
    model: npt.NDArray[np.float32]
    memory: Memory | None = None


def sealed(head: bytes, body: bytes) -> bytes:
    """The message of a header and a body, with the checksum of both between them."""
    return b"".join((head, _CHECKSUM.pack(checksum_of(head, body)), body))


def opened(message: memoryview, head_bytes: int, body_bytes: int, *, what: str) -> memoryview:
    """The body of a message whose header, checksum included, has `head_bytes` bytes; `what` it holds is for errors.

    Raises:
        ModelMessageError: the body has another length than `body_bytes`, or the checksum is wrong.
    """
    body = message[head_bytes:]
    if len(body) != body_bytes:
        raise ModelMessageError(f"{what} take {head_bytes + body_bytes} bytes, got {len(message)}")
    (stated,) = _CHECKSUM.unpack_from(message, head_bytes - _CHECKSUM.size)
    if checksum_of(message[: head_bytes - _CHECKSUM.size], body) != stated:
        raise ModelMessageError("the message was damaged in transit: its checksum is wrong")
    return body


def model_bytes(dimension: int, *, memory: int = 0) -> int:
    """Bytes of the message of a model, with as many numbers of the optimizer's memory."""
    return MODEL_HEADER_BYTES + 4 * dimension + 8 * memory


def write_model(model: npt.NDArray[np.float32], *, round: int, memory: Memory | None = None) -> bytes:
    """The bytes of the model for `round`, with the optimizer's memory if it is given and not empty."""
    if model.ndim != 1 or model.dtype != np.float32 or model.size == 0:
        raise InvalidParameter(f"the model must be a flat float32 vector, got {model.dtype} {model.shape}")
    check_finite(model, NOT_SENT)
    body, dtype = model.astype("<f4", copy=False).tobytes(), _FLOAT32
    if memory is not None and memory.size:
        check_finite(memory, NOT_SENT)
        body, dtype = body + memory.astype("<f8", copy=False).tobytes(), _WITH_MEMORY
    return sealed(_HEAD.pack(_MAGIC, _VERSION, dtype, check_int("round", round, 0, 2**63 - 1), model.size), body)


def read_model(message: bytes | bytearray | memoryview, *, dimension: int, memory: int = 0) -> ModelMessage:
    """Check a model message in full and return a copy of the model.

    memory: how many numbers the optimizer remembers; the message may hold them or leave them out. With 0 it must leave
    them out.

    Raises:
        ModelMessageError: wrong magic, version, dtype, dimension, length or checksum, or a value that is not finite.
    """
    view = memoryview(message).cast("B")
    if len(view) < MODEL_HEADER_BYTES:
        raise ModelMessageError(f"a model message has at least {MODEL_HEADER_BYTES} bytes, got {len(view)}")
    magic, version, dtype, round_, stated = _HEAD.unpack_from(view)
    expected = (_FLOAT32, _WITH_MEMORY) if memory else (_FLOAT32,)
    if (magic, version) != (_MAGIC, _VERSION) or dtype not in expected:
        raise ModelMessageError(f"not a model message of version {_VERSION} in float32: {magic!r}, {version}, {dtype}")
    if stated != dimension:
        raise ModelMessageError(f"this client's model has {dimension} coordinates, the message has {stated}")
    remembered = memory if dtype == _WITH_MEMORY else 0
    what = f"{dimension} coordinates" + (f" and {remembered} numbers of the optimizer" if remembered else "")
    body = opened(view, MODEL_HEADER_BYTES, 4 * dimension + 8 * remembered, what=what)
    if round_ >= 2**63:
        raise ModelMessageError(f"round must be below 2^63, got {round_}")
    # `astype` copies: the buffer of the message may be reused while the client trains.
    model = np.frombuffer(body[: 4 * dimension], dtype="<f4").astype(np.float32)
    numbers = np.frombuffer(body[4 * dimension :], dtype="<f8").astype(np.float64)
    if not bool(np.isfinite(model).all() and np.isfinite(numbers).all()):
        raise ModelMessageError("the model message holds NaN or infinity")
    return ModelMessage(round=round_, model=model, memory=numbers if remembered else None)
