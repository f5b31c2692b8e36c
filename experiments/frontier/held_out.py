"""A run's own task with 10,000 training samples as its test set: where hyper-parameters are chosen.

Where the data say which client holds which sample, the last quarter of each client's is held out instead.

The search looks at data that clients hold, and like every search for hyper-parameters it is not charged to epsilon.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.lab import provenance

from bqsgd import data
from bqsgd._src import models
from bqsgd._src.client.draws import Purpose, seed_for
from bqsgd._src.data.dataset import Split
from bqsgd._src.data.features import whole_features
from bqsgd._src.run import train
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.named import NamedTask, plain_settings, settings_of
from bqsgd._src.tasks.task import Task

HELD_OUT, SPLIT_SEED = 10_000, 7


@lru_cache(maxsize=1)
def _training(dataset: str, features: str) -> tuple[Split, int]:
    loaded = data.load(dataset)
    return whole_features(features, "train", of=loaded), loaded.classes


def held_out_task(named: NamedTask, config: Config) -> Task:
    """10,000 samples of the training split held out, the rest shared evenly among the clients; or of each its last."""
    train, classes = _training(named.dataset, named.features)
    owners = data.load(named.dataset).owners
    if owners is None:
        rows = np.random.default_rng(SPLIT_SEED).permutation(len(train))
        kept = np.array_split(rows[HELD_OUT:], config.clients.count)
        held_rows = rows[:HELD_OUT]
    else:
        each = [np.flatnonzero(owners == client) for client in range(config.clients.count)]
        kept = [rows[: cut_of(rows)] for rows in each]
        held_rows = np.concatenate([rows[cut_of(rows) :] for rows in each])
    shares = [train.take(np.sort(part)) for part in kept]
    held = train.take(np.sort(held_rows))
    shape = train.inputs.shape[1:]
    name = named.model or models.default_for(shape, features=named.features)
    seed = seed_for(named.init_seed, Purpose.MODEL)
    return Task(
        make_model=lambda: models.build(
            name, input_shape=shape, classes=classes, seed=seed, activation=named.activation
        ),
        shares=[(share.inputs, share.labels) for share in shares],
        test=(held.inputs, held.labels),
    )


def cut_of(rows: npt.NDArray[np.int64]) -> int:
    """Where the last quarter of a client's rows begins."""
    return len(rows) * 3 // 4


def try_out(**settings: Any) -> dict[str, Any]:
    """One run; its noise is seeded so that the search can be repeated (no privacy claim)."""
    named, config = settings_of(**settings)
    summary = train(held_out_task(named, config), config)
    return {
        "held_out_accuracy": summary.accuracy,
        "held_out_loss": summary.loss,
        "guarantee": None if summary.guarantee is None else summary.guarantee.to_dict(),
        "config": plain_settings(named, config),
        **provenance(),
    }
