"""Tasks of one's own: data sets, loaders, metrics and models of any kind; what is refused before there is a ledger."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task

CONFIG = Config.of(
    clients=2, rounds=2, batch_size=16, levels=4, trials=60, seed=1, evaluate_every=1, workers=1, range=0.05
)


def data(samples=32, shift=0):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(shift))
    return x, (x[:, 0] > 0).long()


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def run(task, folder=None, config=CONFIG):
    with Run.start(task, config, folder=folder) as opened:
        records = list(opened.rounds())
    return opened, records


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number], self.y[number]


class Dicts(Pairs):
    def __getitem__(self, number):
        return {"x": self.x[number], "y": self.y[number]}


def by_name(model, batch):
    return model(batch["x"]), batch["y"]


PAIR = torch.zeros(4), torch.tensor(0)
DICT = {"x": torch.zeros(4), "y": torch.tensor(0)}
FORMS = {
    "arrays": (lambda x, y: (x.numpy(), y.numpy()), None, None),
    "tensors": (TensorDataset, None, None),
    "data set": (Pairs, None, PAIR),
    "loader": (lambda x, y: DataLoader(Pairs(x, y), batch_size=4, shuffle=True), None, PAIR),
    "dicts": (Dicts, by_name, DICT),
    "dicts in a loader": (lambda x, y: DataLoader(Dicts(x, y), batch_size=4), by_name, DICT),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_same_model(form):
    """Bit for bit: a sample's row and gradient do not depend on how it was read."""
    make, forward, sample = FORMS[form]
    expected, _ = run(Task(make_model=linear, shares=[data(32, 0), data(40, 1)], test=data(64, 2)))
    shares = [make(*data(32, 0)), make(*data(40, 1))]
    found, records = run(
        Task(make_model=linear, shares=shares, test=make(*data(64, 2)), forward=forward, sample=sample)
    )
    assert np.array_equal(found.model, expected.model)
    assert found.summary.accuracy == expected.summary.accuracy == records[-1].test_accuracy


def test_a_run_gives_back_a_state_dict():
    opened, _ = run(Task(make_model=linear, shares=[data(), data()]))
    model = nn.Linear(4, 2)
    model.load_state_dict(opened.state_dict())
    assert np.array_equal(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy(), opened.model)


def test_a_state_dict_holds_frozen_parameters_and_buffers_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = nn.Linear(4, 3).requires_grad_(False), nn.Linear(3, 2)
            self.register_buffer("scale", torch.rand(1))

        def forward(self, x):
            return self.head(self.frozen(x) * self.scale)

    made = []

    def make():
        made.append(Scaled())
        return made[0]

    opened, _ = run(Task(make_model=make, shares=[data(), data()]))
    state = opened.state_dict()
    assert sorted(state) == sorted(made[0].state_dict())
    assert torch.equal(state["scale"], made[0].scale)


def worst_error(outputs, targets):
    return (outputs.squeeze(1) - targets).abs().max()


def squared_error(outputs, targets):
    return (outputs.squeeze(1) - targets).square()


def test_regression_has_a_loss_and_a_metric_of_its_own(tmp_path):
    shares = [(x, x[:, 1]) for x, _ in (data(32, 0), data(32, 1))]
    test = data(40, 2)[0], data(40, 2)[0][:, 1]
    task = Task(make_model=lambda: nn.Linear(4, 1), shares=shares, test=test, loss_fn=squared_error)
    opened, records = run(task, tmp_path / "plain")
    assert opened.summary.accuracy is None
    assert opened.summary.loss > 0
    with_metric = Task(
        make_model=lambda: nn.Linear(4, 1), shares=shares, test=test, loss_fn=squared_error, metric=worst_error
    )
    opened, records = run(with_metric, tmp_path / "metric")
    assert opened.summary.metric_name == "worst_error"
    assert opened.summary.metric == records[-1].test_metric > 0
    assert (tmp_path / "metric" / "report.html").exists()


def test_multi_label_targets_have_a_loss_and_no_accuracy():
    def loss(outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(dim=1)

    x, y = data(32)
    many = torch.stack([y, 1 - y, y], 1).float()
    task = Task(make_model=lambda: nn.Linear(4, 3), shares=[(x, many), (x, many)], test=(x, many), loss_fn=loss)
    opened, _ = run(task)
    assert (opened.summary.accuracy, opened.summary.loss > 0) == (None, True)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def broken_metric(outputs, targets):
    raise ZeroDivisionError("no positives")


REFUSED = {
    "batch norm": ({"make_model": lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))}, "GroupNorm"),
    "a reduced loss": ({"loss_fn": nn.CrossEntropyLoss()}, "reduction='none'"),
    "other shapes": ({"make_model": lambda: nn.Linear(5, 2)}, "fails on samples of the shapes"),
    "a metric that fails": ({"metric": broken_metric}, "no positives"),
    "a metric without a number": ({"metric": lambda outputs, targets: float("nan")}, "NaN"),
    "test data of other shapes": ({"test": (torch.ones(4, 9), torch.zeros(4).long())}, "cannot be evaluated"),
    "a stream": ({"shares": [Stream(), Stream()]}, "map-style"),
    "a weighted loader": (
        {"shares": [DataLoader(TensorDataset(*data()), 4, sampler=WeightedRandomSampler([1.0] * 32, 32))] * 2},
        "same probability",
    ),
    "three arrays": ({"shares": [(*data(), data()[1])] * 2}, "TensorDataset"),
    "inputs that do not pair up": ({"shares": [(data(8)[0], data(9)[1])] * 2}, "do not pair up"),
    "dicts without a forward": ({"shares": [Dicts(*data())] * 2, "sample": DICT}, "forward="),
    "a data set of unknown form": ({"shares": [Pairs(*data())] * 2}, r"sample=\(torch.zeros\(3, 32, 32\), 0\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_fail_in_a_round_is_refused_before_there_is_a_ledger(case, tmp_path):
    changes, says = REFUSED[case]
    given = {"make_model": linear, "shares": [data(), data()], "test": data(16)} | changes
    with pytest.raises(InvalidParameter, match=says):
        Run.start(Task(**given), CONFIG.but(seed=None), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_dropout_trains_the_same_with_any_number_of_workers():
    """Threads share one generator of masks; a client that draws has it alone."""

    def dropping():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 2))

    task = Task(make_model=dropping, shares=[data(32, shift) for shift in range(2)])
    one, two = (run(task, config=CONFIG.but(workers=workers))[0] for workers in (1, 2))
    assert np.array_equal(one.model, two.model)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.gradients.SlowGradientsWarning")
def test_a_gru_trains():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.layer(x.unsqueeze(1))[0][:, -1])

    _, records = run(Task(make_model=Net, shares=[data(), data()], test=data()))
    assert [record.used for record in records] == [2, 2]
