"""Centred runs: what the first round measures, the runs that follow from it, and what is refused."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.client.client import Client
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import Part
from bqsgd._src.descent.centre import Centre
from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import build, to_vector
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.fit import Sizes, fit
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.model_message import write_model
from tiny_task import client_of

FEATURES, CLASSES, EACH = 24, 4, 400
DIMENSION = CLASSES * (FEATURES + 1)
LOSS = nn.CrossEntropyLoss(reduction="none")
BASE = {
    "clients": 3, "method": "centred", "rounds": 12, "rate": 1.0, "batch_size": EACH, "clip": "l2", "clip_norm": 1.0,
    "learning_rate": 0.8, "momentum": 0.5, "schedule": "constant", "range": 0.5, "seed": 1, "run": "centred",
}  # fmt: skip
EXACT = {"levels": 2**18, "trials": 0}


def blobs(samples, seed):
    """Features of norm sqrt(FEATURES), far from zero in the mean."""
    rng = np.random.default_rng(seed)
    fixed = np.random.default_rng(99)
    centres = 1.0 + 0.6 * fixed.normal(size=(CLASSES, FEATURES))
    labels = rng.integers(0, CLASSES, samples)
    inputs = centres[labels] + 0.5 * rng.normal(size=(samples, FEATURES))
    inputs *= np.sqrt(FEATURES) / np.linalg.norm(inputs, axis=1, keepdims=True)
    return (0.999 * inputs).astype(np.float32), labels


def linear():
    return build("linear", input_shape=(FEATURES,), classes=CLASSES, seed=0)


def random_layer():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES))


def task(**changes):
    shares = [blobs(EACH, seed) for seed in range(3)]
    return Task(**{"make_model": linear, "shares": shares, "test": blobs(1000, 7), **changes})


def trained(config, folder=None, *, killed_after=None, on=None):
    """A run, to its end or killed after so many rounds."""
    records = []
    with contextlib.suppress(KeyError), Run.start(on or task(), config, folder=folder, force=True) as run:
        for record in run.rounds():
            records.append(record)
            if len(records) == killed_after:
                raise KeyError
    return run, records


def centre_in(model):
    return model[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).mean(axis=0)


def reference(model, *, rounds, learning_rate, momentum):
    """Weights and offset of gradient descent on features less their mean, in float64, on all samples at once."""
    inputs, labels = (np.concatenate(part) for part in zip(*task().shares, strict=True))
    weights = model[:-CLASSES].reshape(CLASSES, FEATURES).astype(np.float64)
    offset, centre = model[-CLASSES:].astype(np.float64), inputs.mean(axis=0, dtype=np.float64)
    weights, offset = weights - weights.mean(axis=0), offset + (weights - weights.mean(axis=0)) @ centre
    inputs = inputs - centre
    velocity = np.zeros((CLASSES, FEATURES + 1))
    for _ in range(1, rounds):
        scores = inputs @ weights.T + offset
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors = errors / errors.sum(axis=1, keepdims=True) - np.eye(CLASSES)[labels]
        gradients = errors[:, :, None] * np.c_[inputs, np.ones(len(inputs))][:, None, :]
        gradients /= np.maximum(1, np.linalg.norm(gradients.reshape(len(inputs), -1), axis=1))[:, None, None]
        velocity = momentum * velocity + gradients.mean(axis=0)
        weights, offset = weights - learning_rate * velocity[:, :-1], offset - learning_rate * velocity[:, -1]
    return np.concatenate([weights.reshape(-1), offset - weights @ centre])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"secure": True},
        {"aggregation": "median", "clients": 1},
        {"packed_rows": True},
    ],
    ids=["each message", "sums", "robust", "packed"],
)
@pytest.mark.parametrize("make", [linear, random_layer], ids=["from zero", "from random weights"])
def test_a_run_is_gradient_descent_on_features_less_their_mean(changes, make):
    whole = task(make_model=make)
    if changes.get("clients") == 1:
        inputs, labels = (np.concatenate(part) for part in zip(*whole.shares, strict=True))
        whole = task(make_model=make, shares=[(inputs, labels)])
        changes = changes | {"batch_size": 3 * EACH}
    run, records = trained(Config.of(**BASE | EXACT | changes), on=whole)
    assert all(record.stepped for record in records)
    expected = reference(to_vector(make()), rounds=12, learning_rate=0.8, momentum=0.5)
    np.testing.assert_allclose(run.model, expected, atol=2e-4)
    plain, _ = trained(Config.of(**BASE | EXACT | changes | {"method": "sgd"}), on=whole)
    assert np.abs(run.model - plain.model).max() > 0.05  # or the comparison above would say little
    assert abs(centre_in(run.model)).max() < 1e-6  # a model to use holds no centre


@pytest.mark.parametrize("changes", [{"optimizer": "adam", "learning_rate": 0.02}, {"average": 0.9}], ids=str)
def test_optimizer_and_average_are_those_of_a_run_on_centred_data(changes):
    """The same run without a centre, on samples from which the mean was taken before, one round behind."""
    shares = task().shares
    centre = np.concatenate([inputs for inputs, _ in shares]).mean(axis=0, dtype=np.float64)
    less = [((inputs - centre).astype(np.float32), labels) for inputs, labels in shares]
    run, _ = trained(Config.of(**BASE | EXACT | changes))
    other, _ = trained(
        Config.of(**BASE | EXACT | changes | {"method": "sgd", "rounds": 11}), on=task(shares=less, test=None)
    )
    inputs = blobs(200, 3)[0].astype(np.float64)
    scores, expected = (
        given @ model[:-CLASSES].reshape(CLASSES, FEATURES).T + model[-CLASSES:]
        for given, model in ((inputs, run.model), (inputs - centre, other.model))
    )
    scores, expected = (each - each.mean(axis=1, keepdims=True) for each in (scores, expected))
    # The average begins one round later, which shortens it by the same share everywhere.
    scale = float((scores * expected).sum() / (expected * expected).sum()) if "average" in changes else 1.0
    assert 0.8 < scale < 1.3
    np.testing.assert_allclose(scores, scale * expected, atol=0.05 * np.abs(expected).max())


@pytest.mark.parametrize("one_in", [1, 2, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"secure": True}, {"aggregation": "median"}], ids=str)
def test_the_first_round_measures_the_mean_of_the_features(changes, one_in):
    run, _ = trained(Config.of(**BASE | EXACT | changes | {"one_in": one_in}), killed_after=1)
    means = [inputs.mean(axis=0, dtype=np.float64) for inputs, _ in task().shares]
    expected = np.median(means, axis=0) if changes.get("aggregation") else np.mean(means, axis=0)
    np.testing.assert_allclose(centre_in(run.server.model), expected, atol=2e-3)
    assert not run.server.model[-CLASSES:].any()
    assert not run.server.state.get("velocity", np.zeros(1)).any()


@pytest.mark.parametrize("changes", [{}, {"one_in": 4}, {"secure": True, "one_in": 2}], ids=str)
def test_noise_in_the_centre_is_that_of_the_plan_and_the_epsilon_that_of_any_run(tmp_path, changes):
    private = {"epsilon": 4.0, "seed": None, "rounds": 4, "range": 0.2, **changes}
    epsilons, frames = [], []
    for method in ("centred", "sgd"):
        config = Config.of(**BASE | private | {"method": method})
        with Run.start(task(), config, folder=tmp_path / method, force=True) as run:
            records = list(run.rounds())
        frames.append([[entry.levels for entry in record.clients] for record in records])
        epsilons.append([])
        for ledger in sorted((tmp_path / method).glob("**/*.ledger")):
            with Ledger(ledger) as opened:
                assert opened.spent_rounds == 4
                epsilons[-1].append(opened.guarantee(delta=1e-5).epsilon)
    assert epsilons[0] == epsilons[1]
    assert len(epsilons[0]) == 3
    assert 0 < max(epsilons[0]) <= 4.0
    assert frames[0] == frames[1]


@pytest.mark.parametrize("secure", [False, True], ids=["each message", "sums"])
def test_steps_are_repeated_and_widths_follow_the_gradients(secure):
    private = {"levels": 60, "trials": 400, "range": 0.2, "secure": secure, "epsilon": 1e6}
    first, records = trained(Config.of(**BASE | private))
    _, others = trained(Config.of(**BASE | private | {"method": "sgd"}))
    if secure:
        # The first sum of a gradient, in round 1, says how wide those after it must be.
        widths, expected = ([record.sum_width for record in each] for each in (records, others))
        assert widths[0] == widths[1] == expected[0]
        assert max(widths[2:]) <= max(expected[2:]) + 1
        assert max(widths[2:]) < widths[0]
        assert max(record.bytes_down for record in records[2:]) < records[0].bytes_down
    assert (first.server.way_down.descent is not None) == secure


@pytest.mark.parametrize("changes", [{}, {"secure": True}, {"one_in": 3, "aggregation": "median"}], ids=str)
@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_run_that_is_killed_goes_on_to_the_same_model(tmp_path, changes, after):
    config = Config.of(
        **BASE | {"levels": 60, "trials": 400, "epsilon": 1e6, "checkpoint_every": 1, "average": 0.5} | changes
    )
    whole, _ = trained(config)
    trained(config, tmp_path, killed_after=after)
    with Run.resume(task(), folder=tmp_path) as run:
        assert run.round == after - 1  # the checkpoint follows what the caller does with the record
        list(run.rounds())
    np.testing.assert_array_equal(run.server.model, whole.server.model)
    np.testing.assert_array_equal(run.model, whole.model)


def test_a_first_round_that_is_lost_leaves_a_run_without_a_centre():
    config = Config.of(**BASE | EXACT | {"quorum": 3})
    with Run.start(task(), config) as run:
        run.server.open_round()
        run.server.close_round()
        list(run.rounds())
        assert abs(centre_in(run.server.model)).max() < 1e-6
    plain, _ = trained(Config.of(**BASE | EXACT | {"method": "sgd", "rounds": 11}))
    np.testing.assert_allclose(run.model, plain.model, atol=1e-3)


@pytest.mark.parametrize("one_in", [1, 2, 4])
@pytest.mark.parametrize("clip", ["l2", "dual"])
def test_a_neighbour_moves_a_message_within_the_bound_in_either_kind_of_round(clip, one_in):
    config = Config.of(**BASE | EXACT | {"clip": clip, "clip_bound": 0.4, "one_in": one_in, "range": 100.0})
    objective = objective_of(config, linear(), LOSS)
    inputs, labels = (torch.from_numpy(part) for part in blobs(20, 0))
    objective.check((inputs[:1], labels[:1]))
    stated = config.message_clip.sensitivity(batch_size=EACH, range=1.0)
    generator, largest = torch.Generator().manual_seed(0), []
    for round, size in ((0, 0.0), (3, 1.0), (3, 1e12)):
        objective.load(size * np.random.default_rng(1).normal(size=DIMENSION).astype(np.float32), round=round)
        subset = objective.subset(round=round, client=0)
        before, _ = objective.mean([Part(data=(inputs, labels), numbers=np.arange(20))], subset)
        assert before.shape == (config.kept(DIMENSION),)
        moves = []
        for scale in (1e-30, 0.1, 1.0, 1e3, 1e19, 3e38, np.inf, np.nan):
            record = scale * torch.randn(1, FEATURES, generator=generator)
            given = torch.cat([inputs, record]), torch.cat([labels, labels[:1]])
            after, _ = objective.mean([Part(data=given, numbers=np.arange(21))], subset)
            moves.append(after - before)
        assert max(np.abs(move).max() for move in moves) <= stated.linf
        largest.append(max(np.linalg.norm(move) for move in moves))
        assert largest[-1] <= stated.l2
        assert not np.any(moves[-1])  # what is not finite adds nothing
    assert largest[0] > 0.5 * stated.l2
    assert largest[1] > 0.5 * stated.l2


def test_a_model_that_overflows_is_refused_before_anything_is_spent(tmp_path):
    config = Config.of(**BASE | {"levels": 2, "trials": 2000, "seed": None, "epsilon": 1e6, "delta": 1e-5})
    with Ledger.open(tmp_path / "ledger", client=0, budget_epsilon=1e6, budget_delta=1e-5) as ledger:
        client = client_of(config, linear(), LOSS, blobs(EACH, 0), ledger=ledger)
        with pytest.raises(NonFiniteInput):
            client.answer(write_model(np.linspace(-3e38, 3e38, DIMENSION).astype(np.float32), round=1))
        assert ledger.spent_rounds == 0


def test_a_client_with_another_method_takes_no_part():
    config = Config.of(**BASE | EXACT)
    client = client_of(config, linear(), LOSS, blobs(EACH, 0))
    for asked, made in ((config, "sgd"), (config.but(method="sgd"), "centred")):
        objective = objective_of(config.but(method=made), linear(), LOSS)
        with pytest.raises(InvalidParameter, match="method than these settings"):
            Client(asked, objective, client.samples, client.sender)
    assert config.summed != config.but(method="sgd").summed  # masks do not cancel between the two


def test_noise_shortens_the_centre_and_removes_one_that_is_all_noise():
    centre = Centre.of(Config.of(**BASE), classes=CLASSES, features=FEATURES)
    rng, true = np.random.default_rng(0), np.full(FEATURES, 0.5)
    sent = centre.message(true * centre.scale)
    np.testing.assert_allclose(centre.measured(sent, variance=0.0), true)
    for deviation in (0.001, 0.03, 1.0):
        errors, shorter = [], []
        for _ in range(300):
            noisy = sent + deviation * rng.normal(size=DIMENSION)
            errors.append(np.linalg.norm(centre.measured(noisy, variance=0.0) - true))
            shorter.append(np.linalg.norm(centre.measured(noisy, variance=deviation**2) - true))
        assert np.mean(shorter) <= 1.001 * np.mean(errors)
    assert np.mean(shorter) < 0.3 * np.mean(errors)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rounds": 1}, "rounds = 2"),
        ({"unit": "client"}, "unit = 'sample'"),
        ({"clip": "clamp"}, "clip = 'dual' or 'l2'"),
        ({"clip": "normalize"}, "clip = 'dual' or 'l2'"),
        ({"clip": "per-layer"}, "clip = 'dual' or 'l2'"),
        ({"down_bits": 4}, "down_bits"),
    ],
)
def test_settings_that_do_not_go_with_a_centre_are_refused(changes, says):
    with pytest.raises(InvalidParameter, match=f"method = 'centred' .*{says}"):
        Config.of(**BASE | changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"make_model": lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES))}, "one nn.Linear"),
        ({"make_model": lambda: nn.Linear(FEATURES, CLASSES, bias=False)}, "with a bias"),
        ({"make_model": lambda: nn.Linear(FEATURES, CLASSES).to(torch.bfloat16)}, "in float32"),
        ({"make_model": lambda: build("pooled", input_shape=(6, 2, 2), classes=CLASSES, seed=0)}, "one nn.Linear"),
        ({"forward": lambda model, batch: (model(batch[0]), batch[1])}, "forward of its own"),
        ({"loss_fn": nn.MultiMarginLoss(reduction="none", p=2)}, None),
        (
            {"loss_fn": lambda outputs, targets: (outputs - nn.functional.one_hot(targets, CLASSES)).square().sum(1)},
            "differences of a sample's outputs",
        ),
    ],
    ids=["layers", "no offset", "half precision", "pooled", "forward", "margins", "squares"],
)
def test_models_and_losses_that_a_centre_does_not_fit_are_refused_before_anything_is_spent(tmp_path, changes, says):
    config = Config.of(**BASE | {"seed": None, "epsilon": 4.0})
    if says is None:
        Run.start(task(**changes), config, folder=tmp_path, force=True)._resources.close()
        return
    with pytest.raises(InvalidParameter, match=says):
        Run.start(task(**changes), config, folder=tmp_path)
    assert not list(tmp_path.glob("**/*.ledger"))


def test_a_subset_without_room_for_all_features_is_refused(tmp_path):
    config = Config.of(**BASE | {"seed": None, "epsilon": 4.0, "one_in": 5})
    with pytest.raises(InvalidParameter, match="set one_in to at most 4"):
        Run.start(task(), config, folder=tmp_path)
    assert not list(tmp_path.glob("**/*.ledger"))
    sizes = Sizes(samples=60_000, dimension=40_000, parameters=40_000)
    given = {"clip": "l2", "clip_norm": 1.0, "epsilon": 1.0, "clients": 100}
    assert fit(given, sizes).clients.one_in > 1
    assert fit(given | {"method": "centred"}, sizes).clients.one_in == 1
