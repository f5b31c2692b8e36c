"""The paper's privacy figures: values worked out by hand, and laws of the formulas."""

import math

import pytest
from experiments.paper.statements import fewest_bits, fewest_bits_as_printed, peak_probability_normal
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.paper.nominal import (
    NominalPrivacy,
    NominalSetting,
    nominal_epsilon,
    peak_probability,
    privacy_level,
    strong_composition,
    theorem_1_epsilon,
    theorem_1_epsilon_in_text,
)
from bqsgd._src.params import Mechanism

MNIST = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-4)


@pytest.mark.parametrize(("trials", "value"), [(0, 1.0), (1, 0.5), (2, 0.5), (3, 0.375), (4, 0.375), (10, 252 / 1024)])
def test_peak_probability_is_the_central_binomial_probability(trials, value):
    assert peak_probability(trials) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("trials", [251, 1003, 16279])
def test_peak_probability_matches_integer_arithmetic(trials):
    assert peak_probability(trials) == pytest.approx(math.comb(trials, trials // 2) / 2**trials, rel=1e-14)


@given(st.integers(1, 20000))
def test_remark_1_never_lies_below_lemma_1(trials):
    """So a plan that keeps Eq. 18 keeps Lemma 1 with the exact P_max too, for every m and not only m > 10."""
    assert peak_probability_normal(trials) > peak_probability(trials)
    mechanism = Mechanism(levels=3, trials=trials)
    assert nominal_epsilon(mechanism, MNIST) > nominal_epsilon(mechanism, MNIST, exact_peak=True)


def test_remark_1_is_close_for_more_than_ten_trials():
    assert all(peak_probability_normal(m) / peak_probability(m) < 1.07 for m in range(11, 400))


def test_factor_of_remark_1():
    assert (
        8 * peak_probability_normal(100) * 10
        == pytest.approx(16 / math.sqrt(2 * math.pi))
        == pytest.approx(6.383, abs=1e-3)
    )


def test_nominal_epsilon_of_one_round_by_hand():
    # 6.4 * 3000 * 2 * 32 / (15000^2 * sqrt(251) * 1e-4)
    assert nominal_epsilon(Mechanism(levels=2, trials=251), MNIST) == pytest.approx(3.447163, abs=1e-6)
    # 8 * 3000 * 2 * 32 * C(251, 125) / 2^251 / (15000^2 * 1e-4)
    exact = 8 * 3000 * 2 * 32 * (math.comb(251, 125) / 2**251) / (15000**2 * 1e-4)
    assert nominal_epsilon(Mechanism(levels=2, trials=251), MNIST, exact_peak=True) == pytest.approx(exact)


def test_no_noise_has_no_remark_1_figure_but_lemma_1_prints_one():
    with pytest.raises(InvalidParameter, match="trials must be at least 1"):
        nominal_epsilon(Mechanism(levels=1, trials=0), MNIST)
    assert nominal_epsilon(Mechanism(levels=1, trials=0), MNIST, exact_peak=True) == pytest.approx(34.13, abs=0.01)


def test_privacy_level_is_the_ratio_of_levels_to_the_root_of_trials():
    mechanism = Mechanism(levels=5, trials=245)
    assert privacy_level(nominal_epsilon(mechanism, MNIST), MNIST) == pytest.approx(5 / math.sqrt(245))


def test_fewest_bits_is_where_one_level_just_fits():
    """At epsilon of (s = 1, m = 2^8) the bound is 8 bits; Remark 2 as printed says 2."""
    epsilon = nominal_epsilon(Mechanism(levels=1, trials=256), MNIST)
    assert fewest_bits(epsilon, MNIST) == pytest.approx(8)
    assert fewest_bits_as_printed(epsilon, MNIST) == pytest.approx(2)


@given(st.integers(1, 200), st.integers(1, 60000))
def test_no_mechanism_beats_fewest_bits(levels, trials):
    mechanism = Mechanism(levels=levels, trials=trials)
    assert mechanism.bits_per_coordinate > fewest_bits(nominal_epsilon(mechanism, MNIST), MNIST) - 1e-9


def test_theorem_1_both_printed_variants():
    # sqrt(2 * 1000 * ln 1e4) = 135.72; times 1.72 = 233.4; without the 2 under the root 165.1
    assert theorem_1_epsilon(1.72, delta=1e-4, rounds=1000) == pytest.approx(233.44, abs=0.01)
    assert theorem_1_epsilon_in_text(1.72, delta=1e-4, rounds=1000) == pytest.approx(165.07, abs=0.01)


def test_strong_composition_is_lemma_2_whole():
    epsilon, delta = strong_composition(1.72, delta=1e-4, rounds=1000, delta_slack=1e-4)
    assert epsilon == pytest.approx(233.44 + 1000 * 1.72 * (math.exp(1.72) - 1), abs=0.01)
    assert epsilon - 233.44 == pytest.approx(7886, abs=2)
    assert delta == pytest.approx(0.1001)


def test_strong_composition_overflow_is_infinite_not_wrong():
    assert strong_composition(806.0, delta=1e-4, rounds=10, delta_slack=1e-4)[0] == math.inf


@given(
    st.integers(1, 50),
    st.integers(1, 5000),
    st.integers(1, 10**6),
    st.integers(1, 1000),
    st.floats(1e-12, 0.1),
)
def test_nominal_epsilon_is_monotone(levels, trials, dimension, batch, delta):
    setting = NominalSetting(dimension=dimension, batch_size=batch, dataset_size=10**4, delta=delta)
    base = nominal_epsilon(Mechanism(levels=levels, trials=trials), setting)
    assert nominal_epsilon(Mechanism(levels=levels + 1, trials=trials), setting) > base
    assert nominal_epsilon(Mechanism(levels=levels, trials=trials + 1), setting) < base
    half = NominalSetting(dimension=dimension, batch_size=batch, dataset_size=10**4, delta=delta / 2)
    assert nominal_epsilon(Mechanism(levels=levels, trials=trials), half) == pytest.approx(2 * base)


@pytest.mark.parametrize(
    "wrong",
    [{"dimension": 0}, {"batch_size": 15001}, {"dataset_size": 0}, {"delta": 0.0}, {"delta": 1.0}, {"delta": math.nan}],
)
def test_settings_are_checked(wrong):
    fields = {"dimension": 3000, "batch_size": 32, "dataset_size": 15000, "delta": 1e-4}
    with pytest.raises(InvalidParameter):
        NominalSetting(**{**fields, **wrong})


def test_all_figures_together_carry_the_caveat():
    figures = NominalPrivacy.of(Mechanism(levels=2, trials=251), MNIST, rounds=1000).to_dict()
    assert figures["epsilon_per_round"] == pytest.approx(3.447, abs=1e-3)
    assert figures["epsilon_total"] == pytest.approx(467.86, abs=0.01)
    assert figures["epsilon_total_in_text"] == pytest.approx(467.86 / math.sqrt(2), abs=0.01)
    assert figures["delta_total"] == pytest.approx(0.1)
    assert figures["strong_delta"] == pytest.approx(0.1001)
    assert figures["caveat"] == "as published; not a guarantee"
