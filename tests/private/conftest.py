"""A small classification problem, and private training of it that is quick to set up: the mechanism is given."""

import pytest
import torch
from private_loops import LOSS, QUIET
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import bqsgd


@pytest.fixture
def points():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


@pytest.fixture
def private(tmp_path, points):
    """Make private training; what is not given is small."""
    made = []

    def make(model=None, *, dataset=None, loader=None, batch_size=32, optimizer=None, **given):
        model = nn.Linear(4, 2) if model is None else model
        dataset = TensorDataset(*points) if dataset is None else dataset
        loader = DataLoader(dataset, batch_size=batch_size, shuffle=True) if loader is None else loader
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.5) if optimizer is None else optimizer
        if "seed" not in given:
            given.setdefault("ledger", tmp_path / "me.ledger")
        if not isinstance(loader.dataset, (TensorDataset, Subset)):
            given.setdefault("sample", (torch.zeros(4), 0))
        asked = {"loss_fn": LOSS, "epsilon": 8.0, "delta": 1e-5, "epochs": 2, "mechanism": QUIET, "range": 0.5}
        made.append(bqsgd.make_private(model, optimizer, loader, **{"ledger": None} | asked | given))
        return made[-1]

    yield make
    for each in made:
        each.close()
