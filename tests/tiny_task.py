"""A tiny task: six parameters, two classes, data that a line parts."""

import numpy as np
import pytest
import torch

from bqsgd._src.client.client import Client, client_sender
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import reader_of
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


def client_of(config, model, loss_fn, data, *, client=0, ledger=None, sample=None, resume=False, **options):
    """A client that trains `model` on `data`."""
    objective, reader = objective_of(config, model, loss_fn), reader_of(data, sample)
    return Client(config, objective, reader, client_sender(config, client, ledger, resume=resume), **options)


@pytest.fixture
def settings():
    """Settings of the tiny task, with changes."""
    return lambda **changes: Config.of(**{**BASE, **changes})


@pytest.fixture
def make_client():
    """A client of the tiny task."""

    def make(config, client=0, *, samples=60, **options):
        return client_of(config, linear(), LOSS, points(samples, client), client=client, **options)

    return make
