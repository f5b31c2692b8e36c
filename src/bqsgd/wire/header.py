"""The 80-byte header of frame v1 (layout in docs/wire.md): written from checked values, read as hostile bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from bqsgd.errors import InvalidParameter
from bqsgd.params import MAX_LEVELS, MAX_TRIALS, Coarsening, Mechanism
from bqsgd.wire import errors
from bqsgd.wire.fixed import layout

MAGIC = b"BQSG"
VERSION = 1
HEADER = struct.Struct("<4sHBB16sQQQIIQIIQ")
HEADER_BYTES = HEADER.size
ENTROPY_SLACK_BYTES = 16
"""An entropy-coded payload is at most this much longer than the fixed-width payload of the same codes."""
MAX_DIMENSION = 2**63 - 1
_CHECKSUM = struct.Struct("<Q")
CHECKED_HEADER_BYTES = HEADER_BYTES - _CHECKSUM.size
_SEEDED = 1


class Coding(IntEnum):
    """How the payload holds the codes."""

    FIXED = 1
    ENTROPY = 2


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a frame says about itself; `seeded` marks noise from a seeded generator (no privacy claim)."""

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
    """xxh3_64 (seed 0) of the header up to the checksum, then the payload. Guards against accidents, not forgery."""
    state = xxhash.xxh3_64(frame[:CHECKED_HEADER_BYTES])
    state.update(frame[HEADER_BYTES:])
    return state.intdigest()


def write_header(header: Header, frame: bytearray) -> None:
    """Write the header and then the checksum over a frame whose payload is in place."""
    parameters = (header.mechanism.levels, header.mechanism.trials, header.payload_bytes)
    names = (header.digest, header.client, header.round, header.dimension)
    flags = _SEEDED if header.seeded else 0
    coarsening = header.mechanism.coarsening
    coarse = (0, 0) if coarsening is None else (coarsening.points, coarsening.width)
    HEADER.pack_into(frame, 0, MAGIC, VERSION, header.coding, flags, *names, *parameters, *coarse, 0)
    _CHECKSUM.pack_into(frame, CHECKED_HEADER_BYTES, checksum(memoryview(frame)))


def read_header(view: memoryview) -> Header:
    """Parse and check the header alone, then length and checksum of the whole frame."""
    if len(view) < HEADER_BYTES:
        raise errors.TruncatedFrame(f"a frame has at least {HEADER_BYTES} bytes, got {len(view)}")
    magic, version, coding, flags, *names, payload_bytes, points, width, stated = HEADER.unpack_from(view)
    digest, client, round_, dimension, levels, trials = names
    if magic != MAGIC:
        raise errors.BadMagic(f"a frame starts with {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise errors.UnsupportedVersion(f"this reader knows frame version {VERSION}, got {version}")
    expected = HEADER_BYTES + payload_bytes
    if len(view) < expected:
        raise errors.TruncatedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if len(view) > expected:
        raise errors.OversizedFrame(f"the header announces a frame of {expected} bytes, got {len(view)}")
    if (found := checksum(view)) != stated:
        raise errors.ChecksumMismatch(f"the header states checksum {stated:016x}, the bytes give {found:016x}")
    if coding not in (Coding.FIXED, Coding.ENTROPY):
        raise errors.BadHeader(f"coding must be 1 (fixed width) or 2 (entropy), got {coding}")
    if flags & ~_SEEDED:
        raise errors.BadHeader(f"unknown flags must be 0, got flags {flags:#04x}")
    if not (1 <= levels <= MAX_LEVELS and trials <= MAX_TRIALS):
        raise errors.BadHeader(f"levels must be 1 to {MAX_LEVELS}, trials 0 to {MAX_TRIALS}, got {levels}, {trials}")
    if not 1 <= dimension <= MAX_DIMENSION:
        raise errors.BadHeader(f"dimension must be 1 to {MAX_DIMENSION}, got {dimension}")
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
    """Points and width are both 0 where the codes are not coarsened (all frames before there was a coarsening)."""
    try:
        coarsening = Coarsening(points=points, width=width) if points or width else None
        return Mechanism(levels=levels, trials=trials, coarsening=coarsening)
    except InvalidParameter as error:
        raise errors.BadHeader(f"{error} (levels={levels}, trials={trials})") from error


def check_payload_length(header: Header) -> None:
    """Refuse a payload length that the coding never gives this many codes, in exact integers."""
    fixed = layout(header.mechanism.code_count).payload_bytes(header.dimension)
    if header.coding is Coding.FIXED and header.payload_bytes != fixed:
        raise errors.BadPayload(
            f"{header.dimension} codes of {header.mechanism} take {fixed} bytes, got {header.payload_bytes}"
        )
    if header.payload_bytes > fixed + ENTROPY_SLACK_BYTES:
        raise errors.BadPayload(
            f"entropy coding never takes more than {fixed + ENTROPY_SLACK_BYTES} bytes here, got {header.payload_bytes}"
        )
