"""Flower's own quickstart shape behind the gate: FedAvg as it is, mods on the nodes, real Flower messages."""

import json
from copy import copy

import numpy as np
import pytest
import torch
from flower_cases import GATE, SECRET, app_of, model, run, spent, two_nodes
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd.integrations.flower import OpenUpdates, PrivateUpdates, ThinUpdates
from loop_grid import LoopGrid


@pytest.fixture
def nodes(tmp_path):
    return two_nodes(tmp_path)


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
            "update": ["delta", "epsilon", "following", "ranges"],
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
        tamper=lambda n, message, reply: replies.append(copy(reply)) or reply,
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


@pytest.mark.parametrize("limit", [{"epsilon": 1.0}, {"units": "client"}, {"largest-clip": 0.5}], ids=str)
def test_a_node_with_limits_and_no_number_is_not_taken_for_a_simulated_one(tmp_path, monkeypatch, limit):
    """Flower's quickstart names nodes by partition-id. Their limits would be read by nobody."""
    monkeypatch.setenv("BQSGD_LEDGER_FOLDER", str(tmp_path))
    nodes = [{"partition-id": n, "num-partitions": 2} | limit for n in (0, 1)]
    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1)
    assert not result.train_metrics_clientapp
    assert not list(tmp_path.rglob("*.ledger"))


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
    [{}, {"ranges": "x"}, {"ranges": []}, {"ranges": [0.0]}],
    ids=["missing", "text", "none", "zero"],
)
def test_replies_of_another_form_are_left_out(nodes, broken):
    def tamper(n, message, reply):
        content = reply.content
        content["update"] = ConfigRecord(dict(content["update"]) | broken if broken else {})
        reply.content = content
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=tamper)
    assert not result.train_metrics_clientapp


@pytest.mark.parametrize(
    "metrics",
    [
        {"num-examples": float("nan")},
        {"num-examples": -1},
        {"num-examples": 0},
        {"num-examples": [1, 2]},
        {"epsilon": float("inf")},
        {"other": 1.0},
    ],
    ids=str,
)
def test_one_node_with_odd_metrics_cannot_end_the_run(nodes, metrics):
    """FedAvg raises an error if metrics differ from node to node, and a weight of NaN would make the model NaN."""
    nodes = [*nodes, nodes[1] | {"client": 2}]

    def tamper(n, message, reply):
        if n == 2:
            content = reply.content
            content["metrics"] = MetricRecord(dict(content["metrics"]) | metrics)
            reply.content = content
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=tamper)
    assert set(result.train_metrics_clientapp[1]) == {"epsilon"}
    assert all(np.isfinite(values).all() for values in result.arrays.to_numpy_ndarrays())


def outer(message, context, call_next):
    """A mod around the gate, with the app's own message and context in hand."""
    message.content["mine"] = ConfigRecord({"note": SECRET})
    reply = call_next(message, context)
    assert SECRET not in str(reply.content)
    return reply


def inner(message, context, call_next):
    """A mod between the gate and the app, which adds to the reply."""
    reply = call_next(message, context)
    content = reply.content
    content["more"] = MetricRecord({"mean-of-the-data": 0.123})
    reply.content = content
    return reply


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["outside", "inside"])
def test_another_mod_gets_nothing_past_the_gate(nodes, order):
    mods = [(outer, PrivateUpdates(**GATE)), (PrivateUpdates(**GATE), inner)][order[0]]
    replies = []
    run(app_of(*mods), nodes, 1, tamper=lambda n, message, reply: replies.append(copy(reply)) or reply)
    for reply in replies:
        assert sorted(reply.content) == ["bqsgd.frame.v1", "fields", "metrics", "update"]
    assert [rounds for rounds, _ in spent(nodes)] == [1, 1]


def test_a_mod_that_calls_the_app_twice_gets_two_counted_updates(nodes):
    def twice(message, context, call_next):
        call_next(message, context)
        return call_next(message, context)

    run(app_of(twice, PrivateUpdates(**GATE)), nodes, 1)
    assert [rounds for rounds, _ in spent(nodes)] == [2, 2]


@pytest.mark.parametrize("fails", [None, bqsgd.BudgetExhausted("x")], ids=["sends", "declines"])
def test_what_an_app_writes_into_the_metadata_is_not_in_the_reply(nodes, fails):
    """Flower copies the group and the type of the message into the reply."""

    def writing(message, context, call_next):
        message.metadata.__dict__["_group_id"] = message.metadata.__dict__["_message_type"] = SECRET
        if fails is not None:
            raise fails
        return call_next(message, context)

    for gate in (PrivateUpdates(**GATE), ThinUpdates()):
        grid = LoopGrid(app_of(gate, writing), {}, nodes)
        content = RecordDict({"arrays": ArrayRecord(model().state_dict())})
        (reply,) = grid.send_and_receive([Message(content, dst_node_id=1000, message_type="train", group_id="7")])
        assert SECRET not in str(vars(reply.metadata))
        assert reply.metadata.group_id == "7"


def test_an_app_that_changes_the_message_it_was_sent_does_not_change_what_its_update_is(nodes):
    """The model before is read before the app runs: else `after - before` could be anything, though it is clipped."""

    def changing(message, context, call_next):
        reply = call_next(message, context)
        message.content["arrays"] = ArrayRecord()
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE), changing), nodes, 1)
    assert not np.array_equal(
        result.arrays.to_numpy_ndarrays()[0], ArrayRecord(model().state_dict()).to_numpy_ndarrays()[0]
    )


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
