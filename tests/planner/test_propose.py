"""Proposals: what is given is kept, what is proposed plans within its budget, and little noise is wasted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd.errors import InvalidParameter
from bqsgd.planner.plan import Budget, ClientSetting
from bqsgd.planner.propose import Proposal, propose
from bqsgd.planner.search import make_plan, shift_per_round, total_shift

BUDGET = Budget(bits=8, epsilon=3.0, delta=1e-5)


def accumulated_noise(budget: Budget, proposal: Proposal, dataset_size: int) -> float:
    """Deviation of the noise in the mean of all rounds, times n mu; 1 where nothing is wasted."""
    rate = proposal.batch_size / dataset_size
    one = 1 / proposal.batch_size / shift_per_round(budget, rate=rate, rounds=proposal.rounds)
    return one / math.sqrt(proposal.rounds) * dataset_size * total_shift(budget)


def test_a_gaussian_of_the_total_shift_has_the_asked_delta() -> None:
    mu = total_shift(BUDGET)
    normal = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    delta = normal(mu / 2 - 3 / mu) - math.exp(3) * normal(-mu / 2 - 3 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-6)


@given(
    epsilon=st.floats(0.2, 5.0),
    dataset_size=st.integers(400, 10**7),
    dimension=st.integers(1, 10**8),
)
def test_a_proposal_wastes_at_most_a_twentieth(epsilon: float, dataset_size: int, dimension: int) -> None:
    budget = Budget(bits=8, epsilon=epsilon, delta=1e-5)
    found = propose(budget, dimension=dimension, dataset_size=dataset_size)
    assert 1 <= found.batch_size <= dataset_size
    assert accumulated_noise(budget, found, dataset_size) <= 1.06


def test_what_is_given_is_kept() -> None:
    found = propose(BUDGET, dimension=1000, dataset_size=15_000, batch_size=300, rounds=77)
    assert (found.batch_size, found.rounds) == (300, 77)
    assert propose(BUDGET, dimension=1000, dataset_size=15_000, rounds=77).rounds == 77
    small, large = (propose(BUDGET, dimension=1000, dataset_size=15_000, batch_size=size) for size in (500, 2000))
    assert small.rounds > large.rounds, "a small batch needs more rounds to waste as little"


def test_a_larger_epsilon_asks_for_a_larger_batch_and_a_narrower_range() -> None:
    low, high = (
        propose(Budget(bits=8, epsilon=epsilon, delta=1e-5), dimension=1000, dataset_size=15_000) for epsilon in (1, 3)
    )
    assert low.batch_size < high.batch_size
    assert low.range > high.range


def test_the_plan_of_a_proposal_is_within_budget_and_hardly_noisier_than_a_gaussian() -> None:
    found = propose(BUDGET, dimension=39_700, dataset_size=15_000)
    setting = ClientSetting(
        dimension=39_700,
        batch_size=found.batch_size,
        dataset_size=15_000,
        linf=found.sensitivity,
        l2=found.sensitivity,
    )
    plan = make_plan(BUDGET, setting, rounds=found.rounds)
    assert 2.9 < plan.guarantee.epsilon <= 3.0
    mechanism = plan.mechanism
    noise = math.sqrt(mechanism.trials / 4) / mechanism.levels * found.range
    assert 1 < found.range / noise < 3, "the range is about two deviations of the noise"


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="batch_size"):
        propose(BUDGET, dimension=10, dataset_size=100, batch_size=101)
