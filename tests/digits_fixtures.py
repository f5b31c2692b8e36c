"""A small real task: four clients that share scikit-learn's digits."""

import pytest
import torch

from bqsgd import data
from bqsgd._src import models
from bqsgd._src.data.shares import rows_by_client
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task

torch.set_num_threads(1)
BASE = {
    "clients": 4,
    "rounds": 12,
    "batch_size": 64,
    "levels": 17,
    "trials": 220,
    "epsilon": 30.0,
    "seed": 1,
    "evaluate_every": 6,
    "checkpoint_every": 3,
    "reserve_rounds": 4,
    "weights": "equal",
}


def digits_task():
    """Digits and the MLP. All shares have one size, so that the accountant is asked about one sampling rate."""
    digits = data.load("digits")
    shares = [digits.train.take(rows[:359]) for rows in rows_by_client(digits.train.labels, 4, seed=0)]
    return Task(
        make_model=lambda: models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0),
        shares=[(share.inputs, share.labels) for share in shares],
        test=(digits.test.inputs, digits.test.labels),
    )


@pytest.fixture(scope="session")
def task():
    """The digits task, made once."""
    return digits_task()


@pytest.fixture
def settings():
    """Settings of the small task, with changes."""
    return lambda **changes: Config.of(**{**BASE, **changes})
