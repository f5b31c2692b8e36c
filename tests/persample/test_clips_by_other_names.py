"""Automatic clipping and clip schedules are the L2 clip under other names; the pages say how to ask for them."""

import pytest
import torch
from torch import nn

from bqsgd._src.persample import L2, clipped_gradients
from persample.persample_oracle import Case, gradients_one_by_one


class Scaled(nn.Module):
    """A loss over a public scale, as the page of clips has it."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none") / self.scale


@pytest.fixture
def case():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    return Case(model, (torch.randn(16, 5), torch.arange(16) % 3), Scaled())


def test_a_clip_below_every_gradient_normalises_them(case):
    """g C / |g|: automatic clipping, with the sensitivity of the clip."""
    gradients = gradients_one_by_one(case)
    norm = 1e-3 * float(gradients.norm(dim=1).min())
    mean, dropped = clipped_gradients(case.model, case.loss, case.batch, clip=L2(norm), batch_size=16)
    expected = (gradients / gradients.norm(dim=1, keepdim=True)).mean(dim=0)
    assert dropped == 0
    assert mean / norm == pytest.approx(expected, abs=1e-5)
    assert L2(norm).sensitivity(batch_size=16) == L2(1.0).sensitivity(batch_size=16)


def test_a_schedule_of_the_loss_is_a_schedule_of_the_clip(case):
    for factor in (1.0, 0.5, 0.1):
        case.loss.scale = factor
        scaled, _ = clipped_gradients(case.model, case.loss, case.batch, clip=L2(0.5), batch_size=16)
        case.loss.scale = 1.0
        clipped, _ = clipped_gradients(case.model, case.loss, case.batch, clip=L2(0.5 * factor), batch_size=16)
        assert factor * scaled == pytest.approx(clipped, abs=1e-6)
