"""Least squares in one message: the solution, what is refused, and whole runs with their ledgers."""

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import Part
from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import build
from bqsgd._src.persample.clips import L2
from bqsgd._src.persample.moments import clipped_moments, moments_dimension
from bqsgd._src.run import Run
from bqsgd._src.server.least_squares import solve
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.settings.outlook import foresee
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.frame import read_frame
from tiny_task import client_of as client_with

FEATURES, CLASSES, EACH = 12, 4, 2000
ONE = {"clients": 3, "method": "least-squares", "rounds": 1, "rate": 1.0, "batch_size": EACH, "range": 0.05}
LOSS = nn.CrossEntropyLoss(reduction="none")


def blobs(samples, seed):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(CLASSES, FEATURES))
    labels = rng.integers(0, CLASSES, samples)
    return (centres[labels] + 0.6 * rng.normal(size=(samples, FEATURES))).astype(np.float32), labels


def model():
    return build("linear", input_shape=(FEATURES,), classes=CLASSES, seed=0)


def task(**changes):
    shares = [blobs(EACH, seed) for seed in range(3)]
    return Task(**{"make_model": model, "shares": shares, "test": blobs(1000, 7), **changes})


def test_the_solution_is_that_of_ridge_regression():
    inputs, labels = blobs(500, 1)
    batch = torch.from_numpy(inputs), torch.from_numpy(labels)
    mean, _ = clipped_moments(batch, classes=CLASSES, clip=L2(1.0), batch_size=500)
    found = solve(LeastSquares.of(model()), mean.numpy(), noise_variance=0.0)
    unit = inputs / np.linalg.norm(inputs, axis=1, keepdims=True)
    # Every sample is weighted by what its moments were scaled by, which depends a little on its direction.
    weight = 1 / np.sqrt((1 + (unit**4).sum(axis=1)) / 2 + 2)
    expected = np.linalg.solve((unit.T * weight) @ unit, (unit.T * weight) @ np.eye(CLASSES)[labels]).T
    assert found[-CLASSES:].tolist() == [0.0] * CLASSES
    np.testing.assert_allclose(found[:-CLASSES].reshape(CLASSES, FEATURES), expected, atol=1e-3)


def test_the_ridge_follows_the_noise():
    problem = LeastSquares(features=3, classes=2, offset=False)
    mean = np.concatenate([[4.0, 0, 0, 1.0, 0, -1.0], np.ones(6)])
    free, noisy = (solve(problem, mean, noise_variance=variance).reshape(2, 3) for variance in (0.0, 1 / 3))
    np.testing.assert_allclose(free[0, :2], np.array([1 / 4, 1]) / np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(noisy[0], 1 / np.array([4.7, 1.7, 0.7]) / np.sqrt(2))
    assert not solve(problem, np.zeros(12), noise_variance=0.0).any()
    with pytest.raises(NonFiniteInput):
        solve(problem, np.full(12, np.nan), noise_variance=0.0)
    with pytest.raises(InvalidParameter, match="12 coordinates"):
        solve(problem, np.zeros(11), noise_variance=0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rounds": 2}, "one round"),
        ({"rate": 0.5}, "every sample"),
        ({"rate": None}, "every sample"),
        ({"rate": None, "sampling": "fixed"}, "every sample"),
        ({"unit": "client"}, "unit = 'sample'"),
        ({"clip": "clamp"}, "clip = 'dual' or 'l2'"),
        ({"packed_rows": True}, "packed_rows"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"average": 0.9}, "average"),
        ({"aggregation": "median"}, "aggregation = 'mean'"),
        ({"down_bits": 4}, "down_bits"),
        ({"local_steps": 2}, "local_steps"),
    ],
)
def test_what_does_not_go_with_one_message_is_refused(changes, says):
    assert Config.of(**ONE).run.method == "least-squares"
    with pytest.raises(InvalidParameter, match=says):
        Config.of(**ONE | changes)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, CLASSES)), "one nn.Linear"),
        (lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)), "one nn.Linear"),
        (lambda: nn.Linear(FEATURES, 1), "an output per class"),
        (lambda: nn.Linear(FEATURES + 1, CLASSES), "13 features"),
        (lambda: nn.Linear(15_552, CLASSES), "at most 8192 features"),
    ],
)
def test_models_that_are_not_linear_on_the_inputs_are_refused_before_anything_is_spent(tmp_path, make, says):
    with pytest.raises(InvalidParameter, match=says):
        Run.start(task(make_model=make), Config.of(**ONE, epsilon=1.0), folder=tmp_path)
    assert not list(tmp_path.glob("**/*.ledger"))


def test_targets_that_are_no_classes_are_refused():
    inputs, labels = blobs(EACH, 0)
    shares = [(inputs, labels.astype(np.float32))] * 3
    with pytest.raises(InvalidParameter, match="one class"):
        Run.start(task(shares=shares, test=None), Config.of(**ONE, levels=8, trials=0))


def test_inputs_without_a_row_per_sample_are_refused_before_anything_is_spent(tmp_path):
    share = np.ones(EACH, np.float32), np.zeros(EACH, np.int64)
    config = Config.of(**ONE, epsilon=1.0)
    with pytest.raises(InvalidParameter, match="pairs of 1 features"):
        Run.start(task(make_model=lambda: nn.Linear(1, 2), shares=[share] * 3, test=None), config, folder=tmp_path)
    assert not list(tmp_path.glob("**/*.ledger"))


def test_a_part_without_samples_adds_nothing():
    objective = objective_of(Config.of(**ONE), model(), LOSS)
    nobody = torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64)
    objective.check(nobody)
    values, lost = objective.mean([Part(data=nobody, numbers=np.arange(0))])
    assert not values.any()
    assert lost == 0


@pytest.mark.parametrize("changes", [{}, {"secure": True, "seed": 3}, {"coding": "entropy", "seed": 3}], ids=str)
def test_one_message_of_each_client_makes_the_model(tmp_path, changes):
    config = Config.of(**ONE, epsilon=2.0, levels=100, trials=53, **changes)
    with Run.start(task(), config, folder=tmp_path) as run:
        records = list(run.rounds())
    assert len(records) == 1
    assert run.summary.accuracy > 0.85
    dimension = moments_dimension(FEATURES, CLASSES)
    assert records[0].bytes_up_float32 == 3 * 4 * dimension
    if not changes:
        assert run.summary.guarantee.epsilon <= 2.0
        for ledger in tmp_path.glob("**/*.ledger"):
            with Ledger(ledger) as opened:
                assert opened.spent_rounds == 1
                assert opened.guarantee(delta=1e-5).epsilon <= 2.0
        with Run.resume(task(), folder=tmp_path) as again:  # the model is kept, and no round is left
            assert list(again.rounds()) == []
            np.testing.assert_array_equal(again.model, run.model)


def client_of(inputs, labels, **changes):
    config = Config.of(**ONE | {"seed": 1, "levels": 50, "trials": 100, "epsilon": 50.0} | changes)
    return client_with(config, model(), LOSS, (inputs, labels))


def test_a_frame_comes_whatever_the_data_are():
    inputs, labels = blobs(100, 0)
    spoilt, none = inputs.copy(), labels.copy()
    spoilt[:] = np.nan
    none[:] = 77
    start = np.zeros(CLASSES * (FEATURES + 1), np.float32)
    frames = [
        client_of(*share).update(start, 0).frame for share in ((inputs, labels), (spoilt, labels), (inputs, none))
    ]
    assert len({len(frame) for frame in frames}) == 1
    assert frames[1] == frames[2]  # no samples at all, and the same noise
    assert frames[0] != frames[1]
    dimension = LeastSquares.of(model()).dimension
    assert read_frame(frames[0], dimension=dimension, range=0.05, client=0).header.dimension == dimension


def test_the_model_that_is_sent_changes_nothing():
    inputs, labels = blobs(100, 0)
    size = CLASSES * (FEATURES + 1)
    first, second = (client_of(inputs, labels).update(np.full(size, at, np.float32), 0).frame for at in (0.0, 5.0))
    assert first == second


def test_defaults_are_those_of_one_message():
    dimension = moments_dimension(1280, 10)
    many, few = (Sizes(samples=samples, dimension=dimension, parameters=12_810) for samples in (50_000, 4000))
    config = fit({"method": "least-squares", "clients": 4, "epsilon": 0.1}, many)
    assert (config.run.rounds, config.privacy.rate, config.privacy.batch_size) == (1, 1.0, 12_500)
    every = fit({"method": "least-squares", "sampling": "none"}, few)
    assert every.privacy.rate is None


def test_the_outlook_looks_at_the_class_sums():
    config = Config.of(**ONE | {"levels": 10, "trials": 200, "clip_norm": 0.5, "range": 0.005, "batch_size": 12_500})
    held, dimension = dict.fromkeys(range(3), 12_500), moments_dimension(1280, 10)
    assert foresee(config, held, dimension=dimension).hopeless  # as if all of it were a gradient
    outlook = foresee(config, held, dimension=dimension, learnt=12_810)
    assert not outlook.hopeless
    assert outlook.forecast.noise_length == pytest.approx(outlook.noise * np.sqrt(12_810))
