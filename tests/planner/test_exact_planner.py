"""The exact planner: least error, proven within the budget, on the private side, and helpful when it cannot."""

from __future__ import annotations

import itertools

import pytest

from bqsgd.errors import Infeasible
from bqsgd.mechanism.properties import noise_variance
from bqsgd.params import Mechanism
from bqsgd.planner.exact import least_error_mechanism, plan_exact
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
        with pytest.raises(Infeasible):
            plan_exact(budget, **small, rounds=rounds)
        return
    plan = plan_exact(budget, **small, rounds=rounds)
    assert plan.mechanism == best
    assert plan.guarantee.epsilon <= target


def test_ends_on_the_private_side_and_one_trial_less_would_not():
    plan = plan_exact(Budget(bits=8, epsilon=2.0, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
    s, m = plan.mechanism.levels, plan.mechanism.trials
    assert plan.guarantee.epsilon <= 2.0
    assert epsilon(Mechanism(levels=s, trials=m - 1), 500, 1e-5, dimension=4000) > 2.0
    assert plan.mechanism.code_count <= 256
    assert Plan.from_dict(plan.to_dict()) == plan


def test_what_was_spent_before_counts():
    def wide(mechanism):
        return make_release(mechanism, dimension=4000)

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


def test_an_infeasible_budget_names_the_nearest_trades():
    with pytest.raises(Infeasible) as error:
        plan_exact(Budget(bits=6, epsilon=0.3, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
    words = str(error.value)
    assert "6 bits reach epsilon >= " in words or "no finite epsilon" in words
    needed = int(words.split(" needs ")[1].split(" bits")[0])
    assert 6 < needed <= 20
    enough = plan_exact(Budget(bits=needed, epsilon=0.3, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
    assert enough.guarantee.epsilon <= 0.3
    with pytest.raises(Infeasible):
        plan_exact(Budget(bits=needed - 1, epsilon=0.3, delta=1e-5), **SETTING | {"dimension": 4000}, rounds=500)
