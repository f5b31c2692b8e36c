"""One ledger for every kind of message and many runs: no first run can fix its budget, none is a dead end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bqsgd._src.errors import BudgetExhausted, LedgerError
from bqsgd._src.ledger import Ledger, PrivacyBudget
from bqsgd._src.ledger._entries import LedgerEntry
from bqsgd._src.ledger.spending import Charge, Spending
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

DELTA = 1e-5
POISSON = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=4, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.POISSON, rate=0.1)),
)
FIXED = replace(
    POISSON,
    terms=replace(
        POISSON.terms,
        sensitivity=Sensitivity(linf=0.25, relation="replace one"),
        sampling=Sampling(scheme=Scheme.FIXED_SIZE, rate=0.1),
    ),
)
CLIENT = replace(
    POISSON,
    terms=replace(
        POISSON.terms,
        sensitivity=Sensitivity(linf=0.25, relation="replace one"),
        sampling=Sampling(scheme=Scheme.NONE),
        unit="client",
    ),
)


def open_ledger(path: Path, *, epsilon: float = 3.0, reason: str | None = None) -> Ledger:
    return Ledger.open(path, client=0, budget_epsilon=epsilon, budget_delta=DELTA, change_reason=reason)


def test_every_kind_is_counted_and_none_is_a_dead_end(tmp_path: Path) -> None:
    order = [CLIENT, FIXED, POISSON]
    tally = Accountant()
    with open_ledger(tmp_path / "a", epsilon=100.0) as ledger:
        for number, release in enumerate(order):
            ledger.spend(release, run="a", round=number, seeded=False)
            tally = tally.compose(release)
        total, kinds = ledger.guarantee(), ledger.guarantees()
        assert total is not None
        assert total.epsilon == tally.epsilon(DELTA)
        assert (total.unit, total.relation) == ("sample", "add/remove one")
        assert [(kind.unit, kind.relation) for kind in kinds] == [
            ("client", "replace one"), ("sample", "add/remove one"), ("sample", "replace one"),
        ]  # fmt: skip
        assert all(kind.epsilon <= total.epsilon for kind in kinds)
        assert len(ledger.to_dict()["guarantees_by_kind"]) == 3
        spending = Spending(ledger, run="a", seeded=False)
        assert spending.guarantee(delta=DELTA) == total


def for_one(*content: Release) -> PrivacyBudget:
    """A budget for these messages and no more."""
    tally = Accountant()
    for release in content:
        tally = tally.compose(release)
    return PrivacyBudget(epsilon=1.0001 * tally.epsilon(DELTA), delta=DELTA)


def test_mixed_kinds_stop_at_the_budget(tmp_path: Path) -> None:
    with open_ledger(tmp_path / "a", epsilon=for_one(CLIENT, POISSON).epsilon) as ledger:
        ledger.spend(CLIENT, run="a", round=0, seeded=False)
        ledger.spend(POISSON, run="b", round=0, seeded=False)
        with pytest.raises(BudgetExhausted, match="0 round\\(s\\) of this release are left"):
            ledger.spend(POISSON, run="b", round=1, seeded=False)


def test_a_run_gets_what_it_asks_for_and_its_ledger_keeps_its_own_budget(tmp_path: Path) -> None:
    tiny, small = PrivacyBudget(epsilon=1e-9, delta=DELTA), for_one(POISSON)
    with open_ledger(tmp_path / "a", epsilon=100.0) as ledger:
        with pytest.raises(BudgetExhausted, match=r"the budget of run 'first' \(epsilon 1e-09 at delta 1e-05\)"):
            ledger.spend(POISSON, run="first", round=0, seeded=False, within=tiny)
        assert ledger.spent_rounds == 0
        spending = Spending(ledger, run="second", seeded=False, ahead=1000)
        spending.spend(Charge(release=POISSON, round=0, last_round=9, within=small))
        with pytest.raises(BudgetExhausted):
            spending.spend(Charge(release=POISSON, round=1, last_round=9, within=small))
        ledger.spend(POISSON, run="third", round=0, seeded=False, within=small)
    with open_ledger(tmp_path / "a", epsilon=100.0) as ledger:  # its budget is as it was, and the runs are kept apart
        with pytest.raises(BudgetExhausted):
            ledger.spend(POISSON, run="second", round=0, seeded=False, resume=True, within=small)
        ledger.spend(POISSON, run="fourth", round=0, seeded=False, within=small)
        assert ledger.spent_rounds == 3


def test_only_the_owner_changes_the_budget(tmp_path: Path) -> None:
    open_ledger(tmp_path / "a", epsilon=1e-9).close()
    with pytest.raises(
        LedgerError, match=r"has a budget of epsilon 1e-09 at delta .*not epsilon 3 .*change_budget\(epsilon=3, delta="
    ):
        open_ledger(tmp_path / "a", epsilon=3.0)
    with open_ledger(tmp_path / "a", epsilon=3.0, reason="the node's own limits") as ledger:
        assert ledger.budget.epsilon == 3.0
        assert ledger.entries[-1].reason == "the node's own limits"
    with open_ledger(tmp_path / "a", epsilon=3.0, reason="the node's own limits") as ledger:
        assert len(ledger.entries) == 2


SPEND = {"kind": "spend", "time": "t", "run": "a", "first_round": 0, "rounds": 1, "release": POISSON.to_dict()}
BUDGET = '{"kind":"budget","time":"t","reason":"","budget":{"epsilon":%s,"delta":1e-5}}'


@pytest.mark.parametrize(
    "text",
    [
        BUDGET % ("9" * 400),
        BUDGET % ("9" * 5000),
        BUDGET % ("[" * 20_000),
        BUDGET % '"3"',
        "[1]",
        "null",
        '{"kind":"budget","time":"t","budget":7}',
        json.dumps(SPEND | {"first_round": 10**400}),
        json.dumps(SPEND | {"release": []}),
        json.dumps(SPEND | {"release": {**POISSON.to_dict(), "dimension": 10**400}}),
    ],
)  # fmt: skip
def test_an_entry_that_is_none_is_named_whatever_it_holds(text: str) -> None:
    with pytest.raises(LedgerError, match="cannot be read") as caught:
        LedgerEntry.from_json(text)
    assert len(str(caught.value)) < 400
