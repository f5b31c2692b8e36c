"""All three that send through the Sender (a client of a run, a private loop, the DDP hook): the spend comes first."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bqsgd
from bqsgd._src.client.objective import Objective
from bqsgd._src.engines.torch_distributed.hook import BQHookState, PrivateSteps
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import dimension_of
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2
from bqsgd._src.tasks.task import Task
from tiny_task import client_of

SAMPLES = torch.full((64, 3), 2.0), torch.zeros(64, dtype=torch.int64)
LOSS = nn.CrossEntropyLoss(reduction="none")


class Watching(nn.Module):
    """Notes what the ledger has counted whenever it meets a real sample; made-up ones are zeros."""

    ledger: Ledger
    seen: list[int]

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        if float(x.sum()) > 1:  # looks at a value, so this code runs for every sample
            type(self).seen.append(type(self).ledger.spent_rounds)
        return self.layer(x)


@pytest.fixture
def watched(tmp_path):
    Watching.ledger = Ledger.open(tmp_path / "book", client=0, budget_epsilon=50, budget_delta=1e-5)
    Watching.seen = []
    yield Watching.ledger
    Watching.ledger.close()


def client_of_a_run(ledger):
    task = Task(make_model=Watching, shares=[SAMPLES], test=None, loss_fn=LOSS)
    config = bqsgd.Config.of(clients=1, rounds=3, batch_size=32, levels=8, trials=4000, epsilon=50)
    model = task.make_model()
    client = client_of(config, model, LOSS, SAMPLES, ledger=ledger)
    client.update(np.zeros(dimension_of(model), np.float32), 0)


def private_loop(ledger):
    model = Watching()
    loader = DataLoader(TensorDataset(*SAMPLES), batch_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = bqsgd.make_private(
        model, optimizer, loader, loss_fn=LOSS, epsilon=50, delta=1e-5, bits=12, epochs=1, ledger=ledger,
        mechanism=Mechanism(levels=8, trials=4000), range=0.1,
    )  # fmt: skip
    private.step(next(iter(private.loader)))


def ddp_hook(ledger):
    steps = PrivateSteps(
        model=Watching(), loss_fn=LOSS, clip=L2(norm=1.0), batch_size=32, dataset_size=64, ledger=ledger, run="mine"
    )
    state = BQHookState(Mechanism(levels=8, trials=4000), range=0.1, rng=privacy_rng(), private=steps)
    state.supply(tuple(part[:32] for part in SAMPLES), indices=np.arange(32))


@pytest.mark.parametrize("send", [client_of_a_run, private_loop, ddp_hook])
def test_no_gradient_is_computed_before_the_spend_is_in_the_ledger(send, watched):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model that looks at values is slow, and says so
        send(watched)
    assert Watching.seen
    assert min(Watching.seen) >= 1


class Broken(L2):
    """A clip with a fault in its own code."""

    def weights(self, *arguments, **named):
        raise UnboundLocalError("a clip that was not finished")


def test_a_fault_of_a_clip_is_raised_before_the_spend():
    objective = Objective(nn.Linear(3, 2), LOSS, clip=Broken(norm=1.0), batch_size=32)
    with pytest.raises(UnboundLocalError):
        objective.check(tuple(part[:1] for part in SAMPLES))
