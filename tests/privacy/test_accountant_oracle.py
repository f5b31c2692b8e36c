"""The accountant against full enumeration, against figures known from elsewhere, and against random data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from enumeration import hockey_stick, orders, product, value_law, worst_delta
from scipy.signal import oaconvolve

from bqsgd._src.laws import Binomial
from bqsgd._src.noise import ROUNDING_SLACK_STEPS
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy import _rounds
from bqsgd._src.privacy._message import message_pair
from bqsgd._src.privacy._rounds import poisson
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Sensitivity, Terms


def release(levels=1, trials=251, dimension=61706, batch=32, data=15000, scheme="poisson", linf=None, l2=None):
    replace = scheme.startswith("fixed")
    return Release(
        mechanism=Mechanism(levels=levels, trials=trials),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(
                linf=linf or (2 if replace else 1) / batch,
                l2=l2,
                relation="replace one" if replace else "add/remove one",
            ),
            sampling=Sampling.of_batch(scheme, batch_size=batch, dataset_size=data),
        ),
    )


def curve(pair, epsilon):
    return pair.p_only + float(np.maximum(pair.p - math.exp(epsilon) * pair.q, 0).sum())


def quiet_epsilons(losses: np.ndarray, width: float, count: int = 8) -> np.ndarray:
    """Epsilons that lie further than `width` from every loss: gridding leaves the curve untouched there."""
    losses = np.unique(losses[(losses > 0) & np.isfinite(losses)])
    gaps = np.diff(losses)
    wide = np.argsort(gaps)[::-1][: 4 * count]
    middles = [(losses[i] + losses[i + 1]) / 2 for i in wide if gaps[i] > 2 * width]
    return np.array(middles[:count])


@pytest.mark.parametrize("trials", [2, 5, 8])
@pytest.mark.parametrize("shift", [0.25, 1.0, 1.7])
@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_one_message_equals_full_enumeration(trials, shift, dimension):
    """Worst case over all orders, unsampled: equal to 1e-9 wherever the grid cannot be seen."""
    pair = message_pair(Binomial(trials), shift, dimension)
    a, b = orders(trials, shift)
    vertices = [product(*([a] * k + [b] * (dimension - k))) for k in range(dimension + 1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = np.concatenate([np.log(p / q) for p, q in vertices])
    epsilons = quiet_epsilons(losses, width=(dimension + 1) * pair.step)
    assert epsilons.size >= 1 or trials == 2
    for epsilon in epsilons:
        truth = max(hockey_stick(vertex, epsilon) for vertex in vertices)
        assert curve(pair, epsilon) == pytest.approx(truth, abs=1e-9)
    for epsilon in np.linspace(-3, 6, 37):  # and never below it, anywhere
        truth = max(hockey_stick(vertex, epsilon) for vertex in vertices)
        assert curve(pair, epsilon) >= truth - 1e-12


@pytest.mark.parametrize(("trials", "dimension", "rounds"), [(3, 1, 2), (3, 1, 3), (4, 2, 2), (2, 3, 2), (2, 2, 3)])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_rounds_equal_full_enumeration(trials, dimension, rounds, rate):
    """One order, composed over rounds, equals the listed joint law to 1e-9; all orders never fall below any choice."""
    shift = 0.4
    attained = poisson(message_pair(Binomial(trials), shift, dimension, attained=True), rate).on_grid(1e-4)
    many = attained
    for _ in range(rounds - 1):  # composition by plain convolution: independent of the library's
        p, q = oaconvolve(many.p, attained.p), oaconvolve(many.q, attained.q)
        loss = (many.first + attained.first + np.arange(p.size)) * attained.step
        p_only = many.p_only + attained.p_only - many.p_only * attained.p_only
        many = type(many)(
            step=many.step,
            first=many.first + attained.first,
            major=np.where(loss >= 0, p, q),
            p_only=p_only,
            q_only=0.0,
        )
    one = product(*[orders(trials, shift)[0]] * dimension)
    listed = product(*[((1 - rate) * one[1] + rate * one[0], one[1])] * rounds)
    with np.errstate(divide="ignore", invalid="ignore"):
        epsilons = quiet_epsilons(np.log(listed[0] / listed[1]), width=2 * rounds * dimension * 1e-4)
    assert epsilons.size
    for epsilon in epsilons:
        assert curve(many, epsilon) == pytest.approx(hockey_stick(listed, epsilon), abs=1e-9)

    scheme = "no sampling" if rate == 1 else "poisson"
    what = release(1, trials, dimension, batch=3, data=10 if rate < 1 else 3, scheme=scheme, linf=shift)
    accountant = Accountant().compose(what, rounds)
    for epsilon in np.linspace(0, 4, 9):
        proven = accountant.delta(epsilon)
        for add in (False, True):
            truth = worst_delta(trials, shift, dimension, rate, rounds, epsilon, add=add)
            assert proven >= truth - 1e-12
        # The envelope lets the data change order from outcome to outcome, which fixed choices cannot: up to a
        # tenth of delta for single coordinates, nothing to speak of for many (next test).
        assert proven <= 1.15 * worst_delta(trials, shift, dimension, rate, rounds, epsilon) + 1e-3


# The best single-order figures, computed once with an independent program; the truth lies at or above them.
SINGLE_ORDER = [
    (1, 251, "poisson", 1000, 0.3304),
    (2, 251, "poisson", 1000, 4.4694),
    (2, 251, "no sampling", 1, 9.8055),
]


@pytest.mark.parametrize(("levels", "trials", "scheme", "rounds", "figure"), SINGLE_ORDER)
def test_between_the_single_order_figure_and_three_per_cent_above(levels, trials, scheme, rounds, figure):
    accountant = Accountant().compose(release(levels, trials, scheme=scheme), rounds)
    assert figure <= accountant.epsilon(1e-5) <= 1.03 * figure
    assert accountant.attained_epsilon(1e-5) == pytest.approx(figure, rel=2e-3)


@pytest.mark.parametrize(("levels", "trials"), [(10, 4079), pytest.param(40, 65535, marks=pytest.mark.slow)])
def test_gaussian_limit(levels, trials):
    """Many trials: within 3 % of the subsampled Gaussian of equal variance, as dp-accounting computes it."""
    what = release(levels, trials)
    gaussian = PLDAccountant()
    multiplier = math.sqrt(trials) / 2 / (math.sqrt(what.terms.dimension) * what.shift)
    gaussian.compose(
        dp_event.PoissonSampledDpEvent(what.terms.sampling.rate, dp_event.GaussianDpEvent(multiplier)), 1000
    )
    assert Accountant().compose(what, 1000).epsilon(1e-5) == pytest.approx(gaussian.get_epsilon(1e-5), rel=0.03)


def test_two_thousand_random_pairs_obey_the_worst_case_claim():
    """Claim 1: no x, y with |x - y| <= Delta diverge more than the two orders do at Delta."""
    rng = np.random.default_rng(20261115)
    worst = -math.inf
    for _ in range(2000):
        trials = int(rng.integers(1, 40))
        delta = float(rng.uniform(0.01, 6.0))
        x = float(rng.uniform(-3, 3))
        y = x + float(rng.uniform(-delta, delta))
        support = range(-12, trials + 14)
        pair = value_law(trials, x, support), value_law(trials, y, support)
        a, b = orders(trials, delta)
        for epsilon in rng.uniform(-4, 4, size=5):
            worst = max(worst, hockey_stick(pair, epsilon) - max(hockey_stick(a, epsilon), hockey_stick(b, epsilon)))
    assert worst <= 1e-14


@pytest.mark.parametrize("trials", [1, 7, 64, 65, 81, 251, 4079, 30000, 65535, 1 << 18, 1 << 20])
def test_the_sampled_law_is_log_concave(trials):
    """What the proof needs of the law that is really sampled, cut and rounded: checked in exact integers."""
    shares = Binomial(trials).masses
    assert all(shares[k] ** 2 >= shares[k - 1] * shares[k + 1] for k in range(1, len(shares) - 1))
    assert shares == shares[::-1] or abs(shares[len(shares) // 2] - shares[::-1][len(shares) // 2]) < len(shares)


def test_rounding_of_the_input_is_charged():
    """The accounted shift is longer than the stated one by the encoder's rounding, so epsilon cannot be below."""
    what = release(1, 40, 1, batch=1, data=1, scheme="no sampling", linf=1e-6)
    longer = _rounds.sampled_message(what)
    plain = poisson(message_pair(Binomial(40), 1e-6, 1), 1.0)
    # Losses are proportional to so small a shift; the grid moves them by a share of less than 1e-2.
    expected = 1 + ROUNDING_SLACK_STEPS / 1e-6
    assert longer.loss.max() / plain.loss.max() == pytest.approx(expected, rel=1e-2)
    assert expected > 1.05


def test_edge_outcomes_are_the_delta_floor():
    """d coordinates each show an outcome that only one law has with probability shift 2^-m: no epsilon below that."""
    what = release(1, 10, 5, batch=4, data=4, scheme="no sampling", linf=0.25)
    accountant = Accountant().compose(what)
    edge = -math.expm1(5 * math.log1p(-(0.25 + ROUNDING_SLACK_STEPS) * math.exp(-10 * math.log(2))))
    assert accountant.epsilon(0.9 * edge) == math.inf
    assert accountant.guarantee(delta=0.1).delta_floor == pytest.approx(edge, rel=1e-3)
    assert math.isfinite(accountant.epsilon(1.1 * edge))
