"""Data for --quick: scikit-learn's digits grown from 8 x 8 to 28 x 28, so that nothing is downloaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bqsgd._src.data.shares import rows_by_client
from bqsgd._src.models import build
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.named import NamedTask
from bqsgd._src.tasks.task import Task
from bqsgd.data import load


def padded_digits(named: NamedTask, config: Config) -> Task:
    """The task for `config` with digits for images: every layer and every frame has its real size."""
    digits = load("digits")
    grown = {name: _grow(getattr(digits, name).inputs) for name in ("train", "test")}
    train = replace(digits.train, inputs=grown["train"])
    shares = [train.take(rows) for rows in rows_by_client(train.labels, config.clients.count, seed=named.init_seed)]
    model = named.model or "lenet5"
    return Task(
        make_model=lambda: build(model, input_shape=(1, 28, 28), classes=10, seed=named.init_seed),
        shares=[(share.inputs, share.labels) for share in shares],
        test=(grown["test"], digits.test.labels),
    )


def _grow(images: np.ndarray) -> np.ndarray:
    return np.pad(images.repeat(3, axis=2).repeat(3, axis=3), ((0, 0), (0, 0), (2, 2), (2, 2)), constant_values=-1.0)
