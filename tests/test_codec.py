"""Vector -> frame -> vector, and frames added up by a server."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd._src import errors
from bqsgd._src.codec import Accumulator, decode_frame, encode_frame
from bqsgd._src.errors import FrameError, InvalidParameter, NonFiniteInput, OutOfRange
from bqsgd._src.mechanism.encoder import decode, encode
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Coarsening, Mechanism, parameters_digest
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import HEADER_BYTES, Coding, FrameWriter, Header, read_frame

# 8 and 16 bits direct, 10 and 14 bits packed, mixed radix (213, 3), 32-bit codes.
MECHANISMS = [(2, 251), (1, 251), (4, 1015), (52, 16279), (6, 200), (1, 0), (100, 65335), (1 << 17, 1 << 17)]
CODINGS = ["fixed", "entropy"]


def vector(d: int, seed: int = 0) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).normal(0, 0.4, d), -1, 1).astype(np.float32)


@pytest.mark.parametrize(("levels", "trials"), MECHANISMS)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("d", [1, 2, 777, 70_001])
def test_a_frame_carries_exactly_the_encoder_s_codes(levels: int, trials: int, coding: str, d: int) -> None:
    mechanism, values = Mechanism(levels=levels, trials=trials), vector(d)
    frame = encode_frame(values, mechanism, range=1.0, rng=seeded_rng(seed=3), client=4, round=5, coding=coding)
    codes = encode(values, mechanism, range=1.0, rng=seeded_rng(seed=3))
    decoded = decode_frame(frame, range=1.0, dimension=d, mechanism=mechanism, client=4, round=5)
    assert np.array_equal(decoded, decode(codes, mechanism, range=1.0))
    header = read_frame(frame).header
    assert (header.client, header.round, header.dimension, header.mechanism) == (4, 5, d, mechanism)
    assert header.seeded
    assert header.coding is (Coding.FIXED if coding == "fixed" else Coding.ENTROPY)
    if coding == "fixed":
        assert len(frame) == HEADER_BYTES + FixedWidth(mechanism.code_count).payload_bytes(d)


@pytest.mark.parametrize(("points", "width"), [(4, 29), (8, 40), (16, 45), (64, 63), (300, 500)])
@pytest.mark.parametrize("coding", CODINGS)
def test_coarse_frames_hold_the_encoder_s_codes_and_add_up(points: int, width: int, coding: str) -> None:
    mechanism = Mechanism(levels=13, trials=997, coarsening=Coarsening(points=points, width=width))
    values, limits = vector(70_001), np.linspace(0.9, 1.1, 70_001)
    for limit in (1.0, limits):
        given = np.clip(values, -0.9, 0.9)
        frame = encode_frame(given, mechanism, range=limit, rng=seeded_rng(seed=3), client=4, round=5, coding=coding)
        codes = encode(given, mechanism, range=limit, rng=seeded_rng(seed=3))
        decoded = decode_frame(frame, range=limit, mechanism=mechanism)
        assert np.array_equal(decoded, decode(codes, mechanism, range=limit))
        server = Accumulator(values.size)
        server.add(frame, range=limit, weight=2.0)
        server.add(frame, range=limit, weight=1.0)
        assert server.mean() == pytest.approx(decoded)
        if coding == "fixed":
            assert len(frame) == HEADER_BYTES + FixedWidth(points).payload_bytes(values.size)


def test_a_frame_says_whether_its_noise_was_seeded() -> None:
    mechanism, values = Mechanism(levels=2, trials=251), vector(10)
    frame = encode_frame(values, mechanism, range=1.0, rng=privacy_rng(), client=0, round=0)
    assert not read_frame(frame).header.seeded
    server = Accumulator(10)
    server.add(frame, range=1.0)
    assert not server.seeded
    server.add(encode_frame(values, mechanism, range=1.0, rng=seeded_rng(seed=1), client=1, round=0), range=1.0)
    assert server.seeded


@given(
    st.sampled_from(MECHANISMS),
    st.lists(st.tuples(st.floats(0.01, 100), st.sampled_from(CODINGS)), min_size=1, max_size=6),
    st.integers(1, 3000),
    st.booleans(),
)
@settings(max_examples=60)
def test_adding_frames_is_adding_what_they_decode_to(  # type: ignore[no-untyped-def]
    parameters, senders, d: int, per_coordinate: bool
) -> None:
    mechanism = Mechanism(levels=parameters[0], trials=parameters[1])
    limit = np.linspace(1, 2, d) if per_coordinate else 1.25
    server, expected = Accumulator(d), np.zeros(d)
    for i, (weight, coding) in enumerate(senders):
        frame = encode_frame(vector(d, i), mechanism, range=limit, rng=privacy_rng(), client=i, round=7, coding=coding)
        header = server.add(frame, range=limit, weight=weight, client=i, round=7)
        assert header.client == i
        expected += weight * decode_frame(frame, range=limit)
    size = np.abs(expected).max() + 1
    np.testing.assert_allclose(server.total, expected, rtol=1e-12, atol=1e-13 * size)
    np.testing.assert_allclose(server.mean(), expected / sum(w for w, _ in senders), rtol=1e-12, atol=1e-13 * size)
    assert server.frames == len(senders)


def test_clients_of_different_mechanisms_and_ranges_add_up() -> None:
    server, expected, d = Accumulator(501), np.zeros(501), 501
    for i, (levels, trials) in enumerate(MECHANISMS):
        mechanism, limit = Mechanism(levels=levels, trials=trials), 1.0 + i
        frame = encode_frame(vector(d, i), mechanism, range=limit, rng=privacy_rng(), client=i, round=0)
        server.add(frame, range=limit)
        expected += decode_frame(frame, range=limit)
    np.testing.assert_allclose(server.total, expected, atol=1e-9 * np.abs(expected).max())


def test_the_mean_over_many_clients_comes_back_unbiased() -> None:
    # 400 clients, noise variance (251/4 + 1/4)/4 at most: |z| < 6.1 for 300 coordinates fails once in 3e6 seeds.
    mechanism, values, server, rng = Mechanism(levels=2, trials=251), vector(300), Accumulator(300), seeded_rng(seed=9)
    for client in range(400):
        server.add(encode_frame(values, mechanism, range=1.0, rng=rng, client=client, round=0), range=1.0)
    z = (server.mean() - values) / np.sqrt((251 + 1) / 4 / 4 / 400)
    assert np.abs(z).max() < 6.1
    assert 0.7 < z.std() < 1.3


def refused_frames(mechanism: Mechanism, d: int):  # type: ignore[no-untyped-def]
    good = encode_frame(vector(d), mechanism, range=1.0, rng=privacy_rng(), client=1, round=2)
    damaged = bytearray(good)
    damaged[-1] ^= 1
    yield good[:-1], {}, errors.TruncatedFrame
    yield good + b"\0", {}, errors.OversizedFrame
    yield damaged, {}, errors.ChecksumMismatch
    yield good, {"range": 1.5}, errors.WrongParameters
    yield good, {"mechanism": Mechanism(levels=3, trials=249)}, errors.WrongParameters
    yield good, {"client": 2}, errors.WrongOrigin
    yield good, {"round": 3}, errors.WrongOrigin
    longer = encode_frame(vector(d + 1), mechanism, range=1.0, rng=privacy_rng(), client=1, round=2)
    yield longer, {}, errors.WrongDimension
    yield out_of_range(mechanism, d), {}, errors.CodeOutOfRange


def out_of_range(mechanism: Mechanism, d: int) -> bytearray:
    """A frame whose checksum holds but whose last code is one too large."""
    digest = parameters_digest(mechanism, range=1.0, dimension=d)
    writer = FrameWriter(Header(mechanism=mechanism, digest=digest, client=1, round=2, dimension=d, seeded=False))
    writer.payload[:] = 0
    writer.payload[-1] = 255
    return writer.seal()


def test_a_refused_frame_leaves_the_sum_as_it_was() -> None:
    mechanism, d = Mechanism(levels=2, trials=250), 1000
    server = Accumulator(d)
    server.add(encode_frame(vector(d), mechanism, range=1.0, rng=privacy_rng(), client=0, round=0), range=1.0)
    before, count = server.total.copy(), 0
    for frame, stated, reason in refused_frames(mechanism, d):
        with pytest.raises(reason):
            server.add(frame, **{"range": 1.0, **stated})
        with pytest.raises(FrameError):
            decode_frame(frame, **{"range": 1.0, "dimension": d, **stated})
        count += 1
    assert count == 9
    assert np.array_equal(server.total, before)
    assert (server.frames, server.weight) == (1, 1.0)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), True])
def test_weights_must_be_positive_and_finite(weight: float) -> None:
    frame = encode_frame(vector(5), Mechanism(levels=2, trials=251), range=1.0, rng=privacy_rng(), client=0, round=0)
    server = Accumulator(5)
    with pytest.raises(InvalidParameter, match="weight"):
        server.add(frame, range=1.0, weight=weight)
    assert not server.total.any()


def test_an_empty_sum_has_no_mean_and_no_dimension_zero() -> None:
    with pytest.raises(InvalidParameter, match="no frame"):
        Accumulator(3).mean()
    with pytest.raises(InvalidParameter, match="dimension"):
        Accumulator(0)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("levels", "trials"), [(2, 251), (52, 16279)])
def test_bad_values_give_no_frame(levels: int, trials: int, coding: str) -> None:
    mechanism, d = Mechanism(levels=levels, trials=trials), 100_000
    for bad, reason in ((np.nan, NonFiniteInput), (1.5, OutOfRange)):
        values = vector(d)
        values[d - 3] = bad
        with pytest.raises(reason, match=r"values\[99997\]"):
            encode_frame(values, mechanism, range=1.0, rng=privacy_rng(), client=0, round=0, coding=coding)
    values = vector(d)
    values[7] = 1.5
    encode_frame(values, mechanism, range=1.0, rng=privacy_rng(), client=0, round=0, coding=coding, clamp=True)


def test_an_unknown_coding_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="coding"):
        encode_frame(
            vector(5), Mechanism(levels=2, trials=2), range=1.0, rng=privacy_rng(), client=0, round=0, coding="zip"
        )


def test_a_tensor_makes_the_same_frame_as_its_array() -> None:
    mechanism, values = Mechanism(levels=2, trials=251), vector(1000)
    first, second = (
        encode_frame(x, mechanism, range=1.0, rng=seeded_rng(seed=1), client=0, round=0)
        for x in (values, torch.from_numpy(values))
    )
    assert first == second


@pytest.mark.parametrize(("levels", "trials"), [(2, 251), (52, 16279), (6, 200)])
def test_fixed_width_frames_need_no_memory_beside_themselves(levels: int, trials: int) -> None:
    mechanism, values = Mechanism(levels=levels, trials=trials), np.zeros(3_000_000, np.float32)
    encode_frame(values[:100], mechanism, range=1.0, rng=privacy_rng(), client=0, round=0)
    tracemalloc.start()
    frame = encode_frame(values, mechanism, range=1.0, rng=privacy_rng(), client=0, round=0)
    extra = tracemalloc.get_traced_memory()[1] - len(frame)
    tracemalloc.stop()
    assert extra < 1 << 20


def test_a_checked_frame_is_taken_as_it_is_and_still_has_to_be_the_expected_one() -> None:
    mechanism, d = Mechanism(levels=2, trials=251), 1000
    for coding in ("fixed", "entropy"):
        frame = encode_frame(vector(d), mechanism, range=1.0, rng=privacy_rng(), client=4, round=5, coding=coding)
        expected = decode_frame(frame, range=1.0)
        checked = read_frame(frame, dimension=d)
        frame[HEADER_BYTES - 1] ^= 1  # the stored checksum, which nobody reads a second time
        server = Accumulator(d)
        assert server.add(checked, range=1.0, client=4, round=5) == checked.header
        assert np.array_equal(server.total, expected)
        assert np.array_equal(decode_frame(checked, range=1.0, mechanism=mechanism, dimension=d), expected)
        for stated in ({"range": 0.5}, {"range": 1.0, "client": 3}, {"range": 1.0, "round": 4}):
            with pytest.raises(errors.FrameError):
                server.add(checked, **stated)
        assert server.frames == 1
        with pytest.raises(errors.ChecksumMismatch):
            server.add(frame, range=1.0)
