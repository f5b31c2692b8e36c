"""Mutated frames: each is decoded to valid codes or refused with a FrameError, and memory stays small.

The quick tests try 20,000 of them, and every byte of the smallest frames; the slow ones a million, and every value.
"""

from __future__ import annotations

import collections
import functools
import random
import resource
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_frames import RANGE, codes_of, decode_codes, frame_of, reseal, zstd_payload

from bqsgd._src import errors
from bqsgd._src.errors import FrameError
from bqsgd._src.params import Coarsening, Kept, Mechanism
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import Coding, read_frame

MUTANTS = 20_000
FIELDS = [
    (4, "H"),
    (6, "B"),
    (7, "B"),
    (24, "Q"),
    (32, "Q"),
    (40, "Q"),
    (48, "I"),
    (52, "I"),
    (56, "Q"),
    (64, "I"),
    (68, "I"),
]
SUBSET_FIELDS = [(80, "I"), (84, "I"), (88, "Q")]
PREFIX_FIELDS = [(80, "B"), (81, "B"), (82, "H"), (84, "I"), (88, "I"), (92, "I")]
SIZES = {"B": 8, "H": 16, "I": 32, "Q": 64}


@functools.cache
def corpus() -> list[bytes]:
    rng, frames = np.random.default_rng(2), []
    for levels, trials in [(2, 251), (1, 251), (52, 16279), (1, 0), (7, 0), (1, 254), (32, 0), (3, 65533), (9, 2**17)]:
        mechanism = Mechanism(levels=levels, trials=trials)
        for dimension in (1, 37, 260):
            codes = codes_of(mechanism, dimension, rng)
            frames.append(frame_of(codes, mechanism, Coding.FIXED))
            frames.append(frame_of(codes, mechanism, Coding.ENTROPY))
        low_bits = max(0, (mechanism.code_count - 1).bit_length() - 6)
        if trials:  # few codes without noise: zstandard does not pay
            frames.append(frame_of(codes, mechanism, Coding.ENTROPY, zstd_payload(codes, low_bits)))
    for points in (4, 8, 16, 64, 100):
        mechanism = Mechanism(levels=10, trials=189, coarsening=Coarsening(points=points, width=60))
        for dimension in (1, 37, 260):
            codes = rng.binomial(points - 1, 0.5, dimension).astype(np.uint8)
            frames.append(frame_of(codes, mechanism, Coding.FIXED))
            frames.append(frame_of(codes, mechanism, Coding.ENTROPY))
            kept = Kept(one_in=10, rotated=points > 8, model_dimension=10 * dimension)
            frames.append(frame_of(codes, mechanism, Coding.FIXED, kept=kept))
    return frames


def mutate(frame: bytes, other: bytes, rng: random.Random) -> bytes:
    data = bytearray(frame)
    kind = rng.randrange(10)
    if kind <= 2:  # bit flips, mostly in the payload
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(80, len(data)) if rng.random() < 0.8 else rng.randrange(len(data))
            data[at] ^= 1 << rng.randrange(8)
    elif kind == 3:  # truncation
        del data[rng.randrange(len(data)) :]
    elif kind == 4:  # extension
        data += rng.randbytes(rng.randint(1, 64))
    elif kind == 5:  # a field of the header, of the entropy prefix
        fields = FIELDS + [f for f in PREFIX_FIELDS + SUBSET_FIELDS if f[0] + SIZES[f[1]] // 8 <= len(data)]
        at, fmt = rng.choice(fields)
        old = struct.unpack_from("<" + fmt, data, at)[0]
        value = rng.choice([0, 1, old + 1, old - 1, old * 2, 2**60, rng.getrandbits(16), rng.getrandbits(64)])
        struct.pack_into("<" + fmt, data, at, value % 2 ** SIZES[fmt])
    elif kind == 6:  # a run of one byte
        at = rng.randrange(len(data))
        data[at : at + rng.randint(1, 16)] = bytes([rng.choice([0, 1, 127, 128, 255])]) * rng.randint(1, 16)
    elif kind == 7:  # the head of one frame, the tail of another
        data = bytearray(data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :])
    elif kind == 8:  # another payload
        data[80:] = other[80:]
    else:
        data = bytearray(rng.randbytes(rng.randint(0, 200)))
        if rng.random() < 0.5:
            data = bytearray(frame[:80] + data)
    if rng.random() < 0.75 and len(data) >= 80:
        if rng.random() < 0.8:
            subset = 16 if data[7] & 2 and len(data) >= 96 else 0
            struct.pack_into("<Q", data, 56, len(data) - 80 - subset)
        return reseal(data)
    return bytes(data)


def outcome(frame: bytes, **expected: object) -> str:
    """The name of the error, or "valid" after checking what was decoded."""
    try:
        codes = decode_codes(frame, **expected)
    except FrameError as error:
        return type(error).__name__
    head = read_frame(frame).header
    coder = FixedWidth(head.mechanism.code_count)
    assert (codes.size, codes.dtype) == (head.dimension, coder.dtype)
    assert int(codes.max()) < head.mechanism.code_count
    if head.coding is Coding.FIXED:  # one byte string a code vector
        out = np.empty(coder.payload_bytes(codes.size), np.uint8)
        coder.pack(codes, out)
        assert out.tobytes() == frame[head.header_bytes :]
    return "valid"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mutants", [MUTANTS, pytest.param(50 * MUTANTS, marks=pytest.mark.slow)])
def test_mutants_are_decoded_or_refused(mutants: int) -> None:
    frames, rng = corpus(), random.Random(20240607)
    for frame in frames:  # compiles every kernel before memory is looked at
        assert outcome(frame, range=RANGE, kept=read_frame(frame).header.kept) == "valid"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(mutants):
        frame, other = rng.choice(frames), rng.choice(frames)
        expected: dict[str, object] = {}
        if rng.random() < 0.3:
            expected = {"dimension": struct.unpack_from("<Q", frame, 40)[0], "range": RANGE, "client": 7}
        seen[outcome(mutate(frame, other, rng), **expected)] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{seen.total():,} mutants, {grown:.0f} MiB more: {dict(seen.most_common())}")
    assert grown < 64
    names = {kind.__name__ for kind in errors.FrameError.__subclasses__()} - {"ModelMessageError"}
    assert set(seen) == {*names, "valid"}, "every reason must be reached, else the fuzzing is too shallow"
    assert seen["valid"] > mutants / 200
    assert seen["BadPayload"] > mutants / 20


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_byte_of_the_smallest_frames(every: bool) -> None:
    """Whatever stands in one byte, with a checksum that fits: decoded or refused. Without one: always refused."""
    coarse = Mechanism(levels=10, trials=189, coarsening=Coarsening(points=4, width=60))
    rng = np.random.default_rng(4)
    fixed = frame_of(codes_of(Mechanism(levels=2, trials=3), 1, rng), Mechanism(levels=2, trials=3), Coding.FIXED)
    smallest = [
        fixed,
        frame_of(codes_of(Mechanism(levels=2, trials=251), 2, rng), Mechanism(levels=2, trials=251), Coding.ENTROPY),
        frame_of(np.array([3, 0], np.uint8), coarse, Coding.FIXED),
        frame_of(
            codes_of(Mechanism(levels=2, trials=3), 1, rng),
            Mechanism(levels=2, trials=3),
            Coding.FIXED,
            kept=Kept(one_in=2, rotated=True, model_dimension=2),
        ),
    ]
    assert len(fixed) == 81
    for frame in smallest:
        for position, byte in enumerate(frame):
            flips = {byte ^ 1 << bit for bit in range(8)} | {0, 127, 255, (byte + 1) % 256, (byte - 1) % 256}
            for value in range(256) if every else flips:
                changed = bytearray(frame)
                changed[position] = value
                outcome(reseal(changed))
                if value != byte:
                    assert outcome(bytes(changed)) != "valid"


def test_no_mutant_allocates_more_than_the_codes_it_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bqsgd._src.wire.frame._UNSTATED_MAX_DIMENSION", 1 << 16)
    frames, rng = corpus(), random.Random(11)
    for frame in frames:
        outcome(frame)
    tracemalloc.start()
    try:
        for _ in range(3000):
            outcome(mutate(rng.choice(frames), rng.choice(frames), rng))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@given(data=st.binary(max_size=300), index=st.integers(0, 1000), sealed=st.booleans())
@settings(max_examples=500)
def test_any_bytes_behind_any_header(data: bytes, index: int, sealed: bool) -> None:
    frames = corpus()
    assert outcome(data) in ("TruncatedFrame", "BadMagic")
    frame = bytearray(frames[index % len(frames)][:80] + data)
    struct.pack_into("<Q", frame, 56, len(data))
    assert outcome(reseal(frame) if sealed else bytes(frame))
