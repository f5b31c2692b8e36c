"""Private training that is quick to set up and free of noise, so that a test sees what one record moves."""

import pytest
import torch
from neighbours import EXACT, LOSS, RANGE
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from tiny_task import make_client, settings

__all__ = ["make_client", "private", "settings"]
torch.set_num_threads(1)


@pytest.fixture
def private(tmp_path):
    """Make private training of samples (inputs, targets), or of any data set; unless told otherwise every sample is in
    every batch."""
    made = []

    def make(model, dataset, *, batch_size=None, optimizer=None, **settings):
        dataset = TensorDataset(*dataset) if isinstance(dataset, tuple) else dataset
        loader = DataLoader(dataset, batch_size=batch_size or len(dataset))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=1.0) if optimizer is None else optimizer
        if "seed" not in settings and "ledger" not in settings:
            settings["seed"] = 0
        asked = {"loss_fn": LOSS, "epsilon": 8.0, "delta": 1e-5, "epochs": 2, "mechanism": EXACT, "range": RANGE}
        made.append(bqsgd.make_private(model, optimizer, loader, **{"ledger": None} | asked | settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
