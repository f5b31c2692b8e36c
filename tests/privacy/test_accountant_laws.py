"""Laws of the accountant: monotone in every parameter, composes, caches, and never answers low on a fault."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accountant_oracle import release

from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.laws import Binomial
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy import _rounds
from bqsgd._src.privacy._message import message_pair
from bqsgd._src.privacy._pairs import Atoms, Pair, checked, envelope
from bqsgd._src.privacy._rounds import fixed_size, poisson
from bqsgd._src.privacy.accountant import METHOD_L2, METHOD_LINF, Accountant
from bqsgd._src.privacy.guarantee import Guarantee, rounded_up
from bqsgd._src.release import Release, Sampling, Sensitivity, Terms, Trust

GRID = 0.004
"""Two settings are put on two grids, each at most so much (relatively) above the truth."""

settings_st = st.fixed_dictionaries(
    {
        "levels": st.integers(1, 4),
        "trials": st.integers(90, 400),
        "dimension": st.integers(1, 3000),
        "batch": st.integers(16, 64),
        "data": st.integers(2000, 4000),
    }
)


def epsilon(rounds=20, delta=1e-5, **parameters):
    return Accountant().compose(release(**parameters), rounds).epsilon(delta)


@given(settings_st, st.sampled_from(["levels", "trials", "dimension", "rounds", "rate", "delta"]))
@settings(max_examples=3, deadline=None)
def test_monotone_in_every_parameter(parameters, name):
    """More levels, coordinates, rounds or sampling cost more; more trials or a larger delta cost less."""
    one = epsilon(**parameters)
    if name == "rounds":
        other = epsilon(rounds=33, **parameters)
    elif name == "delta":
        other = epsilon(delta=1e-6, **parameters)
    elif name == "rate":
        other = epsilon(**{**parameters, "data": parameters["data"] // 2})
    elif name == "trials":
        other = epsilon(**{**parameters, "trials": parameters["trials"] - 20})
    else:
        other = epsilon(**{**parameters, name: parameters[name] + max(1, parameters[name] // 5)})
    assert other >= one * (1 - GRID)


@pytest.mark.parametrize("trials", [40, 43, 60])
def test_fewer_rounds_never_cost_more_with_few_trials_under_an_l2_bound(trials):
    """Loss distributions alone gave ten rounds twice the epsilon of fifty, so that a ledger stopped a planned run."""
    one = Release(
        mechanism=Mechanism(levels=2, trials=trials),
        terms=Terms(
            dimension=12810,
            sensitivity=Sensitivity(linf=0.04, l2=0.04),
            sampling=Sampling(scheme="poisson", rate=1.0),
            trust=Trust.SUMS_ONLY,
        ),
    )
    found = [Accountant().compose(one, rounds).epsilon(1e-5) for rounds in (1, 4, 10, 25, 50)]
    assert math.isfinite(found[0])
    assert all(after >= before * (1 - GRID) for before, after in pairwise(found))


@given(st.integers(1, 60), st.floats(0.01, 3.0), st.integers(1, 40), st.floats(0.01, 1.0))
@settings(max_examples=12, deadline=None)
def test_pairs_are_laws_and_curves_are_hockey_sticks(trials, shift, dimension, rate):
    """P and Q weigh 1, and the curve is convex and decreasing between max(0, 1 - e^e) and 1."""
    try:
        pair = message_pair(Binomial(trials), shift, dimension)
    except AccountingError:
        assert shift > trials  # neighbours have nothing in common
        return
    for sampled in (poisson(pair, rate), fixed_size(pair, rate)):
        grid = sampled.on_grid((sampled.loss[-1] - sampled.loss[0] + 1e-3) / 5000)
        assert grid.p.sum() + grid.p_only == pytest.approx(1, abs=1e-9)
        assert grid.q.sum() + grid.q_only == pytest.approx(1, abs=1e-9)
        z = np.exp(np.linspace(-2, 4, 25))
        heights = np.array([grid.p_only + np.maximum(grid.p - x * grid.q, 0).sum() for x in z])
        assert np.all(np.diff(heights) <= 1e-12)
        slopes = np.diff(heights) / np.diff(z)
        assert np.all(np.diff(slopes) >= -1e-9)
        assert np.all(heights >= np.maximum(0, 1 - z) - 1e-9)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0.01, 0.7))
@settings(max_examples=60, deadline=None)
def test_connecting_the_dots_keeps_both_masses_and_lies_above(losses, step):
    loss = np.sort(np.array(losses))
    p = np.full(loss.size, 1 / (2 * loss.size)) / np.maximum(1, np.exp(-loss))
    grid = Atoms(loss=loss, p=p, q=p * np.exp(-loss), p_only=0.0, q_only=0.0).on_grid(step)
    assert grid.p.sum() == pytest.approx(p.sum(), rel=1e-12)
    assert grid.q.sum() == pytest.approx((p * np.exp(-loss)).sum(), rel=1e-12)
    for e in np.linspace(-3, 3, 23):
        before = np.maximum(p - math.exp(e) * p * np.exp(-loss), 0).sum()
        after = np.maximum(grid.p - math.exp(e) * grid.q, 0).sum()
        assert after >= before - 1e-13


def test_envelope_lies_on_or_above_both_and_touches_one():
    pair = message_pair(Binomial(9), 0.6, 2, attained=True)
    top = envelope(pair, pair.reversed())
    touched = 0.0
    for i in range(-40, 41):
        z = math.exp(i * 37 * pair.step)
        heights = [x.p_only + np.maximum(x.p - z * x.q, 0).sum() for x in (pair, pair.reversed(), top)]
        assert heights[2] >= max(heights[:2]) - 1e-13
        touched = max(touched, heights[2] - max(heights[:2]))
    assert touched < 1e-4


def test_composition_of_unequal_releases_lies_between_its_parts():
    light, heavy = release(1, 251, 2000), release(2, 251, 2000)
    mixed = Accountant().compose(light, 30).compose(heavy, 30).epsilon(1e-5)
    assert Accountant().compose(light, 60).epsilon(1e-5) < mixed < Accountant().compose(heavy, 60).epsilon(1e-5)
    assert mixed == Accountant().compose(heavy, 10).compose(light, 30).compose(heavy, 20).epsilon(1e-5)


def test_delta_and_epsilon_are_inverse():
    accountant = Accountant().compose(release(2, 251, 5000), 100)
    for delta in (1e-4, 1e-6, 1e-8):
        assert accountant.delta(accountant.epsilon(delta)) == pytest.approx(delta, rel=1e-6)


def test_nothing_released_costs_nothing_and_has_no_guarantee():
    assert Accountant().epsilon(1e-5) == 0
    assert Accountant().delta(0.0) == 0
    with pytest.raises(InvalidParameter, match="nothing was released"):
        Accountant().guarantee(delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_outside_its_range_is_refused(delta):
    with pytest.raises(InvalidParameter, match="delta"):
        Accountant().compose(release()).epsilon(delta)


def test_the_batch_mean_clip_is_beyond_meaning():
    """Shift 2s in every coordinate: no effort is spent, and the figure says so."""
    what = release(2, 251, linf=2.0)
    guarantee = Accountant().compose(what, 1000).guarantee(delta=1e-5)
    assert guarantee.epsilon > 1000
    assert guarantee.epsilon_text == "> 1000: no meaningful guarantee"
    assert _rounds.beyond_meaning(what)
    assert not _rounds.beyond_meaning(release(2, 251))


def test_sums_over_clients_need_less_noise_each():
    """Four clients of 63 trials, only their sum seen, are as private as one client of 252 trials, and say so."""
    summed = Accountant().compose(release(1, 63).summed(4), 100).guarantee(delta=1e-5)
    one = Accountant().compose(release(1, 252), 100).epsilon(1e-5)
    assert one < summed.epsilon < one * (1 + 1e-5)  # the sum of cut laws is charged
    assert summed.trust == "server sees only sums over clients"
    assert summed.epsilon < Accountant().compose(release(1, 63), 100).epsilon(1e-5)


def test_no_noise_is_no_privacy():
    assert Accountant().compose(release(2, 0), 1).epsilon(1e-5) == math.inf


@pytest.mark.slow
def test_a_hundred_million_coordinates():
    """A batch large enough that the figure means something; the Gaussian of equal variance is the yardstick."""
    what = release(1, 4079, 10**8, batch=4096, data=60000)
    figure = Accountant().compose(what, 1).epsilon(1e-5)
    assert math.isfinite(figure)
    assert figure >= Accountant().compose(release(1, 4079, 10**6, batch=4096, data=60000), 1).epsilon(1e-5)


def test_a_guarantee_states_everything_and_survives_json():
    guarantee = Accountant().compose(release(), 1000).guarantee(delta=1e-5, seeded=True)
    text = str(guarantee)
    for word in ("epsilon 0.3318", "delta 1e-05", "add/remove one sample", "each client", "poisson", "seeded noise"):
        assert word in text
    assert Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict()))) == guarantee
    assert guarantee.method == METHOD_LINF
    earlier = {**guarantee.to_dict(), "method": "exact: privacy loss distribution, L-infinity"}
    assert Guarantee.from_dict(earlier) == guarantee  # as older ledgers and runs have it
    with_l2 = Accountant().compose(release(dimension=26010, l2=0.01), 100).guarantee(delta=1e-5)
    assert with_l2.method == METHOD_L2


@given(st.floats(1e-9, 1e6))
def test_shown_figures_are_rounded_up(value):
    assert value <= float(rounded_up(value)) <= value * 1.0011


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"major": np.array([0.5, -0.1, 0.6])}, "negative"),
        ({"major": np.array([0.5, np.nan, 0.5])}, "non-finite"),
        ({"major": np.array([0.5, 0.2, 0.2])}, "weighs"),
        ({"p_only": -0.1}, "negative"),
    ],
)
def test_a_faulty_distribution_is_refused(change, words):
    fields = {"step": 0.1, "first": -1, "major": np.array([0.25, 0.5, 0.25]), "p_only": 0.0, "q_only": 0.0, **change}
    with pytest.raises(AccountingError, match=words):
        checked(Pair(**fields))
