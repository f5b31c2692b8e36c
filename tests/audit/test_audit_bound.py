"""The statistics of an audit, on mechanisms whose epsilon is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from bqsgd._src.audit.bound import Event, at_least, at_most, check_curve, epsilon_lower_bound
from bqsgd._src.errors import InvalidParameter


@pytest.mark.parametrize(("successes", "samples"), [(0, 10), (3, 10), (10, 10), (57, 1000)])
def test_clopper_pearson_agrees_with_scipy(successes: int, samples: int) -> None:
    low = binomtest(successes, samples, alternative="greater").proportion_ci(0.99, method="exact").low
    high = binomtest(successes, samples, alternative="less").proportion_ci(0.99, method="exact").high
    assert float(at_least(successes, samples, confidence=0.99)) == pytest.approx(low)
    assert float(at_most(successes, samples, confidence=0.99)) == pytest.approx(high)


def randomised_response(epsilon: float, samples: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    rng = np.random.default_rng(seed)
    return (rng.random(samples) < truth).astype(float), (rng.random(samples) >= truth).astype(float)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.5])
def test_randomised_response_is_bounded_closely(epsilon: float) -> None:
    with_record, without = randomised_response(epsilon, 40_000, seed=3)
    bound = epsilon_lower_bound(with_record, without, delta=0.0, confidence=0.99)
    assert 0.85 * epsilon < bound.epsilon <= epsilon


def test_the_bound_holds_as_often_as_it_says() -> None:
    # 300 audits at confidence 0.9. The bound is wrong in at most 10 %; 45 or more wrong has probability < 0.004.
    wrong = sum(
        epsilon_lower_bound(*randomised_response(0.3, 400, seed=seed), delta=0.0, confidence=0.9).epsilon > 0.3
        for seed in range(300)
    )
    assert wrong < 45


def test_delta_is_taken_off() -> None:
    # The record shows itself with probability 0.1 and leaves no other trace: (0, 0.1)-private exactly.
    rng = np.random.default_rng(8)
    with_record, without = (rng.random(20_000) < 0.1).astype(float), np.zeros(20_000)
    assert epsilon_lower_bound(with_record, without, delta=0.1, confidence=0.99).epsilon == 0.0
    assert epsilon_lower_bound(with_record, without, delta=0.01, confidence=0.99).epsilon > 3


def test_either_direction_is_used() -> None:
    # Absence shows itself: the event lies below the threshold.
    rng = np.random.default_rng(9)
    with_record, without = np.ones(2000), (rng.random(2000) < 0.5).astype(float)
    bound = epsilon_lower_bound(with_record, without, delta=0.0, confidence=0.99)
    assert bound.epsilon > 3
    assert not bound.event.above


def test_equal_worlds_show_nothing() -> None:
    rng = np.random.default_rng(10)
    bound = epsilon_lower_bound(rng.normal(size=4000), rng.normal(size=4000), delta=1e-5, confidence=0.99)
    assert bound.epsilon < 0.05


def test_a_curve_is_broken_only_where_the_runs_break_it() -> None:
    with_record, without = randomised_response(1.0, 20_000, seed=11)
    true_delta = math.e / (1 + math.e) - 1 / (1 + math.e)
    honest = {0.0: true_delta, 1.0: 0.0}
    assert not check_curve(with_record, without, claimed=honest, confidence=0.99).broken
    check = check_curve(with_record, without, claimed={0.0: true_delta - 0.05, 1.0: 1.0}, confidence=0.99)
    assert check.broken
    assert check.claimed_epsilon == 0.0
    assert check.lower.delta == true_delta - 0.05
    assert true_delta - 0.05 < check.delta_lower <= true_delta


def test_an_event_that_was_never_seen_in_one_world_does_not_decide_the_point() -> None:
    """Total separation, and a claim that says next to nothing at its own epsilon.

    At epsilon 7 a plug-in error calls the excess certain (no run without the record), yet e^7 times the Clopper-Pearson
    bound of that "no run" is beyond 1. At epsilon 0 the same runs break the claim.
    """
    with_record, without = np.full(4000, 1.0), np.full(4000, -1.0)
    check = check_curve(with_record, without, claimed={0.0: 0.9, 7.0: 1e-3}, confidence=0.99)
    assert check.claimed_epsilon == 0.0
    assert check.broken
    assert check.delta_lower > 0.99


def test_a_broken_point_reads_the_same_along_both_axes() -> None:
    with_record, without = randomised_response(1.0, 20_000, seed=11)
    for claimed in ({0.5: 0.1}, {0.5: 0.9}, {0.2: 0.3}, {0.9: 1e-9}):
        check = check_curve(with_record, without, claimed=claimed, confidence=0.99)
        ((epsilon, delta),) = claimed.items()
        assert check.broken == (check.lower.epsilon > epsilon) == (check.delta_lower > delta)


def test_events_split_the_runs() -> None:
    scores = np.array([-1.0, 0.0, 1.0])
    assert Event(threshold=0.0, above=True).holds(scores).tolist() == [False, False, True]
    assert Event(threshold=0.0, above=False).holds(scores).tolist() == [True, False, False]


@pytest.mark.parametrize("scores", [np.array([1.0]), np.array([1.0, np.nan, 2.0])])
def test_unusable_scores_are_refused(scores: np.ndarray) -> None:
    with pytest.raises(InvalidParameter, match="at least 2 scores in each world, all finite"):
        epsilon_lower_bound(scores, scores, delta=0.0, confidence=0.9)
