"""The server's message to a client that holds an earlier model: how the model has changed since, in 2 to 7 bits.

A change has one code per coordinate and one scale per block of BLOCK coordinates. Server and client apply the codes
with the same float32 operations, so both get the same model bit for bit, and a digest of the result confirms it.
Rounding errors do not add up: the server keeps its model in float64, and the next change makes up for what this one
left out.

A change is computed from models only, so it costs no privacy. The layout is in docs/wire.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from bqsgd._src.errors import FrameError, InvalidParameter, ModelMessageError, ModelNotHeld
from bqsgd._src.params import Codes, check_finite, check_int
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.model_message import NOT_SENT, ModelMessage, opened, read_model, sealed

BLOCK = 1024
"""Coordinates that share a scale."""
FEWEST_BITS, MOST_BITS = 2, 7
MOST_CHANGES = 16
"""The most changes in one message; a client that is further behind gets the whole model."""
_HEAD = struct.Struct("<4sHHQQIIQ")
CHANGE_HEADER_BYTES = _HEAD.size + 8
"""With the checksum after it."""
_MAGIC, _VERSION = b"BQSC", 1
_Model = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """What turns the model of one round into that of the next: a scale for each block, and the packed codes."""

    bits: int
    scales: npt.NDArray[np.float32]
    payload: npt.NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a message."""
        return self.scales.nbytes + self.payload.nbytes


def make_change(model: _Model, wanted: npt.NDArray[np.float64], *, bits: int) -> tuple[Change, _Model]:
    """The change that brings `model` as near to `wanted` as the bits allow, and the model that results.

    >>> change, after = make_change(np.zeros(2, np.float32), np.array([3.0, -1.1]), bits=3)
    >>> after.tolist()
    [3.0, -1.0]
    """
    check_int("bits", bits, FEWEST_BITS, MOST_BITS)
    moved = np.asarray(wanted, np.float64) - model
    check_finite(moved, NOT_SENT)
    most = (1 << (bits - 1)) - 1
    starts = np.arange(0, model.size, BLOCK)
    with np.errstate(over="ignore"):
        scales = (np.maximum.reduceat(np.abs(moved), starts) / most).astype(np.float32)
    check_finite(scales, "the model changes by more than float32 holds; it was not sent. Lower the learning rate")
    per_value = np.repeat(scales, BLOCK)[: model.size].astype(np.float64)
    whole = np.divide(moved, per_value, out=np.zeros_like(moved), where=per_value > 0)
    codes = (np.clip(np.rint(whole), -most, most) + most).astype(np.uint8)
    coder = FixedWidth(2 * most + 1)
    payload = np.empty(coder.payload_bytes(model.size), np.uint8)
    coder.pack(codes, payload)
    # The server continues from this model, not from `wanted`: it must be the one that the clients compute.
    after = _applied(model, codes, scales, most)
    check_finite(after, NOT_SENT)
    return Change(bits=bits, scales=scales, payload=payload), after


def _applied(model: _Model, codes: Codes, scales: npt.NDArray[np.float32], most: int) -> _Model:
    """model + (code - most) * scale in float32, rounded after the product and again after the sum."""
    # Two separate operations on purpose. A fused multiply-add rounds once, and peers would differ in the last bit.
    steps = codes.astype(np.float32) - np.float32(most)
    with np.errstate(over="ignore", invalid="ignore"):
        steps *= np.repeat(scales, BLOCK)[: model.size]
        steps += model
    return steps


def change_bytes(dimension: int, *, bits: int) -> int:
    """The number of bytes that one change takes in a message."""
    return _scale_bytes(dimension) + FixedWidth((1 << bits) - 1).payload_bytes(dimension)


def _scale_bytes(dimension: int) -> int:
    return 4 * -(-dimension // BLOCK)


def write_changes(changes: Sequence[Change], *, model: _Model, round: int) -> bytes:
    """The message that turns the model of round `round - len(changes)` into `model`, the model of `round`."""
    count = check_int("number of changes", len(changes), 1, MOST_CHANGES)
    bits = changes[0].bits
    if any(change.bits != bits for change in changes):
        raise InvalidParameter("all changes of a message must have the same number of bits")
    check_int("round", round, count, 2**63 - 1)
    head = _HEAD.pack(_MAGIC, _VERSION, bits, round, model.size, count, BLOCK, digest(model))
    body = b"".join(change.scales.astype("<f4").tobytes() + change.payload.tobytes() for change in changes)
    return sealed(head, body)


def is_change(message: bytes | memoryview) -> bool:
    """Whether the message holds changes rather than a whole model."""
    return bytes(message[:4]) == _MAGIC


def digest(model: _Model) -> int:
    """XXH3 of the float32 bytes of a model, by which a client sees that it has the server's model."""
    return xxhash.xxh3_64_intdigest(model.astype("<f4", copy=False).tobytes())


def receive_model(
    message: bytes | bytearray | memoryview, *, dimension: int, held: ModelMessage | None = None
) -> ModelMessage:
    """The model of a round, from a message with the whole model or with changes to the model that the reader holds.

    Raises:
        ModelNotHeld: the changes belong to another model than the one held; ask for the whole model.
        ModelMessageError: the message is not valid.
    """
    view = memoryview(message).cast("B")
    if not is_change(view):
        return read_model(view, dimension=dimension)
    if len(view) < CHANGE_HEADER_BYTES:
        raise ModelMessageError(f"changes of a model take at least {CHANGE_HEADER_BYTES} bytes, got {len(view)}")
    _, version, bits, round_, stated, count, block, expected = _HEAD.unpack_from(view)
    if version != _VERSION or block != BLOCK or not FEWEST_BITS <= bits <= MOST_BITS:
        raise ModelMessageError(
            f"expected changes of version {_VERSION} in {FEWEST_BITS} to {MOST_BITS} bits and blocks of {BLOCK}, got "
            f"version {version}, {bits} bits and blocks of {block}"
        )
    if stated != dimension:
        raise ModelMessageError(f"this client's model has {dimension} coordinates, the message has {stated}")
    if not 1 <= count <= MOST_CHANGES or not count <= round_ < 2**63:
        raise ModelMessageError(
            f"a message has 1 to {MOST_CHANGES} changes that lead to a round below 2^63, got {count} to round {round_}"
        )
    part_bytes = change_bytes(dimension, bits=bits)
    what = f"{count} changes of {dimension} coordinates"
    body = opened(view, CHANGE_HEADER_BYTES, count * part_bytes, what=what)
    if held is None or held.round != round_ - count:
        has = "none" if held is None else f"that of round {held.round}"
        raise ModelNotHeld(f"the message changes the model of round {round_ - count}, this client holds {has}")
    model, coder = held.model, FixedWidth((1 << bits) - 1)
    for start in range(0, len(body), part_bytes):
        model = _changed(model, body[start : start + part_bytes], coder)
    if not bool(np.isfinite(model).all()):
        raise ModelMessageError("the changes lead to a model with NaN or infinity")
    if digest(model) != expected:
        raise ModelNotHeld(f"the changes lead to another model of round {round_} than the server has")
    return ModelMessage(round=round_, model=model)


def _changed(model: _Model, part: memoryview, coder: FixedWidth) -> _Model:
    scale_bytes = _scale_bytes(model.size)
    scales = np.frombuffer(part[:scale_bytes], "<f4").astype(np.float32)
    if not bool((np.isfinite(scales) & ~np.signbit(scales)).all()):
        raise ModelMessageError("a scale of a change must be finite and not negative")
    try:
        codes = coder.unpack(np.frombuffer(part[scale_bytes:], np.uint8), model.size)
    except FrameError as error:
        raise ModelMessageError(f"the codes of a change cannot be read: {error}") from error
    return _applied(model, codes, scales, coder.code_count // 2)
