"""The same lines under torchrun: each rank a client, frames exchanged, the same model everywhere."""

from pathlib import Path

import pytest
import torch
from private_loops import LOSS, recorded, told_by_ranks
from torch import nn

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "rank_loop.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, told_by_ranks(WORKER, folder, 2)


def test_every_rank_has_the_same_model_and_its_own_guarantee(told):
    folder, (first, second) = told
    assert first["begun"] == second["begun"]
    assert first["weights"] == second["weights"] != first["begun"]
    assert first["steps"] == second["steps"] == 8  # the larger number of steps, twice
    assert "server sees each client's messages" in first["guarantee"]
    assert "0.3333" in first["guarantee"]
    assert "0.25" in second["guarantee"]
    assert recorded(folder / "loop-0.ledger") == recorded(folder / "loop-1.ledger") == 8


def test_the_step_is_the_mean_of_the_ranks_means(told):
    """A rank of 96 samples and one of 64 weigh the same: no claim of a size moves the mean."""
    _, (first, second) = told
    assert first["gradient"] == second["gradient"]
    model = nn.Linear(4, 2)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), first["own"], strict=True):
            parameter.copy_(torch.tensor(values))
    total = torch.zeros(10)
    for rank, samples in enumerate((96, 64)):
        x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(rank))
        for row in range(samples):
            target = (x[row : row + 1, 0] > 0).long()
            found = torch.autograd.grad(LOSS(model(x[row : row + 1]), target).sum(), model.parameters())
            own = torch.cat([part.flatten() for part in found])
            total += own * min(1, 1 / own.norm()) / samples / 2
    assert (torch.tensor(first["gradient"]) - total).abs().max() <= 0.6e-3


def test_messages_of_subsets_give_every_rank_the_same_estimate(told):
    _, (first, second) = told
    assert first["part"] == second["part"] != first["gradient"]
    assert torch.tensor(first["part"]).norm() < 4 * torch.tensor(first["gradient"]).norm()


def test_a_rank_without_budget_ends_the_loop_of_all(told):
    _, (first, second) = told
    assert first["ended"] == second["ended"] == "the budget of rank 1 is spent, so every rank stops"
    assert first["taken"] == second["taken"]
    assert second["spent"] <= 0.5
