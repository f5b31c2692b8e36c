"""Entropy coding: close to the entropy of the codes, and never more than 16 bytes longer than fixed width.

A code is split into a bin (its high bits) and `low_bits` raw bits. Noise makes the histogram smooth, so coarse bins
lose next to nothing and need a small table; the encoder takes the binning with the fewest bytes. The bins are
compressed by zstandard if that comes within 1.5 % of the entropy, because it is faster. Otherwise constriction's ANS
coder does it, with the histogram of the bins in the payload. If neither gains anything, the fixed-width payload is
stored.

Everything is computed from noised codes (post-processing), so it costs no privacy. But the length depends on the codes,
so it is only for a server that may see them: secure sums use fixed width. The layout is in docs/wire.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import constriction
import numpy as np
import numpy.typing as npt
import zstandard

from bqsgd._src.errors import BadPayload, CodeOutOfRange, InvalidParameter
from bqsgd._src.params import Codes, Mechanism, code_dtype
from bqsgd._src.wire import _bits
from bqsgd._src.wire.fixed import FixedWidth, Payload

PREFIX = struct.Struct("<BBHIII")
MAX_BINS = 1 << 16
_ZSTD_BINS = 256
_ZSTD_LEVEL = 1
_ZSTD_EXCESS = 1.015
"""zstandard is used if its payload is at most this many times the entropy of the codes."""
CHUNK_CODES = 1 << 18
"""Codes handled at a time; a multiple of 8, so that the low bits of each chunk start on a byte boundary."""
_Counts = npt.NDArray[np.int64]


class Mode(IntEnum):
    """What follows the prefix of an entropy-coded payload."""

    STORED = 0
    ANS = 1
    ZSTD = 2


@dataclass(frozen=True, kw_only=True)
class _Binning:
    """Bins of 2^low_bits codes: counts[i] codes lie in bin first + i. entropy_bytes is the entropy of the codes."""

    low_bits: int
    first: int
    counts: _Counts
    entropy_bytes: float


def histogram(codes: Codes, code_count: int) -> _Counts:
    """How often each code below code_count occurs.

    Raises:
        CodeOutOfRange: a code is not below code_count.
    """
    counts = np.zeros(code_count, np.int64)
    top = _bits.count(_bits.readonly(codes), counts)
    if top >= code_count:
        raise CodeOutOfRange(f"codes must be below {code_count}, got {top}")
    return counts


def _entropy_bits(counts: _Counts) -> float:
    """d log2 d - sum n log2 n: the bits of d = sum n symbols coded by their own histogram."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return float(total * np.log2(total) - (seen * np.log2(seen)).sum())


def best_binning(counts: _Counts, max_bins: int) -> _Binning:
    """The binning with the fewest bits in all: table of counts, entropy of the bins, raw low bits."""
    entropy_bytes = _entropy_bits(counts) / 8
    dimension = int(counts.sum())
    best, best_bits, offset = None, float("inf"), 0
    for low_bits in range(int(counts.size - 1).bit_length() + 1):
        used = np.flatnonzero(counts)
        first, last = int(used[0]), int(used[-1])
        window = counts[first : last + 1]
        if window.size <= max_bins:
            cost = 8 * _table_bytes(window) + _entropy_bits(window) + dimension * low_bits
            if cost < best_bits:
                best = _Binning(
                    low_bits=low_bits, first=offset + first, counts=window.copy(), entropy_bytes=entropy_bytes
                )
                best_bits = cost
            if window.size == 1:
                break
        # The next bins are pairs of these, and a pair must start at an even bin: pad both ends.
        start = first - (offset + first) % 2
        padded = np.concatenate([np.zeros(max(0, -start), np.int64), counts[max(0, start) : last + 1]])
        counts = np.append(padded, np.zeros(padded.size % 2, np.int64)).reshape(-1, 2).sum(axis=1)
        offset = (offset + start) // 2
    assert best is not None  # the last binning has a single bin
    return best


def _table_bytes(counts: _Counts) -> int:
    return counts.size + sum(int((counts >= 1 << shift).sum()) for shift in range(7, 63, 7))


def write_counts(counts: _Counts) -> bytes:
    """The counts as varints: seven bits per byte, low bits first, the top bit set in all bytes but the last."""
    table = bytearray()
    for count in counts.tolist():
        while count > 127:
            table.append((count & 127) | 128)
            count >>= 7
        table.append(count)
    return bytes(table)


def read_counts(table: Payload, bins: int, dimension: int) -> _Counts:
    """The counts in a table that a client sent.

    Raises:
        BadPayload: the table is not exactly `bins` varints in shortest form that add up to `dimension`, or its first or
            last count is zero.
    """
    # Only the shortest form is accepted, so that codes have exactly one payload.
    if not bins <= table.size <= 9 * bins:
        raise BadPayload(f"a table of {bins} counts has {bins} to {9 * bins} bytes, got {table.size}")
    counts, total = np.zeros(bins, np.int64), 0
    at, value, shift = 0, 0, 0
    for byte in table.tolist():
        value |= (byte & 127) << shift
        shift += 7
        # Nine bytes hold 63 bits; a tenth would overflow the counts.
        if byte & 128 and shift < 63:
            continue
        if at == bins or byte & 128 or (byte == 0 and shift > 7):
            raise BadPayload(f"the table must be {bins} varints of the shortest form, at most 9 bytes each")
        counts[at] = value
        total += value
        at, value, shift = at + 1, 0, 0
    if at != bins or shift or total != dimension or counts[0] == 0 or counts[-1] == 0:
        raise BadPayload(
            f"the table must be {bins} counts of {dimension} codes in all, the outer ones not zero; got {total}"
        )
    return counts


def compress(codes: Codes, mechanism: Mechanism) -> bytes | bytearray:
    """The entropy-coded payload of a vector of at least one code, in the dtype of `FixedWidth`.

    Raises:
        CodeOutOfRange: a code is not below the code count.
    """
    fixed = FixedWidth(mechanism.code_count)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype != fixed.dtype:
        raise InvalidParameter(f"codes must be 1-D of {fixed.dtype}, at least one, got {codes.shape} of {codes.dtype}")
    limit = fixed.payload_bytes(codes.size)
    counts = histogram(np.ascontiguousarray(codes), mechanism.code_count)
    binning = best_binning(counts, MAX_BINS)
    if binning.entropy_bytes < limit:
        low = _low_bits(codes, binning)
        if binning.counts.size <= _ZSTD_BINS:
            body = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(_bins(codes, binning, np.uint8).data)
            if PREFIX.size + len(low) + len(body) <= min(limit, _ZSTD_EXCESS * binning.entropy_bytes):
                return PREFIX.pack(Mode.ZSTD, binning.low_bits, 0, binning.first, binning.counts.size, 0) + low + body
        table, body = write_counts(binning.counts), _ans_encode(codes, binning)
        if PREFIX.size + len(table) + len(low) + len(body) <= limit:
            prefix = PREFIX.pack(Mode.ANS, binning.low_bits, 0, binning.first, binning.counts.size, len(table))
            return prefix + table + low + body
    payload = bytearray(PREFIX.size + limit)
    fixed.pack(codes, np.frombuffer(payload, np.uint8, offset=PREFIX.size))
    return payload


def _bins(codes: Codes, binning: _Binning, dtype: type[np.uint8] | type[np.int32]) -> npt.NDArray[np.integer]:
    return ((codes >> binning.low_bits) - codes.dtype.type(binning.first)).astype(dtype)


def _low_bits(codes: Codes, binning: _Binning) -> bytes:
    low = np.empty((codes.size * binning.low_bits + 7) // 8, np.uint8)
    mask = codes.dtype.type((1 << binning.low_bits) - 1)
    for start in range(0, codes.size if binning.low_bits else 0, CHUNK_CODES):
        piece = codes[start : start + CHUNK_CODES] & mask
        at = start * binning.low_bits // 8
        _bits.pack_plain(piece, low[at : at + (piece.size * binning.low_bits + 7) // 8], binning.low_bits)
    return low.tobytes()


def _ans_encode(codes: Codes, binning: _Binning) -> bytes:
    if binning.counts.size == 1:
        return b""
    coder, model = constriction.stream.stack.AnsCoder(), _model(binning.counts)
    # ANS is a stack: what is encoded last is decoded first, so chunks are encoded from the end.
    for start in reversed(range(0, codes.size, CHUNK_CODES)):
        coder.encode_reverse(_bins(codes[start : start + CHUNK_CODES], binning, np.int32), model)
    return bytes(coder.get_compressed().astype("<u4").tobytes())


def _model(counts: _Counts) -> constriction.stream.model.Categorical:
    # Writer and reader build the model from the same counts, so that both get the same probabilities.
    return constriction.stream.model.Categorical(counts.astype(np.float64), perfect=False)


def decompress(payload: Payload, mechanism: Mechanism, dimension: int) -> Codes:
    """The codes of an entropy-coded payload, checked.

    The caller must have bounded `dimension` (`read_frame` does): the result is allocated before all of it is checked.

    Raises:
        BadPayload: the payload is not what `compress` writes for this many codes.
        CodeOutOfRange: a code is not below the code count.
    """
    code_count = mechanism.code_count
    mode, low_bits, first, bins, table_bytes = _read_prefix(payload, code_count)
    body = payload[PREFIX.size :]
    if mode is Mode.STORED:
        return FixedWidth(code_count).unpack(body, dimension)
    low_end = table_bytes + (dimension * low_bits + 7) // 8
    if body.size < low_end:
        raise BadPayload(f"table and low bits take {low_end} bytes, got {body.size}")
    low, stream = body[table_bytes:low_end], body[low_end:]
    # Table and length are checked before the result is allocated: few bytes may claim many codes.
    if mode is Mode.ANS:
        pieces = _ans_pieces(stream, dimension, read_counts(body[:table_bytes], bins, dimension))
    else:
        pieces = _chunks(_zstd_decode(stream, dimension, bins))
    codes, at = np.empty(dimension, code_dtype(code_count)), 0
    for piece in pieces:
        raw = np.empty(piece.size if low_bits else 0, np.uint32)
        if low_bits:
            begin, end = at * low_bits // 8, ((at + piece.size) * low_bits + 7) // 8
            _, spare = _bits.unpack_plain(_bits.padded(low[begin:end]), raw, low_bits)
            if spare:
                raise BadPayload("the bits after the last low part must be zero")
        top = _bits.join(_bits.readonly(piece), raw, first, low_bits, codes[at : at + piece.size])
        if top >= code_count:
            raise CodeOutOfRange(f"codes must be below {code_count}, got {top}")
        at += piece.size
    return codes


def _read_prefix(payload: Payload, code_count: int) -> tuple[Mode, int, int, int, int]:
    """(mode, low_bits, first, bins, table_bytes), each within the limits of its mode."""
    if payload.size < PREFIX.size:
        raise BadPayload(f"an entropy-coded payload has at least {PREFIX.size} bytes, got {payload.size}")
    mode, low_bits, reserved, first, bins, table_bytes = PREFIX.unpack_from(payload.data)
    if mode not in (Mode.STORED, Mode.ANS, Mode.ZSTD) or reserved:
        raise BadPayload(f"mode must be 0, 1 or 2 and the reserved bytes 0, got {mode} and {reserved}")
    if mode == Mode.STORED:
        if low_bits or first or bins or table_bytes:
            raise BadPayload("a stored payload has zeros after its mode")
    else:
        last = (code_count - 1) >> low_bits
        most = MAX_BINS if mode == Mode.ANS else _ZSTD_BINS
        if low_bits > (code_count - 1).bit_length() or not 1 <= bins <= most or first + bins - 1 > last:
            raise BadPayload(
                f"codes below {code_count} have at most {most} bins up to {last} at {low_bits} low bits, "
                f"got {bins} bins from {first}"
            )
        if mode == Mode.ZSTD and table_bytes:
            raise BadPayload(f"a zstandard payload has no table, got {table_bytes} bytes")
    return Mode(mode), low_bits, first, bins, table_bytes


def _chunks(array: npt.NDArray[np.integer]) -> Iterator[npt.NDArray[np.integer]]:
    return (array[start : start + CHUNK_CODES] for start in range(0, array.size, CHUNK_CODES))


def _ans_pieces(stream: Payload, dimension: int, counts: _Counts) -> Iterator[npt.NDArray[np.integer]]:
    """The bins of an ANS stream, chunk by chunk. Some faults show, and are raised, only after the last chunk."""
    if stream.size % 4 or (counts.size == 1 and stream.size):
        raise BadPayload(f"the ANS stream must be whole words, and empty for a single bin; got {stream.size} bytes")
    if counts.size == 1:
        yield from _chunks(np.zeros(dimension, np.int32))
        return
    words = np.frombuffer(stream.tobytes(), "<u4").astype(np.uint32)
    # constriction raises ValueError for a last word of zero, which no writer produces.
    if words.size and words[-1] == 0:
        raise BadPayload("the last ANS word must not be zero")
    coder, model = constriction.stream.stack.AnsCoder(words), _model(counts)
    seen = np.zeros(counts.size, np.int64)
    for start in range(0, dimension, CHUNK_CODES):
        piece = coder.decode(model, min(CHUNK_CODES, dimension - start))
        seen += np.bincount(piece, minlength=counts.size)
        yield piece
    if not coder.is_empty():
        raise BadPayload("the ANS stream continues after the last code")
    # Any words decode to some codes. Only the counts show that these are the codes that were encoded.
    if not np.array_equal(seen, counts):
        raise BadPayload("the codes in the ANS stream do not have the counts of its table")


def _zstd_decode(stream: Payload, dimension: int, bins: int) -> npt.NDArray[np.integer]:
    try:
        size = zstandard.get_frame_parameters(stream.data).content_size
        # Before decompressing, because the library allocates what the frame claims.
        if size != dimension:
            raise BadPayload(f"the zstandard frame must hold {dimension} bytes, it claims {size}")
        data = zstandard.ZstdDecompressor().decompress(stream.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadPayload(f"the zstandard frame is damaged: {error}") from error
    indices = np.frombuffer(data, np.uint8)
    if indices.size != dimension or indices.max() >= bins:
        raise BadPayload(f"the zstandard frame must hold {dimension} bins below {bins}")
    return indices
