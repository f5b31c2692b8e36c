"""Secure sums around a stock strategy: what the nodes count, what the server gets, and what each of them refuses."""

import logging
from pathlib import Path

import numpy as np
import pytest
from flower_cases import SECRET, app_of, model
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import NeighboringRelation, PrivacyConfig, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import FedAdam, FedAvg

import bqsgd
from bqsgd._src.flower.settings import identity_path, write_identities
from bqsgd._src.integrations.flower_sums import _digest
from bqsgd._src.settings.config import Config
from bqsgd.integrations.flower import OpenSums, SiteAccountant, SummedUpdates
from loop_grid import LoopGrid

STUDY = {
    "study": "trial-7", "rounds": 3, "epsilon": 3000.0, "delta": 1e-5, "clip_norm": 1.0, "clients": 4, "dropouts": 1,
    "mechanism": bqsgd.Mechanism(levels=8, trials=250),
}  # fmt: skip
"""So little noise that the sum shows the updates: a standard deviation of 0.25 in a coordinate of the mean."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return write_identities(Config.of(clients=4), folder)


@pytest.fixture
def nodes(tmp_path, keys):
    return [
        {
            "client": n, "ledger-folder": str(tmp_path / f"site-{n}"), "epsilon": 4000.0, "units": "client",
            "roster": str(keys), "identity": str(identity_path(keys.parent, n)),
        }
        for n in range(4)
    ]  # fmt: skip


def run(nodes, keys, *, rounds=1, tamper=None, strategy=None, app=None, **changed):
    grid = LoopGrid(app or app_of(SummedUpdates(**STUDY), moved=0.25), {}, nodes, tamper)
    inner = strategy or FedAvg(fraction_evaluate=0.0, min_available_nodes=2)
    result = OpenSums(inner, roster=keys, seconds=60.0, **STUDY | changed).start(
        grid, ArrayRecord(model().state_dict()), num_rounds=rounds
    )
    return grid, result


def counted(node):
    path = f"{node['ledger-folder']}/client-{node['client']:04}.ledger"
    with bqsgd.Ledger(path) as ledger:
        return ledger.spent_rounds, ledger.guarantee()


def named(change):
    sizes = {name: array.numpy().size for name, array in ArrayRecord(model().state_dict()).items()}
    return dict(zip(sizes, np.split(change, np.cumsum(list(sizes.values()))[:-1]), strict=True))


def moved(result):
    before, after = ArrayRecord(model().state_dict()), result.arrays
    return np.concatenate(
        [(a - b).ravel() for a, b in zip(after.to_numpy_ndarrays(), before.to_numpy_ndarrays(), strict=True)]
    )


def test_the_strategy_gets_the_mean_and_the_ledgers_count_a_sum(nodes, keys):
    grid, result = run(nodes, keys, rounds=2)
    change = moved(result)
    # Each node moves its 14 parameters by 0.25 a round, which is within the clip.
    trained = [named(change)[name] for name in ("0.weight", "0.bias", "1.weight", "1.bias")]
    assert abs(np.concatenate(trained).mean() - 0.5) < 0.48, "5 standard errors"
    for node in nodes:
        rounds, guarantee = counted(node)
        assert rounds == 2
        assert guarantee.unit == "client"
        assert "sums" in str(guarantee.trust)
        assert guarantee.epsilon <= 3000
    asked = [message for message in grid.sent if "arrays" in message.content]
    assert len(asked) == 8, "a model for each node and round"


def test_the_accountant_ends_the_run_when_no_node_has_room(nodes, keys):
    held = SiteAccountant(
        PrivacyConfig(
            target_delta=1e-5, population_size=4, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
        )
    )  # fmt: skip
    with pytest.raises(PrivacyBudgetExhausted):
        run(nodes, keys, rounds=4, accountant=held)
    assert [counted(node)[0] for node in nodes] == [3] * 4
    assert held.get_epsilon(1e-5) == max(counted(node)[1].epsilon for node in nodes)


def test_a_node_that_states_nothing_about_its_ledger_is_not_in_the_sum(nodes, keys):
    def tamper(n, message, reply):
        if n == 0 and "arrays" in message.content:
            content = reply.content
            content["update"] = ConfigRecord({"epsilon": float("nan")})
            reply.content = content
        return reply

    _, result = run(nodes, keys, tamper=tamper)
    assert result.train_metrics_clientapp[1]["epsilon"] == counted(nodes[1])[1].epsilon


def test_adam_on_the_server_works_as_it_is(nodes, keys):
    _, result = run(nodes, keys, strategy=FedAdam(fraction_evaluate=0.0, min_available_nodes=2))
    assert all(np.isfinite(values).all() for values in result.arrays.to_numpy_ndarrays())
    assert np.abs(moved(result)).max() > 0


def test_a_node_that_is_missing_from_a_round_costs_nothing_but_its_update(nodes, keys):
    def tamper(n, message, reply):
        return None if n == 3 and "arrays" in message.content else reply

    _, result = run(nodes, keys, tamper=tamper)
    assert np.abs(moved(result)).max() > 0.05
    assert [counted(node)[0] for node in nodes] == [1, 1, 1, 1], "the missing node had counted its vector"


def test_what_leaves_a_node_is_one_masked_vector_and_its_statement(nodes, keys):
    seen = []

    def tamper(n, message, reply):
        if "arrays" in message.content and n == 0:
            seen.append(reply.content["bqsgd.frame.v1"]["bqsgd.frame.v1"].data)
            assert SECRET not in str(reply.content)
            assert sorted(reply.content) == ["bqsgd.frame.v1", "fields", "update"]
        return reply

    _, first = run(nodes, keys, tamper=tamper)
    assert len(seen) == 1
    assert np.abs(moved(first)).max() < 2


def test_a_server_that_asks_twice_gets_no_second_vector(nodes, keys, caplog):
    """For the same round: the keys mask one vector. The node refuses before it counts or trains."""
    again = []

    def tamper(n, message, reply):
        if "arrays" in message.content and n == 0 and not again:
            again.append(None)
            copy = Message(RecordDict(dict(message.content)), dst_node_id=1000, message_type="train")
            again[0] = grid_of[0].app(grid_of[0]._carried(copy), grid_of[0].contexts[1000])
        return reply

    grid_of = []
    app = app_of(SummedUpdates(**STUDY))
    grid = LoopGrid(app, {}, nodes, tamper)
    grid_of.append(grid)
    OpenSums(FedAvg(fraction_evaluate=0.0, min_available_nodes=2), roster=keys, seconds=60.0, **STUDY).start(
        grid, ArrayRecord(model().state_dict()), num_rounds=1
    )
    assert again[0].has_error()
    assert counted(nodes[0])[0] == 1
    assert "no keys for the sum of round 0, or they were used before" in caplog.text


def test_a_server_that_begins_again_must_go_on_after_the_last_round(nodes, keys, caplog):
    run(nodes, keys)
    _, result = run(nodes, keys)
    assert not result.train_metrics_clientapp
    assert [counted(node)[0] for node in nodes] == [1] * 4, "nothing was counted or trained again"
    _, result = run(nodes, keys, first_round=1)
    assert [counted(node)[0] for node in nodes] == [2] * 4
    assert result.train_metrics_clientapp is not None


def test_a_node_cannot_take_the_place_of_another(nodes, keys, caplog, tmp_path, monkeypatch):
    """Node 4 says that it is client 0, after node 0. Its ledger may count its vector, and no sum has it."""
    monkeypatch.setattr("random.sample", lambda nodes, count: sorted(nodes)[:count])  # Flower asks in a random order
    stranger = nodes[0] | {"ledger-folder": str(tmp_path / "stranger"), "identity": str(identity_path(keys.parent, 1))}
    _, result = run([*nodes, stranger], keys)
    assert "says that it is client 0, which it cannot be" in caplog.text
    assert [counted(node)[0] for node in nodes] == [1] * 4
    assert result.train_metrics_clientapp
    assert not (tmp_path / "stranger" / "client-0000.ledger").exists()


def test_the_study_ends_with_its_last_round(nodes, keys, caplog):
    run(nodes, keys, rounds=4)
    assert [counted(node)[0] for node in nodes] == [3] * 4
    assert "all 3 rounds of the study are over" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [{"roster": ""}, {"identity": "/nowhere"}, {"fewest-in-sum": 4}, {"colluders": 1}, {"units": "sample"}],
    ids=lambda value: next(iter(value)),
)
def test_a_node_whose_limits_or_keys_do_not_fit_sends_nothing(nodes, keys, changed, caplog):
    nodes[0] |= changed
    with caplog.at_level(logging.ERROR):
        run(nodes, keys, app=app_of(SummedUpdates(**STUDY)))
    assert "refused by this node" in caplog.text
    assert [counted(node)[0] for node in nodes[1:]] == [1, 1, 1], "the others go on: one dropout is borne"
    ledger = Path(nodes[0]["ledger-folder"]) / "client-0000.ledger"
    assert not ledger.exists() or counted(nodes[0])[0] == 0


def test_other_settings_on_the_server_reach_no_sum(nodes, keys):
    _, result = run(nodes, keys, mechanism=bqsgd.Mechanism(levels=8, trials=249))
    assert not result.train_metrics_clientapp
    for node in nodes:
        assert counted(node)[0] == 0


def test_masks_depend_on_the_model_that_a_node_was_sent():
    one, other = (RecordDict({"arrays": ArrayRecord({"w": _array(value)})}) for value in (0.0, 1e-30))
    assert _digest(one) != _digest(other)
    assert _digest(one) == _digest(RecordDict({"arrays": ArrayRecord({"w": _array(0.0)})}))


def _array(value):
    from flwr.app import Array

    return Array(np.full(3, value, np.float32))
