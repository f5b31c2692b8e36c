"""The gate that a node sets around any app: apps without the mod, with others, or that fail while they are imported."""

from copy import copy

import pytest
from flower_cases import GATE, SECRET, app_of, run, spent, two_nodes
from flwr.app import ConfigRecord, RecordDict

import bqsgd
from bqsgd._src.integrations.flower_node import gate_of, gated, gated_supernode
from bqsgd.integrations.flower import PrivateUpdates, ThinUpdates

SET = {f"gate-{name.replace('_', '-')}": value for name, value in GATE.items()}
FORM = ["bqsgd.frame.v1", "fields", "metrics", "update"]


@pytest.fixture
def nodes(tmp_path):
    return [node | SET for node in two_nodes(tmp_path)]


def behind(app):
    """The app as a SuperNode with a gate runs it."""
    return gated(lambda *names: app)("id", "version", "hash")


def seen(app, nodes, rounds=1, **more):
    replies = []
    run(app, nodes, rounds, tamper=lambda n, message, reply: replies.append(copy(reply)) or reply, **more)
    return replies


def around(message, context, call_next):
    reply = call_next(message, context)
    content = reply.content
    content["note"] = ConfigRecord({"note": SECRET})
    reply.content = content
    return reply


@pytest.mark.parametrize("mods", [(), (around,), (around, ThinUpdates())], ids=["none", "other", "thin"])
def test_an_app_without_the_mod_answers_behind_the_nodes_gate(nodes, mods):
    for reply in seen(behind(app_of(*mods)), nodes):
        assert sorted(reply.content) == FORM
        assert reply.content["metrics"]["num-examples"] == 1
    assert [rounds for rounds, _ in spent(nodes)] == [1, 1]


def test_an_app_that_changes_the_nodes_configuration_changes_nothing(nodes):
    """Flower keeps the context that an app has written to, and gives it to the app's next round."""

    def forgetting(message, context, call_next):
        assert context.node_config["gate-study"] == GATE["study"]
        context.node_config.clear()
        context.state = RecordDict({"kept": ConfigRecord({"rounds": len(context.state) + 1})})
        return call_next(message, context)

    grid, _ = run(behind(app_of(forgetting)), nodes, 2)
    assert [rounds for rounds, _ in spent(nodes)] == [2, 2]
    for context, node in zip(grid.contexts.values(), nodes, strict=True):
        assert context.node_config == node
        assert context.state["kept"]["rounds"] == 2


def test_the_apps_own_gate_inside_the_nodes_is_counted_too(nodes):
    """Both count. The outer one gets no arrays, so its update is zero: nothing leaves that was not counted."""
    for reply in seen(behind(app_of(PrivateUpdates(**GATE))), nodes):
        assert sorted(reply.content) == FORM or reply.has_error()
    assert [rounds for rounds, _ in spent(nodes)] in ([1, 1], [2, 2])


def test_an_app_that_fails_while_it_is_imported_is_an_update_of_zeros(nodes):
    def load(*names):
        raise ImportError(SECRET)

    replies = seen(gated(load)("id", "version", "hash"), nodes)
    assert [sorted(reply.content) for reply in replies] == [FORM, FORM]
    assert [rounds for rounds, _ in spent(nodes)] == [1, 1]


@pytest.mark.slow
def test_evaluation_and_the_rounds_after_the_last_are_declined(nodes):
    replies = seen(behind(app_of()), [node | {"gate-rounds": 1} for node in nodes], 2, evaluated=1.0)
    assert [reply.has_error() for reply in replies] == [False, False] + [True] * 6
    assert {reply.error.reason for reply in replies[2:]} == {
        "declined: only training passes the privacy gate of this node",
        "declined: the privacy budget of this node is spent",
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"gate-round": 2},
        {"gate-rounds": 0},
        {"gate-study": "../up"},
        {"gate-epsilon": "x"},
        {"gate_bits": 4},
        {"Gate": 1},
    ],
    ids=str,
)
def test_a_gate_that_is_set_wrong_lets_nothing_through(nodes, changed):
    app = gated(lambda *names: pytest.fail("the app was loaded"))("id", "version", "hash")
    replies = seen(app, [node | changed for node in nodes])
    assert all(reply.has_error() for reply in replies)


@pytest.mark.parametrize("missing", sorted(SET))
def test_every_setting_is_needed(missing):
    with pytest.raises(bqsgd.InvalidParameter, match=missing):
        gate_of({key: value for key, value in SET.items() if key != missing})


def test_without_a_gate_the_app_answers_as_it_is(tmp_path):
    replies = seen(behind(app_of(ThinUpdates())), two_nodes(tmp_path))
    assert all("update" in reply.content for reply in replies)
    assert gate_of({"client": 0}) is None


def test_apps_that_another_program_starts_are_refused():
    with pytest.raises(bqsgd.InvalidParameter, match="isolation"):
        gated_supernode(["--isolation", "process", "--node-config", 'gate-study="t"'])
