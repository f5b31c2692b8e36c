"""The L2 route of the accountant: tight, never below what data attain, and saying so where it does not apply."""

from __future__ import annotations

import math

import numpy as np
import pytest
from enumeration import hockey_stick, product, subsampled, value_law
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accountant_oracle import release

from bqsgd._src.errors import AccountingError
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import make_plan
from bqsgd._src.privacy import _renyi
from bqsgd._src.privacy._rounds import homogeneous
from bqsgd._src.privacy.accountant import METHOD_L2, METHOD_LINF, Accountant
from bqsgd._src.release import Release, Sampling, Sensitivity, Terms


def by_shifts(trials, l2, linf, rate, *, dimension=26_010, scheme="poisson"):
    relation = "replace one" if scheme.startswith("fixed") else "add/remove one"
    return Release(
        mechanism=Mechanism(levels=1, trials=trials),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(linf=linf, l2=l2, relation=relation),
            sampling=Sampling(scheme=scheme, rate=rate),
        ),
    )


@pytest.mark.parametrize(
    ("trials", "l2", "linf", "rate", "rounds", "most"),
    [
        (141, 3.0, 3.0, 1024 / 15_000, 300, 1.03),
        pytest.param(14_400, 3.0, 3.0, 1024 / 15_000, 300, 1.01, marks=pytest.mark.slow),
        (189, 6.0, 1.0, 512 / 15_000, 150, 1.03),
        (800, 4.0, 4.0, 0.2, 50, 1.03),
    ],
)
def test_within_three_per_cent_of_what_data_attain(trials, l2, linf, rate, rounds, most):
    accountant = Accountant().compose(by_shifts(trials, l2, linf, rate), rounds)
    guarantee = accountant.guarantee(delta=1e-5)
    attained = accountant.attained_epsilon(1e-5)
    assert attained <= guarantee.epsilon <= most * attained
    assert guarantee.method == METHOD_L2
    assert guarantee.epsilon < 0.93 * _renyi.epsilon(accountant.spent, 1e-5)


@pytest.mark.parametrize("scheme", ["poisson", "no sampling", "fixed-size without replacement"])
@pytest.mark.parametrize(
    ("trials", "delta"), [(90, 1e-5), *(pytest.param(trials, 1e-10, marks=pytest.mark.slow) for trials in (1000, 3000))]
)
def test_never_below_what_data_attain(scheme, trials, delta):
    for rate, rounds, linf in ((0.01, 200, 0.3), (0.5, 3, 2.0)):
        rate = 1.0 if scheme == "no sampling" else rate
        what = by_shifts(trials, 2.0, linf, rate, scheme=scheme)
        accountant = Accountant().compose(what, rounds)
        assert 0 < accountant.attained_epsilon(delta) <= accountant.epsilon(delta) < math.inf


@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_two_rounds_are_never_below_full_enumeration(rate):
    """Random shift vectors in two dimensions, both orders, both directions: every outcome of two rounds listed."""
    trials, dimension, l2, linf = 20, 2, 1.1, 0.9
    scheme = "no sampling" if rate == 1 else "poisson"
    accountant = Accountant().compose(by_shifts(trials, l2, linf, rate, dimension=dimension, scheme=scheme), 2)
    assert accountant.guarantee(delta=0.01).method == METHOD_L2
    rng = np.random.default_rng(1)
    support = range(trials + 3)
    still = value_law(trials, 0.0, support)
    epsilons = np.array([0.1, 0.5, 1.0, 1.5])
    proven = [accountant.delta(epsilon) for epsilon in epsilons]
    for _ in range(6):
        rounds = []
        for _ in range(2):
            first = rng.uniform(math.sqrt(l2**2 - linf**2), linf)
            laws = [(value_law(trials, u, support), still) for u in (first, math.sqrt(l2**2 - first**2))]
            rounds.append(subsampled(product(*(law if rng.random() < 0.5 else law[::-1] for law in laws)), rate))
        p, q = product(*rounds)
        for epsilon, bound in zip(epsilons, proven, strict=True):
            assert max(hockey_stick((p, q), epsilon), hockey_stick((q, p), epsilon)) <= bound + 1e-12


@given(
    st.integers(1, 10**8), st.floats(1e-4, 30.0), st.floats(1e-3, 1.0), st.sampled_from([1, 4, 10, 128]), st.booleans()
)
@settings(max_examples=200, deadline=None)
def test_data_that_attain_are_within_the_bounds(dimension, l2, share, spread, plain):
    what = by_shifts(100, None if plain else l2, l2 * share, 0.1, dimension=dimension)
    shift, copies = homogeneous(what, spread)
    assert 1 <= copies <= dimension
    assert shift <= what.shift
    assert copies * shift**2 <= what.shift_l2**2 * (1 + 1e-12)
    if plain:
        assert (shift, copies) == (what.shift, dimension)


def test_releases_with_and_without_an_l2_bound_compose():
    long, short = by_shifts(200, 2.0, 2.0, 0.05), by_shifts(300, 1.0, 0.2, 0.05)
    plain = by_shifts(300, None, 0.01, 0.05, dimension=2000)
    accountant = Accountant().compose(long, 20).compose(short, 30).compose(plain, 10)
    guarantee = accountant.guarantee(delta=1e-6)
    assert guarantee.method == METHOD_L2
    assert accountant.attained_epsilon(1e-6) <= guarantee.epsilon <= 1.05 * accountant.attained_epsilon(1e-6)
    for part in (Accountant().compose(long, 20), Accountant().compose(short, 30), Accountant().compose(plain, 10)):
        assert part.epsilon(1e-6) < guarantee.epsilon


def test_where_the_route_does_not_apply_another_stands_or_none_is_claimed():
    """Four trials: the outcomes that one neighbour lacks weigh a tenth; shifts of 700 steps: beyond the grid."""
    few = Accountant().compose(by_shifts(4, 1.6, 1.0, 1.0, dimension=3, scheme="no sampling"))
    guarantee = few.guarantee(delta=0.3)
    assert guarantee.method == METHOD_LINF
    assert few.attained_epsilon(0.3) <= guarantee.epsilon < math.inf
    with pytest.raises(AccountingError, match="700 steps"):
        Accountant().compose(by_shifts(1_000_000, 700.0, 700.0, 0.01), 10).epsilon(1e-5)


def test_an_l2_bound_that_does_not_bind_changes_nothing():
    bound, free = release(1, 251, 400, 50, 1000, l2=20 / 50), release(1, 251, 400, 50, 1000)
    for what in (bound, free):
        assert Accountant().compose(what, 20).guarantee(delta=1e-5).method == METHOD_LINF
    assert Accountant().compose(bound, 20).epsilon(1e-5) == Accountant().compose(free, 20).epsilon(1e-5)


def test_plans_have_less_noise_than_moments_allow():
    terms = Terms.of_batch(dimension=39_700, batch_size=1024, dataset_size=15_000, linf=1 / 1.024, l2=1 / 1.024)
    plan = make_plan(Budget(bits=8, epsilon=3.0, delta=1e-5), terms, rounds=300)
    assert plan.guarantee.epsilon <= 3.0
    assert _renyi.epsilon(((plan.release, 300),), 1e-5) > 3.2
