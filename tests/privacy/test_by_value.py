"""Claim 15: mechanisms whose law depends on the value, against every outcome of random values."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import numpy as np
import pytest
from enumeration import hockey_stick, product
from scipy.stats import binom

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.privacy.by_value import PoissonBinomial, RandomizedQuantization, composed, guarantee
from bqsgd._src.release import Relation, Trust, Unit

EPSILONS = (-0.7, 0.0, 0.2, 0.9, 2.0)


def delta_of(law, epsilon: float) -> float:
    """The curve of a loss distribution for any epsilon; dp-accounting answers for those from 0 up."""
    loss = (law._lower_loss + np.arange(law.size)) * law._discretization
    return law._infinity_mass + float(np.maximum(law._probs * -np.expm1(epsilon - loss), 0)[loss > epsilon].sum())


def sum_law(mechanism: PoissonBinomial, values) -> np.ndarray:
    laws = [binom.pmf(np.arange(mechanism.trials + 1), mechanism.trials, 0.5 + mechanism.theta * x) for x in values]
    return reduce(np.convolve, laws)


@pytest.mark.parametrize(("trials", "theta", "clients"), [(3, 0.25, 1), (6, 0.1, 1), (3, 0.25, 3), (2, 0.2, 12)])
def test_any_two_values_of_a_poisson_binomial_client_stay_below_the_curve(trials, theta, clients):
    mechanism = PoissonBinomial(trials=trials, theta=theta, clients=clients)
    bound = composed(mechanism, dimension=1, rounds=1)
    rng, largest = np.random.default_rng(4), dict.fromkeys(EPSILONS, 0.0)
    for index in range(120):
        # Ends of the range and what lies between, for the client and for all others.
        others = rng.choice([-1.0, 1.0, rng.uniform(-1, 1)], size=clients - 1)
        x, y = (1.0, -1.0) if index % 3 == 0 else rng.uniform(-1, 1, 2)
        pair = sum_law(mechanism, [x, *others]), sum_law(mechanism, [y, *others])
        for epsilon in EPSILONS:
            largest[epsilon] = max(largest[epsilon], hockey_stick(pair, epsilon))
    for epsilon, seen in largest.items():
        assert seen <= delta_of(bound, epsilon) + 1e-12
        if clients <= 3:  # few trials: no block leaves any of them out
            assert delta_of(bound, epsilon) <= 1.25 * seen + 1e-3


def brute_quantised(mechanism: RandomizedQuantization, x: float) -> np.ndarray:
    """Every subset of kept levels listed."""
    places, law = mechanism.places, np.zeros(mechanism.levels)
    for kept in itertools.product([False, True], repeat=mechanism.levels - 2):
        weight = math.prod(mechanism.keep if one else 1 - mechanism.keep for one in kept)
        there = [0, *(i + 1 for i, one in enumerate(kept) if one), mechanism.levels - 1]
        above = next(i for i in there if places[i] > x)
        below = there[there.index(above) - 1]
        up = (x - places[below]) / (places[above] - places[below])
        law[above] += weight * up
        law[below] += weight * (1 - up)
    return law


QUANTISED = [
    RandomizedQuantization(levels=6, margin=0.5, keep=0.4),
    RandomizedQuantization(levels=9, margin=1.0, keep=0.7),
    RandomizedQuantization(levels=2, margin=0.3, keep=0.5),
]


@pytest.mark.parametrize("mechanism", QUANTISED, ids=str)
def test_randomised_quantisation_has_the_law_of_its_description(mechanism):
    for x in np.linspace(-1, 1, 23):
        law = mechanism.law(float(x))
        np.testing.assert_allclose(law, brute_quantised(mechanism, float(x)), atol=1e-14)
        assert law @ mechanism.places == pytest.approx(x, abs=1e-12)


@pytest.mark.parametrize("mechanism", QUANTISED, ids=str)
@pytest.mark.parametrize(("dimension", "rounds"), [(1, 1), (2, 1), (1, 2)])
def test_any_two_values_that_are_quantised_at_random_stay_below_the_curve(mechanism, dimension, rounds):
    bound = composed(mechanism, dimension=dimension, rounds=rounds)
    rng, count = np.random.default_rng(6), dimension * rounds
    ends = [-1.0, 1.0, *(float(place) for place in mechanism.places if -1 < place < 1)]
    largest = dict.fromkeys(EPSILONS, 0.0)
    for _ in range(150):
        values = [rng.choice([rng.choice(ends), rng.uniform(-1, 1)]) for _ in range(2 * count)]
        pair = product(*((mechanism.law(x), mechanism.law(y)) for x, y in zip(values[::2], values[1::2], strict=True)))
        for epsilon in EPSILONS:
            largest[epsilon] = max(largest[epsilon], hockey_stick(pair, epsilon))
    for epsilon, seen in largest.items():
        assert seen <= delta_of(bound, epsilon) + 1e-12
    if count == 1:
        assert all(delta_of(bound, epsilon) <= 1.02 * seen + 1e-3 for epsilon, seen in largest.items())


def test_the_guarantee_says_whom_it_hides_and_from_whom():
    mechanism = PoissonBinomial(trials=64, theta=0.25, clients=100)
    stated = guarantee(mechanism, dimension=10, rounds=2, delta=1e-6)
    assert (stated.relation, stated.unit, stated.trust) == (Relation.REPLACE, Unit.CLIENT, Trust.SUMS_ONLY)
    alone = PoissonBinomial(trials=64, theta=0.25)
    assert stated.epsilon < 0.3 * guarantee(alone, dimension=10, rounds=2, delta=1e-6).epsilon
    assert 0 < stated.delta_floor < 1e-8


@pytest.mark.parametrize("theta", [0.0, 0.26, math.nan])
def test_parameters_outside_of_the_proof_are_refused(theta):
    with pytest.raises(InvalidParameter):
        PoissonBinomial(trials=4, theta=theta)
    with pytest.raises(InvalidParameter):
        RandomizedQuantization(levels=4, margin=theta - 0.26 if theta else 0.0, keep=0.5)
