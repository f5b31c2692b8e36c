"""All ten rows of Tables 2 and 3 through the planner (rounding nearest) and the accountant of the paper."""

import pytest
from experiments.paper.published import FASHION_MNIST, MNIST, ROWS

from bqsgd._src.paper.nominal import NominalPrivacy, nearest_mechanism, nominal_epsilon
from bqsgd._src.params import Mechanism

MISPRINTED = {(8, 8.72), (10, 3.44), (12, 3.44)}


def row_name(row):
    return f"{row.setting.dataset}-{row.bits}-{row.epsilon}"


def test_ten_rows_twelve_cells():
    assert len(ROWS) == 10
    assert sum(2 in row.tables for row in ROWS) == sum(3 in row.tables for row in ROWS) == 6


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_the_printed_row_stands_unless_flagged(row):
    """A row stands when its codes fit and its epsilon is the printed one, or (s rounded down) up to 1.1 % below it."""
    epsilon = nominal_epsilon(row.printed, row.setting.nominal)
    fits = row.printed.code_count <= 2**row.bits
    agrees = -0.011 < epsilon / row.epsilon - 1 < 0.003
    assert (fits and agrees) == (not row.misprint)
    assert row.misprint == (row.setting is MNIST and (row.bits, row.epsilon) in MISPRINTED)
    assert row.misprint == (row.printed != row.corrected)


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_the_corrected_row_always_stands(row):
    assert row.corrected.code_count <= 2**row.bits
    assert nominal_epsilon(row.corrected, row.setting.nominal) == pytest.approx(row.epsilon, rel=0.011)


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_nearest_gives_the_corrected_row_or_the_row_says_why_not(row):
    planned = nearest_mechanism(row.budget, row.setting.nominal)
    if planned == row.corrected:
        assert row.misprint == (row.note is not None)
    else:
        assert f"({planned.levels}, {planned.trials})" in row.note


def test_the_two_rows_that_are_rounded_otherwise():
    odd = {row_name(row) for row in ROWS if nearest_mechanism(row.budget, row.setting.nominal) != row.corrected}
    assert odd == {"MNIST-8-1.72", "Fashion-MNIST-14-112.42"}


@pytest.mark.parametrize(
    ("levels", "trials", "epsilon"),
    [(1, 251, 1.724), (2, 251, 3.447), (4, 247, 6.950), (5, 245, 8.723), (6, 4079, 2.565)],
)
def test_nominal_epsilons_of_the_mnist_rows(levels, trials, epsilon):
    assert nominal_epsilon(Mechanism(levels=levels, trials=trials), MNIST.nominal) == pytest.approx(epsilon, abs=5e-4)


def test_table_1():
    assert (MNIST.nominal_dimension, FASHION_MNIST.nominal_dimension) == (3000, 30000)
    assert (MNIST.clip, FASHION_MNIST.clip) == (0.0015, 0.003)
    assert (MNIST.rounds, FASHION_MNIST.rounds) == (1000, 3000)
    shared = [(s.learning_rate, s.batch_size, s.clients, s.dataset_size) for s in (MNIST, FASHION_MNIST)]
    assert shared == [(0.006, 32, 4, 15000)] * 2


def test_total_deltas_of_the_published_runs():
    totals = {
        setting.dataset: NominalPrivacy.of(row.corrected, setting.nominal, rounds=setting.rounds).delta_total
        for row in ROWS
        for setting in [row.setting]
    }
    assert totals == {"MNIST": pytest.approx(0.1), "Fashion-MNIST": pytest.approx(0.3)}
