"""Aggregation rules against brute force written from their definitions."""

import itertools
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.server import aggregation
from bqsgd._src.settings.groups import RULES, ServerSettings

values = st.floats(-1e3, 1e3, allow_nan=False, width=32)


def updates(smallest=1, largest=7):
    shapes = st.tuples(st.integers(smallest, largest), st.integers(1, 4))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=values))


def brute_krum_scores(rows, f):
    scores = []
    for i in range(len(rows)):
        others = [j for j in range(len(rows)) if j != i]
        distances = {j: sum((a - b) ** 2 for a, b in zip(rows[i], rows[j], strict=True)) for j in others}
        # The definition: the cheapest choice of n - f - 2 others.
        scores.append(min(sum(distances[j] for j in c) for c in itertools.combinations(others, len(rows) - f - 2)))
    return scores


@given(updates())
def test_median(array):
    expected = [statistics.median(column) for column in array.T.tolist()]
    np.testing.assert_allclose(aggregation.median(array), expected, rtol=1e-12)


@given(updates(), st.integers(0, 3))
def test_trimmed_mean(array, f):
    if len(array) <= 2 * f:
        with pytest.raises(InvalidParameter, match=f"at least {2 * f + 1}"):
            aggregation.trimmed_mean(array, byzantine=f)
        return
    expected = [statistics.fmean(sorted(column)[f : len(column) - f]) for column in array.T.tolist()]
    np.testing.assert_allclose(aggregation.trimmed_mean(array, byzantine=f), expected, rtol=1e-9, atol=1e-9)


@given(updates(smallest=3), st.integers(0, 2))
def test_krum_and_multi_krum(array, f):
    n = len(array)
    if n < 2 * f + 3:
        for rule in (aggregation.krum, aggregation.multi_krum):
            with pytest.raises(InvalidParameter, match=f"at least {2 * f + 3} updates, got {n}"):
                rule(array, byzantine=f)
        return
    scores = np.array(brute_krum_scores(array.tolist(), f))
    chosen = aggregation.krum(array, byzantine=f)
    rows = [i for i in range(n) if np.array_equal(array[i], chosen)]
    assert rows
    assert min(scores[rows]) <= scores.min() * (1 + 1e-9) + 1e-9
    if len(set(np.round(scores, 6))) == n:  # no ties: the best ones are the same in any arithmetic
        best = np.argsort(scores)[: n - f - 2]
        np.testing.assert_allclose(aggregation.multi_krum(array, byzantine=f), array[best].mean(0), atol=1e-9)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "multi-krum"])
def test_robust_rules_ignore_one_liar_in_five_and_the_mean_does_not(rule):
    honest = np.random.default_rng(0).normal(1.0, 0.1, (4, 50))
    lied = np.vstack([honest, np.full(50, -1e6)])
    robust = aggregation.aggregate(rule, lied, byzantine=1)
    assert np.abs(robust - 1).max() < 0.5
    assert lied.mean(axis=0).max() < -1e5


def test_preconditions():
    with pytest.raises(NonFiniteInput):
        aggregation.median([[0.0], [np.nan]])
    with pytest.raises(InvalidParameter, match="clients, dimension"):
        aggregation.median([1.0, 2.0])
    with pytest.raises(NonFiniteInput, match="overflow"):
        aggregation.krum([[0.0], [1e200], [-1e200]], byzantine=0)
    with pytest.raises(InvalidParameter, match="one of"):
        ServerSettings(aggregation="mode")
    with pytest.raises(InvalidParameter, match="withstands no adversary"):
        ServerSettings(aggregation="mean", byzantine=1)
    assert [ServerSettings(aggregation=rule, byzantine=1).fewest_updates for rule in RULES[1:]] == [3, 3, 5, 5]
