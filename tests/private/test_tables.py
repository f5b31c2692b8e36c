"""Estimators for tables: scikit-learn's own checks, what a row becomes, and what a fit spends."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from bqsgd import BudgetExhausted, CannotLearn, InvalidParameter, Ledger, Mechanism
from bqsgd._src.private.tables import _feature_bounds
from bqsgd.tables import PrivateClassifier, PrivateRegressor

# The checks make up small tables of their own, and compare fits: seeded noise, little of it, and no search for a plan.
CHECKED = {"bounds": (-5, 5), "epsilon": 8.0, "seed": 0, "epochs": 15, "learning_rate": 2.0}
CHECKED |= {"mechanism": Mechanism(levels=64, trials=16)}
REASONS = {
    "PrivateRegressor": {
        "check_supervised_y_no_nan": "a missing target must not decide whether there is a model: it adds nothing",
    },
}


@pytest.mark.slow  # about a hundred fits
@parametrize_with_checks(
    [
        PrivateClassifier(classes="from_y", **CHECKED),
        PrivateRegressor(target_bounds=(-5, 5), **CHECKED),
    ],
    expected_failed_checks=lambda estimator: REASONS.get(type(estimator).__name__, {}),
)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.fixture
def points():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3))
    return x, (x[:, 0] > 0).astype(int)


@pytest.fixture
def classifier(tmp_path):
    """Make a classifier with a ledger of its own; 2 steps with given noise, so that nothing is planned."""

    def make(**given):
        return PrivateClassifier(
            **{"ledger": tmp_path / "me.ledger", "bounds": (-3, 3), "classes": [0, 1]} | NOISY | given
        )

    return make


NOISY = {"epsilon": 8.0, "epochs": 2, "batch_size": 120, "mechanism": Mechanism(levels=1, trials=2000)}
SEEDED = {"ledger": None, "seed": 1}


def weights(model):
    return np.concatenate([part.reshape(-1) for layer in model.layers_ for part in layer])


def spent(path):
    with Ledger(path) as ledger:
        return ledger.spent_rounds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ledger": None}, "give ledger"),
        ({"ledger": 3}, "path of a file"),
        ({"bounds": None}, "give bounds"),
        ({"bounds": (1, 1)}, "low < high"),
        ({"bounds": (0, float("inf"))}, "finite"),
        ({"bounds": [(0, 1), (0, 1)]}, "2 pairs for a table of 3"),
        ({"bounds": {"age": (0, 110)}}, "column names"),
        ({"classes": None}, "give classes"),
        ({"classes": "y"}, "give classes"),
        ({"classes": [1]}, "one class"),
        ({"classes": ["a", "b"]}, "of type"),
        ({"delta": 1e-6, "epsilon": -1.0}, "epsilon"),
    ],
)
def test_what_is_not_stated_is_refused_and_nothing_is_spent(classifier, points, tmp_path, given, message):
    with pytest.raises(InvalidParameter, match=message):
        classifier(**given).fit(*points)
    assert not (tmp_path / "me.ledger").exists() or spent(tmp_path / "me.ledger") == 0


def test_a_regressor_needs_bounds_of_its_target(points):
    with pytest.raises(InvalidParameter, match="give target_bounds"):
        PrivateRegressor(bounds=(-3, 3), **NOISY, **SEEDED).fit(*points)


def test_every_fit_spends_and_the_last_that_does_not_fit_is_refused(classifier, points, tmp_path):
    path = tmp_path / "me.ledger"
    one = classifier().fit(*points).guarantee_
    with Ledger(path) as ledger:
        assert ledger.budget.epsilon == 8
        ledger.change_budget(epsilon=1.6 * one.epsilon, delta=1e-6, reason="a second fit")
    model = classifier().fit(*points)
    both = model.guarantee_
    assert one.epsilon < both.epsilon <= 1.6 * one.epsilon
    assert (both.unit, both.relation, both.trust.value) == (one.unit, one.relation, one.trust.value)
    assert "proven upper bound" in both.method
    assert spent(path) == 4
    with pytest.raises(BudgetExhausted, match="Nothing was spent"):
        model.fit(*points)
    assert not hasattr(model, "guarantee_"), "it would be of another fit"
    assert spent(path) == 4


def test_a_fit_states_the_delta_of_its_ledger(classifier, points):
    classifier().fit(*points)
    with pytest.raises(InvalidParameter, match="at delta"):
        classifier(delta=1e-5).fit(*points)


def test_a_fit_is_planned_for_itself(points, tmp_path):
    model = PrivateClassifier(ledger=tmp_path / "a", bounds=(-3, 3), classes=[0, 1], epsilon=16, epochs=1)
    assert 12 < model.fit(*points).guarantee_.epsilon <= 16
    assert model.n_steps_ == 1


def test_the_plan_is_made_on_made_up_rows_before_there_is_a_ledger(classifier, points, tmp_path, monkeypatch):
    def refuse(model, optimizer, loader, *, ledger, **given):
        assert ledger is None
        assert not any(tensor.any() for tensor in loader.dataset.tensors)
        raise CannotLearn("too much noise")

    monkeypatch.setattr("bqsgd._src.private.tables.make_private", refuse)
    with pytest.raises(CannotLearn):
        classifier().fit(*points)
    assert not (tmp_path / "me.ledger").exists()


def test_grid_search_spends_for_every_fit(classifier, points, tmp_path):
    pipeline = Pipeline([("as_is", FunctionTransformer()), ("private", classifier(batch_size=60, epochs=1))])
    search = GridSearchCV(pipeline, {"private__learning_rate": [0.5, 2.0]}, cv=2, refit=False).fit(*points)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert spent(tmp_path / "me.ledger") == 4  # 2 candidates in 2 folds of a step each


def test_values_beyond_the_bounds_and_missing_ones_are_mapped_row_by_row(classifier, points):
    x, y = points
    odd, even = x.copy(), x.copy()
    odd[0], even[0] = (1e300, -np.inf, np.nan), (3, -3, 0)
    fitted, same = classifier(**SEEDED).fit(odd, y), classifier(**SEEDED).fit(even, y)
    assert np.array_equal(weights(fitted), weights(same))
    assert np.array_equal(fitted.predict_proba(odd), same.predict_proba(even))
    # The scale of the other rows depends on nothing but the bounds.
    assert np.array_equal(fitted.predict_proba(x[1:]), same.predict_proba(x)[1:])


def test_a_row_with_an_unknown_label_or_no_target_adds_nothing(classifier, points):
    x, y = points
    wild, tame = x.copy(), x.copy()
    wild[5] = 3.0
    wrong = np.where(np.arange(len(y)) == 5, 77, y)
    fits = [classifier(**SEEDED).fit(rows, wrong) for rows in (wild, tame)]
    assert np.array_equal(*map(weights, fits))
    target = np.where(np.arange(len(y)) == 5, np.nan, x[:, 0])
    fits = [
        PrivateRegressor(bounds=(-3, 3), target_bounds=(-3, 3), **NOISY, **SEEDED).fit(r, target) for r in (wild, tame)
    ]
    assert np.array_equal(*map(weights, fits))
    assert np.isfinite(weights(fits[0])).all()


def test_classes_that_nobody_has_are_still_there(classifier, points):
    x, y = points
    model = classifier(classes=[2, 1, 0], **SEEDED).fit(x, y)
    assert model.classes_.tolist() == [0, 1, 2]
    assert model.predict_proba(x).shape == (120, 3)
    assert "public" not in model.guarantee_.assumption
    assert "labels that occur" in classifier(classes="from_y", **SEEDED).fit(x, y).guarantee_.assumption


def test_bounds_by_column_name_follow_the_columns():
    low, high = _feature_bounds({"b": (0, 2), "a": (1, 3)}, 2, np.array(["a", "b"]))
    assert (low.tolist(), high.tolist()) == ([1, 0], [3, 2])
    with pytest.raises(InvalidParameter, match="no pair for the columns b"):
        _feature_bounds({"a": (0, 1)}, 2, np.array(["a", "b"]))


@pytest.mark.slow  # 150 steps
def test_hidden_layers_learn_what_a_line_cannot(points):
    x = points[0]
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    quiet = CHECKED | {"bounds": (-3, 3), "epochs": 150}
    model = PrivateClassifier(classes=[0, 1], hidden=(16,), **quiet).fit(x, y)
    assert model.score(x, y) > 0.8
    assert [layer[0].shape for layer in model.layers_] == [(16, 3), (2, 16)]


def test_a_regressor_predicts_in_the_units_of_its_target(points):
    x = points[0]
    model = PrivateRegressor(target_bounds=(0, 100), **CHECKED).fit(x, 50 + 10 * x[:, 0])
    low, high = model.predict([[-5, 0, 0], [5, 0, 0]])
    assert 0 <= low < 40
    assert 60 < high <= 100


def test_a_fit_leaves_the_global_generators_alone(points):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    PrivateClassifier(classes=[0, 1], hidden=(4,), **CHECKED).fit(*points)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_page_states_the_figures_of_the_committed_run():
    root = Path(__file__).resolve().parents[2]
    run = json.loads((root / "experiments" / "results" / "table.json").read_text(encoding="utf-8"))
    page = (root / "docs" / "training.md").read_text(encoding="utf-8")
    stated = f"accuracy of {np.mean(run['private']):.1%} and logistic\nregression without privacy"
    assert f"{stated} {np.mean(run['not_private']):.1%}" in page
    assert run["guarantee"]["epsilon"] <= 2
    assert "epsilon 2.000 at delta 1e-5" in page
