"""The arithmetic behind the errata in docs/paper.md, one test an entry."""

import math

import numpy as np
import pytest
from experiments.paper.published import FASHION_MNIST, MNIST, ROWS
from experiments.paper.statements import convergence_bound, fewest_bits, fewest_bits_as_printed, peak_probability_normal

from bqsgd._src.mechanism.coarsening import worst_squared_error
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import (
    NominalSetting,
    closed_form,
    nearest_mechanism,
    nominal_epsilon,
    strong_composition,
    theorem_1_epsilon,
    theorem_1_epsilon_in_text,
)
from bqsgd._src.paper.tradeoffs import Problem
from bqsgd._src.params import Mechanism


def row(dataset, bits, epsilon):
    return next(r for r in ROWS if (r.setting.dataset, r.bits, r.epsilon) == (dataset, bits, epsilon))


def epsilon_of(levels, trials, setting=MNIST):
    return nominal_epsilon(Mechanism(levels=levels, trials=trials), setting.nominal)


def test_e01_table_2_prints_4_247_where_5_245_is_meant():
    printed = row("MNIST", 8, 8.72)
    assert closed_form(printed.budget, MNIST.nominal) == (
        pytest.approx(4.998, abs=1e-3),
        pytest.approx(245.0, abs=0.01),
    )
    assert epsilon_of(4, 247) == pytest.approx(6.950, abs=1e-3)
    assert epsilon_of(5, 245) == pytest.approx(8.723, abs=1e-3)


def test_e02_table_3_swaps_digits_of_1015():
    printed = row("MNIST", 10, 3.44)
    assert printed.printed.code_count == 1059 > 2**10
    assert closed_form(printed.budget, MNIST.nominal)[1] == pytest.approx(1014.97, abs=0.01)
    assert nearest_mechanism(printed.budget, MNIST.nominal) == Mechanism(levels=4, trials=1015)


def test_e03_table_3_prints_6_levels_where_8_are_meant():
    printed = row("MNIST", 12, 3.44)
    assert closed_form(printed.budget, MNIST.nominal)[0] == pytest.approx(8.046, abs=1e-3)
    assert epsilon_of(6, 4079) == pytest.approx(2.565, abs=1e-3)
    assert epsilon_of(8, 4079) == pytest.approx(3.420, abs=1e-3)


def test_e04_rounding_is_not_one_rule_and_breaks_the_budget():
    assert epsilon_of(1, 251) == pytest.approx(1.7236, abs=1e-4)
    assert epsilon_of(1, 253) == pytest.approx(1.7168, abs=1e-4)
    widest = row("Fashion-MNIST", 14, 112.42)
    assert closed_form(widest.budget, FASHION_MNIST.nominal)[0] == pytest.approx(52.53, abs=0.01)
    above = [r for r in ROWS if nominal_epsilon(r.printed, r.setting.nominal) > r.epsilon]
    assert {(r.printed.levels, r.printed.trials) for r in above} == {(1, 251), (2, 251), (10, 1003), (13, 997)}


def test_e05_remark_2_has_the_inverse_factor():
    setting = MNIST.nominal
    assert fewest_bits(1.72, setting) == pytest.approx(7.98, abs=0.01)
    assert fewest_bits_as_printed(1.72, setting) == pytest.approx(1.99, abs=0.01)
    # 2 bits hold (1, 1) at most, which is nowhere near epsilon 1.72
    assert epsilon_of(1, 1) == pytest.approx(27.3, abs=0.1)


def test_e06_the_factor_6_4_is_rounded_up():
    assert 8 * peak_probability_normal(1) == pytest.approx(6.3831, abs=1e-4)


def test_e07_the_bit_constraint_is_printed_strict_and_not_strict():
    full = [r for r in ROWS if r.corrected.code_count == 2**r.bits]
    assert len(full) == 9  # all but (1, 251): only "2s + m + 1 <= 2^b" allows them


def test_e08_theorem_1_and_its_text_differ_by_the_root_of_two():
    printed = theorem_1_epsilon(1.72, delta=1e-4, rounds=1000)
    assert printed == pytest.approx(233.4, abs=0.1)
    assert theorem_1_epsilon_in_text(1.72, delta=1e-4, rounds=1000) == pytest.approx(printed / math.sqrt(2))


def test_e09_theorem_1_drops_the_larger_term_of_lemma_2():
    whole, delta = strong_composition(1.72, delta=1e-4, rounds=1000, delta_slack=1e-4)
    assert whole - theorem_1_epsilon(1.72, delta=1e-4, rounds=1000) == pytest.approx(7886, abs=1)
    assert delta == pytest.approx(0.1001)


def test_e10_lemma_1_needs_a_batch_above_2s():
    broken = {r.printed.levels for r in ROWS if not r.setting.batch_size > 2 * r.printed.levels}
    assert broken == {16, 26, 52}


def test_e11_amplification_is_used_far_outside_its_range():
    rate = 32 / 15000
    before = 1.72 / rate
    assert before == pytest.approx(806.25)
    amplified = before + math.log(rate + (1 - rate) * math.exp(-before))  # log(1 + q (e^eps' - 1)) without overflow
    assert amplified == pytest.approx(800.1, abs=0.05)


def test_e12_lemma_1_gives_a_figure_without_any_noise():
    assert nominal_epsilon(Mechanism(levels=1, trials=0), MNIST.nominal, exact_peak=True) == pytest.approx(
        34.1, abs=0.05
    )


def test_e13_the_real_dimension_multiplies_the_figure_by_twenty():
    real = NominalSetting(dimension=61706, batch_size=32, dataset_size=15000, delta=1e-4)
    assert nominal_epsilon(Mechanism(levels=1, trials=251), real) == pytest.approx(35.45, abs=0.01)


def test_e14_epsilon_times_delta_is_constant():
    small = NominalSetting(dimension=3000, batch_size=32, dataset_size=15000, delta=1e-5)
    mechanism = Mechanism(levels=1, trials=251)
    assert nominal_epsilon(mechanism, small) == pytest.approx(10 * nominal_epsilon(mechanism, MNIST.nominal))


def test_e15_total_deltas_are_far_above_one_over_the_data_set():
    assert MNIST.rounds * MNIST.delta == pytest.approx(0.1)
    assert FASHION_MNIST.rounds * FASHION_MNIST.delta == pytest.approx(0.3)
    assert MNIST.rounds * MNIST.delta * MNIST.dataset_size == pytest.approx(1500)


def test_e16_v_is_an_average_over_a_prior_not_a_bound():
    for r in ROWS:
        gap = worst_squared_error(r.printed) - noise_variance(r.printed)
        assert gap == pytest.approx((1 / 4 - 1 / 6) / r.printed.levels**2)


def test_e17_the_sensitivity_is_that_of_replacing_a_sample():
    clip, batch = 1.0, 4
    rest = np.full(batch - 1, clip)
    mean = (rest.sum() + clip) / batch
    assert mean - (rest.sum() - clip) / batch == pytest.approx(2 * clip / batch)  # replaced
    assert mean - rest.sum() / batch == pytest.approx(clip / batch)  # removed, public batch size


def test_e18_clipping_is_not_unbiased():
    clip = 1.0
    gradients = np.array([3 * clip, -clip])
    clipped = gradients / np.maximum(1, np.abs(gradients) / clip)
    assert (gradients.mean(), clipped.mean()) == (1.0, 0.0)


def test_e19_the_factor_n_hides_the_gain_from_more_clients():
    problem = Problem(
        setting=NominalSetting(dimension=100, batch_size=10, dataset_size=1000, delta=1e-4),
        dimension=100,
        clip=1.0,
        rounds=10,
        learning_rate=0.1,
        initial_gap=1.0,
        gradient_variance=1.0,
    )
    shares = [(1 / 8, Mechanism(levels=1, trials=10))] * 8
    eight = convergence_bound(problem, shares).quantisation_error
    variance = 100 * sum(weight**2 * noise_variance(mechanism) for weight, mechanism in shares)
    assert eight == pytest.approx(8 * variance)
