"""The gate on updates: counted first, then made; whatever the training does, a frame leaves or nothing does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bqsgd
from bqsgd._src.laws import DiscreteGaussian, Geometric, Sum
from bqsgd._src.params import Coarsening
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.wire.frame import read_frame

STUDY = {"study": "trial-7", "rounds": 3, "epsilon": 8.0, "delta": 1e-5, "clip_norm": 2.0}
D = 40
SOURCES = Path(bqsgd.__file__).resolve().parents[1]


@pytest.fixture
def gate(tmp_path):
    """Opens the gate of one site; each is closed at the end."""
    made = []

    def opened(**changed):
        made.append(bqsgd.UpdateGate(tmp_path / "site.ledger", **STUDY | changed))
        return made[-1]

    yield opened
    for each in made:
        each.close()


def opened(frame, reach):
    return bqsgd.open_update(frame, ranges=[reach], sizes=[D], largest_range=2.0)


def counted(tmp_path):
    with bqsgd.Ledger(tmp_path / "site.ledger") as ledger:
        return ledger.spent_rounds


def test_the_spend_is_in_the_ledger_before_the_update_is_made(gate, tmp_path):
    seen = []
    gate().send(lambda: seen.append(counted(tmp_path)) or np.zeros(D), dimension=D)
    assert seen == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_the_training_has_forked_sends_nothing(gate):
    """It would send the same update with noise of its own, and only one of the two was counted."""
    children = []

    def forks():
        children.append(os.fork())
        return np.zeros(D)

    try:
        gate().send(forks, dimension=D)
    except bqsgd.LedgerError:
        os._exit(17 if children == [0] else 1)
    finally:
        if children == [0]:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 17


def test_what_leaves_is_unbiased_and_its_noise_is_the_planned_one(gate):
    each = np.linspace(-0.2, 0.2, D)
    sent = gate(seed=1, rounds=400, epsilon=900.0)
    frames = [sent.send(lambda: each, dimension=D) for _ in range(400)]
    values = np.array([opened(frame, sent.range) for frame in frames])
    deviation = sent.range * sent.plan(D).variance ** 0.5
    error = deviation / np.sqrt(400)
    assert np.abs(values.mean(axis=0) - each).max() < 5 * error, "40 coordinates, 5 standard errors: 1 in 40,000"
    assert 0.9 * deviation**2 < values.var(axis=0).mean() < 1.1 * deviation**2


@pytest.mark.parametrize(
    "update",
    [
        lambda: np.full(D, np.nan),
        lambda: np.full(D, np.inf),
        lambda: np.zeros(D + 1),
        lambda: np.zeros((D, 1)),
        lambda: ["a"] * D,
        lambda: None,
        lambda: 1 / 0,
        lambda: (_ for _ in ()).throw(SystemExit(3)),
        lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    ],
    ids=["nan", "inf", "long", "shape", "text", "none", "error", "exit", "interrupt"],
)
def test_a_failed_training_sends_what_an_update_of_zeros_sends(gate, tmp_path, update):
    """With one seed: the bytes are those of zeros, so nothing shows that the training failed."""
    failed = gate(seed=5).send(update, dimension=D)
    assert counted(tmp_path) == 1
    zeros = gate(seed=5, study="other", epsilon=8.0).send(lambda: np.zeros(D), dimension=D)
    assert failed == zeros


@pytest.mark.parametrize("size", [1.0, 1e6, 1e300])
def test_one_update_moves_the_message_by_at_most_the_stated_sensitivity(gate, size):
    """Without noise in the way: the clipped vector that the encoder gets."""
    sent = gate()
    clipped = sent._clipped(lambda: np.full(D, size), D)
    terms = sent.plan(D).release.terms
    assert np.linalg.norm(clipped) <= 2.0
    assert 2 * np.linalg.norm(clipped) / sent.range <= terms.sensitivity.l2 * (1 + 1e-12)
    assert terms.unit == "client"


def test_the_study_ends_when_its_updates_are_sent_and_within_its_budget(gate, tmp_path):
    for expected in (1, 2, 3):  # a process for each round
        site = gate()
        site.send(lambda: np.zeros(D), dimension=D)
        assert site.sent == expected
    assert 0.9 * 8 < site.guarantee().epsilon <= 8
    with pytest.raises(bqsgd.BudgetExhausted, match="all are taken"):
        gate().send(lambda: pytest.fail("trained after the end"), dimension=D)
    assert counted(tmp_path) == 3


def test_the_ledgers_own_budget_stops_a_study_that_asks_for_more(tmp_path, caplog):
    with bqsgd.Ledger.open(tmp_path / "own.ledger", client=4, budget_epsilon=6.5, budget_delta=1e-5) as ledger:
        site = bqsgd.UpdateGate(ledger, **STUDY)
        for _ in range(2):
            site.send(lambda: np.zeros(D), dimension=D)
        with pytest.raises(bqsgd.BudgetExhausted):
            site.send(lambda: pytest.fail("trained without budget"), dimension=D)
        assert "of the 3 updates of the study 'trial-7', 2 fit into what is left" in caplog.text
        assert ledger.guarantee().epsilon <= 6.5
        assert ledger.spent_rounds == 2


_SITE = """
import os, signal, sys
import numpy as np
import bqsgd

path, settings, killed = sys.argv[1], eval(sys.argv[2]), sys.argv[3] == "killed"
for _ in range(settings["rounds"]):
    try:
        with bqsgd.UpdateGate(path, **settings) as gate:
            frame = gate.send(lambda: os.kill(os.getpid(), signal.SIGKILL) if killed else np.zeros(40), dimension=40)
    except (bqsgd.LedgerError, bqsgd.BudgetExhausted):
        continue
    print(frame.hex(), flush=True)
"""


def site(tmp_path, how):
    """A job of the site in a process of its own; it prints each frame that leaves."""
    words = [sys.executable, "-c", _SITE, str(tmp_path / "site.ledger"), repr(STUDY), how]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(SOURCES)})


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_a_site_that_is_killed_between_spend_and_send_has_spent_and_goes_on_after_it(gate, tmp_path):
    gate().plan(D)
    killed = site(tmp_path, "killed")
    assert killed.communicate(timeout=120)[0] == "", "nothing left"
    assert killed.returncode == -signal.SIGKILL
    assert counted(tmp_path) == 1
    again = gate()
    again.send(lambda: np.zeros(D), dimension=D)
    assert again.sent == counted(tmp_path) == 2


def test_jobs_in_processes_of_their_own_send_no_more_than_the_ledger_counts(gate, tmp_path):
    """Both want all three updates at the same time."""
    gate().plan(D)
    jobs = [site(tmp_path, "running") for _ in range(2)]
    frames = [line for job in jobs for line in job.communicate(timeout=120)[0].split()]
    assert [job.returncode for job in jobs] == [0, 0]
    assert 1 <= len(frames) == len(set(frames)) <= counted(tmp_path) <= 3
    assert gate().guarantee().epsilon <= 8


def test_two_jobs_on_one_ledger_never_count_one_update_for_two(gate, tmp_path):
    one, other = gate(), gate()
    one.send(lambda: np.zeros(D), dimension=D)
    with pytest.raises(bqsgd.LedgerError, match="already recorded"):
        other.send(lambda: pytest.fail("trained uncounted"), dimension=D)
    assert counted(tmp_path) == 1


@pytest.mark.parametrize("changed", [{"epsilon": 4.0}, {"rounds": 2}, {"clip_norm": 1.0}, {"bits": 6}])
def test_other_settings_of_a_study_are_refused(gate, changed):
    gate().send(lambda: np.zeros(D), dimension=D)
    with pytest.raises(bqsgd.InvalidParameter, match="planned with other settings"):
        gate(**changed).send(lambda: pytest.fail("trained"), dimension=D)


@pytest.mark.parametrize(
    "mechanism",
    [
        bqsgd.Mechanism.of(levels=2, noise=DiscreteGaussian(3.0)),
        bqsgd.Mechanism(levels=2, trials=251, coarsening=Coarsening(points=16, width=45)),
    ],
    ids=["law", "coarse"],
)
def test_a_sum_counts_the_noise_that_its_clients_add(gate, mechanism):
    """They add binomial parts, so a ledger that counted another law would count noise that nobody added."""
    with pytest.raises(bqsgd.InvalidParameter, match="binomial"):
        gate(mechanism=mechanism, rule=thresholds(clients=4, dropouts=0, colluders=0))


def test_a_law_that_no_frame_carries_is_refused_before_there_is_a_ledger(gate, tmp_path):
    with pytest.raises(bqsgd.InvalidParameter, match="cannot carry"):
        gate(mechanism=bqsgd.Mechanism.of(levels=2, noise=Sum(Geometric(0.5), 3)))
    assert not list(tmp_path.iterdir())


def test_a_mechanism_that_was_given_is_the_studys_and_the_ledger_still_ends_it(gate, tmp_path):
    fixed = bqsgd.Mechanism(levels=2, trials=251)
    site = gate(mechanism=fixed, rounds=400)
    site.send(lambda: np.zeros(D), dimension=D)
    assert site.plan(D).mechanism == fixed
    with pytest.raises(bqsgd.InvalidParameter, match="has the mechanism"):
        gate(mechanism=bqsgd.Mechanism(levels=2, trials=253), rounds=400).send(lambda: np.zeros(D), dimension=D)

    def send_all():
        for _ in range(400):
            site.send(lambda: np.zeros(D), dimension=D)

    with pytest.raises(bqsgd.BudgetExhausted):
        send_all()
    assert site.guarantee().epsilon <= 8
    assert site.epsilon_after_next() == float("inf")


def test_another_model_is_refused(gate):
    site = gate()
    site.send(lambda: np.zeros(D), dimension=D)
    with pytest.raises(bqsgd.InvalidParameter, match="dimension 40 then, 41 now"):
        site.send(lambda: pytest.fail("trained"), dimension=D + 1)


def test_a_lost_ledger_is_not_replaced_by_a_fresh_one(gate, tmp_path):
    gate().send(lambda: np.zeros(D), dimension=D)
    (tmp_path / "site.ledger").unlink()
    with pytest.raises(bqsgd.LedgerError, match="restore the ledger"):
        gate()
    with pytest.raises(bqsgd.LedgerError, match="restore the ledger"):
        gate(study="another")


@pytest.mark.parametrize("bits", range(2, 9))
def test_thin_updates_have_few_bits_and_no_bias(bits):
    values = [np.linspace(-3, 1, 600), np.zeros(7), np.array([5e-7])]
    frame, ranges = bqsgd.thin_update(values, bits=bits)
    assert read_frame(frame).header.mechanism.code_count <= 2**bits
    assert len(frame) <= 608 * bits / 8 + 120
    sizes = [600, 7, 1]
    means = np.mean(
        [
            bqsgd.open_update(bqsgd.thin_update(values, bits=bits)[0], ranges=ranges, sizes=sizes, largest_range=9.0)
            for _ in range(200)
        ],
        axis=0,
    )
    step = np.repeat(ranges, sizes) / (2 ** (bits - 1) - 1)
    assert np.all(np.abs(means - np.concatenate(values)) <= 5 * step / 2 / np.sqrt(200))
    assert means[607] == pytest.approx(5e-7)


def test_hostile_updates_are_refused(gate):
    site = gate()
    frame, reach = site.send(lambda: np.zeros(D), dimension=D), site.range
    good = {"ranges": [reach], "sizes": [D], "largest_range": 2.0}
    assert bqsgd.open_update(frame, **good).shape == (D,)
    for changed in (
        {"ranges": [2.1]},
        {"ranges": [float("nan")]},
        {"ranges": [-1.0]},
        {"ranges": []},
        {"ranges": [reach, reach]},
        {"ranges": [reach * 1.0001]},
        {"sizes": [D - 1]},
        {"sizes": [2**60]},
        {"bits": 2},
    ):
        with pytest.raises(bqsgd.BqsgdError):
            bqsgd.open_update(frame, **good | changed)
    for broken in (b"", frame[:-1], frame + b"\0", bytes(len(frame)), b"x" + frame[1:]):
        with pytest.raises(bqsgd.FrameError):
            bqsgd.open_update(broken, **good)
