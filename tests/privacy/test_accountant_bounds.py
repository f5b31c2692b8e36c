"""Any legal input gets a figure, infinity or a documented refusal; sampling never costs; small figures stay small."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_accountant_oracle import release

from bqsgd._src.errors import AccountingError
from bqsgd._src.params import MAX_LEVELS, MAX_TRIALS, Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms, Trust


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread evenly over the powers of ten."""
    return st.floats(math.log10(low), math.log10(high)).map(lambda x: min(max(10.0**x, low), high))


RATES = st.one_of(
    magnitudes(1e-9, 1.0),
    magnitudes(1e-16, 4e-3).map(lambda gap: 1.0 - gap),
    st.sampled_from([0.5, 0.996, 0.998, math.nextafter(1.0, 0.0), 1.0]),
)


@st.composite
def releases(draw: st.DrawFn, most_trials: int, most_coordinates: int) -> Release:
    """Anything `Release` accepts, with the few trials and the rates near 1 that once broke the accountant."""
    scheme = draw(st.sampled_from(list(Scheme)))
    relation = {Scheme.POISSON: Relation.ADD_REMOVE, Scheme.FIXED_SIZE: Relation.REPLACE}.get(scheme)
    levels = draw(st.one_of(st.integers(1, 20), st.integers(1, MAX_LEVELS)))
    return Release(
        mechanism=Mechanism(
            levels=levels,
            trials=draw(st.one_of(st.integers(0, 5), st.integers(60, 300), st.integers(0, most_trials))),
        ),
        terms=Terms(
            dimension=draw(st.one_of(st.integers(1, 40), magnitudes(1, most_coordinates).map(int))),
            sensitivity=Sensitivity(
                linf=draw(st.one_of(magnitudes(1e-4, 10.0).map(lambda x: x / levels), magnitudes(1e-300, 1e300))),
                l2=draw(
                    st.one_of(st.none(), magnitudes(1e-4, 100.0).map(lambda x: x / levels), magnitudes(1e-300, 1e300))
                ),
                relation=relation or draw(st.sampled_from(list(Relation))),
            ),
            sampling=Sampling(scheme=scheme, rate=1.0 if scheme is Scheme.NONE else draw(RATES)),
            trust=draw(st.sampled_from(list(Trust))),
        ),
    )


DELTAS = st.one_of(magnitudes(1e-300, 0.999), magnitudes(1e-10, 1e-3))
ROUNDS = st.one_of(st.integers(1, 1000), magnitudes(1, 2.0**40).map(int))


def asked_everything(what: Release, rounds: int, delta: float, epsilon: float) -> None:
    """Every query answers with a number that is one, or refuses with AccountingError."""
    accountant = Accountant().compose(what, rounds)
    for query in (
        lambda: accountant.epsilon(delta),
        lambda: accountant.attained_epsilon(delta),
        lambda: accountant.delta(epsilon),
        lambda: accountant.guarantee(delta=delta).epsilon,
    ):
        try:
            figure = query()
        except AccountingError:
            continue
        assert figure >= 0  # false for NaN


@given(releases(most_trials=1000, most_coordinates=300), ROUNDS, DELTAS, magnitudes(1e-6, 1e3))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_release_gets_a_figure_or_a_documented_refusal(what, rounds, delta, epsilon):
    asked_everything(what, rounds, delta, epsilon)


@pytest.mark.slow
@given(releases(most_trials=MAX_TRIALS, most_coordinates=10**9), ROUNDS, DELTAS, magnitudes(1e-6, 1e308))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_release_whatever_its_size(what, rounds, delta, epsilon):
    asked_everything(what, rounds, delta, epsilon)


@pytest.mark.parametrize("rate", [0.996, 0.998, 1 - 1e-9, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("scheme", ["poisson", "fixed-size without replacement"])
def test_l2_at_rates_near_one(rate, scheme):
    """Once an OverflowError. The figure is that without sampling, or a little less."""
    relation = Relation.REPLACE if scheme.startswith("fixed") else Relation.ADD_REMOVE
    terms = Terms(
        dimension=39700,
        sensitivity=Sensitivity(linf=0.15625, l2=0.15625, relation=relation),
        sampling=Sampling(scheme=scheme, rate=rate),
    )
    what = Release(mechanism=Mechanism(levels=9, trials=215), terms=terms)
    whole = replace(what, terms=replace(what.terms, sampling=Sampling(scheme="no sampling")))
    figure, without = (Accountant().compose(x, 10).epsilon(1e-5) for x in (what, whole))
    assert 0.9 * without < figure <= without


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_few_trials_with_fixed_size_batches_are_infinite_or_refused(trials):
    what = release(1, trials, 100, 100, 1000, "fixed-size without replacement", l2=1e-4)
    assert Accountant().compose(what, 10).epsilon(1e-5) == math.inf


@given(
    trials=st.integers(80, 2000),
    levels=st.integers(1, 10),
    dimension=st.integers(1, 3000),
    shift=magnitudes(0.01, 2.0),
    length=st.one_of(st.none(), magnitudes(0.1, 5.0)),
    rate=st.one_of(st.floats(0.01, 1.0), RATES),
    rounds=st.integers(1, 200),
    fixed=st.booleans(),
)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_sampled_figure_is_never_above_the_unsampled_one(
    trials, levels, dimension, shift, length, rate, rounds, fixed
):
    """Under either relation: a record that takes part at times reveals no more than one that always does."""
    what = Release(
        mechanism=Mechanism(levels=levels, trials=trials),
        terms=Terms(
            dimension=dimension,
            sensitivity=Sensitivity(
                linf=shift / levels,
                l2=None if length is None else length / levels,
                relation=Relation.REPLACE if fixed else Relation.ADD_REMOVE,
            ),
            sampling=Sampling(scheme=Scheme.FIXED_SIZE if fixed else Scheme.POISSON, rate=rate),
        ),
    )
    whole = replace(what, terms=replace(what.terms, sampling=Sampling(scheme=Scheme.NONE)))
    figure, without = (Accountant().compose(x, rounds).epsilon(1e-5) for x in (what, whole))
    assert figure <= without


def test_the_figure_that_sampling_once_made_larger():
    """A rate of 0.9: 381.8 where the same without sampling is 13.21."""
    what = release(9, 215, 39700, 128, 142, linf=0.15625, l2=0.15625)
    whole = replace(what, terms=replace(what.terms, sampling=Sampling(scheme="no sampling")))
    assert Accountant().compose(what, 150).epsilon(1e-5) <= Accountant().compose(whole, 150).epsilon(1e-5) < 13.3


@pytest.mark.parametrize("scheme", ["poisson", "no sampling", "fixed-size without replacement"])
def test_small_figures_have_no_floor(scheme):
    """Little is revealed, so little is reported; the largest order once kept epsilon above 0.06 whatever was sent."""
    batch, data = (1000, 1000) if scheme == "no sampling" else (10, 10_000)
    figures = []
    for length in (0.003, 0.03, 0.3):
        what = release(1, 10_000, 1000, batch, data, scheme, linf=length, l2=length)
        figures.append(Accountant().compose(what, 100).epsilon(1e-6))
    assert figures == sorted(figures)
    assert figures[0] < 0.004 if scheme == "no sampling" else figures[0] < 3e-4


@pytest.mark.slow
def test_a_hundred_million_coordinates_allow_a_small_delta():
    """What comparing curves costs no longer grows to 1e-9 with d."""
    what = release(1, 4079, 10**8, batch=4096, data=10**6)
    guarantee = Accountant().compose(what, 1).guarantee(delta=1e-10)
    assert guarantee.delta_floor < 2e-11
    assert math.isfinite(guarantee.epsilon)
