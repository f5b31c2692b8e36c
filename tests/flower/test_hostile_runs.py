"""A hostile server against a client's own limits: real Flower client apps, asked for what they should not give."""

from __future__ import annotations

import json

import numpy as np
import pytest
from torch import nn

from engines.hostile_servers import LOSS, message

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.app import Message, MessageType

from bqsgd._src.engines.engine import read_guarantee
from bqsgd._src.flower.client_app import NO_ANSWER
from bqsgd._src.flower.messages import FRAME, MODEL, field_of, has_data, pack
from bqsgd._src.ledger import Ledger
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.tasks.task import Task
from bqsgd.flower import client_app
from loop_grid import LoopGrid

DIMENSION, SAMPLES = 8, 60
RUN = {
    "clients": 2, "rounds": 50, "batch_size": 20, "levels": 4, "trials": 2000, "epsilon": 3.0, "delta": 1e-5,
    "clip_bound": 0.1, "clip_norm": 0.5, "range": 0.02,
}  # fmt: skip
SECRET = 41.5


class Prey:
    """One client with a secret in its data, on a node that was given its number and a place for its ledger."""

    def __init__(self, folder, **options):
        self.folder, self.options, self.reads = folder, options, 0
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(SAMPLES, 3)).astype(np.float32)
        self.inputs[0, 0] = SECRET
        self.targets = (self.inputs[:, 1] > 0).astype(np.int64)

    def task(self, config, node, options):
        self.reads += 1
        width = int(options.get("width", 2))
        return Task(make_model=lambda: nn.Linear(3, width), shares=[(self.inputs, self.targets)], loss_fn=LOSS)

    def ask(self, kind, content, **settings):
        """One message of one run, as a fresh process gets it: every call is a node that was just restarted."""
        node = {"client": 0, "ledger-folder": str(self.folder), **self.options}
        grid = LoopGrid(client_app(self.task), RUN | settings, [node])
        (reply,) = grid.send_and_receive([Message(content, 1000, kind, ttl=60.0, group_id="0")])
        return reply

    def join(self, **settings):
        return self.ask(MessageType.QUERY, pack(None, kind=MODEL, run="r"), **settings)

    def train(self, model=None, *, round=0, run="r", report=False, **settings):
        model = np.zeros(DIMENSION, np.float32) if model is None else model
        content = pack(message(model, round=round), kind=MODEL, run=run, report=report)
        return self.ask(MessageType.TRAIN, content, **settings)

    @property
    def ledger_file(self):
        return self.folder / "client-0000.ledger"

    def ledger(self):
        return Ledger(self.ledger_file)


def declined(reply):
    assert not has_data(reply, kind=FRAME)
    return field_of(reply, "declined", str)


@pytest.mark.parametrize(
    "asked",
    [
        {"unit": "client", "local_steps": 3},
        {"unit": "client", "sampling": "none"},
        {"sampling": "fixed"},
        {"sampling": "none"},
        {"clip": "batch-mean"},
        {"range": 1e-30},
        {"range": 1e30},
        {"clip_bound": 1e12, "range": 1.0},
        {"epsilon": 1e6},
        {"delta": 0.5},
        {"private_metrics": True},
        {"packed_rows": True},
        {"seed": 1},
        {"trials": 0},
        {"levels": "", "trials": "", "budgets": "[{client = 0, from_round = 3, epsilon = 1e6}]"},
    ],
    ids=str,
)
def test_what_a_strict_node_does_not_allow_is_declined_unread(tmp_path, asked):
    prey = Prey(tmp_path)
    reasons = {declined(prey.join(**asked)), declined(prey.train(**asked))}
    assert len(reasons) == 1
    assert NO_ANSWER not in reasons, "declined for a reason that the operator can read, not failed"
    assert prey.reads == 0
    assert not prey.ledger_file.exists()


@pytest.mark.parametrize(
    "asked",
    [
        {"epsilon": "9" * 400},
        {"budgets": "[" * 5000},
        {"budgets": "[{client = 0, epsilon = " + "9" * 400 + "}]", "levels": "", "trials": ""},
        {"batch_size": 2**80},
        {"clients": 100_001},
        {"run": "../../etc"},
        {"schedule": "cosin"},
    ],
    ids=lambda asked: str(asked)[:40],
)
def test_settings_that_are_none_fail_alike_and_unread(tmp_path, asked):
    prey = Prey(tmp_path)
    assert declined(prey.join(**asked)) == NO_ANSWER
    assert declined(prey.train(**asked)) == NO_ANSWER
    assert prey.reads == 0
    assert not prey.ledger_file.exists()


def test_no_model_that_a_server_chooses_spends_or_tells_apart(tmp_path):
    """The attack that read a value to 1e-6: models that overflow only where the data hold more than a threshold."""
    prey = Prey(tmp_path)
    for threshold in (SECRET - 1, SECRET + 1):
        model = np.zeros(DIMENSION, np.float32)
        model[0] = np.float32(np.finfo(np.float32).max / threshold)
        assert "largest-parameter" in declined(prey.train(model))
        model[0] = np.nan
        assert declined(prey.train(model)) == NO_ANSWER
    if prey.ledger_file.exists():
        with prey.ledger() as ledger:
            assert ledger.spent_rounds == 0


def test_even_a_node_that_allows_everything_answers_overflow_with_a_frame(tmp_path):
    prey = Prey(
        tmp_path, **{"units": "sample,client", "samplings": "none", "epsilon": 1e4, "largest-parameter": 3.5e38}
    )
    for number, threshold in enumerate((SECRET - 1, SECRET + 1)):
        model = np.zeros(DIMENSION, np.float32)
        model[0] = np.float32(np.finfo(np.float32).max / threshold)
        asked = {"unit": "client", "sampling": "none", "local_steps": 2, "epsilon": 1e4}
        assert has_data(prey.train(model, round=number, **asked), kind=FRAME)


def test_a_model_of_too_many_parameters_is_declined(tmp_path):
    prey = Prey(tmp_path, **{"largest-dimension": 100})
    assert declined(prey.join(width=1000)) == (
        "the model has 4000 parameters, this node allows 100 (largest-dimension)"
    )
    assert declined(prey.train(np.zeros(4000, np.float32), width=1000)) == NO_ANSWER
    assert has_data(prey.train(), kind=FRAME)


def test_a_first_run_at_a_tiny_epsilon_fixes_nothing(tmp_path):
    prey = Prey(tmp_path)
    assert declined(prey.train(run="evil", epsilon=1e-9)).startswith("the privacy budget is spent: that of this run")
    assert has_data(prey.train(run="good"), kind=FRAME)
    with prey.ledger() as ledger:
        assert (ledger.budget.epsilon, ledger.spent_rounds) == (10.0, 1)


def test_one_round_of_every_kind_is_no_dead_end(tmp_path):
    """Sampling and unit changed in mid-run, the node restarted before every message."""
    prey = Prey(tmp_path, units="sample,client", samplings="poisson,fixed,none")
    kinds = [
        {"unit": "client", "sampling": "none", "trials": 200_000, "range": 0.5, "levels": 2},
        {"sampling": "fixed"},
        {},
    ]
    for round, kind in enumerate(kinds):
        assert has_data(prey.train(round=round, **kind), kind=FRAME), kind
    reply = prey.train(round=3, report=True, evaluate_every=1)
    stated = read_guarantee(field_of(reply, "guarantee", str))
    with prey.ledger() as ledger:
        total, tally = ledger.guarantee(), Accountant()
        for entry in ledger.entries[1:]:
            tally = tally.compose(entry.release, entry.rounds)
        assert len(ledger.guarantees()) == 3
    assert stated == total
    assert (total.unit, total.relation, total.epsilon) == ("sample", "add/remove one", tally.epsilon(1e-5))


def test_many_runs_together_stay_within_the_nodes_budget(tmp_path):
    prey = Prey(tmp_path, epsilon=2.0)
    answered = 0
    for number in range(40):  # each run asks for 1.5 and names itself anew
        reply = prey.train(run=f"run-{number}", epsilon=1.5, trials=300)
        if not has_data(reply, kind=FRAME):
            assert declined(reply) == "the privacy budget is spent"
            break
        answered += 1
    with prey.ledger() as ledger:
        assert 1 <= answered == ledger.spent_rounds < 40
        assert ledger.guarantee().epsilon <= 2.0


def test_a_lost_operator_note_is_found(tmp_path):
    prey = Prey(tmp_path, epsilom=1.0)
    assert declined(prey.train()) == NO_ANSWER
    assert prey.reads == 0


def test_what_a_client_states_of_itself_never_ends_a_run():
    fields = {
        "epsilon": 1.0, "delta": 1e-5, "relation": "add/remove one", "unit": "sample",
        "trust": "server sees each client's messages", "sampling": "s", "method": "m", "delta_floor": 0.0,
    }  # fmt: skip
    assert read_guarantee(json.dumps(fields)) is not None
    for name in fields:
        for value in (10**400, -(10**400), [], {}, None, True, "x" * 5000, 1e308 * 10, -1):
            found = read_guarantee(json.dumps(fields | {name: value}))
            assert found is None or name in ("delta_floor", "epsilon")
    for text in ("[" * 60_000, "{" * 60_000, '{"epsilon": ' + "9" * 5000 + "}", "[]", "1", "null", '"x"', "\ud800"):
        assert read_guarantee(text) is None
