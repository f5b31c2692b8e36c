"""The fast stand-in for a run on fixed features: the same codes and the same noise, without frames, masks and ledgers.

A linear model, per-sample L2 clips, each client's mean on its grid by stochastic rounding, and the binomial noise of
the plan: of the sum where the preset says `secure`, of every client otherwise. What the server gets has the law that
it has in a real run with all clients there, so accuracies agree; only matrix products are rounded more coarsely
(bfloat16). A simulation sends nothing and has no guarantee: epsilon is what the plan's accountant proves for a real run
of these settings. It is what the search is made with, since a run of 1,000 clients with the protocol takes hours here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from experiments.held_out import HELD_OUT, SPLIT_SEED
from torch import Tensor

from bqsgd import data
from bqsgd.data.dataset import Split
from bqsgd.privacy.accountant import Accountant
from bqsgd.release import Trust
from bqsgd.tasks import plain_settings, settings_of
from bqsgd.training.client_plan import client_setting, release_in, sum_plan
from bqsgd.training.draws import Purpose, seed_for
from bqsgd.training.optimisers import average, schedule
from bqsgd.training.settings import Config

_Rows = npt.NDArray[np.int64]


@lru_cache(maxsize=1)
def _data(dataset: str, features: str, held_out: bool) -> tuple[Split, Split, int]:
    found = data.load(dataset, quiet=True)
    train = data.whole_features(features, "train", of=found)
    train = Split(inputs=np.array(train.inputs).reshape(len(train), -1), labels=train.labels)
    if not held_out:
        test = data.whole_features(features, "test", of=found)
        return train, Split(inputs=np.array(test.inputs).reshape(len(test), -1), labels=test.labels), found.classes
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(train))
    return train.take(np.sort(rows[HELD_OUT:])), train.take(np.sort(rows[:HELD_OUT])), found.classes


def simulate(*, held_out: bool = True, noise: float = 1.0, **settings: Any) -> dict[str, Any]:
    """One run of these settings; accuracy on held-out training samples, or on the test split.

    noise: a factor on the noise's deviation, to see what it costs; anything but 1 is no plan's.
    """
    named, config = settings_of(**settings)
    train, test, classes = _data(named.dataset, named.features, held_out)
    rng = np.random.default_rng(config.privacy.seed)
    shares = data.iid(
        len(train), config.clients.count, rng=np.random.default_rng(seed_for(named.init_seed, Purpose.SHARES))
    )
    dimension = (train.inputs.shape[1] + 1) * classes
    levels, trials, epsilon, bits = _plan(config, dimension, samples=len(shares[0]))
    inputs, test_inputs = torch.from_numpy(train.inputs), torch.from_numpy(test.inputs)
    model, velocity = np.zeros(dimension), np.zeros(dimension)
    averaged = np.zeros(dimension)
    reach, batch = config.range, config.privacy.batch_size
    for round in range(config.run.rounds):
        weights = torch.from_numpy(model.astype(np.float32)).view(-1, classes)
        total = np.zeros(dimension)
        for rows in shares:
            rate = config.privacy.rate or batch / len(rows)
            drawn = rows[rng.random(len(rows)) < rate]
            mean = _clipped_sum(inputs, train.labels, drawn, weights, clip=config.clip.norm).numpy().ravel() / batch
            steps = np.clip(mean, -reach, reach) * (levels / reach)
            total += np.floor(steps + rng.random(dimension))
        total += noise * (rng.binomial(trials, 0.5, dimension) - trials / 2)
        gradient = total * (reach / levels / len(shares))
        velocity = config.server.momentum * velocity + gradient
        rate = config.server.learning_rate * schedule(config.server.schedule, round=round, rounds=config.run.rounds)
        model = model - rate * velocity
        averaged = average(averaged, model, decay=config.server.average, round=round)
    weights = torch.from_numpy(averaged.astype(np.float32)).view(-1, classes)
    found = (test_inputs @ weights[:-1] + weights[-1]).argmax(dim=1).numpy()
    return {
        "accuracy": float((found == test.labels).mean()),
        "on": f"{HELD_OUT} held-out training samples" if held_out else "test split",
        "simulated": True,
        "levels": levels,
        "trials": trials,
        "epsilon": epsilon,
        "bits": bits,
        "config": plain_settings(named, config),
    }


def _plan(config: Config, dimension: int, *, samples: int) -> tuple[int, int, float, float]:
    """(levels, trials in the sum of all clients, proven epsilon of a client, bits of a coordinate)."""
    if config.secure.on:
        plan = sum_plan(config, dimension=dimension)
        setting = client_setting(config, dimension=dimension, dataset_size=config.privacy.batch_size)
        release = setting.release(plan.mechanism)
        assert release.trust is Trust.SUMS_ONLY
        trials, bits = plan.noise.in_sum(config.clients.count), float(plan.width)
    else:
        setting = client_setting(config, dimension=dimension, dataset_size=samples)
        release = release_in(config, setting, client=0, round=0)
        assert release.mechanism.coarsening is None
        trials, bits = release.mechanism.trials * config.clients.count, release.mechanism.bits_per_coordinate
    epsilon = Accountant().compose(release, config.run.rounds).epsilon(config.privacy.delta)
    return release.mechanism.levels, trials, epsilon, bits


def _clipped_sum(inputs: Tensor, labels: _Rows, rows: _Rows, weights: Tensor, *, clip: float) -> Tensor:
    """The sum of the clipped gradients of cross-entropy: each is an outer product of input and error."""
    batch = inputs[torch.from_numpy(rows)]
    errors = torch.softmax(batch @ weights[:-1] + weights[-1], dim=1)
    errors[torch.arange(len(rows)), torch.from_numpy(labels[rows])] -= 1
    norms = errors.norm(dim=1) * torch.sqrt((batch * batch).sum(dim=1) + 1)
    errors *= torch.clamp(clip / norms.clamp_min(1e-12), max=1.0)[:, None]
    return torch.cat([batch.T @ errors, errors.sum(dim=0, keepdim=True)])
