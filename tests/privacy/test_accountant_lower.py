"""No figure below what some data attain: loss distributions composed by plain convolution, every loss rounded down."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from enumeration import hockey_stick, product, subsampled, value_law
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from scipy.signal import oaconvolve

from bqsgd._src.laws import Binomial, exact, mirror_distance
from bqsgd._src.noise import CUT_LAW
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy._rounds import sampled_message
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms

STEP = 2e-4


class Losses:
    """Losses on the grid STEP, each rounded down, with their mass under P and under Q and P's mass at infinity."""

    def __init__(self, first: int, p: np.ndarray, q: np.ndarray, infinite: float) -> None:
        self.first, self.p, self.q, self.infinite = first, p, q, infinite

    @classmethod
    def of(cls, loss: np.ndarray, p: np.ndarray, q: np.ndarray, infinite: float) -> Losses:
        index = np.floor(loss / STEP).astype(int)
        first = index.min()
        columns = [np.bincount(index - first, weights=mass) for mass in (p, q)]
        return cls(first, *columns, infinite)

    @property
    def loss(self) -> np.ndarray:
        return (self.first + np.arange(self.p.size)) * STEP

    def times(self, count: int) -> Losses:
        one, result = self, self
        for _ in range(count - 1):
            p, q = (np.maximum(oaconvolve(a, b), 0) for a, b in ((result.p, one.p), (result.q, one.q)))
            infinite = result.infinite + one.infinite - result.infinite * one.infinite
            result = Losses(result.first + one.first, p, q, infinite)
        return result

    def epsilon(self, delta: float) -> float:
        """The least epsilon with sum p (1 - e^(epsilon - loss))_+ <= delta: a lower bound on the truth."""
        low, high = 0.0, 200.0
        for _ in range(60):
            middle = (low + high) / 2
            above = self.loss > middle
            height = self.infinite + float(self.p[above] @ -np.expm1(middle - self.loss[above]))
            low, high = (middle, high) if height > delta else (low, middle)
        return low


def sampled(loss: np.ndarray, rate: float) -> np.ndarray:
    """log(1 - rate + rate e^loss), however far below 0 the loss."""
    with np.errstate(divide="ignore"):
        return np.logaddexp(np.log1p(-rate), np.log(rate) + loss)


def attained(trials: int, shift: float, count: int, rate: float, rounds: int, delta: float) -> float:
    """The larger of remove and add for `count` coordinates moved by `shift`, all the same way."""
    support = range(trials + math.ceil(shift) + 2)
    moved, still = value_law(trials, shift, support), value_law(trials, 0.0, support)
    figures = []
    for p, q in ((moved, still), (still, moved)):
        both = (p > 0) & (q > 0)
        message = Losses.of(np.log(p[both] / q[both]), p[both], q[both], float(p[q == 0].sum())).times(count)
        mixture = (1 - rate) * message.q + rate * message.p
        removed = Losses.of(sampled(message.loss, rate), mixture, message.q, rate * message.infinite)
        # The true loss of "add" is minus that of "remove", which lies up to `count` steps above the rounded one.
        added = Losses.of(-sampled(message.loss + count * STEP, rate), message.q, mixture, 0.0)
        figures += [x.times(rounds).epsilon(delta) for x in (removed, added)]
    return max(figures)


def proven(
    trials: int,
    shift: float,
    count: int,
    rate: float,
    rounds: int,
    delta: float,
    *,
    l2: bool,
    dimension: int,
    fixed: bool,
) -> float:
    what = Release(
        mechanism=Mechanism(levels=1, trials=trials),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(
                linf=shift,
                l2=shift * math.sqrt(count) if l2 else None,
                relation=Relation.REPLACE if fixed else Relation.ADD_REMOVE,
            ),
            sampling=Sampling(scheme=Scheme.FIXED_SIZE if fixed else Scheme.POISSON, rate=rate),
        ),
    )
    return Accountant().compose(what, rounds).epsilon(delta)


SETTINGS = {
    "trials": st.integers(80, 400),
    "shift": st.floats(0.05, 2.5),
    "count": st.integers(1, 8),
    "rate": st.one_of(st.floats(0.01, 1.0), st.floats(0.9, 1.0)),
    "rounds": st.integers(1, 6),
    "delta": st.floats(-7, -2).map(lambda x: 10.0**x),
    "l2": st.booleans(),
    "more": st.integers(0, 200),
    "fixed": st.booleans(),
}


WHOLE = {"trials": 400, "shift": 2.0, "count": 3, "rate": 1.0, "rounds": 2, "delta": 1e-4} | {
    "l2": True,
    "more": 5,
    "fixed": False,
}
"""No sampling, and losses so far below 0 that e^loss vanishes beside 1."""


def check(trials, shift, count, rate, rounds, delta, l2, more, fixed):
    dimension = count + (more if l2 else 0)
    figure = proven(trials, shift, count, rate, rounds, delta, l2=l2, dimension=dimension, fixed=fixed)
    assert attained(trials, shift, count, rate, rounds, delta) <= figure + 1e-9


@given(**SETTINGS)
@example(**WHOLE)
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_figure_is_below_what_data_attain(**setting):
    check(**setting)


@pytest.mark.slow
@given(**SETTINGS)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_figure_is_below_what_data_attain_in_many_settings(**setting):
    check(**setting)


@given(
    trials=st.integers(2, 5),
    moves=st.lists(st.tuples(st.floats(-2, 2), st.floats(-1.2, 1.2)), min_size=1, max_size=3),
    rate=st.floats(0.05, 1.0),
    epsilon=st.floats(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_whole_messages_of_any_data_stay_below_the_curve(trials, moves, rate, epsilon):
    """Claim 2 on the product: any positions, any moves of up to the longest one, listed outcome by outcome."""
    longest = max(0.05, max(abs(move) for _, move in moves))
    support = range(-6, trials + 8)
    pair = product(*((value_law(trials, x + move, support), value_law(trials, x, support)) for x, move in moves))
    what = Release(
        mechanism=Mechanism(levels=1, trials=trials),
        terms=Terms(
            dimension=len(moves),
            sensitivity=Sensitivity(linf=longest),
            sampling=Sampling(scheme=Scheme.POISSON, rate=rate),
        ),
    )
    remove = sampled_message(what).on_grid(1e-3)
    add = remove.reversed()
    for bound, (p, q) in ((remove, subsampled(pair, rate)), (add, subsampled(pair, rate)[::-1])):
        curve = bound.p_only + float(np.maximum(bound.p - math.exp(epsilon) * bound.q, 0).sum())
        assert hockey_stick((p, q), epsilon) <= curve + 1e-12


@pytest.mark.parametrize("trials", [0, 1, 64, 65, 69, 70, 71, 72, 251, 1001, 4043, 65535])
def test_the_sampled_law_is_symmetric_but_for_one_middle_outcome(trials):
    """Even m and m < 71: symmetric to the last unit. Other odd m: the remainder sits on the lower middle outcome."""
    shares = Binomial(trials).masses
    apart = [k for k, (one, other) in enumerate(zip(shares, reversed(shares), strict=True)) if one != other]
    middle = [len(shares) // 2 - 1, len(shares) // 2]
    assert apart == (middle if trials >= 71 and trials % 2 else [])
    worst = max((abs(shares[k] - shares[~k]) / min(shares[k], shares[~k]) for k in apart), default=0.0)
    assert mirror_distance(Binomial(trials)) == worst < 2.0**-81


@pytest.mark.parametrize(("trials", "clients"), [(80, 2), (101, 3), (65, 4)])
def test_sums_of_cut_laws_are_within_their_charge(trials, clients):
    """The law of a sum of cut noises against the cut law of all trials, in exact fractions."""
    first, shares = exact(Binomial(trials))
    total, low = [1], 0
    for _ in range(clients):
        grown = [0] * (len(total) + len(shares) - 1)
        for i, a in enumerate(total):
            for j, b in enumerate(shares):
                grown[i + j] += a * b
        total, low = grown, low + first
    every, accounted = exact(Binomial(trials * clients))
    summed = {low + k: Fraction(x, 2 ** (104 * clients)) for k, x in enumerate(total)}
    cut = {every + k: Fraction(x, 2**104) for k, x in enumerate(accounted)}
    apart = sum(abs(summed.get(k, Fraction(0)) - cut.get(k, Fraction(0))) for k in summed.keys() | cut.keys()) / 2
    assert 0 < apart <= (clients + 1) * Fraction(CUT_LAW)
