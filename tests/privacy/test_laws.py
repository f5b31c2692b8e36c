"""Laws of noise other than the binomial: their exact integers, and every bound against every outcome listed."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as google
from enumeration import hockey_stick, product, subsampled
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.laws import Binomial, DiscreteGaussian, Geometric, NoiseLaw, Skellam, Sum, law_from, law_of_bytes
from bqsgd._src.noise import NOISE_BITS, REFINE_BITS, alias_table
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy import _rounds
from bqsgd._src.privacy._message import message_pair
from bqsgd._src.privacy._rounds import poisson
from bqsgd._src.privacy._shapes import shaped_pair
from bqsgd._src.privacy.accountant import Accountant, _sum_charge
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms, Trust

# Few outcomes, so that all of them can be listed in two dimensions; their tails are cut like all others.
SMALL = [DiscreteGaussian(0.9), Skellam(0.7), Geometric(0.3), Sum(DiscreteGaussian(0.5), 3), Sum(Geometric(0.02), 4)]
SLOW = pytest.mark.slow
ANY = [
    *SMALL,
    DiscreteGaussian(40.0),
    DiscreteGaussian(2900.0),
    Skellam(900.0),
    Geometric(0.99),
    Sum(Skellam(2.0), 50),
    Sum(Geometric(0.5), 100),
]


def release(
    law: NoiseLaw,
    *,
    shift: float,
    l2: float | None = None,
    dimension: int = 1,
    rate: float = 1.0,
    trust: Trust = Trust.EACH_CLIENT,
) -> Release:
    return Release(
        mechanism=Mechanism.of(levels=1, noise=law),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(linf=shift, l2=l2, relation=Relation.ADD_REMOVE),
            sampling=Sampling(scheme=Scheme.POISSON if rate < 1 else Scheme.NONE, rate=rate),
            trust=trust,
        ),
    )


def value_law(law: NoiseLaw, x: float, support: range) -> np.ndarray:
    """The law of floor(x) + Bernoulli(frac x) + noise on `support`."""
    low, part = math.floor(x), x - math.floor(x)
    result = np.zeros(len(support))
    start = low - support.start
    result[start : start + law.pmf.size] += (1 - part) * law.pmf
    result[start + 1 : start + 1 + law.pmf.size] += part * law.pmf
    return result


def checked_exactly(law: NoiseLaw) -> None:
    masses = law.masses
    assert sum(masses) == 2**104
    assert masses == masses[::-1]
    assert all(masses[k] ** 2 >= masses[k - 1] * masses[k + 1] for k in range(1, len(masses) - 1))
    assert len(masses) == law.span + 1
    assert 2**38 - 1 <= masses[0] < 2**104


@pytest.mark.parametrize("law", ANY, ids=str)
def test_a_law_is_symmetric_and_log_concave_in_exact_integers(law):
    checked_exactly(law)


@given(st.one_of(st.floats(0.2, 100).map(DiscreteGaussian), st.floats(0.01, 9e3).map(Skellam)))
@settings(max_examples=25, deadline=None)
def test_any_gaussian_and_skellam_law_is_symmetric_and_log_concave(law):
    checked_exactly(law)


@given(st.floats(1e-9, 0.97))
@settings(max_examples=25, deadline=None)
def test_any_geometric_law_is_symmetric_and_log_concave(alpha):
    checked_exactly(Geometric(alpha))


@pytest.mark.parametrize("law", [DiscreteGaussian(0.4), DiscreteGaussian(33.3), Skellam(0.3), Skellam(170.0)], ids=str)
def test_the_law_is_the_textbooks_to_the_last_digits(law):
    k = np.abs(np.arange(law.span + 1) - law.span // 2).astype(float)
    expected = special.ive(k, law.mu) if isinstance(law, Skellam) else np.exp(-(k**2) / (2 * law.sigma**2))
    expected /= expected.sum()
    np.testing.assert_allclose(law.pmf, expected, rtol=1e-10)


def test_the_geometric_law_is_bent_by_less_than_it_says():
    law = Geometric(0.9)
    k = np.abs(np.arange(law.span + 1) - law.span // 2).astype(float)
    np.testing.assert_allclose(law.pmf, 0.9**k * 0.1 / 1.9, rtol=2 * k.max() ** 2 * 2.0**-36)


@pytest.mark.parametrize(("law", "parties"), [(DiscreteGaussian(0.7), 3), (Skellam(0.5), 4), (Geometric(0.2), 5)])
def test_a_sum_is_as_far_from_the_exact_convolution_as_it_states(law, parties):
    exact = [1]
    for _ in range(parties):
        grown = [0] * (len(exact) + law.span)
        for i, one in enumerate(exact):
            for j, other in enumerate(law.masses):
                grown[i + j] += one * other
        exact = grown
    summed = Sum(law, parties)
    margin = (len(exact) - 1 - summed.span) // 2
    near = {margin + k: Fraction(mass, 2**104) for k, mass in enumerate(summed.masses)}
    apart = sum(abs(Fraction(mass, 2 ** (104 * parties)) - near.get(k, 0)) for k, mass in enumerate(exact)) / 2
    assert 0 < apart <= Fraction(summed.distance)
    assert summed.distance < 2.0**-58


@pytest.mark.parametrize("law", [DiscreteGaussian(3.0), Skellam(7.5), Geometric(0.8), Binomial(90)], ids=str)
def test_the_sampler_has_exactly_the_law(law):
    table, total = alias_table(law), [0] * (law.span + 1)
    unit = 1 << (NOISE_BITS - table.index_bits + REFINE_BITS)
    for i, (threshold, refine, alias) in enumerate(zip(table.threshold, table.refine, table.alias, strict=True)):
        keep = (int(threshold) << REFINE_BITS) + int(refine)
        if i < len(law.masses):
            total[i] += keep
        else:
            assert keep == 0
        total[int(alias)] += unit - keep
    assert tuple(total[: len(law.masses)]) == law.masses


@pytest.mark.parametrize("law", SMALL, ids=str)
@pytest.mark.parametrize(
    ("dimension", "rate", "rounds"),
    [(1, 0.3, 2), pytest.param(1, 1.0, 1, marks=SLOW), pytest.param(2, 1.0, 1, marks=SLOW), (2, 0.5, 1)],
)
def test_proven_is_never_below_and_hardly_above_full_enumeration(law, dimension, rate, rounds):
    """Claims 1 to 3: the worst of A^k B^(d-k) in both directions, every outcome of every round listed."""
    shift = 0.8
    support = range(law.span + 3)
    moved, still = value_law(law, shift, support), value_law(law, 0.0, support)
    coordinate = np.flatnonzero(moved + still > 1e-13)  # 1e-13 of mass less is far below the tolerance
    a = moved[coordinate], still[coordinate]
    tally = Accountant().compose(release(law, shift=shift, dimension=dimension, rate=rate), rounds)
    for epsilon in (0.1, 0.7, 1.5):
        worst = 0.0
        for k in range(dimension + 1):
            pair = subsampled(product(*([a] * k + [a[::-1]] * (dimension - k))), rate)
            for one in (pair, pair[::-1]):
                worst = max(worst, hockey_stick(product(*[one] * rounds), epsilon))
        proven = tally.delta(epsilon)
        assert worst - 1e-11 <= proven <= 1.12 * worst + 1e-8


@pytest.mark.parametrize("law", SMALL, ids=str)
def test_no_two_inputs_of_any_place_reveal_more_than_is_proven(law):
    """Claim 2 on real data: any places, any moves up to the longest, in two dimensions."""
    rng = np.random.default_rng(5)
    support = range(-4, law.span + 6)
    tally = Accountant().compose(release(law, shift=1.3, dimension=2))
    bounds = {epsilon: tally.delta(epsilon) for epsilon in (0.0, 0.6, 1.7)}
    for _ in range(25):
        places, moves = rng.uniform(-1, 1, 2), rng.uniform(-1.3, 1.3, 2)
        laws = [
            (value_law(law, x + u, support), value_law(law, x, support)) for x, u in zip(places, moves, strict=True)
        ]
        pair = product(*laws)
        for epsilon, bound in bounds.items():
            assert hockey_stick(pair, epsilon) <= bound + 1e-12


@pytest.mark.parametrize("law", [DiscreteGaussian(2.0), Skellam(5.0), Geometric(0.6)], ids=str)
def test_the_l2_route_is_never_below_enumeration_of_random_shifts(law):
    """Claim 10 needs nothing but symmetry and log-concavity either."""
    rng, length = np.random.default_rng(8), 1.4
    pair = shaped_pair(law, length, length, 2)
    support = range(-4, law.span + 6)
    losses = pair.loss
    for _ in range(12):
        shift = rng.normal(size=2)
        shift *= length / np.linalg.norm(shift)
        places = rng.choice([0.0, rng.uniform()], size=2)
        laws = [
            (value_law(law, a + b, support), value_law(law, a, support)) for a, b in zip(places, shift, strict=True)
        ]
        joint = product(*laws)
        for epsilon in (-0.5, 0.0, 0.4, 1.0, 2.0):
            bound = pair.p_only + float(np.maximum(pair.p - math.exp(epsilon) * pair.q, 0)[losses > epsilon].sum())
            assert hockey_stick(joint, epsilon) <= bound + 1e-12


@pytest.mark.parametrize(
    "law", [DiscreteGaussian(2.5), *(pytest.param(law, marks=SLOW) for law in (Skellam(6.0), Geometric(0.7)))], ids=str
)
def test_a_sum_over_clients_is_accounted_as_their_convolution(law):
    one = release(law, shift=0.5, dimension=100)
    of_ten = Accountant().compose(one.summed(10))
    assert one.summed(10).mechanism.law == Sum(law, 10)
    # The convolution's own figure and the charge for its rounding: in delta, so a hair above.
    direct = Accountant().compose(release(Sum(law, 10), shift=0.5, dimension=100))
    assert direct.delta(2.0) <= of_ten.delta(2.0) < direct.delta(2.0) + 1e-12
    assert _sum_charge(of_ten.spent, 2.0) >= 100 * one.summed(10).mechanism.law.distance * math.exp(2.0) > 0
    assert of_ten.epsilon(1e-6) < 0.5 * Accountant().compose(one).epsilon(1e-6)
    with pytest.raises(InvalidParameter, match="sum of draws"):
        release(law, shift=0.5, trust=Trust.SUMS_ONLY)


def agrees_with_google(law: NoiseLaw, sensitivity: int, theirs: Any) -> None:
    """To 1e-6 for the same shift, and to twice that with what the accountant adds to the shift for its encoder."""
    exact = _rounds._composed([(poisson(message_pair(law, float(sensitivity), 1), 1.0).on_grid(4e-6), 1)])
    whole = Accountant().compose(release(law, shift=float(sensitivity)))
    for delta in (0.05, 1e-3, 1e-6):
        expected = theirs.get_epsilon_for_delta(delta)
        assert exact.get_epsilon_for_delta(delta) == pytest.approx(expected, abs=1e-6)
        assert whole.epsilon(delta) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("sigma", [1.5, 4.0, 20.0])
def test_discrete_gaussian_agrees_with_dp_accounting(sigma):
    theirs = google.from_discrete_gaussian_mechanism(sigma, sensitivity=1, value_discretization_interval=1e-7)
    agrees_with_google(DiscreteGaussian(sigma), 1, theirs)


@pytest.mark.parametrize(("parameter", "sensitivity"), [(0.2, 1), (0.5, 2), (1.0, 3)])
def test_discrete_laplace_agrees_with_dp_accounting(parameter, sensitivity):
    theirs = google.from_discrete_laplace_mechanism(parameter, sensitivity, value_discretization_interval=1e-7)
    agrees_with_google(Geometric(math.exp(-parameter)), sensitivity, theirs)


@pytest.mark.parametrize("law", [*SMALL, Binomial(5)], ids=str)
def test_a_law_survives_json_and_a_ledgers_release(law):
    assert law_from(law.to_dict()) == law
    what = release(law, shift=0.5)
    assert Release.from_dict(what.to_dict()) == what
    assert ("noise" in what.to_dict()["mechanism"]) != isinstance(law, Binomial)
    if law.number:
        assert law_of_bytes(law.to_bytes()) == law
    else:
        with pytest.raises(InvalidParameter, match="cannot carry"):
            law.to_bytes()


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"kind": "cauchy", "scale": 1.0},
        {"kind": ["skellam"]},
        {"kind": "skellam"},
        {"kind": "skellam", "mu": "9"},
        {"kind": "skellam", "mu": True},
        {"kind": "skellam", "mu": math.nan},
        {"kind": "skellam", "mu": 1e9},
        {"kind": "skellam", "mu": 10**400},
        {"kind": "skellam", "mu": -(10**400)},
        {"kind": "skellam", "mu": 9.0, "sigma": 1.0},
        {"kind": "discrete gaussian", "sigma": math.inf},
        {"kind": "geometric", "alpha": 1.0},
        {"kind": "sum", "law": {"kind": "binomial", "trials": 3}, "parties": 2},
        {"kind": "sum", "law": {"kind": "geometric", "alpha": 0.9}, "parties": 2**20},
        {"kind": "sum", "law": {"kind": "geometric", "alpha": 0.5}, "parties": 0},
        {"kind": "sum", "law": {"kind": "sum", "law": {}, "parties": 2}, "parties": 2},
        {"kind": "binomial", "trials": 2.5},
    ],
)
def test_fields_that_are_no_law_are_refused(fields):
    with pytest.raises(InvalidParameter):
        law_from(fields)


def test_hardly_any_noise_under_an_l2_bound_is_refused_before_large_arrays_are_made():
    terms = Terms(
        dimension=2, sensitivity=Sensitivity(linf=1.0, l2=0.5755), sampling=Sampling(scheme=Scheme.POISSON, rate=0.2)
    )
    tally = Accountant().compose(Release(mechanism=Mechanism.of(levels=2, noise=Geometric(1e-9)), terms=terms))
    with pytest.raises(AccountingError, match="reveals too much"):
        tally.epsilon(1e-5)
    assert tally.delta(1.0) > 0.1


def test_a_mechanism_cannot_state_other_noise_than_its_law_has():
    with pytest.raises(InvalidParameter, match="span"):
        Mechanism(levels=1, trials=0, noise=DiscreteGaussian(3.0))
    with pytest.raises(InvalidParameter, match="span"):
        Mechanism(levels=1, trials=9, noise=Binomial(9))
    assert Mechanism.of(levels=1, noise=Binomial(9)) == Mechanism(levels=1, trials=9)
