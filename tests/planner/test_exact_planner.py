"""The exact planner: least error, proven within the budget, on the private side, and helpful when it cannot."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bqsgd.errors import Infeasible
from bqsgd.mechanism.coarsening import noise_to_signal
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Coarsening, Mechanism
from bqsgd.planner.exact import least_error_mechanism, plan_exact
from bqsgd.planner.few_bits import coarsened, largest_reach
from bqsgd.planner.pairs import TooFewBits, least_error_pair
from bqsgd.planner.plan import Budget, Plan, release_of
from bqsgd.privacy.accountant import Accountant

SETTING = {"dimension": 40, "batch_size": 64, "dataset_size": 1000}


def make_release(mechanism, **changes):
    return release_of(mechanism, **{**SETTING, **changes})


def epsilon(mechanism, rounds, delta, base=None, **changes):
    return (base or Accountant()).compose(make_release(mechanism, **changes), rounds).epsilon(delta)


@pytest.mark.parametrize(
    ("bits", "target", "delta", "rounds"), [(4, 0.4, 1e-2, 3), (4, 0.03, 1e-2, 3), (5, 0.3, 1e-3, 9)]
)
def test_brute_force_over_all_pairs_agrees(bits, target, delta, rounds):
    """In order of error, the first pair that keeps the budget; a quick lower bound rules out most of the others."""
    small = SETTING | {"dimension": 3}
    top = 2**bits - 1
    pairs = [(s, m) for s, m in itertools.product(range(1, top), range(1, top)) if 2 * s + m <= top]
    pairs = sorted((Mechanism(levels=s, trials=m) for s, m in pairs), key=noise_variance)

    def keeps(mechanism):
        tally = Accountant().compose(make_release(mechanism, **small), rounds)
        return tally.attained_epsilon(delta) <= target and tally.epsilon(delta) <= target

    best = next((mechanism for mechanism in pairs if keeps(mechanism)), None)
    budget = Budget(bits=bits, epsilon=target, delta=delta)
    if best is None:
        with pytest.raises(TooFewBits):
            least_error_pair(budget, lambda mechanism: make_release(mechanism, **small), rounds=rounds)
        return
    assert least_error_pair(budget, lambda mechanism: make_release(mechanism, **small), rounds=rounds) == best


@pytest.mark.parametrize(("bits", "target", "linf"), [(4, 2.0, 1.0), (6, 1.0, 0.1)])
def test_a_coarsened_pair_beats_the_pair_that_fits(bits, target, linf):
    budget = Budget(bits=bits, epsilon=target, delta=1e-2)
    setting = SETTING | {"dimension": 1, "linf": linf, "scheme": "no sampling"}
    plan = plan_exact(budget, **setting, rounds=1)
    pair = least_error_pair(budget, lambda mechanism: make_release(mechanism, **setting), rounds=1)
    assert noise_to_signal(plan.mechanism) < noise_to_signal(pair)
    assert plan.guarantee.epsilon <= target


def test_ends_on_the_private_side_and_one_trial_less_would_not():
    plan = plan_exact(Budget(bits=8, epsilon=2.0, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
    s, m = plan.mechanism.levels, plan.mechanism.trials
    assert plan.guarantee.epsilon <= 2.0
    assert epsilon(Mechanism(levels=s, trials=m - 1), 500, 1e-5, dimension=4000) > 2.0
    assert plan.mechanism.code_count <= 256
    assert Plan.from_dict(plan.to_dict()) == plan


def test_what_was_spent_before_counts():
    budget = Budget(bits=8, epsilon=2.0, delta=1e-5)
    spent = Accountant().compose(wide(Mechanism(levels=2, trials=100)), 300)
    fresh = least_error_mechanism(budget, wide, rounds=100)
    later = least_error_mechanism(budget, wide, rounds=100, spent=spent)
    assert noise_variance(later) > noise_variance(fresh)
    assert epsilon(later, 100, 1e-5, base=spent, dimension=4000) <= 2.0


def test_an_l2_bound_buys_levels():
    budget = Budget(bits=8, epsilon=2.0, delta=1e-5)
    setting = SETTING | {"dimension": 4000, "rounds": 500}
    assert plan_exact(budget, **setting, l2=10 / 64).variance < plan_exact(budget, **setting).variance


def wide(mechanism):
    return make_release(mechanism, dimension=4000)


def test_too_few_bits_for_a_pair_name_the_nearest_trades():
    def pair(bits):
        return least_error_pair(Budget(bits=bits, epsilon=0.3, delta=1e-5), wide, rounds=500)

    with pytest.raises(TooFewBits) as error:
        pair(6)
    words = str(error.value)
    assert "6 bits reach epsilon >= " in words or "no finite epsilon" in words
    needed = error.value.needed
    assert f"epsilon 0.3 needs {needed} bits" in words
    assert 6 < needed <= 20
    assert epsilon(pair(needed), 500, 1e-5, dimension=4000) <= 0.3
    with pytest.raises(Infeasible):
        pair(needed - 1)


def test_a_pair_that_needs_more_bits_is_coarsened_to_those_there_are():
    plan = plan_exact(Budget(bits=9, epsilon=0.3, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
    assert plan.mechanism.fine_code_count > 512 >= plan.mechanism.code_count
    assert plan.guarantee.epsilon <= 0.3
    assert noise_to_signal(plan.mechanism) < 1.001 * noise_to_signal(plan.mechanism.fine)
    assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_few_bits_keep_the_epsilon_of_more_and_cost_only_error(bits):
    budget = Budget(bits=bits, epsilon=2.0, delta=1e-5)
    plan = plan_exact(budget, **SETTING | {"dimension": 4000}, rounds=500)
    pair = least_error_pair(replace(budget, bits=8), wide, rounds=500)
    assert plan.mechanism.fine == pair
    assert plan.mechanism.bits_per_coordinate == bits
    assert plan.guarantee.epsilon == epsilon(pair, 500, 1e-5, dimension=4000) <= 2.0
    cost = noise_to_signal(plan.mechanism) / noise_to_signal(pair)
    assert 1 <= cost < {2: 2.0, 3: 1.3, 4: 1.1, 6: 1.01}[bits]


@pytest.mark.parametrize(("levels", "trials"), [(1, 61), (5, 90), (20, 100)])
@pytest.mark.parametrize("bits", [2, 4])
def test_the_window_is_the_best_of_all(levels, trials, bits):
    pair = Mechanism(levels=levels, trials=trials)

    def at(width):
        return replace(pair, coarsening=Coarsening(points=2**bits, width=width))

    best = min(noise_to_signal(at(width)) for width in range(1, pair.code_count))
    assert noise_to_signal(coarsened(pair, bits=bits)) <= 1.002 * best


def test_codes_that_fit_are_left_as_they_are():
    pair = Mechanism(levels=2, trials=11)
    assert coarsened(pair, bits=4) is pair
    assert coarsened(pair, bits=3).coarsening.points == 8


def test_no_plan_reaches_further_than_a_server_allows():
    for bits in (2, 8, 10):
        assert coarsened(Mechanism(levels=1, trials=1 << 16), bits=bits).reach <= largest_reach(bits)


def test_an_epsilon_beyond_all_bits_is_infeasible_and_says_so():
    with pytest.raises(Infeasible, match="needs more than 20 bits before coarsening"):
        plan_exact(Budget(bits=4, epsilon=0.005, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
