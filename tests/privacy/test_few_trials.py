"""Few trials under an L2 bound (step 8 of Claim 10), attacked: chosen and random data, enumerated, at every height."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from enumeration import hockey_stick, orders, product, subsampled, value_law
from test_accountant_shapes import by_shifts
from test_shapes import curve

from bqsgd._src.errors import AccountingError
from bqsgd._src.laws import Binomial
from bqsgd._src.privacy import _shapes
from bqsgd._src.privacy._rounds import poisson
from bqsgd._src.privacy._shapes import FEW_TRIALS, shaped_pair
from bqsgd._src.privacy.accountant import METHOD_L2, Accountant

RATES = (1e-6, 1e-3, 0.3, 0.97, 1 - 1e-9)


def drawn_setting(rng):
    """(trials, dimension, largest shift, norm): mostly shifts of less than a step, some of several."""
    dimension = int(rng.integers(1, 4))
    trials = int(rng.integers(8, (FEW_TRIALS, 40, 16)[dimension - 1]))
    length = math.exp(rng.uniform(math.log(0.03), math.log(2.5)))
    share = 1.0 if rng.random() < 0.5 else rng.uniform(0.6, 1.0)
    return trials, dimension, min(length, max(length * share, length / math.sqrt(dimension))), length


def drawn_shifts(rng, dimension, largest, length):
    """A shift vector within the bounds: all alike, one large and the others small, or at random; often full."""
    kind = rng.integers(3)
    shift = np.ones(dimension) if kind == 0 else np.abs(rng.normal(size=dimension)) + 1e-9
    if kind == 1:
        shift = np.full(dimension, rng.uniform(0, 0.3))
        shift[0] = 1.0
    shift *= min(length / np.linalg.norm(shift), largest / shift.max())
    return shift * rng.choice([1.0, 1.0, rng.uniform()])


def compared(seed, settings, data):
    """Draw settings and data; assert that no divergence, sampled or not, exceeds the proven one. The comparisons."""
    rng, done = np.random.default_rng(seed), 0
    for _ in range(settings):
        trials, dimension, largest, length = drawn_setting(rng)
        try:
            pair = shaped_pair(Binomial(trials), largest, length, dimension)
        except AccountingError:
            continue  # nothing is claimed
        rate = float(rng.choice(RATES))
        sampled = poisson(pair, rate)
        mu = length / math.sqrt(trials / 4)
        support = range(-1, trials + math.ceil(largest) + 3)
        for _ in range(data):
            start = rng.choice([0.0, rng.uniform()], size=dimension)
            shift = drawn_shifts(rng, dimension, largest, length)
            laws = [
                (value_law(trials, a + u, support), value_law(trials, a, support))
                for a, u in zip(start, shift, strict=True)
            ]
            joint = product(*(law if rng.random() < 0.5 else law[::-1] for law in laws))
            for log_z in mu * np.concatenate([[0.0], np.exp(rng.uniform(-3, 3, 12))]):
                assert hockey_stick(joint, log_z) <= curve(pair, np.array([log_z]))[0] + 1e-13
                drawn = math.log1p(rate * math.expm1(log_z))
                proven = sampled.p_only + np.maximum(sampled.p - math.exp(drawn) * sampled.q, 0).sum()
                assert hockey_stick(subsampled(joint, rate), drawn) <= proven + 1e-13
                done += 2
    return done


def test_no_data_exceed_the_pair_of_few_trials():
    assert compared(1, settings=3, data=12) >= 600


@pytest.mark.slow
def test_no_data_exceed_the_pair_of_few_trials_in_ten_thousand_comparisons():
    assert compared(2, settings=24, data=24) >= 10_000


@pytest.mark.parametrize(
    ("rounds", "delta"),  # in 10,000 rounds at this rate the data attain no epsilon at delta 1e-3
    [(1, 1e-3), (30, 1e-3), *(pytest.param(n, 1e-7, marks=pytest.mark.slow) for n in (1, 30, 10_000))],
)
def test_rounds_of_few_trials_stay_above_what_google_accounts_for_the_data(rounds, delta):
    """One coordinate that takes the whole norm, composed by dp-accounting with every loss rounded down."""
    trials, length, rate = 30, 0.2, min(0.9, 1 / rounds)
    accountant = Accountant().compose(by_shifts(trials, length, length, rate, dimension=40), rounds)
    guarantee = accountant.guarantee(delta=delta)
    assert guarantee.method == METHOD_L2
    p, q = subsampled(orders(trials, length)[0], rate)
    losses = privacy_loss_distribution.from_two_probability_mass_functions(
        {k: math.log(x) for k, x in enumerate(p) if x > 0},
        {k: math.log(x) for k, x in enumerate(q) if x > 0},
        pessimistic_estimate=False,
        value_discretization_interval=1e-4 * rate / rounds**0.5,
    )
    assert 0 < losses.self_compose(rounds).get_epsilon_for_delta(delta) <= guarantee.epsilon


def test_smallest_deltas_are_refused_or_above_the_chance_of_an_outcome_that_only_one_neighbour_has():
    accountant = Accountant().compose(by_shifts(24, 0.5, 0.5, 0.9, dimension=3), 5)
    for delta in (1e-12, 1e-9, 1e-7):
        lone = 1 - (1 - 0.9 * 0.5 * 2.0**-24) ** 5  # the top outcome of a coordinate moved by 0.5
        assert delta > lone or accountant.epsilon(delta) == math.inf
    assert accountant.epsilon(1e-4) < math.inf


def test_blocks_bring_the_figure_near_the_attained_one(monkeypatch):
    """Without its finer lines and its blocks this setting was 1.52 times what data attain."""
    accountant = Accountant().compose(by_shifts(32, 0.1505, 0.1505, 0.434, dimension=214), 16)
    attained = accountant.attained_epsilon(1.1e-5)
    assert attained <= accountant.epsilon(1.1e-5) <= 1.1 * attained
    with_blocks = shaped_pair.__wrapped__(Binomial(32), 0.1505, 0.1505, 214)
    monkeypatch.setattr(_shapes, "NEAR_LINES", -1)  # no line is near: no blocks
    without = shaped_pair.__wrapped__(Binomial(32), 0.1505, 0.1505, 214)
    log_z = np.linspace(0.0, 12.0, 25) * 0.1505 / math.sqrt(8)
    assert np.all(curve(with_blocks, log_z) <= curve(without, log_z) + 1e-15)
    assert np.any(curve(with_blocks, log_z) < 0.9 * curve(without, log_z))
