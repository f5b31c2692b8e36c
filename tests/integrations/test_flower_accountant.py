"""Flower's accountant protocol over what sites state, and the end of a run that it brings."""

import inspect
import math

import pytest
from flower_cases import GATE, app_of, run, spent, two_nodes
from flwr.app import ConfigRecord
from flwr.serverapp import NeighboringRelation, PrivacyAccountant, PrivacyConfig, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

import bqsgd
from bqsgd._src.integrations.flower_accountant import Statement
from bqsgd.integrations.flower import PrivateUpdates, SiteAccountant


def accountant(max_epsilon=None, sampling=SamplingMethod.NO_AMPLIFICATION):
    return SiteAccountant(
        PrivacyConfig(
            target_delta=1e-5, population_size=2, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=sampling, max_epsilon=max_epsilon,
        )
    )  # fmt: skip


@pytest.fixture
def nodes(tmp_path):
    return two_nodes(tmp_path)


def test_it_has_every_member_of_flowers_protocol_with_its_arguments():
    wanted = {name: member for name, member in vars(PrivacyAccountant).items() if not name.startswith("_")}
    assert {"config", "num_releases", "compose", "would_exceed", "get_privacy_spent"} <= set(wanted)
    for name, member in wanted.items():
        ours = inspect.getattr_static(SiteAccountant, name)
        assert isinstance(ours, property) == isinstance(member, property)
        if callable(member):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(member).parameters)


@pytest.mark.slow
def test_the_run_ends_before_the_round_that_would_exceed_the_servers_limit(nodes):
    """The first update of two costs about two thirds of the study's 50."""
    held = accountant(max_epsilon=40.0)
    with pytest.raises(PrivacyBudgetExhausted, match="another round would exceed"):
        run(app_of(PrivateUpdates(**GATE)), nodes, 2, accountant=held)
    for rounds, guarantee in spent(nodes):
        assert rounds == 1
        assert held.get_epsilon(1e-5) == guarantee.epsilon < 40
    assert (held.num_releases, held.get_privacy_spent().num_releases) == (1, 1)


def test_the_run_ends_when_no_node_has_room_for_another_update(nodes):
    held = accountant()
    with pytest.raises(PrivacyBudgetExhausted):
        run(app_of(PrivateUpdates(**GATE)), nodes, 5, accountant=held)
    assert [rounds for rounds, _ in spent(nodes)] == [2, 2]
    assert held.get_epsilon(1e-5) == max(guarantee.epsilon for _, guarantee in spent(nodes)) <= 50


def test_flowers_own_dp_strategy_asks_it_too(nodes):
    held = accountant(max_epsilon=40.0)
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0, min_available_nodes=2), 0.1, 1.0, 2, accountant=held
    )
    with pytest.raises(PrivacyBudgetExhausted):
        run(app_of(PrivateUpdates(**GATE)), nodes, 2, strategy=strategy, accountant=held)
    assert held.num_releases == 1


@pytest.mark.parametrize(
    "lie",
    [
        {"epsilon": math.nan},
        {"epsilon": -1.0},
        {"epsilon": math.inf},
        {"following": 0.1},
        {"following": math.nan},
        {"delta": 0.0},
        {"delta": 2.0},
        {"epsilon": "3"},
        {"epsilon": 3},
    ],
    ids=str,
)
def test_a_statement_that_cannot_be_true_leaves_the_update_out(nodes, lie):
    held = accountant(max_epsilon=49.0)

    def tamper(n, message, reply):
        if n == 0:
            content = reply.content
            content["update"] = ConfigRecord(dict(content["update"]) | lie)
            reply.content = content
        return reply

    _, result = run(app_of(PrivateUpdates(**GATE)), nodes, 1, tamper=tamper, accountant=held)
    assert len(held.state_dict()["sites"]) == 1
    assert result.train_metrics_clientapp


def test_what_it_says_is_never_less_than_what_the_sites_state():
    held = accountant()
    assert (held.get_epsilon(1e-5), held.would_exceed(), held.get_delta(0.0)) == (0.0, False, 0.0)
    held.note(1, Statement(epsilon=2.0, delta=1e-6, following=math.inf))
    held.note(2, Statement(epsilon=1.0, delta=1e-5, following=1.5))
    assert held.get_epsilon(1e-5) == 2.0
    assert held.get_epsilon(1e-6) == math.inf, "one site stated its epsilon at a larger delta"
    assert (held.get_delta(2.0), held.get_delta(1.9)) == (1e-5, 1.0)
    assert not held.would_exceed(max_epsilon=1.5), "the other site declines by itself"
    assert held.would_exceed(max_epsilon=1.4)
    assert held.would_exceed(count=2)
    held.note(3, Statement(epsilon=0.1, delta=1e-2, following=0.2))
    assert held.would_exceed(max_epsilon=100.0), "what a site states at a larger delta says nothing about the limit"
    assert not held.would_exceed(), "without a limit only the sites' own count"
    other = accountant()
    other.load_state_dict(held.state_dict())
    assert other.get_privacy_spent() == held.get_privacy_spent()
    with pytest.raises(bqsgd.InvalidParameter):
        other.load_state_dict({"sites": 3})


def test_amplification_by_sampling_is_refused():
    with pytest.raises(bqsgd.InvalidParameter, match="NO_AMPLIFICATION"):
        accountant(sampling=SamplingMethod.POISSON)
