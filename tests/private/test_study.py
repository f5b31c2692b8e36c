"""A study goes on from process to process: one plan, one noise, and the ledger says where it continues."""

import json

import pytest
import torch
from private_loops import QUIET, recorded

import bqsgd
from bqsgd.clips import L2

CASE = {"study": "trial-7", "epochs": 2, "mechanism": None, "epsilon": 3.0, "force": True}


def taken(training, steps):
    for batch in training.loader:
        if steps == 0:
            break
        training.step(batch)
        steps -= 1


def test_a_later_process_continues_with_the_same_noise_and_without_planning(private, tmp_path, monkeypatch):
    first = private(**CASE)
    taken(first, 2)
    mechanism, reach = first.plan.mechanism, first.range
    first.close()

    def never(*_, **__):
        raise AssertionError("planned again")

    monkeypatch.setattr("bqsgd._src.private.loop.plan_release", never)
    second = private(**CASE)
    assert (second.steps, second.plan.mechanism, second.range) == (2, mechanism, reach)
    taken(second, 3)
    assert second.steps == 5
    second.close()
    assert recorded(tmp_path / "me.ledger") == 5


def test_the_study_ends_with_its_planned_steps_and_within_its_budget(private, tmp_path):
    for _ in range(2):  # a process for each epoch
        training = private(**CASE)
        taken(training, len(training.loader))
        training.close()
    over = private(**CASE)
    before = [p.clone() for p in over.model.parameters()]
    with pytest.raises(bqsgd.BudgetExhausted, match="all are taken"):
        over.step(next(iter(over.loader)))
    assert all(torch.equal(a, b) for a, b in zip(before, over.model.parameters(), strict=True))
    assert over.steps == over.rounds == 6
    assert 0.9 * 3.0 < over.guarantee().epsilon <= 3.0
    over.close()
    assert recorded(tmp_path / "me.ledger") == 6


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"epsilon": 2.0}, "budget"),
        ({"epochs": 3}, "6 steps in all then, 9 now"),
        ({"batch_size": 16}, "sampling"),
        ({"clip": L2(2.0)}, "sensitivity"),
        ({"bits": 6}, "bits 8 then, 6 now"),
        ({"range": 0.123}, "range"),
        ({"mechanism": QUIET}, "mechanism"),
        ({"one_in": 2}, "dimension"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_settings_are_refused_with_what_differs(private, other, named):
    given = CASE | {"range": None}
    private(**given).close()
    with pytest.raises(bqsgd.BqsgdError, match=named):
        private(**given | other)


def test_a_crash_costs_at_most_the_reserved_steps(private, tmp_path):
    for reserve, counted in ((None, 1), (4, 4)):
        name = f"reserved-{reserve}"
        crashed = private(**CASE | {"study": name, "reserve": reserve, "ledger": tmp_path / f"{name}.ledger"})
        taken(crashed, 1)  # and no close: the process is killed here
        assert private(**CASE | {"study": name, "ledger": tmp_path / f"{name}.ledger"}).steps == counted


def test_two_processes_of_one_study_never_share_a_step(private):
    one, other = private(**CASE), private(**CASE)
    taken(one, 1)
    with pytest.raises(bqsgd.LedgerError, match="already recorded"):
        taken(other, 1)


def test_a_missing_plan_is_not_made_anew(private, tmp_path):
    training = private(**CASE)
    taken(training, 1)
    training.close()
    (tmp_path / "me.ledger.trial-7.study.json").unlink()
    with pytest.raises(bqsgd.LedgerError, match="restore it"):
        private(**CASE)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": "bqsgd.study.v1"}', b"[" * 20_000, b"\xff\xfe"])
def test_a_damaged_study_raises_a_documented_error(private, tmp_path, content):
    private(**CASE).close()
    path = tmp_path / "me.ledger.trial-7.study.json"
    path.write_bytes(content)
    with pytest.raises(bqsgd.BqsgdError):
        private(**CASE)


def test_a_changed_plan_cannot_exceed_the_budget(private, tmp_path):
    training = private(**CASE)
    training.close()
    path = tmp_path / "me.ledger.trial-7.study.json"
    stored = json.loads(path.read_text())
    stored["plan"]["release"]["mechanism"]["trials"] = 2
    path.write_text(json.dumps(stored))
    hostile = private(**CASE)
    with pytest.raises(bqsgd.BudgetExhausted):
        taken(hostile, 6)
    assert hostile.guarantee() is None or hostile.guarantee().epsilon <= 3.0


def test_a_plan_that_was_copied_beside_another_ledger_gets_no_budget_from_it(private, tmp_path):
    """The plan says how much noise; what may be spent is in the ledger it now lies beside."""
    private(**CASE).close()
    plan = (tmp_path / "me.ledger.trial-7.study.json").read_bytes()
    (tmp_path / "new.ledger.trial-7.study.json").write_bytes(plan)
    with pytest.raises(bqsgd.LedgerError, match="restore the ledger"):
        private(**CASE | {"ledger": tmp_path / "new.ledger"})
    (tmp_path / "new.ledger.trial-7.study.json").unlink()
    first = private(**CASE | {"ledger": tmp_path / "new.ledger", "study": "other"})
    for _ in range(2):
        taken(first, 2)
    first.close()
    (tmp_path / "new.ledger.trial-7.study.json").write_bytes(plan)
    second = private(**CASE | {"ledger": tmp_path / "new.ledger"})
    taken(second, 2)
    with pytest.raises(bqsgd.BudgetExhausted):
        taken(second, 2)
    assert second.guarantee().epsilon <= 3.0


@pytest.mark.parametrize("name", ["", "../up", "a/b", "a\0b", "x" * 65, 7])
def test_names_are_safe_in_file_names(private, name):
    with pytest.raises(bqsgd.InvalidParameter, match="study must be"):
        private(**CASE | {"study": name})


def test_a_study_needs_a_ledger(private):
    with pytest.raises(bqsgd.InvalidParameter, match="ledger"):
        private(**CASE | {"seed": 3, "ledger": None})
