"""Ctrl-C stops a loop when the step is complete, and the next step works; what a record raises costs that record."""

import copy
import multiprocessing
import os
import signal
import threading

import pytest
import torch
from private_loops import EXACT, LOSS, recorded
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from bqsgd._src.runtime.interrupts import StopNow, interrupts_deferred


def press():
    """A real Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


class Pressing(Dataset):
    """Meets so many Ctrl-C while a sample is read, once it is armed."""

    def __init__(self, points):
        self.points, self.times, self.read = points, 0, 0

    def __len__(self):
        return 96

    def __getitem__(self, number):
        times, self.times, self.read = self.times, 0, self.read + 1
        for _ in range(times):
            press()
        return self.points[0][number], self.points[1][number]


@pytest.fixture
def interrupted(private, points, tmp_path):
    """Private training that is interrupted in a step; steps of one sample at a time, so that most are read in it."""
    dataset = Pressing(points)
    made = private(dataset=dataset, micro_batch=1, ledger=tmp_path / "me.ledger")
    return dataset, made


def test_ctrl_c_within_a_step_is_raised_when_the_step_is_complete(interrupted, tmp_path):
    dataset, made = interrupted
    batches, before = iter(made.loader), made.model.weight.detach().clone()
    batch = next(batches)
    dataset.times = 1
    with pytest.raises(KeyboardInterrupt):
        made.step(batch)
    assert made.steps == 1
    assert made.dropped == 0, "the sample that was read meanwhile counts"
    assert not torch.equal(made.model.weight, before)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    made.step(next(batches))
    made.close()
    assert recorded(tmp_path / "me.ledger") == made.steps == 2


def test_a_second_ctrl_c_is_raised_at_once_and_the_next_step_works(interrupted, tmp_path):
    """Before, the ledger refused it: the step was recorded, and its number not advanced."""
    dataset, made = interrupted
    batches, before = iter(made.loader), made.model.weight.detach().clone()
    batch = next(batches)
    dataset.times = 2
    with pytest.raises(KeyboardInterrupt):
        made.step(batch)
    assert torch.equal(made.model.weight, before)
    assert made.steps == 1, "it was recorded, and nothing of it was seen"
    dataset.read = 0
    batch = next(batches)
    made.step(batch)
    assert dataset.read == len(batch), "none of its samples are left over from the batch before"
    made.close()
    assert recorded(tmp_path / "me.ledger") == made.steps == 2


def test_ctrl_c_from_a_terminal_stops_a_loop_between_two_steps(private, points):
    made = private(seed=0, epochs=50)
    timer = threading.Timer(0.2, press)
    steps = 0

    def loop():
        nonlocal steps
        while True:
            for batch in made.loader:
                made.step(batch)
                steps += 1

    timer.start()
    with pytest.raises(KeyboardInterrupt):
        loop()
    timer.join()
    assert made.steps - steps in (0, 1)
    made.step(next(iter(made.loader)))


def test_ctrl_c_while_a_batch_is_read_ahead_stops_the_loop(interrupted):
    dataset, made = interrupted
    dataset.times = 1
    with pytest.raises(KeyboardInterrupt):
        next(iter(made.loader))
    assert made.steps == 0
    made.step(next(iter(made.loader)))
    assert made.dropped == 0


def test_an_interrupt_in_the_midst_of_a_step_leaves_the_next_one_possible(private, monkeypatch, tmp_path):
    """As a debugger or a timeout may raise it, where no signal is deferred."""
    made = private()
    batches = iter(made.loader)
    real = made._objective.mean

    def interrupted(*given, **asked):
        raise StopNow

    monkeypatch.setattr(made._objective, "mean", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.step(next(batches))
    monkeypatch.setattr(made._objective, "mean", real)
    made.step(next(batches))
    made.close()
    assert recorded(tmp_path / "me.ledger") == made.steps == 2


class Raising(Dataset):
    """One record raises what usually ends a program."""

    def __init__(self, points, error):
        self.points, self.error = points, error

    def __len__(self):
        return 96

    def __getitem__(self, number):
        if number == 5:
            raise self.error
        return self.points[0][number], self.points[1][number]


class Collating:
    """The same when the record is collated."""

    def __init__(self, error):
        self.error = error

    def __call__(self, samples):
        if bool(samples[0][0][0] == 1e6):
            raise self.error
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def gradient(made):
    made.backward(next(iter(made.loader)))
    return torch.cat([parameter.grad.flatten() for parameter in made.model.parameters()])


ENDS = [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, MemoryError]


@pytest.fixture
def without(private, points):
    """(model, the gradient of all samples but number 5)."""
    model = nn.Linear(4, 2)
    weights = points[0].clone(), points[1]
    weights[0][5] = float("nan")
    made = private(copy.deepcopy(model), dataset=TensorDataset(*weights), batch_size=96, mechanism=EXACT, seed=0)
    return model, gradient(made)


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_record_that_raises_what_ends_a_program_costs_itself_alone(private, points, without, error, workers):
    model, expected = without
    loader = DataLoader(Raising(points, error), batch_size=96, num_workers=workers)
    made = private(model, loader=loader, mechanism=EXACT, seed=0)
    assert torch.equal(gradient(made), expected)
    assert (made.dropped, made.steps) == (1, 1)


@pytest.mark.parametrize("error", ENDS)
def test_a_record_that_raises_it_when_collated_costs_itself_alone(private, points, without, error):
    model, expected = without
    x = points[0].clone()
    x[5, 0] = 1e6
    loader = DataLoader(TensorDataset(x, points[1]), batch_size=96, collate_fn=Collating(error))
    made = private(model, loader=loader, mechanism=EXACT, seed=0)
    assert torch.equal(gradient(made), expected)
    assert made.dropped == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_record_for_which_the_loss_raises_it_costs_itself_alone(private, points, without, error):
    """The loss looks at values, so it sees samples one at a time."""
    model, expected = without

    def leaving(outputs, targets):
        if bool((targets == 7).any()):
            raise error
        return LOSS(outputs, targets)

    targets = points[1].clone()
    targets[5] = 7
    made = private(
        model, dataset=TensorDataset(points[0], targets), loss_fn=leaving, batch_size=96, mechanism=EXACT, seed=0
    )
    found = gradient(made)
    assert made.dropped == 1
    assert (found - expected).abs().max() <= 1.1e-3  # one level of the quantiser: another road rounds otherwise


def test_worker_processes_leave_ctrl_c_to_the_one_that_trains(private, points):
    """A terminal sends it to all of them; one that ended would cost the samples that it was to read."""
    before = set(multiprocessing.active_children())
    loader = DataLoader(TensorDataset(*points), batch_size=96, num_workers=1)
    made = private(loader=loader, seed=0, micro_batch=8)
    batch = next(iter(made.loader))
    (worker,) = set(multiprocessing.active_children()) - before
    os.kill(worker.pid, signal.SIGINT)
    made.step(batch)
    assert made.dropped == 0


def test_nobody_is_told_how_many_samples_are_lost(private, points, caplog, capfd):
    """What is written to the standard error is seen by whoever runs the program."""
    made = private(dataset=Raising(points, OSError), batch_size=96)
    made.step(next(iter(made.loader)))
    assert made.dropped == 1
    assert [record for record in caplog.records if record.name.startswith("bqsgd")] == []
    assert capfd.readouterr().err == ""


def test_a_handler_of_the_program_s_own_is_called_at_once():
    """One that only takes a note defers nothing."""
    noted = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        with interrupts_deferred():
            press()
            assert noted == [signal.SIGINT]
            press()
        assert len(noted) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_must_happen_as_a_whole_waits_for_a_second_ctrl_c_too():
    done = []

    def block():
        with interrupts_deferred():
            with interrupts_deferred(firm=True):
                press()
                press()
                done.append("recorded")
            done.append("computed")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert done == ["recorded"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_other_threads_there_is_nothing_to_defer():
    found = []

    def work():
        with interrupts_deferred():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
