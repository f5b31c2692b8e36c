"""Samples in another form than the first: whatever a collate_fn makes of one, it adds no more than one sample may."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.objectives import objective_of
from bqsgd._src.client.samples import reader_of
from bqsgd._src.persample.clips import Dual
from bqsgd._src.settings.config import Config
from tiny_task import client_of

CLIP = Dual(norm=0.5, bound=0.1)
LOSS = nn.CrossEntropyLoss(reduction="none")


def rows(value, inputs=1, targets=None):
    return torch.full((inputs, 3), float(value)), torch.zeros(inputs if targets is None else targets, dtype=torch.int64)


def pair(samples):
    return tuple(torch.cat(column) for column in zip(*samples, strict=True))


def named(samples):
    return dict(zip("xy", pair(samples), strict=True))


def untouched(samples):
    return samples[0]


class Shares(list):
    """None cannot be read: a null record."""

    def __getitem__(self, number):
        found = super().__getitem__(number)
        if found is None:
            raise OSError("no such file")
        return found


def model():
    made = nn.Linear(3, 2)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


def config(method):
    return Config.of(
        clients=1, method=method, rounds=1, rate=1.0, batch_size=4, range=0.1, levels=50, trials=100, seed=1
    )


@pytest.mark.parametrize(
    ("method", "collate", "forward"),
    [
        ("least-squares", pair, None),
        ("sgd", pair, None),
        ("sgd", named, lambda model, batch: (model(batch["x"]), batch["y"])),
    ],
    ids=["moments", "gradients", "gradients of a dict"],
)
def test_a_sample_that_collates_to_many_rows_moves_the_mean_by_no_more_than_one(method, collate, forward):
    """Before, it counted once a row, or the rows of the samples behind it counted as those of others."""
    objective = objective_of(config(method), model(), LOSS, forward)

    def mean(record):
        share = Shares([rows(1), record, *(rows(-1, 7) for _ in range(10))])
        reader = reader_of(DataLoader(share, collate_fn=collate), rows(1))
        objective.check(reader.form())
        return objective.mean(reader.read(range(len(share))))[0]

    moved, stated = mean(rows(1, 7)) - mean(None), CLIP.sensitivity(batch_size=1, range=1.0)
    assert np.linalg.norm(moved) <= stated.l2
    assert np.abs(moved).max() <= stated.linf


@pytest.mark.parametrize("method", ["least-squares", "sgd"])
@pytest.mark.parametrize(
    "record",
    [
        rows(1, 7),
        rows(1, 0),
        rows(1, 2, 1),
        rows(1, 1, 2),
        (torch.ones(3), torch.tensor(0)),
        (torch.ones(1, 3).to_sparse(), torch.tensor([0])),
        (torch.empty(1, 3, device="meta"), torch.tensor([0])),
        (torch.ones(1, 3), "a word"),
        (torch.ones(1, 3), SimpleNamespace(shape=[1])),
        (),
    ],
    ids=["7 rows", "no rows", "2 inputs", "2 targets", "no row", "sparse", "no values", "word", "unhashable", "empty"],
)
def test_a_sample_of_another_form_counts_as_zero_and_a_frame_comes(method, record):
    def frame(record):
        share = DataLoader(Shares([rows(1), record, rows(-1)]), collate_fn=untouched)
        client = client_of(config(method), model(), LOSS, share, sample=rows(1))
        return client.update(np.zeros(8, np.float32), 0).frame

    assert frame(record) == frame(None)


def mean(made, samples, loss=LOSS, forward=None, first=0):
    """The mean of all samples but those before `first`; sample 0 has the shapes for which the model is tried."""
    objective = Objective(made, loss, clip=CLIP, batch_size=1, forward=forward)
    reader = reader_of(Shares(samples), samples[0])
    objective.check(reader.form())
    return objective.mean(reader.read(range(first, len(samples))))[0]


def points(count, width=3, scale=1.0):
    generator = torch.Generator().manual_seed(width)
    return [(torch.randn(width, generator=generator) * scale, torch.tensor(n % 2)) for n in range(count)]


def of_items(model, batch):
    return model(batch[0]), batch[1]


def of_names(model, batch):
    return model(batch["x"]), batch["y"]


def with_names(samples):
    return [None if sample is None else dict(zip("xy", sample, strict=True)) for sample in samples]


def test_a_sample_of_another_type_does_not_change_the_type_of_others():
    """Torch looks into any sequence, and joins float32 with float64 to float64, which the model does not take."""
    others = [deque(point) for point in points(10)]
    record = deque([torch.ones(3, dtype=torch.float64), torch.tensor(0)])
    made = nn.Linear(3, 2)
    assert np.array_equal(
        mean(made, [*others, record], forward=of_items), mean(made, [*others, None], forward=of_items)
    )


def test_a_sample_that_belongs_to_a_graph_is_taken_out_of_it():
    """It could not leave a worker process, and the step would wait for ever."""
    x = torch.ones(1, 3).requires_grad_() * 2
    reader = reader_of(DataLoader(Shares([(x, torch.tensor([0]))]), collate_fn=untouched))
    (part,) = reader.read([0])
    assert not part.data[0].requires_grad


class Own(nn.Module):
    """Linear in the sum of the features; beyond 10 of them it mixes samples."""

    def __init__(self):
        super().__init__()
        self.out, self.longest = nn.Linear(1, 2), 3

    def forward(self, x):
        found = x.sum(dim=1, keepdim=True)
        return self.out(found - found.mean(dim=0) if x.shape[1] > 10 else found)


@pytest.mark.parametrize(("form", "forward"), [(list, None), (with_names, of_names)], ids=["pairs", "dicts"])
def test_a_new_shape_for_which_the_model_mixes_samples_counts_as_zero(form, forward):
    """For dicts the model was tried with the first shape alone."""
    samples = form([*points(1), *points(10, 20)])
    assert not mean(Own(), samples, forward=forward, first=1).any()


class Growing(Own):
    """Positions relative to the longest sample so far, as caches of position encodings have it."""

    def forward(self, x):
        self.longest = max(self.longest, x.shape[1])
        return self.out((x * torch.arange(x.shape[1]) / self.longest).sum(dim=1, keepdim=True))


class GrowingBuffer(Own):
    def __init__(self):
        super().__init__()
        del self.longest
        self.register_buffer("longest", torch.tensor(3.0))

    def forward(self, x):
        self.longest = self.longest.clamp(min=x.shape[1])
        return self.out((x * torch.arange(x.shape[1]) / self.longest).sum(dim=1, keepdim=True))


@pytest.mark.parametrize("kind", [Growing, GrowingBuffer])
@pytest.mark.parametrize(("form", "forward"), [(list, None), (with_names, of_names)], ids=["pairs", "dicts"])
def test_what_a_forward_remembers_of_a_sample_does_not_reach_others(kind, form, forward):
    made, ((long, target),), others = kind(), points(1, 500, 1e-6), points(12, 3, 0.01)
    first, rest = others[0], others[1:]
    alone = mean(made, form([first, (long, target)]), forward=forward, first=1)
    without = mean(made, form([first, None, *rest]), forward=forward, first=1)
    assert np.array_equal(mean(made, form([first, (long, target), *rest]), forward=forward, first=1), alone + without)
    assert made.longest == 3


class Looking(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.out, self.activation = nn.Linear(3, 2), activation

    def forward(self, x):
        x = self.activation(x)
        return self.out(x * 0 if bool((x.abs() > 1e5).any()) else x)


class Cutting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        kept = x[:, (x != 1e6).all(0)]
        return self.out(nn.functional.pad(kept, (0, 3 - kept.shape[1])))


def looking_loss(outputs, targets):
    found = LOSS(outputs, targets.clamp(max=1))
    return found * 0 if bool((targets > 1).any()) else found


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@pytest.mark.parametrize(
    ("made", "loss"),
    [(Looking(nn.ReLU()), LOSS), (Looking(nn.SiLU()), LOSS), (Cutting(), LOSS), (nn.Linear(3, 2), looking_loss)],
    ids=["row-wise but for it", "model", "shape", "loss"],
)
def test_a_sample_whose_value_decides_what_is_computed_decides_it_for_itself(made, loss):
    first, *rest = points(10)
    for record in ((torch.full((3,), 1e6), torch.tensor(0)), (torch.ones(3), torch.tensor(2))):
        alone, without = mean(made, [first, record], loss, first=1), mean(made, [first, None, *rest], loss, first=1)
        assert np.array_equal(mean(made, [first, record, *rest], loss, first=1), alone + without)


def test_a_loss_that_weighs_a_class_against_the_others_of_the_batch_sees_one_sample():
    """Alone, each has the weight of its own batch."""
    weights = torch.tensor([1.0, 1.0, 1e4])

    def balanced(outputs, targets):
        return LOSS(outputs, targets) * weights[targets] / weights[targets].mean()

    made = nn.Linear(3, 3)
    samples = [(x, torch.tensor(n % 3)) for n, (x, _) in enumerate(points(10))]
    np.testing.assert_allclose(mean(made, samples, balanced), mean(made, samples), rtol=1e-5, atol=1e-6)
