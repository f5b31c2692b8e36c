"""No record decides what is computed for the others: not by its mask, not by an extreme value, not by a lucky draw.

What mixes samples only for values that no probe tries, or only now and then, or only after training was planned, passes
every probe. It cannot mix what it never sees: a forward is given one sample.
"""

import random
import types

import pytest
import torch
from neighbours import EXACT, RANGE, assert_apart, gradients_one_by_one, mean_of_clipped
from torch import nn
from torch.nn import functional as F

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients
from long_suite import others_slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def points(samples=64, features=4):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, features, generator=generator)
    return x, (x[:, 0] > 0).long()


PADDING = 1e4


class Padded(nn.Module):
    """A frozen encoder in evaluation mode that is told by the first feature which steps of a sequence are padding.

    Torch has a faster way for padding at the end, where outputs at the padding are zeros. It takes it for the whole
    batch, or for none of it.
    """

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        self.encoder.eval()
        padding = x[:, :, 0] == PADDING
        return self.head(self.encoder(x, src_key_padding_mask=padding).sum(dim=1))


@pytest.mark.parametrize("record", [0, 40])
def test_the_padding_of_one_record_does_not_choose_the_way_of_the_others(private, record):
    torch.manual_seed(0)
    model = Padded()
    x = torch.randn(64, 8, 8)
    x[:, 1:, 0] = PADDING
    x[record, 1:, 0] = 1.0
    x[record, 0, 0] = PADDING  # in front
    y = torch.zeros(64, dtype=torch.long)
    private(model, (x, y))
    found = assert_apart(model, x, y, record=record, batch_size=256)
    assert found.both.dropped == 0


class Experts(nn.Module):
    """Frozen experts, each of which gets its samples by a product with zeros and ones."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3).requires_grad_(False)
        self.experts = nn.Parameter(torch.randn(3, 4, 5), requires_grad=False)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        scores = self.gate(x)
        chosen = (scores == scores.amax(dim=1, keepdim=True)).to(x.dtype)
        sent = torch.einsum("be,bs->bes", chosen, torch.eye(len(x)))
        given = torch.einsum("bes,bd->esd", sent, x)
        found = torch.einsum("esd,edf->esf", given, self.experts)
        return self.head(torch.einsum("bes,esf->bf", sent, found))


class Guarded(nn.Module):
    """Replaces a batch with NaN by zeros."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.where(x.isnan().any(), torch.zeros_like(x), x))


class Scaled(Guarded):
    """Divides by the largest value, if it is above all that is usual."""

    def forward(self, x):
        return self.head(x / x.abs().amax().clamp(min=1e4))


class Centred(Guarded):
    """Looks at values, and centres a batch only if one is far out."""

    def forward(self, x):
        return self.head(x - x.mean(dim=0) if bool((x.abs() > 1e4).any()) else x)


class Halted(Guarded):
    """Works as long as no value of the batch is far out."""

    def forward(self, x):
        for _ in range(3):
            if float(x.abs().max()) > 1e4:
                return self.head(x * 0)
            x = x * 1.5
        return self.head(x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
@pytest.mark.parametrize("make", others_slow([Experts, Guarded, Scaled, Centred, Halted], [Experts, Guarded]))
def test_an_extreme_value_stays_with_its_record(private, make, value):
    torch.manual_seed(0)
    model, (x, y) = make(), points(64)
    private(model, points(64), batch_size=16)
    x[25] = value
    found = assert_apart(model, x, y, record=25, batch_size=64)
    assert found.others.dropped == 0


DRAWS = {
    "torch": lambda: torch.rand(()),
    "torch and a look": lambda: float(torch.rand(())),
    "python": random.random,
}


class Rarely(nn.Module):
    """Centres its batch in some of its calls."""

    def __init__(self, draw, chance):
        super().__init__()
        self.draw, self.chance = DRAWS[draw], chance
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        mixing = self.draw() < self.chance
        if isinstance(mixing, torch.Tensor):
            return self.head(torch.where(mixing, x - x.mean(dim=0), x))
        return self.head(x - x.mean(dim=0) if mixing else x)


def weighted(outputs, targets):
    """A target of zero gives no gradient."""
    return targets * (outputs.square().sum(dim=1) + outputs[:, 0])


@pytest.mark.parametrize("draw", DRAWS)
def test_what_mixes_now_and_then_has_nobody_to_mix_with(draw):
    """Whatever is drawn, a sample's gradient is one of the two that it has alone; the record has no gradient itself."""
    torch.manual_seed(0)
    model = Rarely(draw, 0.3)
    x, y = torch.stack([torch.tensor([0.1, 0.2, -0.1, 0.3]), torch.full((4,), 1e3)]), torch.tensor([1.0, 0.0])
    inputs = torch.stack([x[0], torch.zeros(4)])  # not mixed, and mixed with itself alone
    alone = [mean_of_clipped(row[None], batch_size=1)
             for row in gradients_one_by_one(model.head, inputs, torch.ones(2), weighted)]  # fmt: skip
    far = 0.0
    for seed in range(50):
        torch.manual_seed(seed)
        random.seed(seed)
        found = clipped_gradients(model, weighted, (x, y), clip=L2(1.0), batch_size=1)
        far = max(far, min(float((found.mean - each).norm()) for each in alone))
    assert far <= 1e-5, f"a record without a gradient of its own moves another's by {far:.3g}"


@pytest.mark.parametrize("draw", DRAWS)
def test_what_would_mix_now_and_then_is_accepted(private, draw):
    """One sample's program is well defined: it has its own draws."""
    made = private(Rarely(draw, 0.05), points(64))
    made.step(next(iter(made.loader)))
    assert (made.steps, made.dropped) == (1, 0)


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixing = False
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x - x.mean(dim=0) if self.mixing else x))


def toggle(model):
    model.mixing = True


def replace_forward(model):
    model.forward = types.MethodType(lambda self, x: self.head(self.body(x - x.mean(dim=0))), model)


def replace_forward_of_a_layer(model):
    weight, bias = model.body.weight, model.body.bias
    model.body.forward = lambda x: F.linear(x - x.mean(dim=0), weight, bias)


def hook_of_the_same_id(model):
    """A hook that takes the place of one that is gone, in the same memory."""
    (number, hook), *_ = model.body._forward_pre_hooks.items()
    before = id(hook)
    del model.body._forward_pre_hooks[number], hook
    kept = []
    for _ in range(10_000):
        hook = lambda layer, given: (given[0] - given[0].mean(dim=0),)  # noqa: E731
        if id(hook) == before:
            break
        kept.append(hook)
    model.body.register_forward_pre_hook(hook)


def replace_a_class(model):
    class Centred(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(dim=0))

    model.body.__class__ = Centred


CHANGES = [toggle, replace_forward, replace_forward_of_a_layer, hook_of_the_same_id, replace_a_class]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_planning_mixes_nobody(private, change):
    """Refused before anything is spent, or a record that is replaced moves the released mean by its share."""
    released = []
    for value in (0.0, 1e3):
        x, y = points(96)
        x[0] = value
        torch.manual_seed(0)
        model = Switched()
        model.body.register_forward_pre_hook(lambda layer, given: None)
        made = private(model, (x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        made.step(next(iter(made.loader)))
        change(model)
        try:
            made.backward(next(iter(made.loader)))
        except InvalidParameter:
            assert made.steps == 1
            return
        released.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    moved = float((released[0] - released[1]).norm())
    rounding = RANGE / EXACT.levels * len(released[0]) ** 0.5
    assert moved <= 2 / 96 + rounding, f"one record moves what is released by {96 / 2 * moved:.3g} times the bound"
