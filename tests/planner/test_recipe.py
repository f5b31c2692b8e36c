"""The recipe: what is given is kept, little noise is wasted, and every entry point has the same answer."""

from __future__ import annotations

import math
import tomllib
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bqsgd
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.recipe import Federation, propose
from bqsgd._src.planner.search import make_plan, shift_per_round, total_shift
from bqsgd._src.release import Terms
from bqsgd._src.settings.client_plan import client_terms, release_in
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.tasks.resolve import resolve

BUDGET = Budget(bits=8, epsilon=3.0, delta=1e-5)


def federation(samples: int = 60_000, dimension: int = 1000, clients: int = 4) -> Federation:
    return Federation(samples=samples, clients=clients, dimension=dimension)


def test_a_gaussian_of_the_total_shift_has_the_asked_delta() -> None:
    mu = total_shift(BUDGET)
    normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    delta = normal(mu / 2 - 3 / mu) - math.exp(3) * normal(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)


@given(
    epsilon=st.floats(0.2, 5.0),
    samples=st.integers(2000, 10**7),
    clients=st.integers(1, 1000),
    dimension=st.integers(1, 10**8),
)
def test_a_batch_wastes_a_seventh_of_the_budget_or_leaves_little_noise(
    epsilon: float, samples: int, clients: int, dimension: int
) -> None:
    budget, all_clients = Budget(bits=8, epsilon=epsilon, delta=1e-5), federation(samples, dimension, clients)
    proposal = propose(budget, all_clients)
    assert 1 <= proposal.batch_size <= math.ceil(samples / clients)
    rate = all_clients.rate(proposal.batch_size)
    one = 1 / (rate * samples / clients) / shift_per_round(budget, rate=rate, rounds=proposal.rounds)
    wasted = one / math.sqrt(proposal.rounds) * samples / clients * total_shift(budget)
    rounding = 1 + 1 / proposal.batch_size  # a batch size is a whole number
    assert wasted <= 1.16 * rounding or wasted * all_clients.least_noise(budget) <= 0.0101 * rounding


def test_what_is_given_is_kept() -> None:
    proposal = propose(BUDGET, federation(), batch_size=300, rounds=77)
    assert (proposal.batch_size, proposal.rounds) == (300, 77)
    assert propose(BUDGET, federation(), rounds=77).rounds == 77


def test_a_larger_epsilon_asks_for_a_larger_batch_and_a_narrower_range() -> None:
    low, high = (
        propose(Budget(bits=8, epsilon=epsilon, delta=1e-5), federation(dimension=10**6)) for epsilon in (1, 3)
    )
    assert low.batch_size < high.batch_size
    assert low.range > high.range


def test_the_plan_of_a_proposal_is_within_budget_and_hardly_noisier_than_a_gaussian() -> None:
    proposal = propose(BUDGET, federation(dimension=39_700))
    terms = Terms.of_batch(
        dimension=39_700, batch_size=proposal.batch_size, dataset_size=15_000, linf=proposal.linf, l2=proposal.l2
    )
    plan = make_plan(BUDGET, terms, rounds=proposal.rounds)
    assert 2.9 < plan.guarantee.epsilon <= 3.0
    mechanism = plan.mechanism
    noise = math.sqrt(mechanism.trials / 4) / mechanism.levels * proposal.range
    assert 1 < proposal.range / noise < 3, "the range is about two deviations of the noise"


def test_coordinates_are_left_out_where_there_is_much_noise_and_nowhere_else() -> None:
    large = federation(dimension=40_000)
    assert large.one_in(BUDGET, rounds=300) == 13
    assert federation(dimension=40_000, clients=100).one_in(BUDGET, rounds=300) == 40  # a thousand are kept
    assert federation(dimension=10**6, clients=100).one_in(BUDGET, rounds=300) == 100
    shared = Federation(samples=60_000, clients=100, dimension=40_000, sums=1)
    assert 1 < shared.one_in(BUDGET, rounds=300) < 13
    # Little noise, a tiny model, few rounds, few samples: nothing to gain.
    assert (
        Federation(samples=10**6, clients=4, dimension=40_000).one_in(
            Budget(bits=8, epsilon=50.0, delta=1e-5), rounds=300
        )
        == 1
    )
    assert federation(dimension=1999).one_in(BUDGET, rounds=300) == 1
    assert large.one_in(BUDGET, rounds=20) == 1
    assert federation(samples=9_999, dimension=40_000).one_in(BUDGET, rounds=300) == 1


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="batch_size"):
        propose(BUDGET, federation(100, 10, 1), batch_size=101)


def test_python_the_command_plan_and_the_flower_template_have_the_same_answer() -> None:
    """`digits` over four clients, in as many rounds as the template has."""
    text = (files("bqsgd._src.flower") / "template" / "pyproject.toml.in").read_text(encoding="utf-8")
    template = tomllib.loads(text)["tool"]["flwr"]["app"]["config"]
    rounds = template["rounds"]
    command = resolve({"dataset": template["dataset"], "clients": template["clients"], "rounds": rounds})
    python = command.source.task(command.config).config(rounds=rounds)
    asked = {"bits": 8, "epsilon": 3, "delta": 1e-5, "dimension": command.sizes.dimension, "dataset_size": 359}
    plan = bqsgd.plan(**asked, rounds=rounds, clients=4)

    def answer(config: bqsgd.Config) -> tuple[object, ...]:
        return config.privacy.batch_size, config.clip.range, config.clip.make(), config.server.learning_rate

    assert answer(python) == answer(command.config)
    batch_size, range, clip, learning_rate = answer(command.config)
    assert plan.proposal is not None
    assert plan.proposal.one_in == command.config.clients.one_in == 1
    assert (plan.proposal.batch_size, plan.proposal.range) == (batch_size, range)
    assert (plan.proposal.clip_norm, plan.proposal.clip_bound) == (clip.norm, clip.bound)
    assert (template["batch_size"], template["range"]) == (batch_size, range)
    assert (template["clip_norm"], template["clip_bound"]) == (clip.norm, clip.bound)
    assert template["learning_rate"] == learning_rate
    assert bqsgd.plan(**asked).proposal.rounds == resolve({"dataset": "digits"}).config.run.rounds == 60


@pytest.mark.parametrize(("epsilon", "levels", "trials"), [(3.0, 14, 207), (300.0, 26, 201)])
def test_a_fitted_range_can_neither_grow_much_nor_save_much_at_the_planned_step(
    epsilon: float, levels: int, trials: int
) -> None:
    """Why the range of single messages does not follow what was released (docs/training.md)."""
    config = fit({"epsilon": epsilon, "clients": 4}, Sizes(samples=1437, dimension=4810, parameters=4810))
    terms = client_terms(config, dimension=4810, dataset_size=359)
    mechanism = release_in(config, terms, client=0, round=0).mechanism
    assert (mechanism.levels, mechanism.trials) == (levels, trials)
    assert (2**8 - 1 - trials) // 2 <= 1.75 * levels  # the most levels that fit into 8 bits
    assert math.log2(mechanism.code_count / (2 + trials + 1)) <= 1 / 3  # bits that a range of one level would save
