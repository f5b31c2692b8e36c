"""The paper's planner against brute force over every (levels, trials)."""

import math
from fractions import Fraction

import pytest
from experiments.paper.statements import fewest_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd._src.errors import Infeasible
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import (
    NominalPrivacy,
    NominalSetting,
    closed_form,
    least_epsilon,
    nearest_mechanism,
    nominal_epsilon,
    privacy_level,
    strict_mechanism,
)
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Budget

MNIST = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-4)


def brute_force(budget: Budget, setting: NominalSetting) -> Mechanism | None:
    """Every (s, m), compared in exact rationals: smallest V = (3m + 2) / (12 s^2), then fewest codes."""
    best = None
    for levels in range(1, 2**budget.bits // 2 + 1):
        for trials in range(1, 2**budget.bits - 2 * levels):
            mechanism = Mechanism(levels=levels, trials=trials)
            if nominal_epsilon(mechanism, setting) <= budget.epsilon:
                key = (Fraction(3 * trials + 2, 12 * levels**2), mechanism.code_count)
                best = min(best or (key, mechanism), (key, mechanism), key=lambda entry: entry[0])
                break  # more trials only add error
    return best[1] if best else None


def exhaustive(budget: Budget, setting: NominalSetting) -> Mechanism | None:
    """The same without the early exit, to check that too."""
    keeping = [
        mechanism
        for levels in range(1, 2**budget.bits // 2 + 1)
        for trials in range(1, 2**budget.bits - 2 * levels)
        if nominal_epsilon(mechanism := Mechanism(levels=levels, trials=trials), setting) <= budget.epsilon
    ]
    return min(keeping, key=lambda p: (Fraction(3 * p.trials + 2, 12 * p.levels**2), p.code_count), default=None)


@settings(max_examples=150)
@given(st.integers(2, 8), st.floats(0.05, 500), st.floats(1e-9, 0.5), st.integers(1, 10**6), st.integers(1, 15000))
def test_strict_is_the_brute_force_optimum(bits, epsilon, delta, dimension, batch):
    setting = NominalSetting(dimension=dimension, batch_size=batch, dataset_size=15000, delta=delta)
    budget = Budget(bits=bits, epsilon=epsilon, delta=delta)
    expected = brute_force(budget, setting)
    if expected is None:
        with pytest.raises(Infeasible, match=f"{bits} bits reach epsilon >="):
            strict_mechanism(budget, setting)
    else:
        assert strict_mechanism(budget, setting) == expected


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("epsilon", [1.72, 3.44, 3.45, 8.72, 30.0, 1000.0])
def test_strict_agrees_with_enumeration(bits, epsilon):
    budget = Budget(bits=bits, epsilon=epsilon, delta=1e-4)
    expected = exhaustive(budget, MNIST)
    if expected is None:
        with pytest.raises(Infeasible):
            strict_mechanism(budget, MNIST)
    else:
        assert strict_mechanism(budget, MNIST) == expected


@settings(max_examples=100)
@given(st.integers(2, 8), st.integers(1, 100), st.integers(1, 250))
def test_a_budget_that_is_met_exactly_is_feasible(bits, levels, trials):
    """Epsilon equal to a mechanism's own figure: rounding must not lose that mechanism."""
    mechanism = Mechanism(levels=levels, trials=trials)
    if mechanism.code_count > 2**bits:
        return
    budget = Budget(bits=bits, epsilon=nominal_epsilon(mechanism, MNIST), delta=1e-4)
    found = strict_mechanism(budget, MNIST)
    assert found == brute_force(budget, MNIST)
    assert nominal_epsilon(found, MNIST) <= budget.epsilon


@settings(max_examples=40)
@given(st.integers(9, 20), st.floats(0.5, 200))
def test_large_budgets_keep_both_constraints_and_the_real_bound(bits, epsilon):
    budget = Budget(bits=bits, epsilon=epsilon, delta=1e-4)
    if least_epsilon(bits, MNIST) > epsilon:
        return
    found = strict_mechanism(budget, MNIST)
    assert found.code_count <= 2**bits
    assert nominal_epsilon(found, MNIST) <= epsilon
    real_levels, _ = closed_form(budget, MNIST)
    least = 1 / (4 * privacy_level(epsilon, MNIST) ** 2) + 1 / (6 * real_levels**2)
    assert (found.trials / 4 + 1 / 6) / found.levels**2 >= least * (1 - 1e-12)


@given(st.integers(2, 20), st.floats(1e-3, 1e6))
def test_closed_form_meets_both_constraints_with_equality(bits, epsilon):
    levels, trials = closed_form(Budget(bits=bits, epsilon=epsilon, delta=1e-4), MNIST)
    level = privacy_level(epsilon, MNIST)
    top = 2**bits - 1
    assert 2 * levels + trials == pytest.approx(top)
    assert levels == pytest.approx(level * math.sqrt(trials), rel=1e-6)
    # Eq. 19 as printed, which cancels digits when R is large
    assert levels == pytest.approx(level * math.sqrt(level**2 + top) - level**2, rel=1e-5, abs=1e-9 * level**2)


def test_the_quickstart_budget():
    mechanism = strict_mechanism(Budget(bits=8, epsilon=3.45, delta=1e-4), MNIST)
    nominal = NominalPrivacy.of(mechanism, MNIST, rounds=1)
    assert (mechanism.levels, mechanism.trials) == (2, 251)
    assert nominal.epsilon_per_round == pytest.approx(3.447, abs=1e-3)
    assert noise_variance(mechanism) == pytest.approx(251 / 16 + 1 / 24)
    assert nominal.to_dict()["caveat"] == "as published; not a guarantee"


def test_infeasible_names_the_nearest_feasible_budgets():
    with pytest.raises(Infeasible, match=r"8 bits reach epsilon >= 1\.72; epsilon 1\.0 needs 10 bits"):
        strict_mechanism(Budget(bits=8, epsilon=1.0, delta=1e-4), MNIST)


def test_the_budgets_named_are_feasible():
    strict_mechanism(Budget(bits=8, epsilon=1.72, delta=1e-4), MNIST)
    strict_mechanism(Budget(bits=10, epsilon=1.0, delta=1e-4), MNIST)
    with pytest.raises(Infeasible):
        strict_mechanism(Budget(bits=9, epsilon=1.0, delta=1e-4), MNIST)
    wider = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1.72e-4)
    strict_mechanism(Budget(bits=8, epsilon=1.0, delta=1.72e-4), wider)


def test_infeasible_with_any_bits_says_so():
    with pytest.raises(Infeasible, match="needs more than 20 bits"):
        strict_mechanism(Budget(bits=8, epsilon=1e-6, delta=1e-4), MNIST)


@given(st.integers(2, 20))
def test_fewest_bits_is_a_lower_bound_of_the_planner(bits):
    assert fewest_bits(least_epsilon(bits, MNIST), MNIST) < bits


def test_nearest_fills_the_alphabet_and_may_pass_the_epsilon():
    budget = Budget(bits=8, epsilon=3.44, delta=1e-4)
    nearest = nearest_mechanism(budget, MNIST)
    assert nearest.code_count == 256
    assert nominal_epsilon(nearest, MNIST) > 3.44
    assert nominal_epsilon(strict_mechanism(budget, MNIST), MNIST) <= 3.44


def test_nearest_refuses_what_has_no_integer():
    with pytest.raises(Infeasible, match="nearest integer"):
        nearest_mechanism(Budget(bits=8, epsilon=0.1, delta=1e-4), MNIST)


def test_budgets_differ_by_client_and_over_rounds_by_replanning():
    first = strict_mechanism(Budget(bits=8, epsilon=3.45, delta=1e-4), MNIST)
    later = strict_mechanism(Budget(bits=10, epsilon=8.72, delta=1e-4), MNIST)
    assert noise_variance(later) < noise_variance(first)
    assert first != later
