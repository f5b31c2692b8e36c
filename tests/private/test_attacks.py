"""A loop that is wrong, or hostile to its own guarantee: refused before anything is spent, or harmless."""

import copy
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import time

import numpy as np
import pytest
import torch
from private_loops import EXACT, LOSS, recorded
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bqsgd
from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError, NonFiniteInput
from bqsgd.clips import L2


def gradient(made, batch):
    made.optimizer.zero_grad()
    made.backward(batch)
    return torch.cat([p.grad.flatten() for p in made.model.parameters() if p.requires_grad])


def one_by_one(model, inputs, targets, loss=LOSS):
    """The clipped mean over 96 samples from autograd, which sees one sample and a model that has seen no other."""
    total = 0
    for x, y in zip(inputs.split(1), targets.split(1), strict=True):
        own = copy.deepcopy(model)
        trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(loss(own(x), y).sum(), trained)
        flat = torch.cat([part.flatten() for part in found])
        total = total + flat * min(1, 1 / float(flat.norm().clamp(min=1e-30))) / 96
    return total


def test_a_batch_is_for_one_step(private, tmp_path):
    made = private()
    batches = iter(made.loader)
    first = next(batches)
    made.step(first)
    weight = made.model.weight.detach().clone()
    with pytest.raises(InvalidParameter, match="use each batch once"):
        made.step(first)
    second = next(batches)
    next(batches)
    for stale in (first, second):
        with pytest.raises(InvalidParameter, match="before asking for the next"):
            made.step(stale)
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copying(second)
    assert torch.equal(weight, made.model.weight)
    made.close()
    assert recorded(tmp_path / "me.ledger") == 1


def test_batches_of_others_are_refused(private, points, tmp_path):
    one, other = private(), private(ledger=tmp_path / "other.ledger")
    for batch in (next(iter(other.loader)), points, None):
        with pytest.raises(InvalidParameter):
            one.step(batch)
    assert one.steps == 0
    one.close()
    assert recorded(tmp_path / "me.ledger") == 0


def test_private_training_exists_once(private):
    made = private()
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copying(made)


def test_a_copied_optimiser_changes_nothing(private):
    made = private()
    other = copy.deepcopy(made.optimizer)
    batch = next(iter(made.loader))
    before = made.model.weight.detach().clone()
    made.backward(batch)
    other.step()
    assert torch.equal(made.model.weight, before)
    made.optimizer.step()
    assert not torch.equal(made.model.weight, before)


def test_what_is_trained_cannot_change_in_mid_run(private, tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    made = private(model)
    batches = iter(made.loader)
    made.step(next(batches))
    model[0].weight.requires_grad_(False)
    with pytest.raises(InvalidParameter, match="parameters that require gradients have changed"):
        made.step(next(batches))
    model[0].weight.requires_grad_(True)
    model[1] = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(InvalidParameter, match="mixes samples"):
        made.step(next(batches))
    model[1] = nn.Tanh()
    model[2].weight.data = model[2].weight.data.double()
    with pytest.raises(InvalidParameter, match="must be float32"):
        made.step(next(iter(made.loader)))
    assert made.steps == 1
    made.close()
    assert recorded(tmp_path / "me.ledger") == 1


def test_a_data_set_that_grows_is_refused(private):
    samples = [(torch.ones(4), 0)] * 64
    made = private(dataset=samples)
    batches = iter(made.loader)
    made.step(next(batches))
    batch = next(batches)
    samples.append(samples[0])
    with pytest.raises(InvalidParameter, match="65 samples now"):
        made.step(batch)
    with pytest.raises(InvalidParameter, match="65 samples now"):
        next(iter(made.loader))
    assert made.steps == 1


def test_changing_the_loader_changes_nothing(private, points):
    loader = DataLoader(TensorDataset(*points), batch_size=32)
    made = private(loader=loader)
    loader.collate_fn = None
    for batch in made.loader:
        made.step(batch)
    assert made.plan.release.terms.sampling.rate == pytest.approx(32 / 96)


def test_gradients_from_elsewhere_are_not_stepped_on(private, points):
    made = private()
    batches = iter(made.loader)
    LOSS(made.model(points[0]), points[1]).mean().backward()
    with pytest.raises(InvalidParameter, match="leave out loss"):
        made.backward(next(batches))
    assert made.steps == 0
    made.step(next(batches))  # clears them
    assert made.steps == 1


def test_accumulating_by_hand_adds_up_and_counts_every_batch(private):
    model = nn.Linear(4, 2)
    alone, made = private(copy.deepcopy(model), seed=2), private(model, seed=2)
    first, second, _ = (gradient(alone, batch) for batch in alone.loader)
    batches = iter(made.loader)
    made.backward(next(batches))
    made.backward(next(batches), accumulate=True)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), first + second)
    assert made.steps == 2


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
def test_a_loss_that_raises_on_a_sample_costs_that_sample_and_no_more(private, points):
    """The step is counted, so there is a gradient; the other samples count as they would have without it."""
    model = nn.Linear(4, 2)

    def picky(outputs, targets):
        if bool((targets == 7).any()):
            raise RuntimeError("seven")
        return LOSS(outputs, targets)

    targets = points[1].clone()
    targets[5] = 7
    kept = [n for n in range(96) if n != 5]
    whole = private(
        model, dataset=TensorDataset(points[0], targets), loss_fn=picky, mechanism=EXACT, seed=0, batch_size=96
    )
    found = gradient(whole, next(iter(whole.loader)))
    assert (found - one_by_one(model, points[0][kept], points[1][kept])).abs().max() <= 0.6e-3
    assert whole.dropped == 1


def test_samples_that_are_not_finite_or_cannot_be_read_count_as_zero(private, points):
    class Torn(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, number):
            if number == 3:
                raise OSError("torn page")
            x = points[0][number]
            return (x * float("nan") if number == 4 else x), points[1][number]

    made = private(dataset=Torn(), seed=0, batch_size=96)
    assert gradient(made, next(iter(made.loader))).isfinite().all()
    assert (made.dropped, made.steps) == (2, 1)


def test_a_sample_of_another_shape_counts_as_zero_if_the_model_cannot_take_it(private, points):
    samples = [(x, int(y)) for x, y in zip(*points, strict=True)]
    samples[7] = (torch.ones(5), 0)
    made = private(dataset=samples, seed=0, batch_size=96)
    gradient(made, next(iter(made.loader)))
    assert made.dropped == 1


def test_two_objects_on_one_ledger_share_its_budget(private, tmp_path):
    path = tmp_path / "shared.ledger"
    noisy = bqsgd.Mechanism(levels=1, trials=20)
    both = [private(ledger=path, epsilon=0.5, mechanism=noisy, epochs=50) for _ in range(2)]

    def loop():
        while True:
            for one, other in zip(both[0].loader, both[1].loader, strict=True):
                both[0].step(one)
                both[1].step(other)

    with pytest.raises(BudgetExhausted):
        loop()
    taken = sum(made.steps for made in both)
    for made in both:
        made.close()
    with bqsgd.Ledger(path) as ledger:
        assert ledger.guarantee().epsilon <= 0.5
        assert ledger.spent_rounds >= taken > 0


def test_a_second_training_is_planned_for_what_is_left(private, tmp_path):
    path = tmp_path / "kept.ledger"
    first = private(ledger=path, epsilon=0.5, mechanism=bqsgd.Mechanism(levels=1, trials=20), epochs=1)
    for batch in first.loader:
        first.step(batch)
    first.close()
    second = private(ledger=path, epsilon=0.5, mechanism=bqsgd.Mechanism(levels=1, trials=20), epochs=1)
    assert second.plan.guarantee.epsilon > first.plan.guarantee.epsilon


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_take_a_step(private):
    made = private()
    batch = next(iter(made.loader))
    child = os.fork()
    if child == 0:
        try:
            made.step(batch)
        except LedgerError:
            os._exit(17)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    made.step(batch)


def test_a_step_needs_gradients_and_a_finite_model(private):
    made = private()
    batches = iter(made.loader)
    with torch.inference_mode(), pytest.raises(InvalidParameter, match="inference_mode"):
        made.step(next(batches))
    with torch.no_grad():
        made.step(next(batches))  # harmless: per-sample gradients are taken all the same
        assert made.model.weight.grad.abs().sum() > 0
        made.model.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteInput):
        made.step(next(batches))
    assert made.steps == 1


class Remembering(nn.Module):
    """Writes what it saw into a buffer, which is part of the model that is released."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.seen.copy_(x[0])
        return self.head(x)


class Renaming(nn.Module):
    """The same with new tensors in the place of the old, and a buffer more."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen = x[0].clone()
        self.register_buffer("more", x[0].clone())
        return self.head(x)


class Rewriting(nn.Module):
    """Writes into its parameters, one of which is frozen."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.largest = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.head.bias.add_(x.max())
            self.largest.copy_(torch.maximum(self.largest, x.max()))
        return self.head(x)


def test_buffers_of_the_released_model_do_not_remember_the_data(private):
    made = private(Remembering())
    for batch in made.loader:
        made.step(batch)
    assert torch.equal(made.model.seen, torch.zeros(4))
    made = private(Renaming())
    made.step(next(iter(made.loader)))
    assert {name for name, _ in made.model.named_buffers()} == {"seen"}
    assert torch.equal(made.model.seen, torch.zeros(4))
    rewriting = Rewriting()
    before = copy.deepcopy(rewriting.state_dict())
    made = private(rewriting, optimizer=torch.optim.SGD(rewriting.head.parameters(), lr=0.0))
    made.step(next(iter(made.loader)))
    assert all(torch.equal(value, before[name]) for name, value in rewriting.state_dict().items())


def test_a_loss_over_the_batch_sees_one_sample(private, points):
    def against_the_others(outputs, targets):
        return (outputs - 0.5 * outputs.mean(dim=0)).square().sum(dim=1)

    model = nn.Linear(4, 2)
    made = private(model, loss_fn=against_the_others, mechanism=EXACT, seed=0, batch_size=96)
    expected = one_by_one(model, *points, loss=against_the_others)
    assert (gradient(made, next(iter(made.loader))) - expected).abs().max() <= 0.6e-3


def test_an_open_ledger_must_have_the_same_budget(private, tmp_path):
    with bqsgd.Ledger.open(tmp_path / "open.ledger", client=0, budget_epsilon=1.0, budget_delta=1e-5) as ledger:
        with pytest.raises(InvalidParameter, match="same epsilon and delta"):
            private(ledger=ledger)
        made = private(ledger=ledger, epsilon=1.0)
        made.step(next(iter(made.loader)))
        assert ledger.spent_rounds >= 1


def test_noise_of_the_operating_system_needs_a_ledger(private):
    made = private(ledger=None)
    with pytest.raises(InvalidParameter, match="needs a ledger"):
        made.step(next(iter(made.loader)))
    assert made.steps == 0


class Drawing(Dataset):
    """Augments its samples with the generator of this number, of those that a data set may use; None for none."""

    def __init__(self, which):
        self.which = which

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return torch.tensor([0.2 if self.which is None else 0.2 * drawn()[self.which] for _ in range(16)]), 0


def drawn():
    return float(torch.rand(())), np.random.rand(), random.random()  # noqa: NPY002


def known_seeds():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


DRAWS = {"masks": None, "torch": 0, "numpy": 1, "python": 2}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("draws", DRAWS)
def test_whoever_knows_the_seeds_of_a_program_does_not_know_its_masks_and_augmentation(private, workers, draws):
    """Which mask a sample meets depends on those before it: with known masks one sample would move all the others.

    Without noise and with every sample in each step, only these draws make two steps differ by more than rounding.
    """
    masks = nn.Dropout(0.5) if draws == "masks" else nn.Identity()
    model = nn.Sequential(masks, nn.Linear(16, 2))
    dataset = Drawing(DRAWS[draws])
    loader = DataLoader(dataset, batch_size=8, num_workers=workers, generator=torch.Generator().manual_seed(0))
    made = private(model, loader=loader, mechanism=EXACT, ledger=None, clip=L2(10.0), sample=(torch.zeros(16), 0))
    found = []
    for _ in range(2):
        known_seeds()
        found.append(gradient(made, next(iter(made.loader))))
        after = drawn()
        known_seeds()
        assert after == drawn()  # the program's own draws are left alone
    assert (found[0] - found[1]).abs().max() > 1.1e-3  # two steps of the quantiser


def test_a_number_that_no_tensor_holds_costs_that_sample_and_no_more(private, points):
    samples = [(x, int(y)) for x, y in zip(*points, strict=True)]
    samples[7] = (samples[7][0], 2**70)
    made = private(dataset=samples, seed=0, batch_size=96)
    gradient(made, next(iter(made.loader)))
    assert made.dropped == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_one_epoch_at_a_time(private, persistent, points):
    """Workers that stay read for the newest iteration alone: an older one would take its samples for its own."""
    loader = DataLoader(
        TensorDataset(*points), batch_size=32, num_workers=int(persistent), persistent_workers=persistent
    )
    made = private(loader=loader, micro_batch=8)
    old = iter(made.loader)
    stale = next(old)
    made.step(next(iter(made.loader)))
    with pytest.raises(InvalidParameter, match="use each batch once"):
        made.step(stale)
    with pytest.raises(InvalidParameter, match="one epoch at a time"):
        next(old)
    assert made.steps == 1


def test_what_the_plan_was_made_for_cannot_be_set_by_hand(private):
    made, other = private(seed=0), private(seed=0, batch_size=8)
    with pytest.raises(AttributeError):
        made.loader.batch_size = 1
    made.loader = other.loader
    with pytest.raises(InvalidParameter, match="since training was planned"):
        made.step(next(iter(made.loader)))
    assert made.steps == 0


def test_a_gradient_of_the_data_on_a_frozen_parameter_is_not_stepped_on(private, points):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    LOSS(model(points[0]), points[1]).mean().backward()
    model[0].requires_grad_(False)
    model[1].zero_grad()
    made = private(model, optimizer=optimizer)
    with pytest.raises(InvalidParameter, match="leave out loss"):
        made.backward(next(iter(made.loader)))
    assert made.steps == 0


CHANGES = {
    "a layer": lambda model: model.__setitem__(1, Mixing(nn.Identity())),
    "a forward hook": lambda model: model[1].register_forward_hook(lambda layer, given, out: out - out.mean(0) / 2),
    "a backward hook": lambda model: model[1].register_full_backward_hook(
        lambda layer, g, _: (g[0] - g[0].mean(0) / 2,)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_begins_to_mix_samples_still_sees_one_at_a_time(private, points, change):
    """What was found out of it before does not stand for the changed one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    made = private(model, seed=0, mechanism=EXACT, batch_size=96)
    made.step(next(iter(made.loader)))
    CHANGES[change](model)
    found = gradient(made, next(iter(made.loader)))
    assert (found - one_by_one(model, *points)).abs().max() <= 0.6e-3


def test_every_loss_has_its_own_gradients(private, points):
    model = nn.Linear(4, 2)

    def halved(outputs, targets):
        return LOSS(outputs, targets) / 2

    for loss in (LOSS, halved):
        made = private(model, seed=0, loss_fn=loss, mechanism=EXACT, batch_size=96)
        expected = one_by_one(model, *points, loss=loss)
        assert (gradient(made, next(iter(made.loader))) - expected).abs().max() <= 0.6e-3


@pytest.mark.parametrize("kind", ["Mixing", "MixingInTraining", "RememberingInTraining"])
def test_a_model_that_looks_at_its_batch_or_remembers_it_sees_one_sample(private, points, kind):
    model = globals()[kind]()
    made = private(model, seed=0, mechanism=EXACT, batch_size=96)
    found = gradient(made, next(iter(made.loader)))
    assert (found - one_by_one(model, *points)).abs().max() <= 0.6e-3
    assert not any(buffer.any() for buffer in model.buffers())


NOTES = {
    "a range that outweighs all": {"range": 1e30},
    "no number": {"range": "1"},
    "more bits": {"mechanism": {"levels": 2**19, "trials": 0}},
    "no mechanism": {"mechanism": [1]},
    "fields of another kind": {"mechanism": {"levels": 1, "trials": 20, "rounds": 3}},
}


@pytest.mark.parametrize("note", NOTES)
def test_a_rank_gets_no_more_say_than_the_settings_give_it(private, note):
    made = private(seed=0)
    honest = {"mechanism": made.plan.mechanism.to_dict(), "range": made.range, "step": 0}
    assert made._frames_of(1, honest) == (made.plan.mechanism, made.range)
    with pytest.raises(InvalidParameter, match=r"rank 1|range"):
        made._frames_of(1, honest | NOTES[note])


def test_a_frozen_backbone_with_batch_norm_in_evaluation_mode_is_taken(private, points):
    """Its statistics are fixed then, so that samples stay apart; `model.train()` would change that in mid-run."""
    backbone = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).requires_grad_(False).eval()
    model = nn.Sequential(backbone, nn.Linear(3, 2))
    made = private(model, mechanism=EXACT, seed=0, batch_size=96)
    found = gradient(made, next(iter(made.loader)))
    expected = torch.zeros(8)
    for x, y in zip(*points, strict=True):
        parts = torch.autograd.grad(LOSS(model(x[None]), y[None]).sum(), model[1].parameters())
        own = torch.cat([part.flatten() for part in parts])
        expected += own * min(1, 1 / own.norm()) / 96
    assert (found - expected).abs().max() <= 0.6e-3
    model.train()
    with pytest.raises(InvalidParameter, match="evaluation mode"):
        made.step(next(iter(made.loader)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


class Mixing(nn.Module):
    def __init__(self, head=None):
        super().__init__()
        self.head = head or nn.Linear(4, 2)

    def forward(self, x):
        return self.head(x - x.mean(dim=0))


class MixingInTraining(Mixing):
    """As a batch norm of one's own does."""

    def forward(self, x):
        return super().forward(x) if self.training else self.head(x)


class RememberingInTraining(nn.Module):
    """Samples of one pass touch those of the next."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        out = self.head(x - self.centre)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * x.mean(dim=0))
        return out


def frozen():
    return nn.Linear(4, 2).requires_grad_(False)


def loads(loader):
    return {"loader": loader}


REFUSED = {
    "batch norm": ({"model": lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))}, "GroupNorm"),
    "a reduced loss": ({"loss_fn": nn.CrossEntropyLoss()}, "reduction='none'"),
    "a loss per token": ({"loss_fn": lambda out, y: out}, "one loss per sample"),
    "a model of another shape": ({"model": lambda: nn.Linear(5, 2)}, "fails on samples of the shapes"),
    "nothing to train": (
        {"model": frozen, "optimizer": lambda model: torch.optim.SGD(model.parameters())},
        "no trainable",
    ),
    "double precision": ({"model": lambda: nn.Linear(4, 2).double()}, "must be float32, bfloat16 or float16"),
    "an optimiser of another model": (
        {"optimizer": lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))])},
        "does not belong to the model",
    ),
    "an optimiser of half the model": ({"optimizer": lambda model: torch.optim.SGD([model.weight])}, "requires_grad_"),
    "lbfgs": ({"optimizer": lambda model: torch.optim.LBFGS(model.parameters())}, "LBFGS"),
    "a stream": (loads(lambda data: DataLoader(Stream(), batch_size=4)), "map-style"),
    "a weighted sampler": (
        loads(lambda data: DataLoader(data, batch_size=32, sampler=WeightedRandomSampler([1.0] * 96, 96))),
        "same probability",
    ),
    "sampling with replacement": (
        loads(lambda data: DataLoader(data, batch_size=32, sampler=RandomSampler(data, replacement=True))),
        "same probability",
    ),
    "a part of the samples": (
        loads(lambda data: DataLoader(data, batch_size=32, sampler=SubsetRandomSampler(range(50)))),
        "Subset",
    ),
    "batches of one's own": (loads(lambda data: DataLoader(data, batch_sampler=[[0, 1], [2, 3]])), "batch_sampler"),
    "no batches": (loads(lambda data: DataLoader(data, batch_size=None)), "no batch_size"),
    "ranks' shares": (
        loads(lambda data: DataLoader(data, batch_size=8, sampler=DistributedSampler(data, num_replicas=2, rank=0))),
        "Subset",
    ),
    "a batch of more than all": (loads(lambda data: DataLoader(Subset(data, range(5)), batch_size=8)), "5 samples"),
    "text": (loads(lambda data: DataLoader([("a", 1)] * 40, batch_size=8)) | {"sample": ("a", 1)}, "tensors"),
    "dicts without a forward": (
        loads(lambda data: DataLoader([{"x": torch.ones(4)}] * 40, batch_size=8)) | {"sample": {"x": torch.ones(4)}},
        "forward=",
    ),
    "a single tensor": (
        loads(lambda data: DataLoader([torch.ones(4)] * 40, batch_size=8)) | {"sample": torch.ones(4)},
        "forward=",
    ),
    "a data set of unknown form": (
        loads(lambda data: DataLoader([(torch.ones(4), 0)] * 40, batch_size=8)) | {"sample": None},
        r"sample=\(torch.zeros\(3, 32, 32\), 0\)",
    ),
    "a made-up record that cannot be collated": (
        loads(lambda data: DataLoader([(torch.ones(4), 0)] * 40, batch_size=8)) | {"sample": object()},
        "made-up record",
    ),
    "no budget": ({"epsilon": 0.0}, "epsilon"),
    "no epochs": ({"epochs": 0}, "epochs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_private_is_refused_before_there_is_a_ledger(private, points, tmp_path, case):
    given, says = REFUSED[case]
    given = dict(given)
    model = given.pop("model", lambda: nn.Linear(4, 2))()
    if "optimizer" in given:
        given["optimizer"] = given["optimizer"](model)
    if "loader" in given:
        given["loader"] = given["loader"](TensorDataset(*points))
    with pytest.raises(InvalidParameter, match=says):
        private(model, **given)
    assert not (tmp_path / "me.ledger").exists()


@pytest.mark.parametrize("record", [3, 70])
def test_a_sample_that_ends_its_worker_costs_itself_and_no_more(private, points, monkeypatch, record):
    """Before, all that was to be read after it in the same batch counted as zero too."""

    class Failing(DataLoader):
        """Reads in this process, and fails as torch does when a worker dies or takes too long."""

        def __iter__(self):
            for piece in self.batch_sampler:
                if record in piece:
                    raise RuntimeError("DataLoader worker exited unexpectedly")
                yield self.collate_fn([self.dataset[number] for number in piece])

    class Torn(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, number):
            if number == record:
                raise OSError("torn page")
            return points[0][number], points[1][number]

    def found(dataset):
        loader = DataLoader(dataset, batch_size=96, num_workers=1)
        made = private(copy.deepcopy(model), loader=loader, seed=0, micro_batch=8)
        monkeypatch.setattr("bqsgd._src.private._batches.DataLoader", Failing)
        steps = [gradient(made, batch) for batch in made.loader]
        return torch.stack(steps), made.dropped

    model = nn.Linear(4, 2)
    expected, lost = found(Torn())
    assert lost == 1
    gradients, dropped = found(TensorDataset(*points))
    assert dropped == 1
    assert torch.equal(gradients, expected)


def test_a_worker_that_dies_raises_nothing_in_the_midst_of_a_step(private, points):
    """Torch's own alarm does, wherever the program then is: also after the spend."""
    before = set(multiprocessing.active_children())
    loader = DataLoader(TensorDataset(*points), batch_size=96, num_workers=1)
    batches = iter(private(loader=loader, seed=0, micro_batch=8).loader)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - before
    worker.kill()
    assert multiprocessing.connection.wait([worker.sentinel], timeout=60)
    time.sleep(0.1)
    assert not worker.is_alive()
