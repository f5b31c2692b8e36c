"""A decoder of frame v1 written from docs/wire.md alone: slow, plain Python, sharing no code with bqsgd."""

from __future__ import annotations

import struct

import xxhash
import zstandard


def take_bits(data: bytes, position: int, width: int) -> int:
    """Bits [position, position + width) of the stream; bit i is bit i % 8 of byte i // 8, counted from the lowest."""
    return (int.from_bytes(data, "little") >> position) & ((1 << width) - 1)


def find_layout(count: int) -> tuple[int, int, int, int]:
    """(k, H, n, w) of "Fixed-width payload" in docs/wire.md."""
    width = (count - 1).bit_length()
    if 2 ** (1000 * width) <= count**1009:
        return width, 1, 1, 0
    longest = 124 if count in (61, 65, 121, 122, 129, 241, 242, 481) else 62
    candidates = []
    for k in range(width):
        base = -(-count // 2**k)
        for n in range(1, longest + 1):
            w = (base**n - 1).bit_length()
            if w <= longest and base ** ((n + 1) // 2) <= 2 ** (longest // 2):
                candidates.append(((n * k + w), n, -k, base, w))
    best = candidates[0]
    for other in candidates[1:]:
        ours, theirs = other[0] * best[1], best[0] * other[1]
        if ours < theirs or (ours == theirs and other[1:3] < best[1:3]):
            best = other
    bits, n, minus_k, base, w = best
    if bits >= n * width:
        return width, 1, 1, 0
    return -minus_k, base, n, w


def fixed_codes(payload: bytes, dimension: int, count: int) -> list[int]:
    k, base, n, w = find_layout(count)
    codes: list[int] = []
    position = 0
    while len(codes) < dimension:
        group = min(n, dimension - len(codes))
        word = take_bits(payload, position, w)
        position += w
        for _ in range(group):
            codes.append((word % base) * 2**k + take_bits(payload, position, k))
            word //= base
            position += k
        assert word == 0
    assert len(payload) == (position + 7) // 8
    assert take_bits(payload, position, 8) == 0
    return codes


def ans_bins(stream: bytes, counts: list[int], dimension: int) -> list[int]:
    if len(counts) == 1:
        assert not stream
        return [0] * dimension
    words = list(struct.unpack(f"<{len(stream) // 4}I", stream))
    # Quantised cumulative distribution, in IEEE double precision.
    scale = float(2**24 - len(counts)) / float(sum(counts))
    left = [int(float(sum(counts[:i])) * scale) + i for i in range(len(counts))] + [2**24]
    state = 0
    while state < 2**32 and words:
        state = state * 2**32 + words.pop()
    bins = []
    for _ in range(dimension):
        quantile = state % 2**24
        i = max(j for j in range(len(counts)) if left[j] <= quantile)
        state = (state // 2**24) * (left[i + 1] - left[i]) + quantile - left[i]
        if state < 2**32 and words:
            state = state * 2**32 + words.pop()
        bins.append(i)
    assert state == 0
    assert not words
    return bins


def entropy_codes(payload: bytes, dimension: int, count: int) -> list[int]:
    mode, k, _, first, bin_count, table_bytes = struct.unpack("<BBHIII", payload[:16])
    body = payload[16:]
    if mode == 0:
        return fixed_codes(body, dimension, count)
    table, low = body[:table_bytes], body[table_bytes : table_bytes + (dimension * k + 7) // 8]
    stream = body[table_bytes + len(low) :]
    if mode == 1:
        counts, value, shift = [], 0, 0
        for byte in table:
            value += (byte % 128) << shift
            shift += 7
            if byte < 128:
                counts.append(value)
                value = shift = 0
        assert len(counts) == bin_count
        bins = ans_bins(stream, counts, dimension)
    else:
        bins = list(zstandard.ZstdDecompressor().decompress(stream))
    return [((first + b) << k) + take_bits(low, j * k, k) for j, b in enumerate(bins)]


def read_law(packed: bytes) -> tuple[str, float]:
    """The law of the noise and its parameter. Its values are 0 to the header's `trials`."""
    number, zeros, parameter = struct.unpack("<B7sd", packed)
    assert zeros == bytes(7)
    assert parameter > 0
    return {1: "discrete gaussian", 2: "skellam", 3: "geometric"}[number], parameter


def decode(frame: bytes) -> dict[str, object]:
    magic, version, coding, flags, digest, client, round_, dimension, *more = struct.unpack(
        "<4sHBB16sQQQIIQIIQ", frame[:80]
    )
    levels, trials, length, points, width, checksum = more
    assert (magic, version) == (b"BQSG", 1)
    assert not flags & ~7
    kept = struct.unpack("<IIQ", frame[80:96]) if flags & 2 else None
    before_law = 96 if flags & 2 else 80
    start = before_law + (16 if flags & 4 else 0)
    law = read_law(frame[before_law:start]) if flags & 4 else None
    assert len(frame) == start + length
    assert xxhash.xxh3_64_intdigest(frame[:72] + frame[80:]) == checksum
    read = {1: fixed_codes, 2: entropy_codes}[coding]
    return {
        "seeded": bool(flags & 1),
        "kept": kept,
        "law": law,
        "digest": digest.hex(),
        "client": client,
        "round": round_,
        "levels": levels,
        "trials": trials,
        "coarsening": (points, width),
        "codes": read(frame[start:], dimension, points or 2 * levels + trials + 1),
    }
