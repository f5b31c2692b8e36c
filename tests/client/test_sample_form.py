"""The form of a sample is public: it comes from arrays or from a made-up record, and no record decides what is refused.

Nor does the number of samples, where the guarantee hides the whole client.
"""

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split

from bqsgd._src.client.samples import Fetched, reader_of
from bqsgd._src.engines.engine import Setup
from bqsgd._src.engines.in_process import in_process
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.run import Run
from bqsgd._src.tasks.task import Task
from tiny_task import client_of

MODEL = np.array([0.1, -0.2, 0.3, 0.0, 0.0, 0.0], np.float32)
SAMPLE = torch.zeros(2), torch.tensor(0)
LOSS = nn.CrossEntropyLoss(reduction="none")


def linear():
    return nn.Linear(2, 2)


def points(samples, seed):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(samples, 2)).astype(np.float32)
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


class Records(Dataset):
    """Records of the tiny task, some of which cannot be read; knows which were asked for."""

    def __init__(self, samples=40, damaged=(), error=OSError):
        self.inputs, self.targets = points(samples, 0)
        self.damaged, self.error, self.asked = set(damaged), error, []

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, number):
        self.asked.append(number)
        if number in self.damaged:
            raise self.error
        return torch.as_tensor(self.inputs[number]), torch.as_tensor(self.targets[number])


def described(form):
    return [(tuple(leaf.shape), leaf.dtype, bool(leaf.any())) for leaf in form]


WANTED = [((1, 2), torch.float32, False), ((1,), torch.int64, False)]


def tensors(samples=8):
    return TensorDataset(torch.ones(samples, 2), torch.ones(samples, dtype=torch.int64))


@pytest.mark.parametrize(
    "share",
    [
        points(8, 0),
        tensors(),
        tensors(0),
        DataLoader(tensors(), batch_size=4),
        Subset(tensors(), [3, 1]),
        Subset(Subset(tensors(), [3, 1]), [0]),
        ConcatDataset([tensors(3), tensors()]),
        random_split(tensors(), [3, 5])[1],
        Fetched(lambda: points(8, 0), size=8),
        DataLoader(tensors(), collate_fn=lambda samples: (samples[0][0][None], samples[0][1][None])),
    ],
    ids=["arrays", "tensors", "none", "loader", "subset", "nested", "concat", "split", "fetched", "collated"],
)
def test_the_form_of_tensors_in_memory_is_known(share):
    assert described(reader_of(share).form()) == WANTED


def test_a_made_up_record_says_the_form_of_any_other_data_set_and_its_values_are_not_used():
    records = Records()
    made_up = torch.full((2,), float("nan")), 7
    assert described(reader_of(DataLoader(records, batch_size=4), made_up).form()) == WANTED
    assert records.asked == []


class Augmented(TensorDataset):
    """Gives records of other shapes than its tensors have."""

    def __getitem__(self, number):
        return tuple(tensor[number].repeat(2) for tensor in self.tensors)


@pytest.mark.parametrize("share", [Records(), Augmented(torch.ones(4, 2)), Subset(Records(), [1]), [SAMPLE] * 3])
def test_a_data_set_of_unknown_form_is_refused_with_the_line_to_add(share):
    with pytest.raises(InvalidParameter, match=r"add a made-up record.*sample=\(torch.zeros\(3, 32, 32\), 0\)"):
        reader_of(share).form()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_damaged_record_costs_itself_whichever_it_is(settings, error):
    """Before, record 0 made the client raise, where record 5 had a frame."""
    config = settings(trials=50, sampling="none")

    def frame(*damaged):
        records = Records(damaged=damaged, error=error)
        client = client_of(config, linear(), LOSS, records, sample=SAMPLE)
        return len(client.update(MODEL, 0).frame), records.asked

    assert frame(0) == frame(5) == frame()
    assert frame()[1] == list(range(40))


def test_a_task_reads_no_record_before_the_first_round(settings):
    records = [Records(damaged=range(40)) for _ in range(3)]
    task = Task(make_model=linear, shares=records, sample=SAMPLE)
    with Run.start(task, settings(trials=50), force=True) as run:
        assert [share.asked for share in records] == [[], [], []]
        next(run.rounds())
    assert all(share.asked for share in records)


def whole(settings, **changes):
    return settings(unit="client", local_steps=2, trials=50, batch_size=8, **changes)


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "none"])
def test_a_whole_client_answers_however_many_samples_it_holds(settings, make_client, sampling):
    """Before, one with 7 samples raised where one with 8 answered."""
    clients = [make_client(whole(settings, sampling=sampling), samples=count) for count in (0, 1, 7, 8, 60)]
    assert len({(client.terms, client.charge(0)) for client in clients}) == 1
    assert len({len(client.update(MODEL, 0).frame) for client in clients}) == 1


def test_for_one_sample_the_number_of_samples_is_public_and_too_few_are_refused(settings, make_client):
    with pytest.raises(InvalidParameter, match="more than the 7 samples of client 0"):
        make_client(settings(sampling="fixed", batch_size=8), samples=7)
    with pytest.raises(InvalidParameter, match="0 samples"):
        make_client(settings(), samples=0)


@pytest.mark.parametrize("count", [3, 200], ids=["few", "many"])
def test_whole_clients_weigh_alike_and_nobody_is_told_their_sizes(settings, count):
    config = whole(settings, clients=count)
    shares = [points(7 + client % 3, client) for client in range(count)]
    with Run.start(Task(make_model=linear, shares=shares), config, force=True) as run:
        assert set(run.engine.samples.values()) == {8}
        assert len(set(run.server.weights.values())) == 1


def test_weights_by_size_are_refused_where_sizes_are_hidden(settings):
    task = Task(make_model=linear, shares=[points(9, client) for client in range(3)])
    with pytest.raises(InvalidParameter, match="hides how many samples"):
        Run.start(task, whole(settings, weights="size"), force=True)
    setup = {"task": task, "folder": None, "resuming": False, "dimension": 6}
    listed = in_process(Setup(config=whole(settings, weights="size"), sizes={0: 5, 1: 9, 2: 9}, **setup))
    assert set(listed.samples.values()) == {8}


class Pressing(Records):
    """A real Ctrl-C while a sample is read."""

    def __getitem__(self, number):
        if not self.asked:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__getitem__(number)


@pytest.mark.parametrize("unit", ["sample", "client"])
def test_ctrl_c_is_raised_when_the_frame_is_made_and_the_frame_is_there(settings, unit):
    config = settings(trials=50, unit=unit, sampling="none")

    def client(records):
        return client_of(config, linear(), LOSS, records, sample=SAMPLE)

    interrupted, other = client(Pressing()), client(Records())
    with pytest.raises(KeyboardInterrupt):
        interrupted.update(MODEL, 0)
    frame = interrupted.update(MODEL, 0).frame
    assert frame is not None
    assert frame == other.update(MODEL, 0).frame
