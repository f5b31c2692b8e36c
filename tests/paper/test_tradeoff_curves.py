"""Trade-off curves: what the paper says of them, and how gaps are shown."""

import itertools

import pytest
from experiments.paper.published import MNIST
from experiments.paper.statements import convergence_bound

from bqsgd._src.paper.tradeoffs import Problem, trade_off_curves
from bqsgd._src.params import Mechanism

PROBLEM = Problem(
    setting=MNIST.nominal,
    dimension=61706,
    clip=0.0015,
    rounds=1000,
    learning_rate=0.006,
    initial_gap=2.3,
    gradient_variance=1.0,
)


def test_more_bits_at_fixed_privacy_never_hurt_and_raise_both_parameters():
    (curve,) = trade_off_curves(PROBLEM, fixed="epsilon", epsilons=[3.44], bits=range(8, 17))
    points = curve.points
    assert [p.bits for p in points] == list(range(8, 17))
    for before, after in itertools.pairwise(points):
        assert after.variance <= before.variance
        assert after.bound <= before.bound
        assert after.levels_real > before.levels_real
        assert after.trials_real > before.trials_real


def test_more_privacy_at_fixed_bits_costs_error():
    (curve,) = trade_off_curves(PROBLEM, fixed="bits", epsilons=[2.0, 4.0, 8.0, 16.0], bits=[8])
    variances = [p.variance for p in curve.points]
    assert variances == sorted(variances, reverse=True)
    levels = [p.levels_real for p in curve.points]
    assert levels == sorted(levels)
    assert [p.trials_real for p in curve.points] == sorted((p.trials_real for p in curve.points), reverse=True)


def test_points_hold_the_strict_plan_and_the_floor():
    (curve,) = trade_off_curves(PROBLEM, fixed="epsilon", epsilons=[3.45], bits=[8])
    (point,) = curve.points
    assert (point.levels, point.trials) == (2, 251)
    assert point.nominal_epsilon <= 3.45
    assert point.variance_floor < point.variance_real <= point.variance
    assert point.bound == pytest.approx(point.sgd_error + point.quantisation_error)
    assert point.quantisation_error == pytest.approx(61706 * 0.0015**2 * point.variance)


def test_the_bound_of_a_point_is_theorem_1_for_equal_clients():
    (curve,) = trade_off_curves(PROBLEM, fixed="epsilon", epsilons=[3.45], bits=[8])
    (point,) = curve.points
    whole = convergence_bound(PROBLEM, [(0.25, Mechanism(levels=2, trials=251))] * 4)
    assert (point.sgd_error, point.bound) == (pytest.approx(whole.sgd_error), pytest.approx(whole.total))


def test_eq_22_is_v_of_the_real_optimum():
    (curve,) = trade_off_curves(PROBLEM, fixed="epsilon", epsilons=[8.72], bits=[12])
    point = curve.points[0]
    direct = point.trials_real / (4 * point.levels_real**2) + 1 / (6 * point.levels_real**2)
    assert point.variance_real == pytest.approx(direct)


def test_an_infeasible_budget_is_a_gap_not_a_number():
    (curve,) = trade_off_curves(PROBLEM, fixed="bits", epsilons=[1.0, 3.44], bits=[8])
    gap, point = curve.points
    assert gap.levels is gap.variance is gap.bound is None
    assert point.levels is not None
