"""The measure of these attacks: what one record moves, between data sets that differ in that record alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bqsgd._src.params import Mechanism
from bqsgd._src.persample import L2, ClippedGradients, clipped_gradients

LOSS = nn.CrossEntropyLoss(reduction="none")
CLIP = L2(1.0)
RANGE = 0.5
"""What private training in these tests releases is within +-RANGE in every coordinate."""
EXACT = Mechanism(levels=1000, trials=0)
"""No noise: what is left is the rounding to a thousandth of the range."""
_ROUNDING = 1e-9


class Neighbours(NamedTuple):
    """The clipped means over L with a record, without it, and of the record alone."""

    both: ClippedGradients
    others: ClippedGradients
    own: ClippedGradients
    batch_size: int

    @property
    def moved(self) -> float:
        """How far the record moves the mean, in units of the bound 1 / L."""
        return float((self.both.mean - self.others.mean).norm()) * self.batch_size / CLIP.norm

    @property
    def apart(self) -> bool:
        """Whether the record adds its own clipped gradient and changes no bit of the others' part.

        Ask for it with L a power of two: the means are then whole grid steps over L, and their difference is exact.
        """
        return torch.equal(self.both.mean - self.others.mean, self.own.mean)


def neighbours(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    *,
    record: int,
    batch_size: int,
    afresh: Callable[[], nn.Module] | None = None,
) -> Neighbours:
    """Measure `record`, the number of the attacker's sample in (inputs, targets).

    afresh: makes the model anew for each measurement, so that what one of them leaves in it does not hide itself.
    """
    numbers = torch.arange(len(inputs))

    def clipped(members: Tensor) -> ClippedGradients:
        batch = inputs[members], targets[members]
        used = model if afresh is None else afresh()
        return clipped_gradients(used, loss, batch, clip=CLIP, batch_size=batch_size)

    found = [clipped(members) for members in (numbers, numbers[numbers != record], numbers[numbers == record])]
    return Neighbours(*found, batch_size)


def assert_apart(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    record: int,
    batch_size: int,
    loss: Callable[[Tensor, Tensor], Tensor] = LOSS,
    afresh: Callable[[], nn.Module] | None = None,
) -> Neighbours:
    """Fail unless the record moves the mean by its own clipped gradient and by nothing else."""
    found = neighbours(model, loss, inputs, targets, record=record, batch_size=batch_size, afresh=afresh)
    assert found.moved <= 1 + _ROUNDING, f"one record moves the mean by {found.moved:.4g} times the bound"
    lost = found.both.dropped - found.others.dropped - found.own.dropped
    assert lost == 0, f"one record drops {lost} of the others"
    if batch_size & (batch_size - 1) == 0:
        assert found.apart, f"the others' part changes by {_change(found):.3g} of the bound"
    else:
        assert _change(found) <= _ROUNDING
    return found


def _change(found: Neighbours) -> float:
    rest = found.both.mean - found.others.mean - found.own.mean
    return float(rest.norm()) * found.batch_size / CLIP.norm


def gradients_one_by_one(
    model: nn.Module, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = LOSS
) -> Tensor:
    """(samples, coordinates) from autograd, which sees one sample at a time; a parameter not used gets zeros."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rows = []
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        found = torch.autograd.grad(loss(model(x), y).sum(), parameters, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows)


def mean_of_clipped(gradients: Tensor, *, batch_size: int) -> Tensor:
    """The mean that these per-sample gradients have once each is clipped to `CLIP`."""
    norms = gradients.double().norm(dim=1, keepdim=True)
    return (gradients.double() / norms.clamp(min=CLIP.norm)).sum(dim=0) / batch_size
