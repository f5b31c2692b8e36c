"""The optimizer steps on what was released: contents are compared, so no gradient of the data passes for another."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from private_loops import EXACT, LOSS
from torch import nn
from torch.utils.data import Dataset

from bqsgd._src.errors import InvalidParameter

NOT_RELEASED = "was not released"


def grads(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def released(made):
    """Private training with a gradient in place."""
    made.backward(next(iter(made.loader)))
    return made


def test_a_gradient_takes_the_place_of_the_one_before(private):
    model = nn.Linear(4, 2)
    alone, made = private(copy.deepcopy(model), seed=2), private(model, seed=2)
    expected = []
    for batch in alone.loader:
        alone.optimizer.zero_grad()
        alone.backward(batch)
        expected.append(grads(alone.model))
    for batch, wanted in zip(made.loader, expected, strict=True):
        made.backward(batch)
        assert torch.equal(grads(model), wanted)


def test_accumulating_starts_over_when_gradients_are_cleared(private):
    model = nn.Linear(4, 2)
    alone, made = private(copy.deepcopy(model), seed=2), private(model, seed=2)
    first, second, third = (alone.backward(batch) or grads(alone.model) for batch in alone.loader)
    batches = iter(made.loader)
    made.backward(next(batches), accumulate=True)
    assert torch.equal(grads(model), first)
    made.optimizer.zero_grad(set_to_none=False)
    made.backward(next(batches), accumulate=True)
    assert torch.equal(grads(model), second)
    made.backward(next(batches), accumulate=True)
    assert torch.equal(grads(model), second + third)
    made.optimizer.step()


def test_accumulating_onto_a_gradient_of_the_data_is_refused_before_anything_is_spent(private):
    made = private()
    batches = iter(made.loader)
    made.backward(next(batches))
    made.model.bias.grad.mul_(2)
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.backward(next(batches), accumulate=True)
    assert made.steps == 1


def backward_again(model, points):
    LOSS(model(points[0]), points[1]).mean().backward()


def another_tensor(model, points):
    model.weight.grad = torch.ones_like(model.weight)


def other_data(model, points):
    model.weight.grad.data = torch.ones_like(model.weight)


def in_place(model, points):
    model.bias.grad.add_(1e-3)


def by_numpy(model, points):
    """Numpy does not tell torch that it writes."""
    model.bias.grad.numpy()[0] += 1e-3


def another_type(model, points):
    model.weight.grad = torch.ones_like(model.weight).to_sparse()


@pytest.mark.parametrize("change", [backward_again, another_tensor, other_data, in_place, by_numpy, another_type])
def test_a_step_on_a_gradient_that_was_not_released_is_refused(private, points, change):
    made = released(private())
    change(made.model, points)
    before = made.model.weight.detach().clone()
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.optimizer.step()
    assert torch.equal(made.model.weight, before)
    made.step(next(iter(made.loader)))  # clears it
    assert made.steps == 2


@pytest.mark.parametrize("named", [False, True])
def test_what_a_closure_leaves_behind_is_looked_at(private, points, named):
    """Frameworks give every step a closure; one that computes gradients of its own is refused before the step."""
    made = released(private())
    before = made.model.weight.detach().clone()

    def closure():
        backward_again(made.model, points)
        return 0.0

    step = (lambda call: made.optimizer.step(closure=call)) if named else made.optimizer.step
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        step(closure)
    assert torch.equal(made.model.weight, before)
    made.optimizer.zero_grad()
    made.backward(next(iter(made.loader)))
    assert step(lambda: 7.0) is None
    assert not torch.equal(made.model.weight, before)


class StepsByTheLoss(torch.optim.SGD):
    """As LBFGS does, which takes the loss of the closure to choose its step."""

    def step(self, closure):
        self.seen = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad


def test_an_optimizer_does_not_see_the_loss_that_a_closure_returns(private):
    model = nn.Linear(4, 2)
    made = private(model, optimizer=StepsByTheLoss(model.parameters(), lr=0.1))
    batch = next(iter(made.loader))

    def closure():
        made.backward(batch)
        return LOSS(model(torch.ones(3, 4)), torch.zeros(3, dtype=torch.long)).mean()

    made.optimizer.step(closure)
    assert grads(model).any()
    assert made.optimizer.seen is None


def test_a_closure_that_releases_a_gradient_and_clears_it_is_refused(private):
    """It was counted, and would train nothing: what automatic optimization in Lightning does with it."""
    made = private()

    def closure():
        made.backward(next(iter(made.loader)))
        made.optimizer.zero_grad()

    with pytest.raises(InvalidParameter, match="released within this step and then cleared"):
        made.optimizer.step(closure)
    made.step(next(iter(made.loader)))
    made.optimizer.zero_grad()
    made.optimizer.step(lambda: None)  # nothing new was released


def test_hooks_of_others_run_before_the_gradients_are_looked_at(private):
    """One that leaves them alone does no harm, whenever it was registered."""
    made, seen = private(), []

    def meddle(*_):
        made.model.bias.grad.add_(1.0)

    made.optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    made.step(next(iter(made.loader)))
    assert seen == [1]
    meddling = made.optimizer.register_step_pre_hook(meddle)
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.step(next(iter(made.loader)))
    meddling.remove()
    made.optimizer.zero_grad()
    made.backward(next(iter(made.loader)))
    made.optimizer.register_step_pre_hook(meddle)
    with pytest.raises(InvalidParameter, match="step hook that was registered after"):
        made.optimizer.step()


def test_parameters_that_are_put_into_the_optimizer_later_are_looked_at_too(private, points):
    """Another name for the model's memory, with a gradient of its own."""
    made = released(private())
    other = nn.Parameter(made.model.weight.data)
    other.grad = torch.ones_like(other)
    made.optimizer.param_groups[0]["params"] = [other, made.model.bias]
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.optimizer.step()


def test_a_gradient_on_a_frozen_parameter_is_refused(private):
    model = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    made = released(private(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.optimizer.step()
    model[0].weight.grad = None
    made.optimizer.step()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_without_gradients_or_on_zeros_is_allowed(private, to_none):
    """Neither depends on data. Weight decay still moves the model where there are zeros."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)
    made = released(private(model, optimizer=optimizer))
    optimizer.zero_grad(set_to_none=to_none)
    before = model.weight.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.weight) == to_none
    assert made.steps == 1


def test_two_steps_on_one_gradient_are_two_steps_on_what_was_released(private):
    made = released(private())
    for _ in range(2):
        before = made.model.weight.detach().clone()
        made.optimizer.step()
        assert not torch.equal(made.model.weight, before)
    assert made.steps == 1


class Meddling(Dataset):
    """Puts gradients into the model that is trained, while it is read."""

    def __init__(self, points, model):
        self.points, self.model = points, model

    def __len__(self):
        return 96

    def __getitem__(self, number):
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e6)
        return self.points[0][number], self.points[1][number]


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_a_step_s_own_code_puts_into_gradients_is_not_stepped_on(private, points, accumulate):
    """Nothing of it is left, on frozen parameters either."""
    model = nn.Sequential(nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2))
    # Pieces of one sample: the first is read when the batch is asked for, all others during the step.
    made = private(
        model, dataset=Meddling(points, model), mechanism=EXACT, seed=0, micro_batch=1, sample=(torch.zeros(4), 0)
    )
    batch = next(iter(made.loader))
    for parameter in model.parameters():
        parameter.grad = None
    made.backward(batch, accumulate=accumulate)
    assert all(parameter.grad is None for parameter in model[0].parameters())
    assert all(float(parameter.grad.abs().max()) <= 0.5 for parameter in model[1].parameters())  # the range
    made.optimizer.step()


def test_the_optimizer_is_an_ordinary_one_again_once_training_is_closed(private, points):
    made = released(private())
    made.close()
    backward_again(made.model, points)
    made.optimizer.step()
    made.close()


def test_the_optimizer_does_not_keep_private_training_alive(points):
    import bqsgd

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*points), batch_size=32)
    asked = {"loss_fn": LOSS, "epsilon": 8.0, "delta": 1e-5, "epochs": 2, "mechanism": EXACT, "range": 0.5}
    made = weakref.ref(bqsgd.make_private(model, optimizer, loader, ledger=None, seed=0, **asked))
    gc.collect()
    assert made() is None
    backward_again(model, points)
    optimizer.step()  # nobody is left whose guarantee it could break


def test_an_optimizer_can_be_copied_and_pickled(private, points):
    made = released(private())
    for other in (copy.deepcopy(made.optimizer), pickle.loads(pickle.dumps(made.optimizer))):
        other.param_groups[0]["params"][0].grad = torch.ones(2, 4)
        other.step()  # it has parameters of its own
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    backward_again(made.model, points)
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        made.optimizer.step()


def test_two_trainings_of_one_model_may_take_turns(private, points):
    """Each has data and a ledger of its own."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    one, other = (private(model, optimizer=optimizer, seed=seed) for seed in (1, 2))
    for first, second in zip(one.loader, other.loader, strict=True):
        one.step(first)
        other.step(second)
        one.optimizer.step()
    backward_again(model, points)
    with pytest.raises(InvalidParameter, match=NOT_RELEASED):
        optimizer.step()
    assert (one.steps, other.steps) == (3, 3)
