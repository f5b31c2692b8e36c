"""Frames for the tests of this folder, and the whole way back from a frame to its codes."""

from __future__ import annotations

import numpy as np
import zstandard

from bqsgd._src.params import Kept, Mechanism, parameters_digest
from bqsgd._src.wire import entropy
from bqsgd._src.wire.fixed import Codes, FixedWidth
from bqsgd._src.wire.frame import CHECKED_HEADER_BYTES, Coding, FrameWriter, Header, checksum, read_frame

RANGE = 0.5


def codes_of(mechanism: Mechanism, dimension: int, rng: np.random.Generator, spread: float = 0.2) -> Codes:
    """Codes as the mechanism makes them, from Laplace-distributed values (not the library's own sampler)."""
    values = np.clip(rng.laplace(scale=spread, size=dimension), -1, 1) * mechanism.levels
    low = np.floor(values)
    rounded = low + (rng.random(dimension) < values - low)
    codes = rounded + mechanism.levels + rng.binomial(mechanism.trials, 0.5, dimension)
    return codes.astype(FixedWidth(mechanism.code_count).dtype)


def frame_of(
    codes: Codes,
    mechanism: Mechanism,
    coding: Coding,
    payload: bytes | None = None,
    seeded: bool = True,
    kept: Kept | None = None,
) -> bytes:
    header = Header(
        mechanism=mechanism,
        digest=parameters_digest(mechanism, range=RANGE, dimension=codes.size, kept=kept),
        client=7,
        round=3,
        dimension=codes.size,
        coding=coding,
        seeded=seeded,
        kept=kept,
    )
    if coding is Coding.ENTROPY and payload is None:
        payload = entropy.compress(codes, mechanism)
    writer = FrameWriter(header, payload)
    if payload is None:
        FixedWidth(mechanism.code_count).pack(codes, writer.payload)
    return bytes(writer.seal())


def zstd_payload(codes: Codes, low_bits: int) -> bytes:
    """A payload in zstandard's mode, which the encoder itself takes for long vectors only."""
    bins = codes.astype(np.int64) >> low_bits
    first = int(bins.min())
    low = np.empty((codes.size * low_bits + 7) // 8, np.uint8)
    if low_bits:
        stream = sum(int(c & (2**low_bits - 1)) << (i * low_bits) for i, c in enumerate(codes.tolist()))
        low[:] = np.frombuffer(stream.to_bytes(low.size, "little"), np.uint8)
    body = zstandard.ZstdCompressor(level=1).compress((bins - first).astype(np.uint8).tobytes())
    prefix = entropy.PREFIX.pack(entropy.Mode.ZSTD, low_bits, 0, first, int(bins.max()) - first + 1, 0)
    return prefix + low.tobytes() + body


def reseal(frame: bytes | bytearray) -> bytes:
    """The same bytes with the checksum that belongs to them."""
    if len(frame) < 80:
        return bytes(frame)
    value = checksum(memoryview(bytes(frame)))
    return bytes(frame[:CHECKED_HEADER_BYTES]) + value.to_bytes(8, "little") + bytes(frame[80:])


def decode_codes(frame: bytes, **expected: object) -> Codes:
    checked = read_frame(frame, **expected)
    head = checked.header
    if head.coding is Coding.FIXED:
        return FixedWidth(head.mechanism.code_count).unpack(checked.payload, head.dimension)
    return entropy.decompress(checked.payload, head.mechanism, head.dimension)
