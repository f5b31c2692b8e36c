"""Noise for counts, histograms and sums: within the budget, the least there is, and next to cpSGD's bound."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.laws import Binomial
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.planner.compare import LAWS
from bqsgd._src.planner.queries import Query, cpsgd_trials, plan_query, query_terms
from bqsgd._src.privacy.published import IntegerNorms
from bqsgd._src.release import Relation, Trust

BUDGET = PrivacyBudget(epsilon=1.0, delta=1e-6)


def exact_delta(trials: int, shift: int, epsilon: float) -> float:
    """The delta of Bin(trials, 1/2) beside itself moved by a whole number, every outcome listed."""
    law = Binomial(trials).pmf
    moved, still = np.concatenate([np.zeros(shift), law]), np.concatenate([law, np.zeros(shift)])
    return float(np.maximum(moved - math.exp(epsilon) * still, 0).sum())


def test_a_count_takes_eighty_coins_where_cpsgds_bound_asks_for_fifteen_hundred():
    planned = plan_query("count", BUDGET)
    assert [row.name for row in planned.laws] == list(LAWS)
    rows = {row.name: row for row in planned.laws}
    assert rows["binomial"].law == Binomial(80)
    assert exact_delta(80, 1, 1.0) <= 1e-6 < exact_delta(79, 1, 1.0)
    assert planned.cpsgd_trials == 1483
    assert rows["geometric"].error < 0.35 * rows["binomial"].error
    assert all(row.guarantee.epsilon <= 1 for row in planned.laws)
    assert all(row.guarantee.trust is Trust.TRAINER for row in planned.laws)


def test_what_a_record_moves():
    assert query_terms(Query.HISTOGRAM).dimension == 1
    replaced = query_terms(Query.HISTOGRAM, relation=Relation.REPLACE)
    assert (replaced.dimension, replaced.sensitivity.linf) == (2, 1.0)
    summed = query_terms(Query.SUM, levels=64, relation=Relation.REPLACE)
    assert (summed.dimension, summed.sensitivity.linf) == (1, 128.0)


def test_the_other_bins_of_a_histogram_tell_nothing():
    """Three bins, every outcome: neighbours that differ in one bin are as far apart as two counts are."""
    law, epsilon = Binomial(12).pmf, 0.5
    still, moved = np.concatenate([law, [0.0]]), np.concatenate([[0.0], law])
    others = np.outer(still, still).ravel()
    joint = float(np.maximum(np.outer(moved, others) - math.exp(epsilon) * np.outer(still, others), 0).sum())
    assert joint == pytest.approx(exact_delta(12, 1, epsilon), abs=1e-14)


@pytest.mark.slow
def test_more_releases_need_more_noise_and_bins_only_cost_cpsgd():
    once, often = (plan_query("count", BUDGET, times=times).laws[0] for times in (1, 8))
    assert 6 < often.law.variance / once.law.variance < 9
    assert cpsgd_trials(BUDGET, IntegerNorms(1, 1, 1, 1000), times=1) > 1483
    assert cpsgd_trials(PrivacyBudget(epsilon=1e-4, delta=1e-9), IntegerNorms(1, 1, 1), times=1) is None


def test_the_command_answers_and_refuses_what_does_not_belong(capsys):
    from bqsgd._src.cli import app

    query = ["plan", "--query", "count", "--epsilon", "1", "--delta", "1e-6"]
    assert app.main([*query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["laws"]["binomial"]["law"]["trials"] == 80
    assert app.main(query) == 0
    assert "1483 trials" in capsys.readouterr().out
    assert app.main([*query, "--dimension", "3"]) == 2
    assert app.main(["plan", "--epsilon", "1", "--delta", "1e-6", "--times", "3", "--bits", "8"]) == 2
    assert app.main(["plan", "--query", "count", "--epsilon", "1"]) == 2
    with pytest.raises(InvalidParameter):
        plan_query("median", BUDGET)
