"""Histograms of codes: how finely to bin them for the entropy coder, and the table of counts on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd.wire import bits
from bqsgd.wire.errors import BadPayload, CodeOutOfRange
from bqsgd.wire.fixed import Codes, Payload

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Bins of 2^low_bits codes: counts[i] codes lie in bin first + i; entropy_bytes is that of the codes themselves."""

    low_bits: int
    first: int
    counts: Counts
    entropy_bytes: float


def histogram(codes: Codes, code_count: int) -> Counts:
    """counts[c] = how often code c occurs, for c below code_count."""
    counts = np.zeros(code_count, np.int64)
    top = bits.count(bits.readonly(codes), counts)
    if top >= code_count:
        raise CodeOutOfRange(f"codes must be below {code_count}, got {top}")
    return counts


def _entropy_bits(counts: Counts) -> float:
    """d log2 d - sum n log2 n: the bits of d = sum n symbols under their own histogram."""
    seen = counts[counts > 0].astype(np.float64)
    total = seen.sum()
    return float(total * np.log2(total) - (seen * np.log2(seen)).sum())


def best_split(counts: Counts, max_bins: int) -> Split:
    """The binning that gives the fewest bits: table of counts, entropy of the bins, raw low bits."""
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
                best = Split(low_bits=low_bits, first=offset + first, counts=window.copy(), entropy_bytes=entropy_bytes)
                best_bits = cost
            if window.size == 1:
                break
        # The next bins are pairs of these, and a pair starts at an even bin.
        start = first - (offset + first) % 2
        padded = np.concatenate([np.zeros(max(0, -start), np.int64), counts[max(0, start) : last + 1]])
        counts = np.append(padded, np.zeros(padded.size % 2, np.int64)).reshape(-1, 2).sum(axis=1)
        offset = (offset + start) // 2
    assert best is not None  # the last split has one bin
    return best


def _table_bytes(counts: Counts) -> int:
    return counts.size + sum(int((counts >= 1 << shift).sum()) for shift in range(7, 63, 7))


def write_counts(counts: Counts) -> bytes:
    """Each count as a varint: seven bits a byte, low bits first, the top bit set on all bytes but the last."""
    table = bytearray()
    for count in counts.tolist():
        while count > 127:
            table.append((count & 127) | 128)
            count >>= 7
        table.append(count)
    return bytes(table)


def read_counts(table: Payload, bins: int, dimension: int) -> Counts:
    """The counts of a hostile table: exactly `bins` shortest varints, the outer ones not zero, `dimension` in all."""
    if not bins <= table.size <= 9 * bins:
        raise BadPayload(f"a table of {bins} counts has {bins} to {9 * bins} bytes, got {table.size}")
    counts, total = np.zeros(bins, np.int64), 0
    at, value, shift = 0, 0, 0
    for byte in table.tolist():
        value |= (byte & 127) << shift
        shift += 7
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
