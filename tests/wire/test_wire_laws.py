"""Noise of another law on the wire: header, digest and codes; and who refuses it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import wire_reference
from wire_frames import RANGE, reseal

import bqsgd
from bqsgd import decode_frame, encode_frame, seeded_rng
from bqsgd._src import errors
from bqsgd._src.laws import Binomial, DiscreteGaussian, Geometric, NoiseLaw, Skellam, Sum
from bqsgd._src.params import Kept, Mechanism, parameters_digest
from bqsgd._src.wire.frame import read_frame

LAWS = [DiscreteGaussian(7.5), Skellam(40.0), Geometric(0.8)]
KEPT = Kept(one_in=10, rotated=False, model_dimension=500)


def frame_with(law: NoiseLaw, *, coding: str = "fixed", kept: Kept | None = None, dimension: int = 50) -> bytes:
    mechanism = Mechanism.of(levels=2, noise=law)
    values = np.linspace(-RANGE, RANGE, dimension)
    rng = seeded_rng(seed=4)
    return bytes(encode_frame(values, mechanism, range=RANGE, rng=rng, client=1, round=2, coding=coding, kept=kept))


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "subset"])
@pytest.mark.parametrize("coding", ["fixed", "entropy"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_frame_names_the_law_of_its_noise(law, coding, kept):
    frame = frame_with(law, coding=coding, kept=kept)
    mechanism = Mechanism.of(levels=2, noise=law)
    header = read_frame(frame, dimension=50, range=RANGE, kept=kept, mechanism=mechanism).header
    assert (header.mechanism.law, header.header_bytes) == (law, 96 + 16 * (kept is not None))
    decoded = decode_frame(frame, range=RANGE, dimension=50, kept=kept)
    assert np.abs(decoded - np.linspace(-RANGE, RANGE, 50)).max() < RANGE / 2 * (law.span / 2 + 1)
    assert frame[7] == 5 + 2 * (kept is not None)


def test_a_frame_with_binomial_noise_does_not():
    assert frame_with(Binomial(9))[7] == 1


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_encoder_draws_from_the_law(law):
    """Counts of 200,000 draws at value 0; chi-square within six standard errors: a false alarm in 10^8 runs."""
    mechanism, count = Mechanism.of(levels=2, noise=law), 200_000
    frame = encode_frame(np.zeros(count), mechanism, range=RANGE, rng=seeded_rng(seed=1), client=0, round=0)
    codes = np.rint(decode_frame(frame, range=RANGE) / RANGE * 2 + mechanism.centre).astype(int) - 2
    seen, expected = np.bincount(codes, minlength=law.span + 1), law.pmf * count
    common = expected > 20
    chi = float(((seen - expected)[common] ** 2 / expected[common]).sum())
    assert seen[~common].sum() <= 200
    assert abs(chi - common.sum()) < 6 * np.sqrt(2 * common.sum())


def test_the_digest_binds_the_law():
    digests = {
        parameters_digest(Mechanism.of(levels=2, noise=law), range=RANGE, dimension=5)
        for law in (Binomial(66), DiscreteGaussian(3.0), DiscreteGaussian(3.001), Skellam(9.0), Geometric(0.5))
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("offset", "fmt", "value", "message"),
    [
        (80, "B", 0, "must be 1, 2 or 3"),
        (80, "B", 4, "must be 1, 2 or 3"),
        (81, "B", 1, "must be 1, 2 or 3"),
        (80, "B", 3, "alpha must be"),
        (88, "d", float("nan"), "sigma must be"),
        (88, "d", 1e300, "sigma must be"),
        (88, "d", -7.5, "sigma must be"),
        (88, "d", 8.5, "must be the span"),
        (52, "I", 0, "must be the span"),
    ],
)
def test_a_law_that_is_none_is_refused(offset, fmt, value, message):
    frame = bytearray(frame_with(LAWS[0]))
    struct.pack_into("<" + fmt, frame, offset, value)
    with pytest.raises(errors.BadHeader, match=message):
        read_frame(reseal(frame))


def test_a_server_that_expects_binomial_noise_refuses_another_law():
    frame = frame_with(DiscreteGaussian(7.5))
    span = DiscreteGaussian(7.5).span
    with pytest.raises(errors.WrongParameters):
        decode_frame(frame, range=RANGE, mechanism=Mechanism(levels=2, trials=span))


@pytest.mark.parametrize(("offset", "value"), [(7, 13), (80, 0), (80, 4), (81, 1), (95, 0xC0)])
def test_the_reference_refuses_what_is_no_law(offset, value):
    frame = bytearray(frame_with(LAWS[0]))
    assert wire_reference.decode(bytes(frame))["law"] == ("discrete gaussian", 7.5)
    frame[offset] = value
    with pytest.raises((AssertionError, KeyError)):
        wire_reference.decode(reseal(frame))


def test_a_law_that_is_not_expected_is_not_made(monkeypatch):
    """A wide law takes some 40 ms and a megabyte: a stranger must not make a server spend them."""
    frame = frame_with(LAWS[0])
    monkeypatch.setattr("bqsgd._src.wire.frame.law_of_bytes", lambda packed: pytest.fail("made"))
    others = [Mechanism(levels=2, trials=LAWS[0].span), Mechanism.of(levels=2, noise=LAWS[1])]
    for expected in ({"binomial": True}, *({"mechanism": mechanism} for mechanism in others)):
        with pytest.raises(errors.WrongParameters, match="says otherwise"):
            read_frame(frame, **expected)


def test_the_law_of_a_sum_is_not_sent():
    with pytest.raises(bqsgd.InvalidParameter, match="cannot carry"):
        frame_with(Sum(DiscreteGaussian(1.0), 3))
