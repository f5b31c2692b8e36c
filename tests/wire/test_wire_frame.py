"""Frames: what is written is read back, and every fault has its own error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire_reference
from wire_frames import RANGE, codes_of, decode_codes, frame_of, reseal

from bqsgd._src import errors
from bqsgd._src.errors import FrameError, InvalidParameter
from bqsgd._src.laws import law_from
from bqsgd._src.params import Coarsening, Kept, Mechanism, parameters_digest
from bqsgd._src.wire.frame import HEADER_BYTES, Coding, FrameWriter, Header, read_frame

MECHANISM = Mechanism(levels=2, trials=251)
CODES = codes_of(MECHANISM, 50, np.random.default_rng(0))
FRAME = frame_of(CODES, MECHANISM, Coding.FIXED)
KEPT = Kept(one_in=10, rotated=True, model_dimension=500)
SUBSET = frame_of(CODES, MECHANISM, Coding.FIXED, kept=KEPT)

GOLDEN = json.loads(Path(__file__).with_name("golden_frames.json").read_text())
"""Frames written once and for all, client 7, round 3, seeded; how to read them: docs/wire.md."""


@pytest.mark.parametrize("golden", GOLDEN, ids=[golden["name"] for golden in GOLDEN])
def test_golden_frames(golden: dict[str, Any]) -> None:
    codes, coding, data = golden["codes"], Coding[golden["coding"].upper()], bytes.fromhex(golden["frame"])
    noise = law_from(golden["noise"]) if "noise" in golden else None
    mechanism = Mechanism(levels=golden["levels"], trials=golden["trials"], noise=noise)
    kept = Kept(**golden["kept"]) if "kept" in golden else None
    expected = {"dimension": len(codes), "range": RANGE, "mechanism": mechanism, "kept": kept, "client": 7, "round": 3}
    assert decode_codes(data, **expected).tolist() == codes
    found = wire_reference.decode(data)
    assert found["digest"] == parameters_digest(mechanism, range=RANGE, dimension=len(codes), kept=kept).hex()
    assert found["kept"] == ((kept.one_in, kept.rotated, kept.model_dimension) if kept else None)
    assert found["law"] == (tuple(golden["noise"].values()) if noise else None)
    assert (found["levels"], found["trials"]) == (mechanism.levels, mechanism.trials)
    assert (found["client"], found["round"], found["seeded"], found["codes"]) == (7, 3, True, codes)
    array = np.array(codes, dtype=np.min_scalar_type(mechanism.code_count - 1))
    # zstandard's bytes may differ between its releases; only the meaning of its frames is fixed.
    start = 80 + 16 * (kept is not None) + 16 * (noise is not None)
    payload = data[start:] if coding is Coding.ENTROPY and data[start] == 2 else None
    assert frame_of(array, mechanism, coding, payload, kept=kept) == data


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("coding", Coding)
def test_coarse_frames_take_their_bits_and_are_read_by_the_plain_decoder(bits: int, coding: Coding) -> None:
    mechanism = Mechanism(levels=10, trials=189, coarsening=Coarsening(points=2**bits, width=60))
    codes = np.random.default_rng(bits).binomial(2**bits - 1, 0.5, 2000).astype(np.uint8)
    data = frame_of(codes, mechanism, coding)
    found = wire_reference.decode(data)
    assert (found["coarsening"], found["codes"]) == ((2**bits, 60), codes.tolist())
    assert found["digest"] == parameters_digest(mechanism, range=RANGE, dimension=2000).hex()
    assert read_frame(data).header.mechanism == mechanism
    assert decode_codes(data, mechanism=mechanism, range=RANGE).tolist() == codes.tolist()
    assert len(data) == 80 + 2000 * bits // 8 if coding is Coding.FIXED else len(data) < 80 + 2000 * bits // 8
    with pytest.raises(errors.WrongParameters):
        read_frame(data, mechanism=mechanism.fine)


def test_header_fields_are_read_back() -> None:
    head = read_frame(FRAME).header
    assert (head.coding, head.seeded, head.client, head.round) == (Coding.FIXED, True, 7, 3)
    assert (head.mechanism, head.dimension, head.payload_bytes) == (MECHANISM, 50, 50)
    assert head.digest == parameters_digest(MECHANISM, range=RANGE, dimension=50)
    assert not read_frame(frame_of(CODES, MECHANISM, Coding.FIXED, seeded=False)).header.seeded
    assert HEADER_BYTES == 80


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda b: np.frombuffer(b, np.uint8)])
def test_any_buffer_is_read_without_a_copy(kind: type) -> None:
    buffer = kind(FRAME)
    frame = read_frame(buffer)
    assert frame.payload.tobytes() == CODES.tobytes()
    assert not frame.payload.flags.writeable
    assert np.shares_memory(frame.payload, np.frombuffer(buffer, np.uint8))


def edit(offset: int, fmt: str, *values: int | bytes, frame: bytes = FRAME, seal: bool = True) -> bytes:
    changed = bytearray(frame)
    struct.pack_into("<" + fmt, changed, offset, *values)
    return reseal(changed) if seal else bytes(changed)


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (b"", errors.TruncatedFrame, "at least 80 bytes, got 0"),
        (FRAME[:79], errors.TruncatedFrame, "at least 80 bytes, got 79"),
        (FRAME[:-1], errors.TruncatedFrame, "announces a frame of 130 bytes, got 129"),
        (FRAME + b"\0", errors.OversizedFrame, "announces a frame of 130 bytes, got 131"),
        (edit(0, "4s", b"PNG!"), errors.BadMagic, "starts with b'BQSG', got b'PNG!'"),
        (edit(4, "H", 2), errors.UnsupportedVersion, "knows frame version 1, got 2"),
        (edit(6, "B", 3), errors.BadHeader, "coding must be 1 .* got 3"),
        (edit(7, "B", 8), errors.BadHeader, "flags .* 0x08"),
        (edit(7, "B", 2), errors.TruncatedFrame, "announces a frame of 146 bytes, got 130"),
        (edit(7, "B", 0, frame=SUBSET), errors.OversizedFrame, "announces a frame of 130 bytes, got 146"),
        (edit(80, "I", 1, frame=SUBSET), errors.BadHeader, "one_in must be from 2 to 65536, got 1"),
        (edit(80, "I", 2**16 + 1, frame=SUBSET), errors.BadHeader, "one_in must be from 2 to 65536, got 65537"),
        (edit(80, "I", 11, frame=SUBSET), errors.BadHeader, "has 46 coordinates, the frame 50"),
        (edit(84, "I", 2, frame=SUBSET), errors.BadHeader, "rotated must be 0 or 1, got 2"),
        (edit(88, "Q", 0, frame=SUBSET), errors.BadHeader, "model_dimension must be from 1"),
        (edit(88, "Q", 2**63, frame=SUBSET), errors.BadHeader, "model_dimension must be from 1"),
        (edit(88, "Q", 501, frame=SUBSET), errors.BadHeader, "has 51 coordinates, the frame 50"),
        (edit(88, "B", 0, frame=SUBSET, seal=False), errors.ChecksumMismatch, "the header states checksum"),
        (edit(64, "Q", 5), errors.BadHeader, "width must be from 1 .* got 0"),
        (edit(68, "I", 5), errors.BadHeader, "points must be from 2 .* got 0"),
        (edit(64, "II", 1, 9), errors.BadHeader, "points must be from 2 .* got 1"),
        (edit(64, "II", 256, 9), errors.BadHeader, "at most 2 levels . trials = 255"),
        (edit(64, "II", 16, 256), errors.BadHeader, "at most 2 levels . trials = 255"),
        (edit(64, "II", 2**32 - 1, 2**32 - 1), errors.BadHeader, "points must be from 2"),
        (edit(64, "II", 16, 255), errors.BadPayload, "takes 25 bytes, got 50"),
        (edit(48, "I", 0), errors.BadHeader, "levels must be from 1 to 1048576, got 0"),
        (edit(52, "I", 2**20 + 1), errors.BadHeader, "trials must be from 0 to 1048576, got 1048577"),
        (edit(40, "Q", 0), errors.BadHeader, "dimension must be from 1 to"),
        (edit(40, "Q", 2**63), errors.BadHeader, "dimension must be from 1 to"),
        (edit(40, "Q", 51), errors.BadPayload, "51 codes .* takes 51 bytes, got 50"),
        (edit(40, "Q", 2**60), errors.BadPayload, f"takes {2**60} bytes, got 50"),
        (edit(56, "Q", 2**60), errors.TruncatedFrame, f"announces a frame of {2**60 + 80} bytes, got 130"),
        (edit(56, "Q", 2**64 - 1), errors.TruncatedFrame, "got 130"),
        (edit(100, "B", 0, seal=False), errors.ChecksumMismatch, "the header states checksum"),
        (edit(24, "Q", 8, seal=False), errors.ChecksumMismatch, "the bytes give"),
        (edit(72, "Q", 0, seal=False), errors.ChecksumMismatch, "checksum 0000000000000000"),
    ],
)
def test_each_fault_has_its_error(frame: bytes, error: type[FrameError], message: str) -> None:
    with pytest.raises(error, match=message):
        read_frame(frame)


@pytest.mark.parametrize(
    ("expected", "error", "message"),
    [
        ({"dimension": 51}, errors.WrongDimension, "expected 51 coordinates, the frame holds 50"),
        (
            {"mechanism": Mechanism(levels=1, trials=251)},
            errors.WrongParameters,
            "levels=1, trials=251.*levels=2, trials=251",
        ),
        ({"range": 0.25}, errors.WrongParameters, "expected parameters digest"),
        ({"range": np.full(50, 0.5)}, errors.WrongParameters, "expected parameters digest"),
        ({"range": np.full(49, 0.5)}, errors.WrongDimension, r"shape \(49,\)"),
        ({"client": 8}, errors.WrongOrigin, "client 8, got one of client 7"),
        ({"round": 2}, errors.WrongOrigin, "round 2, got one of round 3"),
    ],
)
def test_each_unmet_expectation_has_its_error(
    expected: dict[str, object], error: type[FrameError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_frame(FRAME, **expected)


def test_an_absurd_entropy_coded_dimension_is_refused() -> None:
    frame = edit(40, "Q", 2**60, frame=frame_of(CODES, MECHANISM, Coding.ENTROPY))
    with pytest.raises(errors.WrongDimension, match="at most 16777216"):
        read_frame(frame)
    with pytest.raises(errors.WrongDimension, match="expected 50"):
        read_frame(frame, dimension=50)
    with pytest.raises(errors.BadPayload):  # even where the caller expects it
        decode_codes(frame, dimension=2**60)


def test_an_entropy_coded_payload_longer_than_fixed_width_is_refused() -> None:
    frame = bytearray(frame_of(CODES, MECHANISM, Coding.ENTROPY) + bytes(100))
    struct.pack_into("<Q", frame, 56, len(frame) - 80)
    with pytest.raises(errors.BadPayload, match=r"entropy coding of 50 codes .* takes at most 66 bytes"):
        read_frame(reseal(frame))


@pytest.mark.parametrize(
    "change",
    [
        {"dimension": 0},
        {"digest": bytes(15)},
        {"client": -1},
        {"round": 2**64},
        {"payload": bytes(51)},
        {"coding": Coding.ENTROPY, "payload": bytes(67)},
    ],
    ids=str,
)
def test_a_writer_refuses_what_a_reader_would(change: dict[str, object]) -> None:
    about = {"mechanism": MECHANISM, "digest": bytes(16), "client": 0, "round": 0, "dimension": 50, "seeded": False}
    payload = change.pop("payload", None)
    with pytest.raises(InvalidParameter):
        FrameWriter(Header(**(about | change)), payload)


def test_every_reason_is_a_frame_error_of_its_own() -> None:
    kinds = FrameError.__subclasses__()
    assert len(kinds) == 12
    assert len({kind.__doc__ for kind in kinds}) == 12
