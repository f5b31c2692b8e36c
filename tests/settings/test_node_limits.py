"""A client's own limits: strict unless its operator says otherwise, decided from settings and models alone."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from bqsgd._src.client.client import Client
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import PlanningTooLong, cpu_seconds, make_plan
from bqsgd._src.release import Terms
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits, key_of
from tiny_task import client_of

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
STRICT = NodeLimits()
WIDER = {
    "epsilon": ({"epsilon": 10.1}, {"epsilon": 11.0}),
    "delta": ({"delta": 1.1e-5}, {"delta": 1e-4}),
    "a schedule of budgets": ({"budgets": ({"client": 0, "from_round": 5, "epsilon": 20.0},)}, {"epsilon": 20.0}),
    "unit": ({"unit": "client"}, {"units": "sample, client"}),
    "fixed batches": ({"sampling": "fixed"}, {"samplings": "poisson,fixed"}),
    "no sampling": ({"sampling": "none"}, {"samplings": "none"}),
    "a clip that bounds no sample": ({"clip": "batch-mean"}, {"clips": "batch-mean"}),
    "a tiny clip": ({"clip_bound": 1e-7, "range": 1.0}, {"least-clip": 1e-8}),
    "a tiny range": ({"range": 1e-40}, {"least-clip": 1e-50}),
    "a huge norm": ({"clip_norm": 1e9, "range": 1.0}, {"largest-clip": 1e12}),
    "private metrics": ({"private_metrics": True}, {"allow-private-metrics": True}),
    "packed rows": ({"packed_rows": True}, {"allow-packed-rows": True}),
    "seeded noise": ({"seed": 1}, {"allow-no-privacy": True}),
    "no noise": ({"levels": 1, "trials": 0}, {"allow-no-privacy": True}),
}


@pytest.mark.parametrize("what", WIDER)
def test_what_is_beyond_the_defaults_is_declined_until_the_operator_allows_it(what: str) -> None:
    asked, allowed = WIDER[what]
    config = Config.of(**asked)
    assert STRICT.refusal(Config(), client=0) is None
    assert STRICT.refusal(config, client=0) is not None
    assert NodeLimits.of(allowed).refusal(config, client=0) is None
    assert NodeLimits.unlimited().refusal(config, client=0) is None


def test_a_budget_of_another_client_is_not_this_clients_concern() -> None:
    config = Config.of(budgets=({"client": 1, "epsilon": 20.0},))
    assert STRICT.refusal(config, client=0) is None
    assert STRICT.refusal(config, client=1) == "the run asks for epsilon 20, this node allows 10"
    assert STRICT.refusal(config, client=4) == "the run has clients 0 to 3, this is client 4"


@pytest.mark.parametrize(
    "wrong",
    [
        {"epsilon": -1.0},
        {"epsilon": 10**400},
        {"delta": 1.0},
        {"units": "sample, planet"},
        {"units": ""},
        {"samplings": 3},
        {"allow-packed-rows": "yes"},
        {"largest-dimension": 0},
        {"largest-parameter": float("nan")},
        {"planning-seconds": "60"},
        {"epsilion": 1.0},
        {"alow-packed-rows": True},
        {"Epsilon": 1.0},
        {"ledger-folder": "/var/lib/bq\0sgd"},
        {"ledger-folder": "~nobody-of-that-name/x"},
    ],
)
def test_a_limit_that_is_none_is_refused_and_none_is_lost_to_a_slip(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter):
        NodeLimits.of(wrong)


def test_other_keys_of_a_node_are_its_owners_but_a_file_of_limits_holds_limits(tmp_path: Path) -> None:
    assert NodeLimits.of({"client": 3, "data-folder": "/x", "partition-id": 1}) == STRICT
    path = tmp_path / "limits.toml"
    path.write_text('epsilon = 3.0\nunits = ["sample", "client"]\nledger-folder = "/var/lib/bqsgd"\n')
    found = NodeLimits.read(path)
    assert (found.epsilon, found.units, found.ledger_folder) == (3.0, ("sample", "client"), Path("/var/lib/bqsgd"))
    path.write_text("data-folder = 1\n")
    with pytest.raises(InvalidParameter, match="is not a limit of a node; known: epsilon, delta"):
        NodeLimits.read(path)


def test_the_page_lists_every_limit_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    for each in fields(NodeLimits):
        default = each.default
        shown = ", ".join(default) if isinstance(default, tuple) else "false" if default is False else default
        expected = each.metadata["help"] + " | " + (f"{shown:g}" if isinstance(shown, float) else str(shown))
        if default is not None:
            assert rows[key_of(each.name)] == expected
        assert key_of(each.name) in rows


def client(path: Path, limits: NodeLimits, **settings: object) -> Client:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 3)).astype(np.float32)
    config = Config.of(
        **{"clients": 1, "batch_size": 8, "rounds": 3, "levels": 4, "trials": 9000, "reserve_rounds": 1, **settings}
    )
    ledger = Ledger.open(
        path, client=0, budget_epsilon=limits.epsilon or 3.0, budget_delta=1e-5, change_reason="the client's own limits"
    )
    data, loss_fn = (inputs, (inputs[:, 0] > 0).astype(np.int64)), nn.CrossEntropyLoss(reduction="none")
    return client_of(config, nn.Linear(3, 2), loss_fn, data, ledger=ledger, limits=limits, resume=True)


def test_a_client_tells_its_operator_what_other_runs_have_spent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = client(tmp_path / "a", STRICT)
    release = made.charge(0).release
    made.spending.ledger.reserve(release, run="another", first_round=0, rounds=2, seeded=False)
    assert made.update(np.zeros(8, np.float32), 0).frame is not None
    (text,) = [record.message for record in caplog.records if "is already spent" in record.message]
    assert f"{tmp_path / 'a'}: epsilon " in text
    assert "(run another: 2 rounds, 20" in text
    assert text.endswith("Of the 3 rounds of this run all fit")
    caplog.clear()
    assert made.update(np.zeros(8, np.float32), 1).frame is not None
    assert "is already spent" not in caplog.text, "said once"


@pytest.mark.parametrize("value", [1.0001e4, -3e38, np.inf, np.nan])
def test_a_model_beyond_the_largest_parameter_is_declined_before_the_spend(tmp_path: Path, value: float) -> None:
    made = client(tmp_path / "a", STRICT)
    model = np.zeros(8, np.float32)
    model[3] = value
    answer = made.update(model, 0)
    assert answer.declined
    assert "not finite or beyond 10000" in answer.reason
    assert made.spending.ledger is not None
    assert made.spending.ledger.spent_rounds == 0
    assert isinstance(made.update(np.full(8, 1e4, np.float32), 0).frame, bytearray)
    assert made.spending.ledger.spent_rounds == 1


def test_a_client_of_a_large_model_or_a_foreign_run_is_never_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="the model has 8 parameters, this node allows 7"):
        client(tmp_path / "a", NodeLimits(largest_dimension=7))
    with pytest.raises(InvalidParameter, match="units='sample'"):
        client(tmp_path / "a", STRICT, unit="client")


def test_a_schedule_of_budgets_does_not_touch_the_clients_own(tmp_path: Path) -> None:
    changes = ({"client": 0, "from_round": 1, "epsilon": 4.0},)
    made = client(tmp_path / "a", STRICT, levels=None, trials=None, budgets=changes, batch_size=20, epsilon=2.0)
    made._follow_schedule(made.charge(1))
    assert made.spending.ledger is not None
    assert made.spending.ledger.budget.epsilon == 10.0
    run_own = client(tmp_path / "b", NodeLimits.unlimited(), levels=None, trials=None, budgets=changes, batch_size=20)
    run_own._follow_schedule(run_own.charge(1))
    assert run_own.spending.ledger is not None
    assert run_own.spending.ledger.budget.epsilon == 4.0


def test_planning_ends_when_its_cpu_seconds_are_used_up(tmp_path: Path) -> None:
    terms = Terms.of_batch(dimension=11, batch_size=4, dataset_size=41)
    with pytest.raises(PlanningTooLong, match="more than the 1e-09 CPU seconds"), cpu_seconds(1e-9):
        make_plan(Budget(bits=8, epsilon=3.0, delta=1e-5), terms, rounds=7)
    made = client(tmp_path / "a", NodeLimits(planning_seconds=1e-9), levels=None, trials=None)
    answer = made.update(np.zeros(8, np.float32), 0)
    assert answer.declined
    assert answer.reason.endswith("planning takes more than the 1e-09 CPU seconds that this client allows")
    assert made.spending.ledger is not None
    assert made.spending.ledger.spent_rounds == 0


def test_the_limits_of_a_client_are_plain_values() -> None:
    assert replace(STRICT, epsilon=1.0) != STRICT
    with pytest.raises(InvalidParameter, match="both epsilon and delta, or neither"):
        replace(STRICT, epsilon=None)
