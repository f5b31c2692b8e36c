"""Whether an answer comes, of what kind, and after how much work: none of it depends on a record.

A refusal, an error and a program that ends are messages too, and they carry no noise. So the form of a sample is public
and comes from nobody's record, whatever a record's code raises costs that record alone, and a client whose number of
samples is hidden does not show it.
"""

import signal
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from neighbours import LOSS, RANGE, gradients_one_by_one
from torch import nn
from torch.utils.data import Dataset

import bqsgd
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.settings.config import Config
from tiny_task import client_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SAMPLE = (torch.zeros(4), 0)
"""A made-up record."""


def points(samples=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


def torn(x, y):
    raise OSError("torn page")


def leaving(x, y):
    sys.exit(3)


def interrupting(x, y):
    raise KeyboardInterrupt


DAMAGES = {
    "cannot be read": torn,
    "ends the program": leaving,
    "interrupts the program": interrupting,
    "has another shape": lambda x, y: (torch.ones(5), y),
    "has another type": lambda x, y: (x.double(), y),
    "has no target": lambda x, y: (x,),
    "is text": lambda x, y: "lost",
    "is nothing": lambda x, y: None,
    "is not finite": lambda x, y: (x * float("nan"), y),
}


class Files(Dataset):
    """Records that are read one by one; the one at `damaged` goes through `damage` first."""

    def __init__(self, damaged=None, damage=torn):
        self.samples, self.damaged, self.damage = points(), damaged, damage
        self.read = 0

    def __len__(self):
        return 32

    def __getitem__(self, number):
        self.read += 1
        x, y = (part[number] for part in self.samples)
        return self.damage(x, int(y)) if number == self.damaged else (x, int(y))


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


@contextmanager
def nothing_escapes():
    """Fail where a record ends the program, which would otherwise end the tests."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        pytest.fail(f"{error!r} of a record escapes")


def released(made):
    with nothing_escapes():
        made.backward(next(iter(made.loader)))
    return torch.cat([parameter.grad.flatten() for parameter in made.model.parameters()])


def expected(model, kept):
    """The mean of the clipped gradients of these samples, over all 32."""
    x, y = points()
    gradients = gradients_one_by_one(model, x[kept], y[kept])
    return (gradients / gradients.norm(dim=1, keepdim=True).clamp(min=1)).sum(dim=0) / 32


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_costs_itself_wherever_it_stands(private, damage, place):
    data = Files(place, DAMAGES[damage])
    with nothing_escapes():
        made = private(linear(), data, sample=SAMPLE)
    found = released(made)
    assert (made.steps, made.dropped) == (1, 1)
    kept = [number for number in range(32) if number != place]
    assert (found - expected(made.model, kept)).abs().max() <= 1.2 * RANGE / 1000


def test_no_record_is_read_before_there_is_a_batch(private):
    data = Files()
    private(linear(), data, sample=SAMPLE)
    assert data.read == 0


def test_without_a_made_up_record_nothing_is_read_either(private):
    data = Files()
    with pytest.raises(InvalidParameter, match="sample"):
        private(linear(), data)
    assert data.read == 0


SETTINGS = {
    "clients": 1,
    "rounds": 10,
    "batch_size": 8,
    "clip": "l2",
    "clip_norm": 1.0,
    "range": 0.5,
    "levels": 100,
    "trials": 0,
    "seed": 1,
}
WHOLE = {"unit": "client", "local_steps": 2, "local_learning_rate": 0.5}
MODEL = np.zeros(10, np.float32)


def client(samples, **settings):
    """One client; what it is given besides its data is the same for all."""
    made_up = {"sample": SAMPLE} if isinstance(samples, Dataset) else {}
    config = Config.of(**SETTINGS | settings)
    return client_of(config, linear(), LOSS, samples, **made_up)


@pytest.mark.parametrize("unit", ["sample", "client"])
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_client_with_a_damaged_record_answers_all_the_same(damage, place, unit):
    settings = {"sampling": "none"} | (WHOLE if unit == "client" else {})
    usual = client(Files(), **settings).update(MODEL, 0).frame
    with nothing_escapes():
        found = client(Files(place, DAMAGES[damage]), **settings).update(MODEL, 0).frame
    assert isinstance(found, bytearray)
    assert len(found) == len(usual)


@pytest.mark.parametrize("sampling", ["fixed", "poisson", "none"])
def test_a_client_that_is_hidden_as_a_whole_does_not_show_how_many_samples_it_has(sampling):
    stated = []
    for samples in (7, 8, 9, 32):
        asked = client(points(samples), sampling=sampling, **WHOLE)
        stated.append((len(asked.update(MODEL, 0).frame), asked.terms))
    assert len({str(each) for each in stated}) == 1


def test_a_node_that_is_hidden_as_a_whole_joins_without_a_number_of_samples(tmp_path):
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from flwr.app import Message, MessageType

    from bqsgd._src.flower.messages import MODEL as MODEL_KIND
    from bqsgd._src.flower.messages import pack
    from bqsgd._src.tasks.task import Task
    from bqsgd.flower import client_app
    from loop_grid import LoopGrid

    config = Config.of(**SETTINGS | WHOLE)
    settings = {name: value for name, value in config.flat().items() if value is not None and name != "budgets"}
    joined = []
    for samples in (7, 8, 32):
        task = Task(make_model=linear, shares=[points(samples)], test=None, loss_fn=LOSS)
        node = {
            "client": 0,
            "ledger-folder": str(tmp_path),
            "allow-no-privacy": True,
            "epsilon": 30.0,
            "units": "client",
        }
        grid = LoopGrid(client_app(lambda config, node, options, task=task: task), settings, [node])
        (reply,) = grid.send_and_receive(
            [Message(pack(None, kind=MODEL_KIND, run="r", roster=""), 1000, MessageType.QUERY)]
        )
        joined.append(str(dict(reply.content["fields"])))
    assert "declined" not in joined[0]
    assert len(set(joined)) == 1, f"clients with 7, 8 and 32 samples join with {joined}"


class Looking(nn.Module):
    """Looks at values, and at one of them does what `react` says."""

    def __init__(self, react):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.react = nn.Linear(4, 2), react

    def forward(self, x):
        if bool((x > 1e5).any()):
            self.react(x, None)
        return self.head(x)


@pytest.mark.parametrize("place", ["forward", "loss"])
@pytest.mark.parametrize("react", [torn, leaving, interrupting])
def test_what_a_record_makes_the_model_or_the_loss_raise_costs_that_record(private, place, react):
    x, y = points()
    x[5] = 1e6

    def loss(outputs, targets):
        if bool((outputs.abs() > 1e5).any()):
            react(outputs, targets)
        return LOSS(outputs, targets)

    model = Looking(react if place == "forward" else lambda x, y: None)
    with nothing_escapes():
        made = private(model, (x, y), loss_fn=loss if place == "loss" else LOSS)
    found = released(made)
    assert (made.steps, made.dropped) == (1, 1)
    kept = [number for number in range(32) if number != 5]
    assert (found - expected(model, kept)).abs().max() <= 1.2 * RANGE / 1000


class Interrupted(Files):
    """The user presses Ctrl-C while one of the later records is read, once."""

    pressed = False

    def __getitem__(self, number):
        if number == 20 and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().__getitem__(number)


def test_after_a_real_interrupt_the_program_stops_and_the_next_step_works(private, tmp_path):
    noisy = bqsgd.Mechanism(levels=1, trials=2000)
    made = private(
        linear(), Interrupted(), sample=SAMPLE, mechanism=noisy, micro_batch=8, ledger=tmp_path / "me.ledger"
    )
    batches = iter(made.loader)
    with pytest.raises(KeyboardInterrupt):
        made.step(next(batches))
    taken = made.steps
    made.step(next(iter(made.loader)))
    assert (made.steps, made.dropped) == (taken + 1, 0)
    made.close()
    with bqsgd.Ledger(tmp_path / "me.ledger") as ledger:
        assert ledger.spent_rounds >= made.steps


def test_after_a_real_interrupt_a_client_answers_the_next_round(tmp_path):
    config = Config.of(**SETTINGS | {"sampling": "none", "seed": None, "trials": 2000, "epsilon": 1e4})
    with bqsgd.Ledger.open(tmp_path / "a", client=0, budget_epsilon=1e4, budget_delta=1e-5) as ledger:
        asked = client_of(config, linear(), LOSS, Interrupted(), ledger=ledger, sample=SAMPLE)
        with pytest.raises(KeyboardInterrupt):
            asked.update(MODEL, 0)
        assert isinstance(asked.update(MODEL, 0).frame, bytearray)  # the round that was interrupted
        assert isinstance(asked.update(MODEL, 1).frame, bytearray)


class Convolutional(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), act, nn.Flatten(), nn.Linear(144, 10))

    def forward(self, x):
        return self.layers(x)


def work_of(call):
    """How many functions are called meanwhile, Python's and C's: the work that is done outside of loops."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("act", [nn.Tanh(), nn.GELU()], ids=["Tanh", "GELU"])
@pytest.mark.parametrize("label", [10, -1, 2**40])
def test_one_label_out_of_range_makes_a_step_little_slower(private, act, label):
    torch.manual_seed(0)
    x, y = torch.randn(256, 1, 8, 8), torch.arange(256) % 10
    work = []
    for last in (0, label):
        torch.manual_seed(0)
        y[-1] = last
        made = private(Convolutional(act), (x, y.clone()))
        released(made)  # plans, compiles
        batch = next(iter(made.loader))
        work.append(work_of(lambda made=made, batch=batch: made.backward(batch)))
        assert made.dropped == (0 if last == 0 else 2)
    assert work[1] <= 3 * work[0], f"a step with one such label takes {work[1] / work[0]:.3g} times the work"


class StochasticDepth(nn.Module):
    """Leaves out its block for some of the samples of a batch, as image models do in training."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Conv2d(1, 1, 3, padding=1), nn.Linear(16, 2)

    def forward(self, x):
        kept = torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.5)) / 0.5
        return self.head((x + kept * self.block(x)).flatten(1))


def test_stochastic_depth_per_sample_is_accepted_and_each_sample_has_its_own_draw(private):
    torch.manual_seed(0)
    model, x, y = StochasticDepth(), torch.randn(1, 1, 4, 4).expand(64, 1, 4, 4).contiguous(), torch.zeros(64).long()
    made = private(model, (x, y))
    made.step(next(iter(made.loader)))
    assert (made.steps, made.dropped) == (1, 0)
    block = slice(0, 10)
    found = []
    for number in range(64):
        one = x[:1], y[:1]
        torch.manual_seed(number)
        found.append(clipped_gradients(model, LOSS, one, clip=L2(1.0), batch_size=1).mean[block])
    assert 0 < sum(bool(each.any()) for each in found) < 64
    torch.manual_seed(0)
    both = clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=64).mean[block]
    most = max(float(each.norm()) for each in found)
    assert 0.1 * most < float(both.norm()) < 0.9 * most  # some of 64 samples alike leave their block out, not all


def test_how_many_records_were_lost_is_not_in_the_log(private, caplog):
    """What a program writes to its terminal is seen by others than the data are."""
    x, y = points()
    x[:7] = float("nan")
    made = private(linear(), (x, y))
    released(made)
    assert made.dropped == 7
    said = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert not any("7" in line for line in said), said
