"""Frame v1: the bytes of one message. Layout in docs/wire.md; everything little-endian.

Writing: `FrameWriter` allocates the frame once, lets the caller fill the payload in place, and seals it with header and
checksum. Reading: `read_frame` treats the buffer as hostile. It compares every stated length with the length of the
buffer, and the header with everything the caller expects, before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import xxhash

from bqsgd._src import errors
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.laws import PACKED, NoiseLaw, law_of_bytes
from bqsgd._src.params import DIGEST_BYTES, Coarsening, Kept, Mechanism, Range, check_int, parameters_digest
from bqsgd._src.wire.fixed import Payload, layout

_MAGIC = b"BQSG"
_VERSION = 1
_HEADER = struct.Struct("<4sHBB16sQQQIIQIIQ")
HEADER_BYTES = _HEADER.size
_ENTROPY_SLACK_BYTES = 16
"""An entropy-coded payload is at most this many bytes longer than the fixed-width payload of the same codes."""
_CHECKSUM = struct.Struct("<Q")
CHECKED_HEADER_BYTES = HEADER_BYTES - _CHECKSUM.size
_SEEDED, _SUBSET, _LAW = 1, 2, 4
_KEPT = struct.Struct("<IIQ")
"""Follows the header of a frame that carries a subset of the coordinates: one_in, rotated, model_dimension."""
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_UNSTATED_MAX_DIMENSION = 1 << 24
"""The most codes of an entropy-coded frame if the caller states no dimension: a few bytes may expand to many codes."""


def header_bytes(kept: Kept | None, noise: NoiseLaw | None = None) -> int:
    """Bytes before the payload of a frame."""
    return HEADER_BYTES + (0 if kept is None else _KEPT.size) + (0 if noise is None else PACKED.size)


class Coding(IntEnum):
    """How the payload holds the codes."""

    FIXED = 1
    ENTROPY = 2


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a frame.

    Attributes:
        coding: how the payload holds the codes.
        seeded: whether the noise came from a seeded generator, so that there is no privacy claim.
        digest: `parameters_digest` of mechanism, range and dimension.
        client, round: who sends the frame, and when; from 0 to 2^64 - 1.
        dimension: number of codes, at least 1.
        mechanism: the mechanism that made the codes.
        kept: which part of the model the codes are, None for all of it.
        payload_bytes: set by `FrameWriter`, and checked against `payload_limits` apart from the other fields.

    Raises:
        InvalidParameter: a field is out of range.
    """

    coding: Coding = Coding.FIXED
    seeded: bool
    digest: bytes
    client: int
    round: int
    dimension: int
    mechanism: Mechanism
    kept: Kept | None = None
    payload_bytes: int = 0

    def __post_init__(self) -> None:
        check_int("client", self.client, 0, 2**64 - 1)
        check_int("round", self.round, 0, 2**64 - 1)
        check_int("dimension", self.dimension, 1, 2**63 - 1)
        if len(self.digest) != DIGEST_BYTES:
            raise InvalidParameter(f"digest must be {DIGEST_BYTES} bytes, got {len(self.digest)}")
        if self.kept is not None and self.kept.dimension != self.dimension:
            raise InvalidParameter(f"{self.kept} has {self.kept.dimension} coordinates, the frame {self.dimension}")
        if self.mechanism.noise is not None:
            self.mechanism.noise.to_bytes()  # raises if no frame can carry this law

    @property
    def header_bytes(self) -> int:
        """Bytes before the payload."""
        return header_bytes(self.kept, self.mechanism.noise)

    @property
    def payload_limits(self) -> tuple[int, int]:
        """The fewest and the most bytes that the coding writes for this many codes; exact for every dimension."""
        fixed = layout(self.mechanism.code_count).payload_bytes(self.dimension)
        return (fixed, fixed) if self.coding is Coding.FIXED else (0, fixed + _ENTROPY_SLACK_BYTES)


def checksum(frame: memoryview) -> int:
    """The checksum of a frame: of the header up to the checksum, then the payload."""
    return checksum_of(frame[:CHECKED_HEADER_BYTES], frame[HEADER_BYTES:])


def checksum_of(head: bytes | memoryview, body: bytes | memoryview) -> int:
    """xxh3_64 (seed 0) of `head` followed by `body`. It finds accidents; anyone can forge it."""
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()


def _read_header(view: memoryview, law: bytes | None) -> Header:
    """Parse the header and check it, the length and the checksum of the frame. `law` is as in `_expected_law`."""
    if len(view) < HEADER_BYTES:
        raise errors.TruncatedFrame(f"a frame has at least {HEADER_BYTES} bytes, got {len(view)}")
    magic, version, coding, flags, *names, payload_bytes, points, width, stated = _HEADER.unpack_from(view)
    digest, client, round_, dimension, levels, trials = names
    if magic != _MAGIC:
        raise errors.BadMagic(f"a frame starts with {_MAGIC!r}, got {magic!r}")
    if version != _VERSION:
        raise errors.UnsupportedVersion(f"this reader knows frame version {_VERSION}, got {version}")
    # Length before checksum: the checksum reads the whole buffer, which must not be longer than the frame.
    before_law = HEADER_BYTES + (_KEPT.size if flags & _SUBSET else 0)
    header_bytes = before_law + (PACKED.size if flags & _LAW else 0)
    expected = header_bytes + payload_bytes
    if len(view) < expected:
        raise errors.TruncatedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if len(view) > expected:
        raise errors.OversizedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if (actual := checksum(view)) != stated:
        raise errors.ChecksumMismatch(f"the header states checksum {stated:016x}, the bytes give {actual:016x}")
    if coding not in (Coding.FIXED, Coding.ENTROPY):
        raise errors.BadHeader(f"coding must be 1 (fixed width) or 2 (entropy), got {coding}")
    if flags & ~(_SEEDED | _SUBSET | _LAW):
        raise errors.BadHeader(f"unknown flags must be 0, got flags {flags:#04x}")
    packed = bytes(view[before_law:header_bytes])
    # Before the law is made: a wide one takes some 40 ms and a megabyte, which a stranger must not make a server spend.
    if law is not None and packed != law:
        wanted = "that of the stated mechanism" if law else "binomial noise"
        raise errors.WrongParameters(f"the noise of this frame must be {wanted}; its header says otherwise")
    try:
        # Points and width are both 0 if the codes are not coarsened, as in all older frames.
        coarsening = Coarsening(points=points, width=width) if points or width else None
        kept = _read_kept(view) if flags & _SUBSET else None
        noise = law_of_bytes(packed) if flags & _LAW else None
        return Header(
            coding=Coding(coding),
            seeded=bool(flags & _SEEDED),
            digest=digest,
            client=client,
            round=round_,
            dimension=dimension,
            mechanism=Mechanism(levels=levels, trials=trials, coarsening=coarsening, noise=noise),
            kept=kept,
            payload_bytes=payload_bytes,
        )
    except InvalidParameter as error:
        raise errors.BadHeader(f"{error} (levels={levels}, trials={trials}, dimension={dimension})") from error


def _expected_law(mechanism: Mechanism | None, binomial: bool) -> bytes | None:
    """The law that a frame must name: its bytes, none for binomial noise; None if the reader takes every law."""
    if mechanism is None:
        return b"" if binomial else None
    return b"" if mechanism.noise is None else mechanism.noise.to_bytes()


def _read_kept(view: memoryview) -> Kept:
    one_in, rotated, model_dimension = _KEPT.unpack_from(view, HEADER_BYTES)
    if rotated not in (0, 1):
        raise InvalidParameter(f"rotated must be 0 or 1, got {rotated}")
    return Kept(one_in=one_in, rotated=bool(rotated), model_dimension=model_dimension)


class Expected(TypedDict, total=False):
    """What a reader may expect of a frame; None, or left out, for no expectation."""

    dimension: int | None
    mechanism: Mechanism | None
    range: Range | None
    kept: Kept | None
    client: int | None
    round: int | None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame whose header, length and checksum were checked by `read_frame`; `payload` is a view of the buffer.

    The codec takes a `Frame` wherever it takes a buffer, and does not repeat those checks.
    """

    header: Header
    payload: Payload

    def expect(self, **expected: Unpack[Expected]) -> Frame:
        """Return this frame if it agrees with everything stated here; see `read_frame` for arguments and errors."""
        header, dimension, mechanism = self.header, expected.get("dimension"), expected.get("mechanism")
        range, kept = expected.get("range"), expected.get("kept")
        client, round = expected.get("client"), expected.get("round")
        # The dimension comes first: the checks after it compute with it, and a digest over a vector of ranges reads
        # as many numbers as there are coordinates.
        if dimension is not None and header.dimension != dimension:
            raise errors.WrongDimension(f"expected {dimension} coordinates, the frame holds {header.dimension}")
        if mechanism is not None and header.mechanism != mechanism:
            raise errors.WrongParameters(f"expected {mechanism}, the frame says {header.mechanism}")
        fewest, most = header.payload_limits
        if not fewest <= header.payload_bytes <= most:
            coding = f"{header.coding.name.lower()} coding of {header.dimension} codes of {header.mechanism}"
            bytes_ = f"{most} bytes" if fewest == most else f"at most {most} bytes"
            raise errors.BadPayload(f"the {coding} takes {bytes_}, got {header.payload_bytes}")
        # Who states a range will decode the codes, and must know what they stand for.
        if (range is not None or kept is not None) and header.kept != kept:
            raise errors.WrongParameters(f"expected {kept or 'all coordinates'}, the frame has {header.kept or 'all'}")
        if range is not None:
            if isinstance(range, np.ndarray) and range.shape != (header.dimension,):
                raise errors.WrongDimension(
                    f"the range has shape {range.shape}, the frame {header.dimension} coordinates"
                )
            digest = parameters_digest(header.mechanism, range=range, dimension=header.dimension, kept=kept)
            if header.digest != digest:
                raise errors.WrongParameters(
                    f"expected parameters digest {digest.hex()} (levels, trials, dimension, range), "
                    f"got {header.digest.hex()} from a frame with levels={header.mechanism.levels}, "
                    f"trials={header.mechanism.trials}"
                )
        if client is not None and header.client != client:
            raise errors.WrongOrigin(f"expected a frame of client {client}, got one of client {header.client}")
        if round is not None and header.round != round:
            raise errors.WrongOrigin(f"expected a frame of round {round}, got one of round {header.round}")
        return self


class FrameWriter:
    """A frame to be written: fill `payload`, then call `seal`.

    Args:
        header: what the header says; the writer sets the length of the payload.
        payload: an entropy-coded payload. Without it, `payload` has room for the codes in fixed width.
    """

    def __init__(self, header: Header, payload: bytes | bytearray | None = None) -> None:
        fewest, most = header.payload_limits
        size = check_int("payload_bytes", most if payload is None else len(payload), fewest, most)
        self.header = replace(header, payload_bytes=size)
        self._buffer = bytearray(header.header_bytes + size)
        self.payload: Payload = np.frombuffer(self._buffer, np.uint8, offset=header.header_bytes)
        """The bytes of the payload, to be written in place; they start at a multiple of 16 within the frame."""
        if payload is not None:
            self.payload[:] = np.frombuffer(payload, np.uint8)

    def seal(self) -> bytearray:
        """Write header and checksum and return the frame. `payload` is a view of it: do not write to it any more."""
        header, mechanism = self.header, self.header.mechanism
        names = (header.digest, header.client, header.round, header.dimension)
        parameters = (mechanism.levels, mechanism.trials, header.payload_bytes)
        coarse = (0, 0) if mechanism.coarsening is None else (mechanism.coarsening.points, mechanism.coarsening.width)
        flags = (_SEEDED if header.seeded else 0) | (0 if header.kept is None else _SUBSET)
        flags |= 0 if mechanism.noise is None else _LAW
        _HEADER.pack_into(self._buffer, 0, _MAGIC, _VERSION, header.coding, flags, *names, *parameters, *coarse, 0)
        if header.kept is not None:
            kept = header.kept
            _KEPT.pack_into(self._buffer, HEADER_BYTES, kept.one_in, kept.rotated, kept.model_dimension)
        if mechanism.noise is not None:
            self._buffer[header.header_bytes - PACKED.size : header.header_bytes] = mechanism.noise.to_bytes()
        # Last, because it covers all other bytes of the frame.
        _CHECKSUM.pack_into(self._buffer, CHECKED_HEADER_BYTES, checksum(memoryview(self._buffer)))
        return self._buffer


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise InvalidParameter("a frame must be a contiguous buffer of bytes")
    return view.cast("B").toreadonly()


def read_frame(buffer: Buffer, *, binomial: bool = False, **expected: Unpack[Expected]) -> Frame:
    """Check a frame against its own header and against what the caller expects. The payload is not decoded yet.

    A server states at least `dimension` and `range`, and `binomial` if its clients add no noise of another law. If no
    `dimension` is stated, an entropy-coded frame may hold at most 2^24 codes.

    Raises:
        FrameError: one subclass for each reason (`bqsgd._src.errors`); nothing of the claimed size was allocated.
    """
    view = _bytes_of(buffer)
    header = _read_header(view, _expected_law(expected.get("mechanism"), binomial))
    unstated = header.coding is Coding.ENTROPY and expected.get("dimension") is None
    if unstated and header.dimension > _UNSTATED_MAX_DIMENSION:
        raise errors.WrongDimension(
            f"at most {_UNSTATED_MAX_DIMENSION} entropy-coded coordinates are read unless the reader states the "
            f"dimension; the frame claims {header.dimension}"
        )
    return Frame(header=header, payload=np.frombuffer(view, np.uint8, offset=header.header_bytes)).expect(**expected)
