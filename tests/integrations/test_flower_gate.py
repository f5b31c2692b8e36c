"""Flower's own quickstart shape behind the gate: FedAvg as it is, mods on the nodes, real Flower messages."""

import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd.integrations.flower import OpenUpdates, PrivateUpdates, ThinUpdates
from loop_grid import LoopGrid

GATE = {"study": "trial-7", "rounds": 2, "epsilon": 50.0, "delta": 1e-5, "clip_norm": 1.0}
SECRET = "patient 17 has"


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


def app_of(*mods, moved=0.1, fails=None):
    """A ClientApp as in Flower's quickstarts: it loads the state, changes it and returns state and metrics."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        if fails is not None:
            raise fails
        net = model()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter += moved
        net[1].num_batches_tracked += 17
        metrics = MetricRecord({"train_loss": 0.123, "num-examples": 512})
        extra = ConfigRecord({"note": SECRET})
        return Message(
            RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics, "extra": extra}), reply_to=message
        )

    @app.evaluate()
    def evaluate(message, context):
        return Message(RecordDict({"metrics": MetricRecord({"eval_acc": 0.5, "num-examples": 512})}), reply_to=message)

    return app


@pytest.fixture
def nodes(tmp_path):
    return [
        {"client": n, "ledger-folder": str(tmp_path / f"site-{n}"), "epsilon": 60.0, "units": "client"} for n in (0, 1)
    ]


def run(app, nodes, rounds, *, largest=10.0, evaluated=0.0, tamper=None, strategy=None):
    grid = LoopGrid(app, {}, nodes, tamper)
    inner = FedAvg(fraction_evaluate=evaluated, min_available_nodes=2) if strategy is None else strategy
    start = ArrayRecord(model().state_dict())
    result = OpenUpdates(inner, largest_range=largest).start(grid, start, num_rounds=rounds, timeout=60)
    return grid, result


def spent(nodes):
    counted = []
    for node in nodes:
        with bqsgd.Ledger(f"{node['ledger-folder']}/client-{node['client']:04}.ledger") as ledger:
            counted.append((ledger.spent_rounds, ledger.guarantee()))
    return counted


def test_two_rounds_behind_the_gate_are_counted_and_the_third_is_declined(nodes, caplog):
    _grid, result = run(app_of(PrivateUpdates(**GATE)), nodes, 3)
    for rounds, guarantee in spent(nodes):
        assert rounds == 2
        assert guarantee.unit == "client"
        assert 0.9 * 50 < guarantee.epsilon <= 50
    assert set(result.train_metrics_clientapp) == {1, 2}, "nothing came in round 3"
    assert result.train_metrics_clientapp[2]["epsilon"] <= 50
    assert "declined: the privacy budget of this node is spent" in caplog.text


def test_only_the_frame_and_public_figures_leave(nodes):
    looked = []

    def look(n, message, reply):
        records = {name: sorted(record) for name, record in reply.content.items()}
        assert records == {
            "bqsgd.frame.v1": ["bqsgd.frame.v1"],
            "fields": [],
            "update": ["ranges", "record"],
            "metrics": ["epsilon", "num-examples"],
        }
        assert reply.content["metrics"]["num-examples"] == 1
        looked.append(len(reply.content["bqsgd.frame.v1"]["bqsgd.frame.v1"].data))
        return reply

    run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=look)
    assert len(looked) == 2
    assert max(looked) < 150


def test_what_is_not_floating_point_stays_the_servers(nodes):
    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1)
    after = result.arrays.to_torch_state_dict()
    assert int(after["1.num_batches_tracked"]) == 0
    assert not torch.equal(after["0.weight"], model().state_dict()["0.weight"])


def test_training_that_fails_still_sends_a_frame(nodes):
    _grid, _result = run(app_of(PrivateUpdates(**GATE), fails=ValueError(SECRET)), nodes, 1)
    assert [rounds for rounds, _ in spent(nodes)] == [1, 1]


@pytest.mark.parametrize("mod", [PrivateUpdates(**GATE), ThinUpdates()], ids=["private", "thin"])
def test_errors_and_evaluation_tell_the_server_nothing(nodes, mod):
    replies = []
    run(
        app_of(mod, fails=ValueError(SECRET)), nodes, 1, evaluated=1.0,
        tamper=lambda n, message, reply: replies.append(reply) or reply,
    )  # fmt: skip
    assert len(replies) == 4
    assert SECRET not in "".join(str(r.error.reason if r.has_error() else r.content) for r in replies)
    assert [r.error.reason for r in replies[2:]] == ["declined: only training passes the privacy gate of this node"] * 2


@pytest.mark.parametrize(
    "limits",
    [{"units": "sample"}, {"largest-dimension": 3}, {"largest-clip": 0.5}, {"epsilon": 1e-9}, {"client": "x"}],
    ids=lambda value: next(iter(value)),
)
def test_the_nodes_own_limits_come_first(nodes, limits):
    nodes = [node | limits for node in nodes]
    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1)
    assert not result.train_metrics_clientapp
    for node in nodes:
        path = f"{node['ledger-folder']}/client-{0 if node['client'] == 'x' else node['client']:04}.ledger"
        try:
            with bqsgd.Ledger(path) as ledger:
                assert ledger.spent_rounds == 0
        except bqsgd.BqsgdError:
            pass  # no ledger was made


def test_a_server_that_asks_twice_is_charged_twice(nodes):
    grid = LoopGrid(app_of(PrivateUpdates(**GATE)), {}, nodes)
    content = RecordDict({"arrays": ArrayRecord(model().state_dict())})
    ask = [Message(content, dst_node_id=1000, message_type="train") for _ in range(3)]
    replies = grid.send_and_receive(ask)
    assert [reply.has_error() for reply in replies] == [False, False, True]
    frames = [reply.content["bqsgd.frame.v1"]["bqsgd.frame.v1"].data for reply in replies[:2]]
    assert frames[0] != frames[1]
    assert spent(nodes[:1])[0][0] == 2


def test_hostile_replies_are_left_out(nodes):
    def tamper(n, message, reply):
        if n:
            content = reply.content
            stated = dict(content["update"])
            content["update"] = ConfigRecord(stated | {"ranges": [1e30]})
            reply.content = content
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=tamper)
    largest = max(float(v.abs().max()) for v in result.arrays.to_torch_state_dict().values())
    assert largest < 1e6


@pytest.mark.parametrize(
    "broken",
    [{}, {"record": 5}, {"ranges": "x"}, {"ranges": []}, {"ranges": [0.0]}],
    ids=["missing", "record", "text", "none", "zero"],
)
def test_replies_of_another_form_are_left_out(nodes, broken):
    def tamper(n, message, reply):
        content = reply.content
        content["update"] = ConfigRecord(dict(content["update"]) | broken if broken else {})
        reply.content = content
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=tamper)
    assert not result.train_metrics_clientapp


def trained_app(tmp_path, *, epochs):
    """An app that trains with `make_private`, one epoch in each round, as a fresh process would."""
    app = ClientApp(mods=[ThinUpdates(bits=6)])

    @app.train()
    def train(message, context):
        number = context.node_config["client"]
        net = nn.Linear(4, 2)
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(64, 4, generator=generator)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32, shuffle=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        with bqsgd.make_private(
            net, optimizer, loader, loss_fn=nn.CrossEntropyLoss(reduction="none"), epsilon=8, delta=1e-5,
            epochs=epochs, ledger=tmp_path / f"{number}.ledger", study="trial-7", force=True,
        ) as private:  # fmt: skip
            for batch in private.loader:
                private.step(batch)
        metrics = MetricRecord({"train_loss": 0.123, "num-examples": 64})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def test_private_training_goes_on_over_the_rounds_and_stops_where_the_plan_said(nodes, tmp_path):
    grid = LoopGrid(trained_app(tmp_path, epochs=2), {}, nodes)
    start = ArrayRecord(nn.Linear(4, 2).state_dict())
    strategy = OpenUpdates(FedAvg(fraction_evaluate=0.0, min_available_nodes=2), largest_range=10.0)
    result = strategy.start(grid, start, num_rounds=3, timeout=60)
    assert set(result.train_metrics_clientapp) == {1, 2}
    assert dict(result.train_metrics_clientapp[1]) == {}, "no training loss"
    for number in (0, 1):
        plan = json.loads((tmp_path / f"{number}.ledger.trial-7.study.json").read_text())["plan"]
        with bqsgd.Ledger(tmp_path / f"{number}.ledger") as ledger:
            assert ledger.spent_rounds == plan["rounds"] == 4
            assert ledger.guarantee().epsilon <= 8
            assert len(ledger.released) == 1, "one noise for the whole study"
    assert np.isfinite(result.arrays.to_numpy_ndarrays()[0]).all()
