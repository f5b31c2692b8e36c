"""`make_private` with a model on the simulated device, in half precision and under autocast."""

import copy

import pytest
import torch
from private_loops import EXACT, QUIET
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bqsgd
from bqsgd._src.persample import device
from bqsgd._src.runtime import generators
from bqsgd.clips import Dual, Normalize, PerLayer


def trained(private, steps=2):
    """Take some steps, and return the parameters on the processor."""
    for _, batch in zip(range(steps), private.loader, strict=False):
        private.step(batch)
    return [parameter.detach().float().cpu() for parameter in private.model.parameters()]


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Linear(4, 2)


@pytest.mark.parametrize(
    "more", [{}, {"clip": Dual(1.0, 0.3)}, {"clip": PerLayer(Normalize(1.0))}, {"one_in": 2}], ids=str
)
def test_a_loop_on_the_device_is_that_on_the_processor_and_gradients_never_leave_it(
    private, sim, model, monkeypatch, more
):
    there = copy.deepcopy(model).to(sim.DEVICE)
    made = private(there, seed=3, **more)
    size = made._objective.dimension
    sim.left.clear()
    found = trained(made)
    assert {shape.numel() for shape in sim.left} <= {1, size + 1, *(p.numel() for p in model.parameters())}
    assert sim.left.count(torch.Size([size + 1])) == 2  # one sum a step
    assert all(p.grad.device == p.device == sim.DEVICE for p in there.parameters())
    assert "sim" in made.guarantee().assumption
    monkeypatch.setattr(device, "forced", True)
    same = trained(private(copy.deepcopy(model), seed=3, **more))
    assert all(map(torch.equal, found, same))
    monkeypatch.setattr(device, "forced", False)
    ordinary = trained(private(model, seed=3, **more))
    assert all(torch.allclose(left, right, atol=1e-2) for left, right in zip(found, ordinary, strict=True))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_parameters_in_half_precision_are_trained(private, sim, model, kind, where, points):
    dataset = TensorDataset(points[0].to(kind), points[1])
    here = model.to(where, kind)
    before = [p.detach().clone() for p in here.parameters()]
    made = private(here, dataset=dataset, seed=3, mechanism=EXACT)
    trained(made)
    assert all(p.dtype == p.grad.dtype == kind for p in here.parameters())
    assert not any(torch.equal(p.detach().cpu(), old.cpu()) for p, old in zip(here.parameters(), before, strict=True))
    here.weight.grad.mul_(1.5)
    with pytest.raises(bqsgd.InvalidParameter, match="was not released"):
        made.optimizer.step()


def test_masks_on_the_device_come_from_the_operating_system(private, sim):
    """A program that seeds the device's generator learns nothing of the masks, and finds its generator as it was."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).to(sim.DEVICE)
    made = private(model, mechanism=EXACT, ledger=None, seed=5)
    generator = sim.module.default_generators[0]
    assert made._objective.draws
    drawn = []
    for batch, _ in zip(made.loader, range(2), strict=False):
        generator.manual_seed(7)
        before = generator.get_state()
        made.step(batch)
        assert torch.equal(generator.get_state(), before)
        drawn.append(model[1].weight.grad.cpu())
    assert not torch.equal(*drawn)


def test_masks_on_a_device_whose_generator_is_not_shown_are_refused(private, sim, monkeypatch):
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).to(sim.DEVICE)
    monkeypatch.setattr(generators, "accelerator_generators", list)
    with pytest.raises(bqsgd.InvalidParameter, match="whose generator torch does not show"):
        private(model)


def test_a_model_half_on_one_device_is_refused(private, sim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).to(sim.DEVICE))
    with pytest.raises(bqsgd.InvalidParameter, match="several devices"):
        private(model)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(sim.DEVICE)
    made = private(whole, ledger=None, seed=1)
    batch = next(iter(made.loader))
    whole[0].to("cpu")
    with pytest.raises(bqsgd.InvalidParameter, match=r"several devices|have changed"):
        made.step(batch)


class Toggling(Dataset):
    """Points of which one turns autocast on when it is read, in the thread that trains."""

    def __init__(self, points, guilty):
        self.points, self.guilty = points, guilty

    def __len__(self):
        return len(self.points[0])

    def __getitem__(self, number):
        if number == self.guilty:
            torch.set_autocast_enabled("cpu", True)
            torch.set_autocast_enabled("sim", True)
        return self.points[0][number], self.points[1][number]


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_a_record_that_turns_autocast_on_changes_no_other_samples_program(private, sim, model, points, where):
    def loop(guilty):
        loader = DataLoader(Toggling(points, guilty), batch_size=96)  # every record is in every batch
        made = private(copy.deepcopy(model).to(where), loader=loader, seed=3)
        try:
            made.step(next(iter(made.loader)))
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.set_autocast_enabled("sim", False)
        return [parameter.grad.cpu() for parameter in made.model.parameters()]

    assert all(map(torch.equal, loop(None), loop(5)))


@pytest.mark.parametrize("where", ["cpu", "sim"])
def test_autocast_around_a_step_is_that_of_the_samples_program(private, sim, model, where):
    def step(enabled):
        made = private(copy.deepcopy(model).to(where), seed=3, mechanism=bqsgd.Mechanism(levels=100_000, trials=0))
        batch = next(iter(made.loader))
        with torch.autocast(where, dtype=torch.bfloat16, enabled=enabled):
            made.step(batch)
        return made.model.weight.grad.cpu()

    plain, cast = step(False), step(True)
    assert not torch.equal(plain, cast)
    assert torch.allclose(plain, cast, atol=0.02)


def test_half_precision_works_with_the_planned_mechanism(private, sim, model):
    made = private(model.to(sim.DEVICE, torch.bfloat16), forward=halved, mechanism=QUIET)
    trained(made, 1)
    assert made.guarantee().epsilon <= 8


def halved(model, batch):
    return model(batch[0].to(torch.bfloat16)), batch[1]
