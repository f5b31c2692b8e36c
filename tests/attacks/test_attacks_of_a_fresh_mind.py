"""Attacks by what is not in the sample: empty rows, zero inputs, unwritten memory, generators, operations, hooks."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from neighbours import LOSS, assert_apart
from torch import nn
from torch.utils.data import Dataset

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, Clamp, Dual, Scale, clipped_gradients
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.program import Form
from long_suite import others_slow

pytestmark = pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
SAMPLES, FEATURES = 64, 9


class Linear(nn.Module):
    """A linear layer behind something that is done to the inputs."""

    def __init__(self, act=lambda model, x: x, prepare=lambda model: None):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.act = nn.Linear(FEATURES, 3), act
        prepare(self)

    def forward(self, x):
        return self.layer(self.act(self, x))


def samples():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, FEATURES, generator=generator), torch.arange(SAMPLES) % 3


# A sample without inputs: its gradient is zero, whatever its error is.


def dot(outputs, targets):
    return (outputs * targets[:, None]).sum(1)


@pytest.mark.parametrize("clip", [L2(1.0), L2(1e-12), Scale(1.0), Clamp(1.0), Dual(1.0, 0.5)], ids=repr)
@pytest.mark.parametrize(("inputs", "outputs"), others_slow([(1, 1), (4, 1), (700, 3), (100, 70)], [(1, 1), (700, 3)]))
def test_zero_inputs_add_nothing_however_large_the_error_is(clip, inputs, outputs):
    for error in (1e19, 1e30, 1e33, 1e37):
        batch = torch.zeros(1, inputs), torch.tensor([error])
        model = nn.Linear(inputs, outputs, bias=False)
        found = clipped_gradients(model, dot, batch, clip=clip, batch_size=1)
        assert not found.mean.any(), f"an error of {error:g} adds {float(found.mean.norm()):g}"


@pytest.mark.parametrize("clip", [L2(1.0), Scale(1.0)], ids=repr)
def test_a_layer_behind_units_that_are_all_off_adds_nothing(clip):
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))
    with torch.no_grad():
        model[0].weight.abs_()
    batch = -torch.ones(1, 4), torch.tensor([1e35])
    assert not clipped_gradients(model, dot, batch, clip=clip, batch_size=1).mean.any()


def bounds_of(clip):
    """In the largest coordinate, and in the norm."""
    match clip:
        case L2(norm=norm):
            return norm, norm
        case Dual(norm=norm, bound=bound):
            return min(norm, bound), norm
        case Scale(bound=bound) | Clamp(bound=bound):
            return bound, np.inf


@pytest.mark.parametrize("clip", [L2(1.0), L2(1e12), Scale(1e-12), Clamp(1.0), Dual(1e-12, 1e12), Dual(1e12, 1e-12)])
def test_no_magnitude_of_inputs_and_errors_passes_the_bound(clip):
    torch.manual_seed(0)
    largest, norm = bounds_of(clip)
    for inputs in (1, 20):
        model = nn.Linear(inputs, 40, bias=False)
        for left in (-45, -38, -20, 0, 20, 38):
            for right in (-45, -30, 0, 30, 38):
                x, y = (10.0**power * torch.rand(1, size).double() for power, size in ((left, inputs), (right, 1)))
                batch = x.float(), y.float()[:, 0]
                found = clipped_gradients(model, dot, batch, clip=clip, batch_size=1).mean
                assert float(found.abs().max()) <= largest, (inputs, left, right)
                assert float(found.norm()) <= norm, (inputs, left, right)


# Rows that are empty hold zeros, which an operation may refuse.


def whole_division(model, x):
    return x * (1 + torch.div(10**9, (x[:, :1] * 1e6).long(), rounding_mode="floor") % 7)


def draw_by_weight(model, x):
    return x + 0 * torch.multinomial(x.abs(), 1)


def inverse_of_a_factor(model, x):
    return torch.cholesky_inverse(x.view(-1, 3, 3)).flatten(1)


@pytest.mark.parametrize("act", [whole_division, draw_by_weight, inverse_of_a_factor])
def test_an_operation_that_refuses_zeros_costs_nobody_who_stands_beside_an_empty_row(act):
    x, y = samples()
    assert_apart(Linear(act), x, y, record=5, batch_size=64)


@pytest.mark.parametrize("act", [whole_division, draw_by_weight])
def test_a_record_of_zeros_that_an_operation_refuses_costs_itself_alone(act):
    x, y = samples()
    x[5] = 0
    found = assert_apart(Linear(act), x, y, record=5, batch_size=64)
    assert found.both.dropped == 1


@pytest.mark.parametrize("operation", [torch.linalg.inv, torch.linalg.cholesky, lambda a: torch.linalg.solve(a, a + 1)])
def test_a_singular_matrix_costs_its_own_sample_alone(operation):
    def act(model, x):
        a = x.view(-1, 3, 3)
        return operation(a @ a.transpose(1, 2)).flatten(1)

    x, y = samples()
    x[5] = 0
    assert_apart(Linear(act), x, y, record=5, batch_size=64)


# Draws from a generator that nobody lends: its next draw tells how many samples came before.


def own_generator(model):
    model.generator = torch.Generator().manual_seed(0)


def drawn(model, x):
    return x * torch.rand(x.shape, generator=model.generator)


def kept(model, x):
    return x * torch.empty_like(x).bernoulli_(0.5, generator=model.generator)


@pytest.mark.parametrize("act", [drawn, kept])
def test_a_generator_of_the_models_own_does_not_count_samples(act):
    x, y = samples()
    with suppress(InvalidParameter):  # a model that cannot be kept apart may be refused
        make = partial(Linear, act, own_generator)
        assert_apart(make(), x, y, record=5, batch_size=64, afresh=make)


# Operations of the user's own: their code meets data on the road of rows too.

_seen: list[float] = []


@torch.library.custom_op("bqsgd_tests::beside_the_last", mutates_args=())
def beside_the_last(x: torch.Tensor) -> torch.Tensor:
    """x and what the call before was given."""
    _seen.append(float(x.sum()))
    return x + (_seen[-2] if len(_seen) > 1 else 0)


beside_the_last.register_fake(torch.empty_like)
beside_the_last.register_autograd(lambda context, gradient: gradient)


def test_an_operation_of_the_users_own_is_not_taken_to_keep_samples_apart():
    batch, model = samples(), Linear(lambda model, x: beside_the_last(x))
    road = road_of(model, LOSS, None, Form.of(batch), batch_size=64, packed=False)
    assert road.assumes, "its code may remember samples, and no guarantee says so"


# Memory that nobody has written holds what another sample has left there.


def unwritten(model, x):
    found = x.new_empty(x.shape[0], FEATURES)
    return x + torch.where(found.isfinite(), found, 0).clamp(-1, 1)


def unwritten_and_looked_at(model, x):
    return unwritten(model, x) * (2 if x.sum().item() > 0 else 1)


def solved(model, x):
    a = x.view(-1, 3, 3)
    return torch.linalg.lstsq(a, a + 1).solution.flatten(1)  # LAPACK reads its pivots, which torch does not set


@pytest.mark.parametrize("act", [unwritten, unwritten_and_looked_at, solved])
def test_memory_that_nobody_has_written_carries_nothing_from_sample_to_sample(act):
    x, y = samples()
    for record in (5, 40):
        assert_apart(Linear(act), x, y, record=record, batch_size=64, afresh=lambda: Linear(act))


class LookedUp(nn.Module):
    """Advanced indexing: its derivative adds with atomic instructions, in the order in which the threads come."""

    def __init__(self, size=40_000):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        half = torch.randint(0, 8, (size // 2,), generator=generator)
        large = 1e6 * torch.randn(size // 2, generator=generator)
        self.weight = nn.Parameter(torch.zeros(8))
        self.register_buffer("index", torch.cat([half, half]))
        self.register_buffer("factor", torch.cat([large, -large]))  # what is left of the sums is their order

    def forward(self, x):
        return ((self.weight[self.index] * self.factor)[None] * x).sum(1)


def test_what_a_sample_adds_does_not_depend_on_the_order_in_which_threads_come():
    model, batch = LookedUp(), (torch.ones(1, 40_000), torch.zeros(1))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [clipped_gradients(model, lambda o, _: o, batch, clip=L2(1.0), batch_size=1).mean for _ in range(8)]
    finally:
        torch.set_num_threads(threads)
    moved = max(float((each - found[0]).norm()) for each in found)
    assert moved == 0, f"one sample differs from itself by {moved:.3g} times the bound"


# What is said of a training may not depend on the length of a record.


class Lengths(Dataset):
    def __init__(self, usual, odd):
        self.usual, self.odd = usual, odd

    def __len__(self):
        return 32

    def __getitem__(self, number):
        return torch.full((self.odd if number == 5 else self.usual, 8), 1.0 + number), number % 3


class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x.sort(1)[0]).mean(1)


class LooksAtSevens(Sorted):
    def forward(self, x):
        return self.layer(x.mean(1)) * (x.max().item() if x.shape[1] == 7 else 1.0)


@pytest.mark.parametrize(("make", "usual", "odd"), [(Sorted, 12_000, 4), (LooksAtSevens, 4, 7)])
def test_the_words_of_the_guarantee_do_not_tell_that_a_record_of_another_length_was_drawn(private, make, usual, odd):
    said = set()
    for length in (usual, odd):
        training = private(make(), Lengths(usual, length), sample=(torch.zeros(usual, 8), 0))
        training.step(next(iter(training.loader)))
        said.add(training.guarantee().assumption)
    assert len(said) == 1, said


# Hooks of the optimizer that come after ours.


def test_a_hook_that_comes_later_does_not_put_other_gradients_under_the_step(private):
    x, y = samples()
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training, before = private(model, (x, y), optimizer=optimizer), model.weight.detach().clone()

    def raw(*_):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 100.0)

    optimizer.register_step_pre_hook(raw)
    with pytest.raises(InvalidParameter):
        training.step(next(iter(training.loader)))
    assert torch.equal(model.weight, before)


# What held, and shall hold.


def test_a_size_that_depends_on_values_is_no_reason_to_fail():
    x, y = samples()
    act = Linear(lambda model, x: x + torch.bincount(x[0].abs().long(), minlength=FEATURES)[:FEATURES])
    assert_apart(act, x, y, record=5, batch_size=64)


def places_to_write(model):
    model.listed, model.named, model.last = [torch.zeros(1, FEATURES)], {"a": torch.zeros(1, FEATURES)}, deque(maxlen=1)


def writes_to_a_list(model, x):
    model.listed[0].add_(x)
    return x - model.listed[0] / 2


def writes_to_a_dict(model, x):
    return x - model.named["a"].copy_(x * 2 + model.named["a"]) / 3


def keeps_the_last(model, x):
    model.last.append(x)
    return x + sum(model.last)


def takes_over_memory(model, x):
    found = torch.zeros(FEATURES)
    found.set_(x.clone().flatten())
    return x * found


def grows(model, x):
    found = torch.zeros(1)
    return x * found.resize_(1, FEATURES).fill_(0).copy_(x)


def writes_out(model, x):
    found = torch.empty(1, FEATURES)
    torch.mul(x, 2, out=found)
    return found


def writes_weights(model, x):
    model.layer.weight.data.add_(x)
    return x


def writes_its_input(model, x):
    x[:, ::2].mul_(3)
    x.view(-1)[1] = 0
    return x


@pytest.mark.parametrize(
    "act",
    [
        writes_to_a_list, writes_to_a_dict, keeps_the_last, takes_over_memory, grows, writes_out, writes_weights,
        writes_its_input,
    ],
)  # fmt: skip
def test_what_is_written_anywhere_stays_with_the_sample(act):
    x, y = samples()
    model = Linear(act, places_to_write)
    before, given = model.layer.weight.detach().clone(), x.clone()
    assert_apart(model, x, y, record=5, batch_size=64)
    assert torch.equal(model.layer.weight, before)
    assert torch.equal(x, given)
    assert not model.listed[0].any()


KINDS = {
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float64": lambda x: x.double(),
    "int8": lambda x: (x * 9).to(torch.int8),
    "bool": lambda x: x > 0,
    "negated view": torch._neg_view,
    "expanded": lambda x: x[:1].expand_as(x),
    "transposed": lambda x: x.t().contiguous().t(),
    "with a gradient": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_kind_stay_apart(kind):
    x, y = samples()
    assert_apart(Linear(lambda model, x: x.float()), KINDS[kind](x), y, record=5, batch_size=64)


@pytest.mark.parametrize(
    "act",
    [
        F.relu, F.hardswish, torch.sign, torch.tanh, torch.erf, lambda x: x.clamp(-0.0, 0.0),
        lambda x: torch.maximum(x, -x), lambda x: x.amax(1, keepdim=True), lambda x: x.sum(1, keepdim=True),
    ],
)  # fmt: skip
def test_the_sign_of_a_zero_does_not_depend_on_where_a_sample_stands(act):
    """1 / x tells the zeros apart."""

    def signs(model, x):
        return torch.sigmoid(1 / act(x).detach()).expand(x.shape) + 0.25

    for count in (15, 17, 33):
        generator = torch.Generator().manual_seed(count)
        x = torch.where(torch.rand(count, FEATURES, generator=generator) < 0.5, 0.0, -0.0)
        for record in (0, count - 1):
            assert_apart(Linear(signs), x, torch.arange(count) % 3, record=record, batch_size=64)


def test_threads_that_meet_a_model_at_once_get_the_same():
    def act(model, x):
        return x.sort(1)[0].cumsum(1) + torch.fft.fft(x).abs()

    (x, y), model, found = samples(), Linear(act), {}

    def ask(number):
        given = {"clip": L2(1.0), "batch_size": SAMPLES}
        found[number] = clipped_gradients(model, LOSS, (x, y), **given).mean

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    ask(3)
    assert len(found) == 4
    assert all(torch.equal(each, found[3]) for each in found.values())
