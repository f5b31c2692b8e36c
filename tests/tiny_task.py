"""A tiny task: six parameters, two classes, data that a line parts."""

import numpy as np
import pytest
import torch

from bqsgd._src.client.client import Client
from bqsgd._src.settings.config import Config

torch.set_num_threads(1)
LOSS = torch.nn.CrossEntropyLoss(reduction="none")
BASE = {
    "clients": 3,
    "rounds": 10,
    "batch_size": 20,
    "clip": "clamp",
    "clip_bound": 0.5,
    "range": None,
    "levels": 100,
    "trials": 0,
    "learning_rate": 1.0,
    "momentum": 0.0,
    "schedule": "constant",
    "seed": 1,
    "reserve_rounds": 4,
}


def linear():
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1, -0.2], [0.3, 0.0]]))
        model.bias.zero_()
    return model


def points(samples, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(samples, 2)).astype(np.float32)
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


@pytest.fixture
def settings():
    """Settings of the tiny task, with changes."""
    return lambda **changes: Config.of(**{**BASE, **changes})


@pytest.fixture
def make_client():
    """A client of the tiny task."""

    def make(config, client=0, *, samples=60, ledger=None, **options):
        inputs, targets = points(samples, client)
        return Client(
            client=client,
            model=linear(),
            loss_fn=LOSS,
            samples=(inputs, targets),
            config=config,
            ledger=ledger,
            **options,
        )

    return make
