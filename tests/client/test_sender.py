"""The one place where something leaves a client: counted first, and the same whatever the data do afterwards."""

import os
import signal
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from bqsgd._src.client.draws import GivenSources, Purpose, Sources
from bqsgd._src.client.sender import Sender
from bqsgd._src.codec import decode_frame, encode_frame
from bqsgd._src.errors import BudgetExhausted
from bqsgd._src.ledger import Ledger
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.noise import privacy_rng, seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.release import Release
from bqsgd._src.runtime.modes import silence

DIMENSION = 6
OUTLET = partial(encode_frame, client=3, range=0.5)
MEAN = np.linspace(-1, 1, DIMENSION)


@pytest.fixture
def charge(settings, make_client):
    """(round) -> what the tiny client is charged for it, without noise unless told otherwise."""
    terms = make_client(settings()).terms

    def of(round, *, trials=0, levels=1000):
        release = Release(mechanism=Mechanism(levels=levels, trials=trials), terms=terms)
        return Charge(release=release, round=round, last_round=round)

    return of


@pytest.fixture
def ledger(tmp_path):
    """(epsilon) -> a ledger."""
    opened = []

    def of(epsilon):
        opened.append(Ledger.open(tmp_path / "a", client=3, budget_epsilon=epsilon, budget_delta=1e-5))
        return opened[-1]

    yield of
    for each in opened:
        each.close()


def seeded_sender():
    return Sender(Spending(None, run="a", seeded=True), Sources(seed=1, client=3))


def test_the_spend_is_in_the_ledger_before_the_values_are_computed(charge, ledger):
    book = ledger(1e6)
    sender = Sender(Spending(book, run="a", seeded=False), Sources(seed=None, client=3))
    seen = []

    def values():
        seen.append((book.spent_rounds, sender.next_round))
        return MEAN

    sender.send(charge(4, levels=2, trials=200), OUTLET, values)
    assert seen == [(1, 5)]


def test_a_message_beyond_the_budget_touches_no_data(charge, ledger):
    book = ledger(1e-9)
    sender = Sender(Spending(book, run="a", seeded=False), Sources(seed=None, client=3))
    with pytest.raises(BudgetExhausted):
        sender.send(charge(0, trials=4), OUTLET, lambda: pytest.fail("the data were touched"))
    assert (book.spent_rounds, sender.next_round) == (0, 0)


def test_what_leaves_is_the_mean_clamped_to_the_range(charge):
    frame = seeded_sender().send(charge(2), OUTLET, lambda: MEAN)
    decoded = decode_frame(frame, range=0.5, dimension=DIMENSION, client=3, round=2)
    np.testing.assert_allclose(decoded, MEAN.clip(-0.5, 0.5), atol=0.5 / 1000)


def test_the_noise_is_that_of_the_round_and_not_of_what_was_drawn_before(charge):
    first = seeded_sender()
    frames = [first.send(charge(round, trials=200), OUTLET, lambda: MEAN) for round in (0, 1)]
    assert bytes(frames[0][-20:]) != bytes(frames[1][-20:])
    assert seeded_sender().send(charge(1, trials=200), OUTLET, lambda: MEAN) == frames[1]


def test_neither_warnings_nor_autocast_reach_the_values(charge):
    found = []

    def values():
        warnings.warn("of one sample", UserWarning, stacklevel=1)
        found.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return MEAN

    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("error")
        seeded_sender().send(charge(0), OUTLET, values)
        with pytest.raises(UserWarning):
            warnings.warn("after the message", UserWarning, stacklevel=1)
    assert found == [torch.float32]


def test_warnings_come_back_when_the_last_thread_leaves():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with silence:
            inside.set()
            leave.wait(60)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=other)
        with silence:
            thread.start()
            inside.wait(60)
        warnings.warn("the other thread is still at work", UserWarning, stacklevel=1)
        leave.set()
        thread.join()
        with pytest.raises(UserWarning):
            warnings.warn("nobody is at work", UserWarning, stacklevel=1)


def test_the_first_ctrl_c_waits_for_the_message(charge):
    sender, finished = seeded_sender(), []

    def values():
        os.kill(os.getpid(), signal.SIGINT)
        finished.append(True)
        return MEAN

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            sender.send(charge(0), OUTLET, values)
    finally:
        signal.signal(signal.SIGINT, before)
    assert finished == [True]
    assert set(sender.seconds) == {"ledger", "gradients", "encode"}


def test_the_data_draw_from_the_sender_and_the_program_draws_on_as_before(charge):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    drawn = []
    for _ in range(2):
        seeded_sender().send(charge(0), OUTLET, lambda: drawn.append(float(torch.rand(1))) or MEAN)
    assert torch.rand(1) == expected
    assert drawn[0] == drawn[1] != float(expected)


def test_a_generator_of_the_callers_makes_the_noise_and_nothing_else():
    seeded, secret = GivenSources(seeded_rng(seed=1)), GivenSources(privacy_rng())
    assert (seeded.seeded, secret.seeded) == (True, False)
    assert seeded.at(Purpose.NOISE, 0).seeded
    assert not seeded.at(Purpose.FORWARD, 0).seeded
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with seeded.lent(Purpose.FORWARD, 0):
        assert torch.rand(1) == expected  # the program's own seeds decide where there is no claim
    torch.manual_seed(0)
    with secret.lent(Purpose.FORWARD, 0):
        assert torch.rand(1) != expected
