"""Frame v1: the bytes of one message. Layout in docs/wire.md; everything little-endian.

Writing: `FrameWriter` allocates the frame once, lets the caller fill the payload in place, and seals it with header and
checksum. Reading: `read_frame` treats the buffer as hostile. It compares every stated length with the length of the
buffer, and the header with everything the caller expects, before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import xxhash

from bqsgd._src import errors
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import (
    DIGEST_BYTES,
    MAX_LEVELS,
    MAX_TRIALS,
    Coarsening,
    Mechanism,
    Range,
    check_int,
    parameters_digest,
)
from bqsgd._src.wire.fixed import Payload, layout

_MAGIC = b"BQSG"
_VERSION = 1
_HEADER = struct.Struct("<4sHBB16sQQQIIQIIQ")
HEADER_BYTES = _HEADER.size
_ENTROPY_SLACK_BYTES = 16
"""An entropy-coded payload is at most this many bytes longer than the fixed-width payload of the same codes."""
_MAX_DIMENSION = 2**63 - 1
_CHECKSUM = struct.Struct("<Q")
CHECKED_HEADER_BYTES = HEADER_BYTES - _CHECKSUM.size
_SEEDED = 1
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
_UNSTATED_MAX_DIMENSION = 1 << 24
"""Most codes of an entropy-coded frame if the caller states no limit: a few bytes may expand to many codes."""


class Coding(IntEnum):
    """How the payload holds the codes."""

    FIXED = 1
    ENTROPY = 2


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a frame. `seeded` means that the noise came from a seeded generator: no privacy claim."""

    coding: Coding
    seeded: bool
    digest: bytes
    client: int
    round: int
    dimension: int
    mechanism: Mechanism
    payload_bytes: int
    checksum: int = 0


def checksum(frame: memoryview) -> int:
    """The checksum of a frame: of the header up to the checksum, then the payload."""
    return checksum_of(frame[:CHECKED_HEADER_BYTES], frame[HEADER_BYTES:])


def checksum_of(head: bytes | memoryview, body: bytes | memoryview) -> int:
    """xxh3_64 (seed 0) of `head` followed by `body`. It finds accidents; anyone can forge it."""
    state = xxhash.xxh3_64(head)
    state.update(body)
    return state.intdigest()


def _write_header(header: Header, frame: bytearray) -> None:
    """Write the header, then the checksum, of a frame whose payload is complete."""
    parameters = (header.mechanism.levels, header.mechanism.trials, header.payload_bytes)
    names = (header.digest, header.client, header.round, header.dimension)
    flags = _SEEDED if header.seeded else 0
    coarsening = header.mechanism.coarsening
    coarse = (0, 0) if coarsening is None else (coarsening.points, coarsening.width)
    _HEADER.pack_into(frame, 0, _MAGIC, _VERSION, header.coding, flags, *names, *parameters, *coarse, 0)
    _CHECKSUM.pack_into(frame, CHECKED_HEADER_BYTES, checksum(memoryview(frame)))


def _read_header(view: memoryview) -> Header:
    """Parse the header and check it, the length and the checksum of the frame. Nothing here depends on expectations."""
    if len(view) < HEADER_BYTES:
        raise errors.TruncatedFrame(f"a frame has at least {HEADER_BYTES} bytes, got {len(view)}")
    magic, version, coding, flags, *names, payload_bytes, points, width, stated = _HEADER.unpack_from(view)
    digest, client, round_, dimension, levels, trials = names
    if magic != _MAGIC:
        raise errors.BadMagic(f"a frame starts with {_MAGIC!r}, got {magic!r}")
    if version != _VERSION:
        raise errors.UnsupportedVersion(f"this reader knows frame version {_VERSION}, got {version}")
    # Length before checksum: the checksum reads the whole buffer, which must not be longer than the frame.
    expected = HEADER_BYTES + payload_bytes
    if len(view) < expected:
        raise errors.TruncatedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if len(view) > expected:
        raise errors.OversizedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if (actual := checksum(view)) != stated:
        raise errors.ChecksumMismatch(f"the header states checksum {stated:016x}, the bytes give {actual:016x}")
    if coding not in (Coding.FIXED, Coding.ENTROPY):
        raise errors.BadHeader(f"coding must be 1 (fixed width) or 2 (entropy), got {coding}")
    if flags & ~_SEEDED:
        raise errors.BadHeader(f"unknown flags must be 0, got flags {flags:#04x}")
    if not (1 <= levels <= MAX_LEVELS and trials <= MAX_TRIALS):
        raise errors.BadHeader(f"levels must be 1 to {MAX_LEVELS}, trials 0 to {MAX_TRIALS}, got {levels}, {trials}")
    if not 1 <= dimension <= _MAX_DIMENSION:
        raise errors.BadHeader(f"dimension must be 1 to {_MAX_DIMENSION}, got {dimension}")
    return Header(
        coding=Coding(coding),
        seeded=bool(flags & _SEEDED),
        digest=digest,
        client=client,
        round=round_,
        dimension=dimension,
        mechanism=_mechanism(levels, trials, points, width),
        payload_bytes=payload_bytes,
        checksum=stated,
    )


def _mechanism(levels: int, trials: int, points: int, width: int) -> Mechanism:
    """The mechanism of a header. Points and width are both 0 if the codes are not coarsened, as in all older frames."""
    try:
        coarsening = Coarsening(points=points, width=width) if points or width else None
        return Mechanism(levels=levels, trials=trials, coarsening=coarsening)
    except InvalidParameter as error:
        raise errors.BadHeader(f"{error} (levels={levels}, trials={trials})") from error


def _check_payload_length(header: Header) -> None:
    """Raise BadPayload if the coding never writes so many bytes for so many codes. Exact for every dimension."""
    fixed = layout(header.mechanism.code_count).payload_bytes(header.dimension)
    if header.coding is Coding.FIXED and header.payload_bytes != fixed:
        raise errors.BadPayload(
            f"{header.dimension} codes of {header.mechanism} take {fixed} bytes, got {header.payload_bytes}"
        )
    most = fixed + _ENTROPY_SLACK_BYTES
    if header.payload_bytes > most:
        raise errors.BadPayload(f"entropy coding never takes more than {most} bytes here, got {header.payload_bytes}")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A frame whose header, length and checksum were checked by `read_frame`; `payload` is a view of the buffer.

    The codec takes a `Frame` wherever it takes a buffer, and does not repeat those checks.
    """

    header: Header
    payload: Payload

    def expect(
        self,
        *,
        dimension: int | None = None,
        max_dimension: int | None = None,
        mechanism: Mechanism | None = None,
        range: Range | None = None,
        digest: bytes | None = None,
        client: int | None = None,
        round: int | None = None,
    ) -> Frame:
        """Return this frame if it agrees with everything stated here; see `read_frame` for arguments and errors."""
        header = self.header
        # The dimension comes first: the checks after it compute with it, and a digest over a vector of ranges reads
        # as many numbers as there are coordinates.
        if dimension is not None and header.dimension != dimension:
            raise errors.WrongDimension(f"expected {dimension} coordinates, the frame holds {header.dimension}")
        if max_dimension is not None and header.dimension > max_dimension:
            raise errors.WrongDimension(
                f"at most {max_dimension} coordinates allowed, the frame claims {header.dimension}"
            )
        if mechanism is not None and header.mechanism != mechanism:
            raise errors.WrongParameters(f"expected {mechanism}, the frame says {header.mechanism}")
        _check_payload_length(header)
        if range is not None:
            if isinstance(range, np.ndarray) and range.shape != (header.dimension,):
                raise errors.WrongDimension(
                    f"the range has shape {range.shape}, the frame {header.dimension} coordinates"
                )
            _expect_digest(parameters_digest(header.mechanism, range=range, dimension=header.dimension), header)
        if digest is not None:
            _expect_digest(digest, header)
        if client is not None and header.client != client:
            raise errors.WrongOrigin(f"expected a frame of client {client}, got one of client {header.client}")
        if round is not None and header.round != round:
            raise errors.WrongOrigin(f"expected a frame of round {round}, got one of round {header.round}")
        return self


class FrameWriter:
    """A frame to be written: fill `payload`, then call `seal`.

    Args:
        mechanism: the mechanism that made the codes.
        digest: `parameters_digest` of mechanism, range and dimension.
        client, round: who sends it, and when; from 0 to 2^64 - 1.
        dimension: number of codes, at least 1.
        coding: how the payload is written.
        seeded: whether the noise came from a seeded generator.
        payload_bytes: length of an entropy-coded payload; that of a fixed-width one is known.
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
        check_int("dimension", dimension, 1, _MAX_DIMENSION)
        if len(digest) != DIGEST_BYTES:
            raise InvalidParameter(f"digest must be {DIGEST_BYTES} bytes, got {len(digest)}")
        fixed_bytes = layout(mechanism.code_count).payload_bytes(dimension)
        if payload_bytes is None:
            payload_bytes = fixed_bytes
        entropy = coding == Coding.ENTROPY
        most = fixed_bytes + _ENTROPY_SLACK_BYTES if entropy else fixed_bytes
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
        """The bytes of the payload, to be written in place; they start at a multiple of 16 within the frame."""

    def seal(self) -> bytearray:
        """Write header and checksum and return the frame. `payload` is a view of it: do not write to it any more."""
        _write_header(self.header, self._buffer)
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
    """Check a frame against its own header and against what the caller expects. The payload is not decoded yet.

    A server states at least `dimension`, and either `range` or the `digest` that it computed once with
    `parameters_digest`. An entropy-coded frame may hold `max_dimension` codes, 2^24 by default, if no `dimension` is
    stated.

    Raises:
        FrameError: one subclass for each reason (`bqsgd._src.errors`); nothing of the claimed size was allocated.
    """
    view = _bytes_of(buffer)
    header = _read_header(view)
    if dimension is None and max_dimension is None and header.coding is Coding.ENTROPY:
        max_dimension = _UNSTATED_MAX_DIMENSION
    frame = Frame(header=header, payload=np.frombuffer(view, np.uint8, offset=HEADER_BYTES))
    return frame.expect(
        dimension=dimension,
        max_dimension=max_dimension,
        mechanism=mechanism,
        range=range,
        digest=digest,
        client=client,
        round=round,
    )


def _expect_digest(expected: bytes, header: Header) -> None:
    if header.digest != expected:
        raise errors.WrongParameters(
            f"expected parameters digest {expected.hex()} (levels, trials, dimension, range), "
            f"got {header.digest.hex()} from a frame with levels={header.mechanism.levels}, "
            f"trials={header.mechanism.trials}"
        )
