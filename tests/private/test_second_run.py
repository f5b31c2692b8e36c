"""The same script run twice with one ledger, and budgets that leave nothing to be learnt."""

import logging

import pytest
from private_loops import recorded

import bqsgd


@pytest.fixture
def spent(private, tmp_path):
    """The path of a ledger of which one run has spent all, and its epsilon. A little left would take long to plan."""
    path = tmp_path / "me.ledger"
    first = private(epochs=2)
    for batch in first.loader:
        first.step(batch)
    first.close()
    with bqsgd.Ledger(path) as ledger:
        epsilon = ledger.guarantee().epsilon * 0.9999
        ledger.change_budget(epsilon=epsilon, delta=1e-5, reason="a test")
    return path, epsilon


def test_a_second_run_is_refused_with_what_is_spent_by_whom_and_what_to_do(private, spent, caplog):
    path, epsilon = spent
    before = recorded(path)
    second = private(epsilon=epsilon, mechanism=None, range=None)
    with pytest.raises(bqsgd.CannotLearn) as refused:
        second.plan  # noqa: B018
    text = str(refused.value)
    assert f"{path}: epsilon " in text
    assert "is already spent" in text
    assert "is left (run private-" in text
    assert ": 3 rounds, 20" in text, "how many rounds, and when"
    assert "load_state_dict" in text
    assert "raise the budget" in text
    assert "A fresh ledger is right only for other data." in text
    assert "which is too little for " in text
    second.close()
    assert recorded(path) == before


def test_with_next_to_nothing_left_it_is_refused_before_planning(private, spent, monkeypatch):
    """Planning for so little takes most of a minute, and only to be refused."""
    path, epsilon = spent
    with bqsgd.Ledger(path) as ledger:
        ledger.change_budget(epsilon=1.001 * epsilon, delta=1e-5, reason="a test")
    monkeypatch.setattr("bqsgd._src.private.loop.plan_release", None)
    second = private(epsilon=1.001 * epsilon, mechanism=None, range=None)
    with pytest.raises(
        bqsgd.CannotLearn, match=r"With what is left, a step has .* first run; .*will not learn .*Nothing was spent"
    ):
        second.plan  # noqa: B018


@pytest.mark.slow  # plans on top of earlier spends
def test_with_room_left_the_noise_is_compared_with_the_first_run(private, spent, caplog):
    path, epsilon = spent
    with bqsgd.Ledger(path) as ledger:
        ledger.change_budget(epsilon=40 * epsilon, delta=1e-5, reason="a test")
    second = private(epsilon=40 * epsilon, mechanism=None, range=None, force=True)
    second.step(next(iter(second.loader)))
    said = " ".join(record.message for record in caplog.records)
    assert "times the noise of a step of the first run" in said
    ratio = float(said.split("a step has ")[1].split(" times")[0])
    assert 0 < ratio < 0.2, "a much larger budget needs much less noise"


def test_resuming_says_nothing_of_earlier_spends(private, caplog):
    made = private(epochs=2)
    made.step(next(iter(made.loader)))
    state = made.state_dict()
    made.close()
    caplog.clear()
    again = private(epochs=2)
    again.load_state_dict(state)
    again.step(next(iter(again.loader)))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_budget_that_cannot_learn_is_refused_unless_forced(private, tmp_path, caplog):
    asked = {"epsilon": 0.05, "mechanism": None, "range": None, "epochs": 2}
    with pytest.raises(bqsgd.CannotLearn, match=r"the model will not learn .*force=True trains it anyway"):
        private(**asked)
    assert recorded(tmp_path / "me.ledger") == 0
    forced = private(**asked, force=True)
    assert forced.forecast.verdict == "will not learn"
    assert any("will not learn" in record.message for record in caplog.records)
