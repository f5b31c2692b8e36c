"""Communication and convergence of Theorem 1, against sums written out by hand."""

from dataclasses import replace

import pytest
from experiments.paper.statements import communication_bits, communication_saving_bits, convergence_bound
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.paper.nominal import NominalSetting
from bqsgd._src.paper.tradeoffs import Problem
from bqsgd._src.params import Mechanism

PROBLEM = Problem(
    setting=NominalSetting(dimension=100, batch_size=10, dataset_size=1000, delta=1e-4),
    dimension=100,
    clip=0.5,
    rounds=50,
    learning_rate=0.1,
    initial_gap=3.0,
    gradient_variance=2.0,
)


def test_communication_cost_and_saving():
    cost = {"rounds": 1000, "dimension": 61706, "bits": 8}
    assert communication_bits(**cost) == 1000 * 61706 * 8
    assert communication_saving_bits(**cost) == 1000 * 61706 * 24
    assert communication_saving_bits(**cost, float_bits=64) == 1000 * 61706 * 56


def test_bound_of_two_unlike_clients_by_hand():
    shares = [
        (0.25, Mechanism(levels=1, trials=4)),  # V = 1 + 1/6
        (0.75, Mechanism(levels=2, trials=16)),  # V = 1 + 1/24
    ]
    bound = convergence_bound(PROBLEM, shares, smoothness=4.0)
    assert bound.descent_error == pytest.approx(2 * 3 / (50 * 0.1))
    assert bound.sampling_error == pytest.approx(2 * 2 * (0.0625 + 0.5625) / 10)
    assert bound.quantisation_error == pytest.approx(2 * 100 * 0.25 * (0.0625 * 7 / 6 + 0.5625 * 25 / 24))
    assert bound.sgd_error == pytest.approx(1.2 + 0.25)
    assert bound.total == pytest.approx(bound.sgd_error + bound.quantisation_error)


@given(st.integers(1, 20))
def test_equal_clients_cancel_the_factor_n(clients):
    mechanism = Mechanism(levels=2, trials=251)
    one = convergence_bound(PROBLEM, [(1.0, mechanism)])
    many = convergence_bound(PROBLEM, [(1 / clients, mechanism)] * clients)
    assert many.total == pytest.approx(one.total)


def test_more_noise_means_a_larger_bound():
    bounds = [
        convergence_bound(PROBLEM, [(1.0, Mechanism(levels=s, trials=m))]).total
        for s, m in [(4, 10), (4, 100), (2, 100), (1, 100)]
    ]
    assert bounds == sorted(bounds)
    assert len(set(bounds)) == 4


def test_preconditions():
    mechanism = Mechanism(levels=2, trials=251)
    with pytest.raises(InvalidParameter, match=r"learning_rate must be at most 1/smoothness = 0\.25"):
        convergence_bound(replace(PROBLEM, learning_rate=0.26), [(1.0, mechanism)], smoothness=4.0)
    with pytest.raises(InvalidParameter, match="add up to 1"):
        convergence_bound(PROBLEM, [(0.5, mechanism)])
    with pytest.raises(InvalidParameter, match="add up to 1"):
        convergence_bound(PROBLEM, [])
    with pytest.raises(InvalidParameter, match="weight must be"):
        convergence_bound(PROBLEM, [(-1.0, mechanism), (2.0, mechanism)])
