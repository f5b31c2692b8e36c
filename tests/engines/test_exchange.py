"""An engine carries these bytes to these clients, and asks nobody else."""

import queue
from contextlib import closing
from dataclasses import replace

import pytest

from bqsgd._src.engines.engine import Setup, make_client
from bqsgd._src.engines.in_process import in_process
from bqsgd._src.engines.torch_distributed.engine import TorchDistributed
from bqsgd._src.engines.torch_distributed.ranks import MessageKind
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import to_vector
from bqsgd._src.wire.frame import read_frame
from bqsgd._src.wire.model_message import write_model


class Rank:
    """A channel to a rank that answers at once, without a process."""

    def __init__(self, client):
        self.peer, self._answer, self._answers = client.client, client.answer, queue.SimpleQueue()

    def send(self, kind, body=b""):
        if kind is MessageKind.MODEL:
            self._answers.put((MessageKind.FRAME, self._answer(bytes(body.numpy())).frame))
        elif kind is MessageKind.REPORT:
            self._answers.put((MessageKind.GUARANTEE, b""))

    def receive(self, *, most_bytes):
        kind, answer = self._answers.get(timeout=60)
        return kind, memoryview(answer)


def setup_of(task, config):
    return Setup(task=task, config=config, folder=None, resuming=False, dimension=to_vector(task.make_model()).size)


def over_ranks(task, config):
    setup = setup_of(task, config)
    clients = [
        make_client(setup, number=number, model=task.make_model(), share=share)
        for number, share in enumerate(task.shares)
    ]
    samples = {client.client: client.public_size for client in clients}
    return TorchDistributed(clients[0], [Rank(client) for client in clients[1:]], samples=samples, most_bytes=10**7)


def over_flower(task, config):
    pytest.importorskip("flwr", reason="needs the extra `flower`")
    from bqsgd._src.flower.engine import flower
    from bqsgd._src.flower.messages import TrackedGrid
    from bqsgd.flower import client_app
    from loop_grid import LoopGrid

    settings = {name: value for name, value in config.flat().items() if value is not None and name != "budgets"}
    app = client_app(lambda config, node, options: replace(task, shares=[task.shares[node.client]]))
    nodes = [{"client": client, "allow-no-privacy": True, "epsilon": 30.0} for client in range(len(task.shares))]
    grid = TrackedGrid(LoopGrid(app, settings, nodes))
    return flower(grid, join_seconds=60.0, round_seconds=60.0)(setup_of(replace(task, shares=()), config))


ENGINES = {
    "in process": lambda task, config: in_process(setup_of(task, config)),
    "two workers": lambda task, config: in_process(setup_of(task, config.but(workers=2))),
    "torch.distributed": over_ranks,
    "flower": over_flower,
}


def asked(engine, messages, *, round):
    return [(answer.client, bytes(answer.frame)) for answer in engine.exchange(messages, round=round)]


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_bytes_from_those_who_are_asked(task, settings, name):
    config = settings()
    model = to_vector(task.make_model())
    common, other = write_model(model, round=0), write_model(model + 1, round=0)
    later = write_model(model, round=1)
    expected, whole = [], dict.fromkeys(range(4), later)
    for engine in (ENGINES["in process"](task, config), ENGINES[name](task, config)):
        with closing(engine):
            found = asked(engine, {3: common, 1: common}, round=0), asked(engine, {0: other, 2: other}, round=0)
            found += (asked(engine, whole, round=1), asked(engine, {}, round=1))
            with pytest.raises(InvalidParameter, match="client 4 does not belong to this run"):
                list(engine.exchange({4: common}, round=0))
        expected.append(found)
    assert expected[0] == expected[1]
    assert [[client for client, _ in answers] for answers in expected[0]] == [[1, 3], [0, 2], [0, 1, 2, 3], []]
    headers = [read_frame(frame).header for answers in expected[0] for _, frame in answers]
    assert [(header.client, header.round) for header in headers] == [
        (1, 0), (3, 0), (0, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 1),
    ]  # fmt: skip
