"""The optimizer steps on what was released and on nothing else.

Reversible blocks and virtual adversarial training call `backward` themselves, which fills `.grad` with gradients that
nobody clipped; a loop may do the same by mistake after the release.
"""

import copy
from contextlib import suppress

import pytest
import torch
from neighbours import LOSS, RANGE, assert_apart, gradients_one_by_one, mean_of_clipped
from torch import nn
from torch.utils.checkpoint import checkpoint

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Recomputed(torch.autograd.Function):
    """x + block(x), whose backward runs the block again and differentiates it there."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        ctx.save_for_backward(x)
        return x + block(x).detach()

    @staticmethod
    def backward(ctx, error):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(x + ctx.block(x), error)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(Recomputed.apply(self.first(x), self.block))


class ReversibleThatLooks(Reversible):
    """The same in a model that torch cannot trace."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) < 1e30 else -x)


class Checkpointed(Reversible):
    """Torch's older checkpoints do the same."""

    def forward(self, x):
        return self.head(checkpoint(self.block, self.first(x), use_reentrant=True))


class Adversarial(nn.Module):
    """Moves its input in the direction that changes its output most, which a backward inside the forward finds."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with torch.enable_grad():
            change = torch.zeros_like(x, requires_grad=True)
            self.head(x + change).square().sum().backward()
        return self.head(x + 0.1 * change.grad)


def points():
    """The last sample is the attacker's."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    x[-1] *= 1e6
    return x, (x[:, 0] > 0).long()


@pytest.mark.parametrize("make", [Reversible, ReversibleThatLooks, Checkpointed, Adversarial])
def test_a_backward_inside_the_model_leaves_no_gradient_behind(private, make):
    """Such a model may be refused, since the gradient of a block that is run again does not come out of autograd.grad;
    if it is accepted, a step is what was released."""
    torch.manual_seed(0)
    model, (x, y) = make(), points()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        made = private(model, (x, y))
    except InvalidParameter:
        assert all(parameter.grad is None for parameter in model.parameters())
        return
    made.step(next(iter(made.loader)))
    moved = max(float((p - old).detach().abs().max()) for p, old in zip(model.parameters(), before, strict=True))
    assert moved <= RANGE, f"a record scaled by 1e6 moves a weight by {moved:.4g}; what is released is within {RANGE}"


@pytest.mark.parametrize("make", [Reversible, ReversibleThatLooks, Adversarial])
def test_clipped_gradients_fill_no_grad(make):
    torch.manual_seed(0)
    model, (x, y) = make(), points()
    kept = torch.full_like(model.head.weight, 3.0)
    model.head.weight.grad = kept.clone()
    with suppress(InvalidParameter):  # a block that is run again may be refused
        clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=16)
    assert torch.equal(model.head.weight.grad, kept), f".grad holds {float(model.head.weight.grad.abs().max()):.4g}"
    filled = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    assert filled == ["head.weight"], f"gradients are left in {filled}"


def test_adversarial_training_is_accepted_with_its_own_gradients(private):
    """One sample's program is well defined: its inner backward is part of it."""
    torch.manual_seed(0)
    model, (x, y) = Adversarial(), points()
    private(model, (x, y))
    expected = mean_of_clipped(gradients_one_by_one(copy.deepcopy(model), x, y), batch_size=16)
    found = assert_apart(model, x, y, record=15, batch_size=16).both
    assert (found.mean - expected).norm() <= 1e-4 * expected.norm()
    assert all(parameter.grad is None for parameter in model.parameters())


def raw_backward(model, x, y):
    LOSS(model(x), y).sum().backward()


def raw_data(model, x, y):
    model.weight.grad.data = torch.full_like(model.weight, 100.0)


def raw_in_place(model, x, y):
    model.weight.grad.copy_(torch.full_like(model.weight, 100.0))


def raw_assigned(model, x, y):
    model.weight.grad = torch.full_like(model.weight, 100.0)


def raw_rows(model, x, y):
    model.bias.grad[0] += 1e-6


RAW = [raw_backward, raw_data, raw_in_place, raw_assigned, raw_rows]


@pytest.mark.parametrize("change", RAW)
def test_a_gradient_that_was_not_released_is_not_stepped_on(private, change):
    model, (x, y) = nn.Linear(4, 2), points()
    made = private(model, (x, y))
    made.backward(next(iter(made.loader)))
    change(model, x, y)
    before = model.weight.detach().clone()
    with pytest.raises(InvalidParameter):
        made.optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("change", RAW)
def test_a_gradient_that_was_not_released_is_not_added_to(private, change):
    model, (x, y) = nn.Linear(4, 2), points()
    made = private(model, (x, y), batch_size=8)
    batches = iter(made.loader)
    made.backward(next(batches))
    change(model, x, y)
    with pytest.raises(InvalidParameter):
        made.backward(next(batches), accumulate=True)
    assert made.steps == 1


def test_a_gradient_on_a_frozen_parameter_of_the_optimizer_is_not_stepped_on(private):
    model, (x, y) = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), points()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model[0].requires_grad_(False)
    made = private(model, (x, y), optimizer=optimizer)
    made.backward(next(iter(made.loader)))
    model[0].weight.grad = x[:4].clone()
    before = model[0].weight.detach().clone()
    with pytest.raises(InvalidParameter):
        made.optimizer.step()
    assert torch.equal(model[0].weight, before)


def test_a_closure_is_refused(private):
    """The optimizer calls it after every check, so it could put any gradient in the place of the released one."""
    model, (x, y) = nn.Linear(4, 2), points()
    made = private(model, (x, y))
    made.backward(next(iter(made.loader)))
    before = model.weight.detach().clone()

    def closure():
        made.optimizer.zero_grad()
        loss = LOSS(model(x), y).sum()
        loss.backward()
        return loss

    with pytest.raises(InvalidParameter):
        made.optimizer.step(closure)
    assert torch.equal(model.weight, before)


def test_a_released_gradient_takes_the_place_of_an_earlier_one_unless_it_is_to_be_added(private):
    model, (x, y) = nn.Linear(4, 2), points()
    alone, made = private(model, (x, y), batch_size=8), private(model, (x, y), batch_size=8)
    released = []  # by private training with the same seed
    for batch in alone.loader:
        alone.backward(batch)
        released.append(model.weight.grad.clone())
    alone.optimizer.zero_grad()
    batches = iter(made.loader)
    made.backward(next(batches))
    made.backward(next(batches), accumulate=True)
    assert torch.equal(model.weight.grad, released[0] + released[1])
    made.optimizer.step()
    assert made.steps == 2
