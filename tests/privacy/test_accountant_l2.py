"""The L2 route against direct sums, against a truth from below, and against the Gaussian."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from test_accountant_oracle import release

from bqsgd._src.laws import Binomial
from bqsgd._src.privacy import _renyi
from bqsgd._src.privacy._renyi import moment_rates
from bqsgd._src.privacy.accountant import Accountant


def log_moments(trials, shifts, order, cut):
    """Direct: (order A, order B) of sum_j log sum_k P^a Q^(1-a), tails of `cut` outcomes a side left out."""
    law = Binomial(trials).pmf
    totals = np.zeros(2)
    for u in shifts:
        whole, part = math.floor(u), u - math.floor(u)
        moved = np.zeros(law.size + whole + 1)
        moved[whole : whole + law.size] += (1 - part) * law
        moved[whole + 1 : whole + 1 + law.size] += part * law
        still = np.concatenate([law, np.zeros(whole + 1)])
        p, q = moved[cut : law.size - cut], still[cut : law.size - cut]
        totals += np.log([np.sum(p**order * q ** (1 - order)), np.sum(q**order * p ** (1 - order))])
    return totals


@given(
    st.integers(60, 1200),
    st.lists(st.floats(0.0005, 1.0), min_size=1, max_size=12),
    st.sampled_from([0.05, 0.4, 1.0, 2.5]),
    st.sampled_from([2, 3, 4, 8, 16]),
)
@settings(max_examples=60, deadline=None)
def test_rates_bound_every_shift_vector(trials, fractions, largest, order):
    shifts = np.array(fractions) * largest
    rates = moment_rates(Binomial(trials), largest, 1e-12)
    cut = int(np.searchsorted(np.cumsum(Binomial(trials).pmf), 5e-13))
    bound = rates.per_square[order - 2] * float(shifts @ shifts) + order * rates.drift * shifts.sum()
    direct = log_moments(trials, shifts, order, max(cut, math.ceil(largest)))
    assert np.all(direct <= bound + 1e-12)


@pytest.mark.parametrize("order", [2, 4, 8, 12])
def test_rates_are_attained_up_to_the_search(order):
    """Some single shift comes within one per cent: the bound is not loose."""
    rates = moment_rates(Binomial(239), 1.0, 1e-12)
    cut = int(np.searchsorted(np.cumsum(Binomial(239).pmf), 5e-13))
    best = max(float(np.max(log_moments(239, [u], order, cut))) / u**2 for u in np.linspace(0.01, 1, 200))
    assert best <= rates.per_square[order - 2] <= 1.01 * best


@pytest.mark.parametrize(("trials", "shift", "rate"), [(100, 0.3, 0.05), (239, 0.9, 0.2), (400, 0.05, 0.5)])
def test_sampled_moments_bound_add_and_remove(trials, shift, rate):
    """E_Q[(1 - g + g r)^a] and E_Q[(1 - g + g r)^(1-a)] by direct summation over two coordinates."""
    law = Binomial(trials).pmf
    cut = 2
    what = release(1, trials, 2, batch=100, data=round(100 / rate), linf=shift, l2=shift * math.sqrt(2))
    bound, _ = _renyi._log_moments(what, 1e-12)
    moved = (1 - shift) * law + shift * np.concatenate([[0.0], law[:-1]])
    still = law
    for p, q in ((moved, still), (still, moved)):
        p2 = np.outer(p, p)[cut:-cut, cut:-cut].ravel()
        q2 = np.outer(q, q)[cut:-cut, cut:-cut].ravel()
        mixture = 1 - rate + rate * p2 / q2
        for order in (2, 3, 6, 10, 20):
            removed = math.log(float(np.sum(q2 * mixture**order)))
            added = math.log(float(np.sum(q2 * mixture ** (1 - order))))
            assert max(removed, added) <= bound[order - 2] + 1e-9


@pytest.mark.parametrize("scheme", ["poisson", "no sampling", "fixed-size without replacement"])
def test_never_below_a_shift_that_is_allowed(scheme):
    """All coordinates equal is one allowed shift; its own figure, from the other route, lies below the L2 figure."""
    dimension, batch, data = 400, 50, 50 if scheme == "no sampling" else 1000
    factor = 2 if scheme.startswith("fixed") else 1
    l2 = factor * 4.0 / batch
    what = release(1, 251, dimension, batch, data, scheme, l2=l2)
    equal = release(1, 251, dimension, batch, data, scheme, linf=l2 / math.sqrt(dimension))
    for rounds in (1, 50):
        below = Accountant().compose(equal, rounds).attained_epsilon(1e-5)
        assert below <= _renyi.epsilon(((what, rounds),), 1e-5)


def test_close_to_the_gaussian_where_the_range_is_fine():
    """8 bits, L2 clip 100 ranges, batch 512: within 3 % of the Gaussian's own Renyi figure."""
    what = release(8, 239, 26010, 512, l2=100 / 512)
    gaussian = RdpAccountant(list(range(2, 129)))
    noise = math.sqrt(239) / 2 / what.shift_l2
    gaussian.compose(dp_event.PoissonSampledDpEvent(512 / 15000, dp_event.GaussianDpEvent(noise)), 1400)
    assert _renyi.epsilon(((what, 1400),), 1e-5) == pytest.approx(gaussian.get_epsilon(1e-5), rel=0.03)


def test_a_shorter_l2_costs_less_and_l2_never_costs_more_than_linf():
    figures = [Accountant().compose(release(8, 239, 26010, 512, l2=x / 512), 600).epsilon(1e-5) for x in (10, 40, 160)]
    assert figures == sorted(figures)
    plain = Accountant().compose(release(8, 239, 26010, 512), 600).epsilon(1e-5)
    assert figures[-1] <= plain * 1.001


def test_tails_that_weigh_more_than_delta_give_infinity():
    assert _renyi.epsilon(((release(1, 12, 26010, 512, l2=0.01), 1000),), 1e-5) == math.inf
    assert _renyi.epsilon(((release(1, 0, 26010, 512, l2=0.01), 1),), 1e-5) == math.inf


def test_infinite_moments_of_large_orders_do_not_spoil_the_small_ones():
    """Shifts of some steps: orders beyond 20 are infinite, and the expansion of "add" at order 8 must not notice."""
    what = release(13, 209, 39700, 1360, linf=1 / 4.624, l2=1 / 4.624)
    assert Accountant().compose(what, 300).epsilon(1e-5) < 3.0
