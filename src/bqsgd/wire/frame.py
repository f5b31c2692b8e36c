"""Frame v1: the bytes of one message. Layout in docs/wire.md; everything little-endian.

Writing: `FrameWriter` allocates header and payload once, hands out the payload to be filled in place, then seals it.
Reading: `read_frame` treats the buffer as hostile. Every length is checked against the buffer's real length, and every
expectation of the caller against the header, before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter
from bqsgd.params import DIGEST_BYTES, Mechanism, Range, check_int, parameters_digest
from bqsgd.wire import errors
from bqsgd.wire.fixed import Payload, layout
from bqsgd.wire.header import (
    ENTROPY_SLACK_BYTES,
    HEADER_BYTES,
    MAX_DIMENSION,
    Coding,
    Header,
    check_payload_length,
    read_header,
    write_header,
)

__all__ = ["HEADER_BYTES", "Buffer", "Coding", "Frame", "FrameWriter", "Header", "read_frame"]

Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
UNSTATED_MAX_DIMENSION = 1 << 24
"""Largest entropy-coded frame read when the caller states no dimension: few bytes may stand for many codes."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame whose header, length and checksum have been checked; `payload` is a read-only view of the buffer."""

    header: Header
    payload: Payload


class FrameWriter:
    """One frame being written: fill `payload`, then `seal`.

    Args:
        mechanism: the levels and trials of the codes.
        digest: `parameters_digest` of mechanism, range and dimension.
        client, round: who sends it and when, from 0 to 2^64 - 1.
        dimension: number of codes, at least 1.
        coding: how the payload is written.
        seeded: True when the noise came from a seeded generator.
        payload_bytes: needed for entropy coding; fixed-width coding knows it.
    """

    def __init__(
        self,
        *,
        mechanism: Mechanism,
        digest: bytes,
        client: int,
        round: int,
        dimension: int,
        coding: Coding = Coding.FIXED,
        seeded: bool,
        payload_bytes: int | None = None,
    ) -> None:
        check_int("dimension", dimension, 1, MAX_DIMENSION)
        if len(digest) != DIGEST_BYTES:
            raise InvalidParameter(f"digest must be {DIGEST_BYTES} bytes, got {len(digest)}")
        fixed_bytes = layout(mechanism.code_count).payload_bytes(dimension)
        if payload_bytes is None:
            payload_bytes = fixed_bytes
        entropy = coding == Coding.ENTROPY
        most = fixed_bytes + ENTROPY_SLACK_BYTES if entropy else fixed_bytes
        check_int("payload_bytes", payload_bytes, 0 if entropy else fixed_bytes, most)
        self.header = Header(
            coding=Coding(coding),
            seeded=bool(seeded),
            digest=bytes(digest),
            client=check_int("client", client, 0, 2**64 - 1),
            round=check_int("round", round, 0, 2**64 - 1),
            dimension=int(dimension),
            mechanism=mechanism,
            payload_bytes=int(payload_bytes),
        )
        self._buffer = bytearray(HEADER_BYTES + payload_bytes)
        self.payload: Payload = np.frombuffer(self._buffer, np.uint8, offset=HEADER_BYTES)
        """The payload's bytes, writable in place, 16-byte aligned within the frame."""

    def seal(self) -> bytearray:
        """Write header and checksum; return the frame (the very buffer `payload` views: write no more to it)."""
        write_header(self.header, self._buffer)
        return self._buffer


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise InvalidParameter("a frame must be a contiguous buffer of bytes")
    return view.cast("B").toreadonly()


def read_frame(
    buffer: Buffer,
    *,
    dimension: int | None = None,
    max_dimension: int | None = None,
    mechanism: Mechanism | None = None,
    range: Range | None = None,
    digest: bytes | None = None,
    client: int | None = None,
    round: int | None = None,
) -> Frame:
    """Check a frame against its own header and against what the caller expects; the payload is not yet decoded.

    A server states at least `dimension` and either `range` (with the header's levels and trials, or those of
    `mechanism`) or `digest`, the `parameters_digest` it has computed once. Without `dimension`, an entropy-coded frame
    may hold `max_dimension` codes (2^24 if not stated).

    Raises:
        FrameError: one subclass a reason (`bqsgd.wire.errors`); nothing of the claimed size has been allocated.
    """
    view = _bytes_of(buffer)
    header = read_header(view)
    if dimension is not None and header.dimension != dimension:
        raise errors.WrongDimension(f"expected {dimension} coordinates, the frame holds {header.dimension}")
    if dimension is None and max_dimension is None and header.coding is Coding.ENTROPY:
        max_dimension = UNSTATED_MAX_DIMENSION
    if max_dimension is not None and header.dimension > max_dimension:
        raise errors.WrongDimension(f"at most {max_dimension} coordinates allowed, the frame claims {header.dimension}")
    if mechanism is not None and header.mechanism != mechanism:
        raise errors.WrongParameters(f"expected {mechanism}, the frame says {header.mechanism}")
    check_payload_length(header)
    if range is not None:
        if isinstance(range, np.ndarray) and range.shape != (header.dimension,):
            raise errors.WrongDimension(f"the range has shape {range.shape}, the frame {header.dimension} coordinates")
        _expect_digest(parameters_digest(header.mechanism, range=range, dimension=header.dimension), header)
    if digest is not None:
        _expect_digest(digest, header)
    if client is not None and header.client != client:
        raise errors.WrongOrigin(f"expected a frame of client {client}, got one of client {header.client}")
    if round is not None and header.round != round:
        raise errors.WrongOrigin(f"expected a frame of round {round}, got one of round {header.round}")
    return Frame(header=header, payload=np.frombuffer(view, np.uint8, offset=HEADER_BYTES))


def _expect_digest(expected: bytes, header: Header) -> None:
    if header.digest != expected:
        raise errors.WrongParameters(
            f"expected parameters digest {expected.hex()} (levels, trials, dimension, range), "
            f"got {header.digest.hex()} from a frame with levels={header.mechanism.levels}, "
            f"trials={header.mechanism.trials}"
        )
