"""The server's message to a client that repeats its steps: what the messages of each round added up to.

Where all clients of a round send the same coordinates, the change of the model follows from the aggregate of their
messages: the exact sum of a secure sum in the bits of its modulus, or the estimate of a robust rule in float32. A
client that holds an earlier model, and what the optimizer remembered then, takes the same steps as the server and gets
the same bits, which a digest confirms (`descent.descent`).

An aggregate is what the server has learnt from the clients, so it costs no privacy. The layout is in docs/wire.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bqsgd._src.errors import FrameError, ModelMessageError
from bqsgd._src.params import check_int
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.model_message import Memory, opened, sealed

MOST_STEPS = 64
"""The most rounds in one message; a client that is further behind gets the whole model."""
LEAST_WIDTH, MOST_WIDTH = 2, 21
"""Bits of the modulus of a secure sum."""
_HEAD = struct.Struct("<4sHHQQIIQ")
STEPS_HEADER_BYTES = _HEAD.size + 8
"""With the checksum after it."""
_PART = struct.Struct("<II")
_VARIANCE = struct.Struct("<d")
_MAGIC, _VERSION = b"BQST", 1
_FLOAT_BITS = 32


class StepKind(IntEnum):
    """What a run's aggregates are."""

    SUMS = 1
    ESTIMATES = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Aggregate:
    """What the messages of one round add up to, in the coordinates that they carry.

    messages: how many were added up; 0 if the round left the model as it was, and then there are no numbers.
    width: bits of each number: sums are taken modulo 2^width, estimates are float32 in units of the range.
    variance: of the noise in a coordinate of an estimate of the whole model. For sums it follows from `messages`.
    """

    messages: int
    width: int = 0
    variance: float = 0.0
    numbers: npt.NDArray[Any] | None = None

    @classmethod
    def estimate(cls, values: npt.NDArray[np.float64], *, messages: int, variance: float) -> Aggregate:
        """Of a robust rule: its values in units of the range, rounded to float32 for the server too."""
        numbers = values.astype(np.float32)
        return cls(messages=messages, width=_FLOAT_BITS, variance=variance, numbers=numbers)

    def part(self) -> bytes:
        """Its bytes in a message."""
        head = _PART.pack(self.messages, self.width)
        if self.numbers is None:
            return head
        if self.width == _FLOAT_BITS:
            return head + _VARIANCE.pack(self.variance) + self.numbers.astype("<f4", copy=False).tobytes()
        coder = FixedWidth(1 << self.width)
        payload = np.empty(coder.payload_bytes(self.numbers.size), np.uint8)
        coder.pack(self.numbers.astype(coder.dtype, copy=False), payload)
        return head + payload.tobytes()


def part_bytes(kept: int, *, width: int | None) -> int:
    """Bytes of the aggregate of `kept` sums in so many bits, or with None of estimates."""
    if width is None:
        return _PART.size + _VARIANCE.size + 4 * kept
    return _PART.size + -(-kept * width // 8)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepsMessage:
    """A checked message: the aggregates of the `len(parts)` rounds before `round`, still packed.

    digest: of the model of `round` and of what the optimizer then remembers.
    """

    round: int
    digest: int
    parts: tuple[memoryview, ...]


def write_steps(
    parts: Sequence[bytes],
    *,
    kind: StepKind,
    one_in: int,
    model: npt.NDArray[np.float32],
    memory: Memory,
    round: int,
) -> bytes:
    """The message that leads from the model of round `round - len(parts)` to `model`, the model of `round`."""
    count = check_int("number of steps", len(parts), 1, MOST_STEPS)
    check_int("round", round, count, 2**63 - 1)
    head = _HEAD.pack(_MAGIC, _VERSION, kind, round, model.size, count, one_in, state_digest(model, memory))
    return sealed(head, b"".join(parts))


def is_steps(message: bytes | memoryview) -> bool:
    """Whether the message holds aggregates rather than a model or its changes."""
    return bytes(message[:4]) == _MAGIC


def state_digest(model: npt.NDArray[np.float32], memory: Memory) -> int:
    """XXH3 of the float32 bytes of a model and the float64 bytes of the optimizer's memory."""
    state = xxhash.xxh3_64(model.astype("<f4", copy=False).tobytes())
    state.update(memory.astype("<f8", copy=False).tobytes())
    return int(state.intdigest())


def read_steps(view: memoryview, *, kind: StepKind, one_in: int, dimension: int) -> StepsMessage:
    """Check everything of a message but its numbers, which `read_aggregate` checks.

    Raises:
        ModelMessageError: the message is not valid.
    """
    if len(view) < STEPS_HEADER_BYTES:
        raise ModelMessageError(f"a message of steps takes at least {STEPS_HEADER_BYTES} bytes, got {len(view)}")
    magic, version, stated_kind, round_, stated, count, stated_one_in, digest = _HEAD.unpack_from(view)
    if (magic, version, stated_kind, stated_one_in) != (_MAGIC, _VERSION, kind, one_in):
        raise ModelMessageError(
            f"expected steps of version {_VERSION}, kind {kind} and one in {one_in} coordinates, got {magic!r}, "
            f"version {version}, kind {stated_kind}, one in {stated_one_in}"
        )
    if stated != dimension:
        raise ModelMessageError(f"this client's model has {dimension} coordinates, the message has {stated}")
    if not 1 <= count <= MOST_STEPS or not count <= round_ < 2**63:
        raise ModelMessageError(
            f"a message has 1 to {MOST_STEPS} steps that lead to a round below 2^63, got {count} to round {round_}"
        )
    kept, ends = -(-dimension // one_in), [STEPS_HEADER_BYTES]
    for _ in range(count):
        ends.append(ends[-1] + _part_length(view[ends[-1] :], kind, kept))
    opened(view, STEPS_HEADER_BYTES, ends[-1] - STEPS_HEADER_BYTES, what=f"{count} steps of {kept} numbers")
    parts = tuple(view[start:stop] for start, stop in pairwise(ends))
    return StepsMessage(round=round_, digest=digest, parts=parts)


def _part_length(view: memoryview, kind: StepKind, kept: int) -> int:
    if len(view) < _PART.size:
        raise ModelMessageError("the message ends before its last step")
    messages, width = _PART.unpack_from(view)
    if messages == 0 and width == 0:
        return _PART.size
    least, most = (_FLOAT_BITS, _FLOAT_BITS) if kind is StepKind.ESTIMATES else (LEAST_WIDTH, MOST_WIDTH)
    if messages == 0 or not least <= width <= most:
        raise ModelMessageError(
            f"a step of kind {kind} has numbers of {least} to {most} bits from at least one message, got {width} bits "
            f"from {messages}"
        )
    return part_bytes(kept, width=None if kind is StepKind.ESTIMATES else width)


def read_aggregate(part: memoryview, *, kept: int) -> Aggregate:
    """The numbers of one part of a checked message.

    Raises:
        ModelMessageError: a number or the variance is not finite, or spare bits are not 0.
    """
    messages, width = _PART.unpack_from(part)
    body = part[_PART.size :]
    if messages == 0:
        return Aggregate(messages=0)
    if width != _FLOAT_BITS:
        try:
            # A copy, because whole bytes would stay a view of the message, whose buffer the engine may use again.
            numbers = FixedWidth(1 << width).unpack(np.frombuffer(body, np.uint8), kept).copy()
        except FrameError as error:
            raise ModelMessageError(f"the sums of a step cannot be read: {error}") from error
        return Aggregate(messages=messages, width=width, numbers=numbers)
    (variance,) = _VARIANCE.unpack_from(body)
    estimates = np.frombuffer(body[_VARIANCE.size :], "<f4").astype(np.float32)
    if not bool(np.isfinite(estimates).all() and np.isfinite(variance)) or variance < 0:
        raise ModelMessageError("the estimates of a step must be finite, and their variance not negative")
    return Aggregate(messages=messages, width=width, variance=variance, numbers=estimates)
