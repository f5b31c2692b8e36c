"""The server: every frame checked, the mean exact, nobody trusted."""

import numpy as np
import pytest

from bqsgd._src.codec import decode_frame, encode_frame
from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.laws import DiscreteGaussian
from bqsgd._src.mechanism.encoder import decode, encode
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.records.checkpoint import CheckpointError
from bqsgd._src.server import aggregation
from bqsgd._src.server.server import Server
from bqsgd._src.wire.frame import checksum
from bqsgd._src.wire.model_message import read_model
from bqsgd._src.wire.reply import Reply

MODEL = np.zeros(6, np.float32)
MECHANISM = Mechanism(levels=100, trials=50)


def frame_of(client=0, round_=0, *, values=None, mechanism=MECHANISM, range=0.5, dimension=6):
    given = np.full(dimension, 0.04 * (client + 1), np.float32) if values is None else np.asarray(values, np.float32)
    rng = seeded_rng(seed=client + 100 * round_)
    return encode_frame(given, mechanism, range=range, rng=rng, client=client, round=round_)


@pytest.fixture
def make_server(settings):
    def make(*, weights=None, clock=None, **changes):
        config = settings(**{"trials": 50, **changes})
        options = {} if clock is None else {"clock": clock}
        return Server(model=MODEL, weights=weights or {0: 1.0, 1: 2.0, 2: 5.0}, config=config, **options)

    return make


def test_weighted_mean_step(make_server):
    server = make_server()
    frames = [frame_of(client) for client in range(3)]
    assert read_model(server.open_round()[0], dimension=6).round == 0
    assert [server.receive(frame).status for frame in frames] == ["ok"] * 3
    outcome = server.close_round()
    expected = np.average([decode_frame(f, range=0.5) for f in frames], axis=0, weights=[1, 2, 5])
    np.testing.assert_allclose(server.model, -expected, rtol=1e-6)
    assert outcome.stepped
    assert outcome.seeded
    assert outcome.bytes_up == sum(map(len, frames))
    assert outcome.bytes_down == 3 * (32 + 24)
    assert server.round == 1


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_robust_rules_see_each_update(make_server, rule):
    server = make_server(aggregation=rule)
    frames = [frame_of(client) for client in range(3)]
    server.open_round()
    for frame in reversed(frames):
        server.receive(frame)
    server.close_round()
    updates = [decode_frame(frame, range=0.5) for frame in frames]
    np.testing.assert_allclose(server.model, -aggregation.aggregate(rule, updates, byzantine=0), rtol=1e-6)


@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_a_frame_is_checksummed_once_and_its_buffer_is_free_afterwards(make_server, monkeypatch, rule):
    """The engine may reuse a buffer as soon as `receive` returns."""
    server, other, sums = make_server(aggregation=rule), make_server(aggregation=rule), []

    def counted(view):
        sums.append(len(view))
        return checksum(view)

    frames = [frame_of(client) for client in range(3)]
    other.open_round()
    for frame in frames:
        other.receive(frame)
    other.close_round()
    server.open_round()
    monkeypatch.setattr("bqsgd._src.wire.frame.checksum", counted)
    for frame in frames:
        assert server.receive(frame).status == "ok"
        frame[:] = bytes(len(frame))
    assert server.close_round().stepped
    assert len(sums) == 3
    np.testing.assert_array_equal(server.model, other.model)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_bad_frames_are_reported_skipped_and_change_nothing(make_server, rule):
    server, clean = make_server(aggregation=rule), make_server(aggregation=rule)
    good, damaged = frame_of(0), frame_of(1)
    damaged[-1] ^= 1
    bad = {
        "replay or late": frame_of(1, 0),
        "ahead": frame_of(1, 2),
        "does not belong": frame_of(9, 1),
        "second frame": frame_of(0, 1, values=np.zeros(6)),
        "WrongDimension": frame_of(1, 1, dimension=7),
        "WrongParameters": frame_of(1, 1, range=0.4),
        "not the mechanism": frame_of(1, 1, mechanism=Mechanism(levels=50, trials=50)),
        "exceeds the": frame_of(1, 1, mechanism=Mechanism(levels=1, trials=5000)),
        "must be binomial noise": frame_of(1, 1, mechanism=Mechanism.of(levels=10, noise=DiscreteGaussian(3.0))),
        "ChecksumMismatch": damaged,
        "TruncatedFrame": b"",
        "BadMagic": bytes(200),
    }
    for each in (server, clean):
        each.open_round()
        each.receive(good)
        each.close_round()
        each.open_round()
        each.receive(frame_of(0, 1))
    for reason, frame in bad.items():
        receipt = server.receive(frame)
        assert receipt.status == "refused"
        assert reason in receipt.reason
    outcome = server.close_round()
    clean.close_round()
    np.testing.assert_array_equal(server.model, clean.model)
    assert sum(receipt.status == "refused" for receipt in outcome.clients) == len(bad)
    assert {receipt.client: receipt.status for receipt in outcome.clients[:3]} == {0: "ok", 1: "missing", 2: "missing"}


def coarse(levels, trials, points, width):
    return Mechanism(levels=levels, trials=trials, coarsening=Coarsening(points=points, width=width))


def test_coarse_frames_are_taken_and_their_noise_is_known(make_server):
    server = make_server(levels=None, trials=None, bits=4, weights={0: 1.0, 1: 1.0})
    server.open_round()
    used = coarse(10, 189, 16, 45)
    receipts = [server.receive(frame_of(client, mechanism=used)) for client in range(2)]
    assert [(r.status, r.levels, r.trials, r.points, r.width) for r in receipts] == [("ok", 10, 189, 16, 45)] * 2
    codes = encode(np.zeros(200_000), used, range=0.5, rng=seeded_rng(seed=1))
    measured = decode(codes, used, range=0.5).var() / 2  # of the mean of two; 2 % is over 6 standard errors
    assert server._noise_variance(server._current()) == pytest.approx(measured, rel=0.02)
    server.close_round()


@pytest.mark.parametrize(
    ("mechanism", "taken"),
    [
        (coarse(1, 4000, 16, 255), True),
        (coarse(1, 4000, 16, 256), False),  # 128 C: further than 8 bits reach at one level
        (coarse(2, 4000, 16, 510), True),
        (coarse(1, 2**20, 16, 2**20), False),
        (coarse(2**19, 2**20, 16, 100), False),  # more fine codes than any plan has
        (coarse(10, 189, 17, 45), False),  # more than 4 bits
        (Mechanism(levels=1, trials=14), False),
        (Mechanism(levels=1, trials=13), True),
    ],
)
def test_no_budget_lets_a_client_reach_further_than_a_plan_can(make_server, mechanism, taken):
    server = make_server(levels=None, trials=None, bits=4)
    server.open_round()
    assert server.receive(frame_of(mechanism=mechanism)).status == ("ok" if taken else "refused")


def test_a_fixed_mechanism_takes_no_coarse_frame(make_server):
    server = make_server()
    server.open_round()
    assert server.receive(frame_of(mechanism=coarse(100, 50, 16, 200))).status == "refused"


def test_a_frame_must_be_of_the_client_the_engine_heard(make_server):
    server = make_server()
    server.open_round()
    receipt = server.receive(frame_of(1), sender=2)
    assert receipt.status == "refused"
    assert receipt.client == 2
    assert server.receive(frame_of(1), sender=1).status == "ok"
    statuses = {receipt.client: receipt.status for receipt in server.close_round().clients}
    assert statuses == {0: "missing", 1: "ok", 2: "refused"}


def test_quorum_and_silence(make_server):
    server = make_server(quorum=2)
    server.open_round()
    server.receive(frame_of(0))
    server.take(Reply.decline(1, "the privacy budget is spent"))
    server.take(Reply(client=2, reason="the process died"))
    outcome = server.close_round()
    assert not outcome.stepped
    assert server.round == 1
    np.testing.assert_array_equal(server.model, MODEL)
    assert [(r.status, r.reason) for r in outcome.clients[1:]] == [
        ("declined", "the privacy budget is spent"),
        ("missing", "the process died"),
    ]
    with pytest.raises(InvalidParameter, match="client 7 does not belong to this run"):
        server.open_round() and server.take(Reply.decline(7, "no"))


def test_the_mean_of_those_who_came_is_weighted_among_them(make_server):
    server = make_server()
    server.open_round()
    frames = [frame_of(client) for client in (1, 2)]
    for frame in frames:
        server.receive(frame)
    server.close_round()
    expected = np.average([decode_frame(f, range=0.5) for f in frames], axis=0, weights=[2, 5])
    np.testing.assert_allclose(server.model, -expected, rtol=1e-6)


def test_deadline(make_server):
    now = [100.0]
    server = make_server(clock=lambda: now[0], deadline_seconds=5.0)
    server.open_round()
    now[0] += 4.9
    assert server.receive(frame_of(0)).status == "ok"
    now[0] += 0.2
    assert "deadline of 5 s" in server.receive(frame_of(1)).reason


def test_averaging_schedule_and_noise_variance(make_server):
    server = make_server(average=0.5, schedule="linear", optimizer="adam", subtract_noise=True, rounds=2)
    for round_ in range(2):
        server.open_round()
        server.receive(frame_of(0, round_))
        server.close_round()
    assert not np.array_equal(server.best_model, server.model)
    with pytest.raises(InvalidParameter, match="all 2 rounds are done"):
        server.open_round()
    server = make_server(weights={0: 1.0, 1: 1.0})
    server.open_round()
    server.receive(frame_of(0))
    server.receive(frame_of(1))
    # Two clients of weight 1/2: half of (C/s)^2 m/4.
    assert server._noise_variance(server._open) == pytest.approx((0.5 / 100) ** 2 * 50 / 4 / 2)


def test_checkpoint_and_restore_give_the_same_future(make_server):
    options = {"average": 0.9, "momentum": 0.9}
    first, second = make_server(**options), make_server(**options)
    for round_ in range(4):
        if round_ == 2:
            second.restore({name: array.copy() for name, array in first.arrays().items()}, round=2)
        for server in (first, second) if round_ >= 2 else (first,):
            server.open_round()
            server.receive(frame_of(0, round_))
            server.close_round()
    np.testing.assert_array_equal(first.model, second.model)
    np.testing.assert_array_equal(first.best_model, second.best_model)
    for wrong in ({"model": MODEL}, {**first.arrays(), "more": MODEL}, {**first.arrays(), "model": MODEL[:5]}):
        with pytest.raises(CheckpointError):
            first.restore(wrong, round=2)
    with pytest.raises(CheckpointError, match="cannot continue"):
        first.restore(first.arrays(), round=99)


def test_rounds_open_and_close_in_order(make_server):
    server = make_server()
    with pytest.raises(InvalidParameter, match="open_round"):
        server.close_round()
    server.open_round()
    with pytest.raises(InvalidParameter, match="open already"):
        server.open_round()
    with pytest.raises(InvalidParameter, match="weight of client 0"):
        make_server(weights={0: 0.0})


def test_divergence_is_refused(make_server):
    server = make_server(learning_rate=1e300)
    server.open_round()
    server.receive(frame_of(0))
    with pytest.raises(BqsgdError, match="diverged"), np.errstate(over="ignore"):
        server.close_round()
    np.testing.assert_array_equal(server.model, MODEL)
