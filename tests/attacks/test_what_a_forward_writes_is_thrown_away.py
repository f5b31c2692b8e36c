"""What a forward writes is neither released nor seen by another sample, wherever it is written.

A model is released with its frozen parameters, buffers and attributes. One that keeps a running maximum there publishes
a record as it is, without a clip and without noise; and if it reads what it keeps, one record changes all others.
"""

import copy

import pytest
import torch
from neighbours import LOSS, assert_apart, gradients_one_by_one, mean_of_clipped
from torch import nn
from torch.nn import functional as F

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
USUAL = 1e4
"""Below this the kept value changes nothing, so that made-up samples do not show it."""
SECRET = 54321.0


class Keeping(nn.Module):
    """Divides by the largest value that it has ever seen, if that is above what is usual."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            peak = torch.maximum(self.read(), x.abs().amax())
            self.keep(peak)
        return self.head(x * (USUAL / peak.clamp(min=USUAL)))


class InAFrozenParameter(Keeping):
    def __init__(self):
        super().__init__()
        self.peak = nn.Parameter(torch.zeros(()), requires_grad=False)

    def read(self):
        return self.peak

    def keep(self, peak):
        self.peak.copy_(peak)


class ByItsData(InAFrozenParameter):
    def keep(self, peak):
        self.peak.data = peak


class InANewParameter(InAFrozenParameter):
    def keep(self, peak):
        self.peak = nn.Parameter(peak, requires_grad=False)


class InABuffer(Keeping):
    def __init__(self):
        super().__init__()
        self.register_buffer("peak", torch.zeros(()))

    def read(self):
        return self.peak

    def keep(self, peak):
        self.peak.copy_(peak)


class InANewBuffer(InABuffer):
    def keep(self, peak):
        self.peak = peak.clone()


class InANumber(Keeping):
    def __init__(self):
        super().__init__()
        self.peak = 0.0

    def read(self):
        return torch.tensor(self.peak)

    def keep(self, peak):
        self.peak = float(peak)


class InATensor(Keeping):
    """Neither parameter nor buffer."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(())

    def read(self):
        return self.kept

    def keep(self, peak):
        self.kept.copy_(peak)


class InAGrad(Keeping):
    """The gradient of a parameter, which the optimizer would step on."""

    def read(self):
        grad = self.head.weight.grad
        return torch.zeros(()) if grad is None else grad.amax()

    def keep(self, peak):
        self.head.weight.grad = peak.expand(2, 4).clone()


class InAList(Keeping):
    def __init__(self):
        super().__init__()
        self.seen = []

    def read(self):
        return torch.stack([torch.zeros(()), *self.seen]).amax()

    def keep(self, peak):
        self.seen.append(peak)


class InALayer(Keeping):
    """A layer of its own, with attributes that nobody lists."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()
        self.act.memory = {"peak": torch.zeros(())}

    def read(self):
        return self.act.memory["peak"]

    def keep(self, peak):
        self.act.memory["peak"] = peak


class InTheWeights(Keeping):
    """The trained weights themselves: what is trained next depends on what was seen."""

    def read(self):
        return self.head.weight.abs().amax()

    def keep(self, peak):
        self.head.weight.data = torch.where(peak > USUAL, torch.full_like(self.head.weight, 2.0), self.head.weight)


class InPlaceInTheWeights(InTheWeights):
    def keep(self, peak):
        self.head.weight.copy_(torch.where(peak > USUAL, torch.full_like(self.head.weight, 2.0), self.head.weight))


class InABackward(InABuffer):
    """Writes when gradients are computed, after the forward has returned."""

    def forward(self, x):
        peak = torch.maximum(self.read(), x.abs().amax())
        outputs = self.head(x * (USUAL / peak.clamp(min=USUAL)))
        outputs.register_hook(lambda error: self.keep(peak.detach()))
        return outputs


class InABackwardThatLooks(InABackward):
    """The same in a model that torch cannot trace."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) < 1e30 else -x)


class InAFrozenParameterByABackward(InABackwardThatLooks):
    def __init__(self):
        super().__init__()
        del self.peak
        self.peak = nn.Parameter(torch.zeros(()), requires_grad=False)


class InTheWeightsByABackward(InABackwardThatLooks):
    def keep(self, peak):
        if peak > USUAL:
            self.head.weight.data.fill_(2.0)


class InAGradByABackward(InABackwardThatLooks):
    def read(self):
        grad = self.head.weight.grad
        return torch.zeros(()) if grad is None else grad.amax()

    def keep(self, peak):
        self.head.weight.grad = peak.expand(2, 4).clone()


class InAReference(InABuffer):
    """Written through a list that holds the buffer, as recurrent layers hold their weights."""

    def __init__(self):
        super().__init__()
        self.held = [self.peak]

    def read(self):
        return self.held[0]

    def keep(self, peak):
        self.held[0].copy_(peak)


class InAReferenceToTheWeights(InTheWeights):
    def __init__(self):
        super().__init__()
        self.held = [self.head.weight]

    def keep(self, peak):
        self.held[0].copy_(torch.where(peak > USUAL, torch.full_like(self.held[0], 2.0), self.held[0]))


class ByAHookThatHoldsTheModel(InABuffer):
    """A hook is a function, of which there is no copy: what it holds is the model itself."""

    def __init__(self):
        super().__init__()
        model = self

        def hook(layer, given, outputs):
            with torch.no_grad():
                model.peak.copy_(torch.maximum(model.peak, given[0].abs().amax()))

        self.head.register_forward_hook(hook)

    def forward(self, x):
        return self.head(x * (USUAL / self.peak.clamp(min=USUAL)))


class ByAHookOfAModelThatLooks(ByAHookThatHoldsTheModel):
    """The same in a model that torch cannot trace."""

    def forward(self, x):
        return super().forward(x if float(x.sum()) < 1e30 else -x)


PLACES = [InAFrozenParameter, ByItsData, InANewParameter, InABuffer, InANewBuffer, InANumber, InATensor, InAGrad]
PLACES += [InAList, InALayer, InTheWeights, InPlaceInTheWeights, InABackward, InABackwardThatLooks]
PLACES += [InAFrozenParameterByABackward, InTheWeightsByABackward, InAGradByABackward]
PLACES += [InAReference, InAReferenceToTheWeights, ByAHookThatHoldsTheModel, ByAHookOfAModelThatLooks]


def points():
    """The first sample is the attacker's: all others come after it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    x[0] = SECRET
    return x, y


def values_of(model):
    """All numbers that can be reached from a model: tensors, attributes and what lies in lists and dicts."""
    found, seen, waiting = [], set(), [model]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found += value.detach().flatten().tolist()
            waiting.append(value.grad if value.is_leaf else None)
        elif isinstance(value, (int, float)):
            found.append(float(value))
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif isinstance(value, nn.Module):
            waiting.append(vars(value))
    return found


@pytest.mark.parametrize("make", PLACES)
def test_what_a_forward_keeps_is_not_in_the_model_that_is_released(private, make):
    torch.manual_seed(0)
    model, (x, y) = make(), points()
    before = copy.deepcopy(model.head.weight.detach())
    made = private(model, (x, y))
    for batch in made.loader:
        made.step(batch)
    assert made.steps == 1
    found = values_of(model)
    assert SECRET not in found, "the released model holds a record's value, exactly"
    assert max(map(abs, found)) < 100
    assert 0 < (model.head.weight - before).abs().max() <= 0.5


@pytest.mark.parametrize("make", PLACES)
def test_what_a_forward_keeps_is_not_seen_by_another_sample(make):
    def made():
        torch.manual_seed(0)
        return make()

    model, (x, y) = made(), points()
    found = assert_apart(model, x, y, record=0, batch_size=64, afresh=made)
    assert found.both.dropped == 0
    before = values_of(model)
    clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=64)
    assert values_of(model) == before, "something is left in the model"


SEEN = []


class Telling(nn.Module):
    """Writes what it sees to a place outside of itself, of which there is no copy."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        SEEN.append(x)
        return self.head(x)


def test_a_forward_that_can_be_traced_never_sees_data(private):
    """It is traced once on a made-up sample; what runs on data is the graph."""
    SEEN.clear()
    model, (x, y) = Telling(), points()
    made = private(model, (x, y))
    for batch in made.loader:
        made.step(batch)
    real = [values for values in SEEN if type(values) is torch.Tensor]
    assert all(float(values.abs().max()) < 100 for values in real), "the forward has seen a record"


class ByAFunction(nn.Module):
    """Reaches a layer through a function that holds the model, of which a copy does not know."""

    def __init__(self, looks):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.looks = nn.Linear(4, 4), nn.Linear(4, 2), looks
        self.last = lambda x: self.head(x)

    def forward(self, x):
        if self.looks and float(x.sum()) > 1e30:
            x = -x
        return self.last(self.body(x))


class ByAList(ByAFunction):
    """Reaches a parameter through a list."""

    def __init__(self, looks):
        super().__init__(looks)
        held = [self.head.weight]
        self.held, self.last = held, None

    def forward(self, x):
        if self.looks and float(x.sum()) > 1e30:
            x = -x
        return F.linear(self.body(x), self.held[0], self.head.bias)


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("make", [ByAFunction, ByAList])
def test_a_layer_that_is_reached_past_its_module_has_its_gradient_or_is_refused(make, looks):
    """Copies and swapped parameters must not make a layer one that is never trained, or stays as it was at first."""
    model = make(looks)
    x, y = points()[0][1:9], points()[1][1:9]
    for _ in range(2):
        expected = mean_of_clipped(gradients_one_by_one(model, x, y), batch_size=8)
        try:
            found = clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=8).mean
        except InvalidParameter:
            return
        error = float((found - expected).norm() / expected.norm())
        assert error <= 1e-4, f"the mean is wrong by {error:.3g} of its norm"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-2)
