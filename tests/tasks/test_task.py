"""Tasks of one's own: data sets, loaders, metrics and models of any kind; what is refused before there is a ledger."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import to_vector
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
    assert opened.summary.metric_name == "R2"
    assert records[-1].test_metric == opened.summary.metric < 1
    with_metric = Task(
        make_model=lambda: nn.Linear(4, 1), shares=shares, test=test, loss_fn=squared_error, metric=worst_error
    )
    opened, records = run(with_metric, tmp_path / "metric")
    assert opened.summary.metric_name == "worst_error"
    assert opened.summary.metric == records[-1].test_metric > 0
    assert (tmp_path / "metric" / "report.html").exists()


def evaluated(model, test, loss_fn, **given):
    """What a model with fixed weights scores on the test data."""
    task = Task(make_model=lambda: model, shares=[test], test=test, loss_fn=loss_fn, **given)
    return task.evaluator(model)(to_vector(model))


def with_weights(outputs, *, after=()):
    """Linear in the first inputs: output k is input k."""
    layer = nn.Linear(4, outputs, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4)[:outputs])
    return nn.Sequential(layer, *after)


def per_sample(loss):
    return lambda outputs, targets: loss(outputs, targets).reshape(len(outputs), -1).sum(dim=1)


def test_one_score_per_sample_is_a_binary_task_not_a_choice_among_one_class():
    """An argmax over one score is always 0: it would report the share of class 0."""
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).float()
    y[:20] = 1 - y[:20]  # a tenth is wrong
    logits = per_sample(nn.BCEWithLogitsLoss(reduction="none"))
    assert evaluated(with_weights(1), (x, y[:, None]), logits).accuracy == pytest.approx(0.9)
    squeezed = with_weights(1, after=[nn.Flatten(0)])
    assert evaluated(squeezed, (x, y), logits).accuracy == pytest.approx(0.9)
    probabilities = with_weights(1, after=[nn.Sigmoid()])
    bce = per_sample(nn.BCELoss(reduction="none"))
    assert evaluated(probabilities, (x, y[:, None]), bce).accuracy == pytest.approx(0.9), "the threshold is 1/2"
    whole = evaluated(squeezed, (x, y.long()), lambda outputs, targets: logits(outputs, targets.float()))
    assert whole.accuracy == pytest.approx(0.9)


def test_several_labels_count_one_by_one():
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    many = (x[:, :3] > 0).float()
    many[:, 0] = 1 - many[:, 0]
    loss = per_sample(nn.BCEWithLogitsLoss(reduction="none"))
    assert evaluated(with_weights(3), (x, many), loss).accuracy == pytest.approx(2 / 3)


def test_regression_has_r2_or_the_mean_absolute_error():
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :1] + 0.5
    squares = per_sample(nn.MSELoss(reduction="none"))
    result = evaluated(with_weights(1), (x, y), squares)
    assert (result.accuracy, result.metric_name) == (None, "R2")
    assert result.metric == pytest.approx(1 - 0.25 / float(y.var(correction=0)), rel=1e-4)
    result = evaluated(with_weights(1), (x, y), squares, metric="MAE")
    assert (result.metric, result.metric_name) == (pytest.approx(0.5), "MAE")
    with pytest.raises(InvalidParameter, match="does not fit these targets, which are numbers"):
        evaluated(with_weights(1), (x, y), squares, metric="accuracy")


def test_classes_at_every_position_have_an_accuracy():
    x = torch.randn(50, 2, 3, generator=torch.Generator().manual_seed(0))
    loss = per_sample(nn.CrossEntropyLoss(reduction="none"))
    model = nn.Conv1d(2, 2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2)[:, :, None])
    assert evaluated(model, (x, x.argmax(dim=1)), loss).accuracy == 1


def test_a_clip_that_rounds_gradients_away_is_named(caplog):
    task = Task(make_model=linear, shares=[data()])
    task.check(CONFIG.but(clients=1, clip="l2", clip_norm=1e6, range=1.0), linear())
    assert "the clip bound 1e+06 is large: gradients are rounded to whole steps of 0.25" in caplog.text
    caplog.clear()
    task.check(CONFIG.but(clients=1, clip="l2", clip_norm=10.0, range=1.0), linear())
    assert "clip bound" not in caplog.text


class Squeezed(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        return super().forward(x).squeeze()


def labelled():
    x, y = data()
    return x, y.float()


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
    "targets of no known kind": (
        {
            "test": (torch.ones(4, 4), torch.zeros(4, 3)),
            "loss_fn": lambda o, t: o.sum(1) - t.reshape(len(o), -1).sum(1),
        },
        "no metric is known for outputs of the shape",
    ),
    "an unknown metric": ({"metric": "f1"}, "accuracy, R2, MAE, got 'f1'"),
    "NaN in the test data": (
        {"test": (torch.tensor([[0.0] * 4, [float("nan")] * 4]), torch.zeros(2).long())},
        "first is sample 1",
    ),
    "a squeeze of a batch of one": (
        {"make_model": Squeezed, "loss_fn": nn.BCEWithLogitsLoss(reduction="none"), "shares": [labelled()] * 2},
        r"write \.squeeze\(1\)",
    ),
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


def test_a_loss_that_takes_targets_between_0_and_1_is_tried_on_such_targets():
    """nn.BCELoss raises for any other target; the bilinear layer has no loops of ours, so torch's kernels run it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Bilinear(4, 4, 1)

        def forward(self, x):
            return torch.sigmoid(self.head(x, x)).squeeze(1)

    x, y = data()
    task = Task(make_model=Net, shares=[(x, y.float())] * 2, loss_fn=nn.BCELoss(reduction="none"), test=(x, y.float()))
    opened, records = run(task)
    assert opened.steps == 2
    assert 0 <= records[-1].test_accuracy <= 1
