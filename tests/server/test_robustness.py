"""One of five clients sends adversarial but well-formed frames: robust rules keep learning, the mean does not."""

import numpy as np
import pytest
import torch

from bqsgd._src.codec import decode_frame
from bqsgd._src.engines.round import run_round
from bqsgd._src.models import to_vector
from bqsgd._src.params import Mechanism, parameters_digest
from bqsgd._src.server.server import Server
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.fixed import FixedWidth
from bqsgd._src.wire.frame import FrameWriter, Header
from bqsgd._src.wire.reply import Reply

MECHANISM = Mechanism(levels=8, trials=60)


class WithOneLiar:
    """Four honest clients and one that sends every code at the end of its range, against the others' direction."""

    def __init__(self, clients):
        self.clients = clients

    def exchange(self, messages, *, round, enough=None):
        frames = [client.answer(messages[client.client]).frame for client in self.clients]
        honest = sum(decode_frame(frame, range=0.5) for frame in frames)
        # As if all the binomial noise had come out at 0 or m: no check of a frame can exclude it.
        codes = np.where(honest > 0, 0, MECHANISM.code_count - 1).astype(np.uint8)
        digest = parameters_digest(MECHANISM, range=0.5, dimension=len(codes))
        writer = FrameWriter(
            Header(mechanism=MECHANISM, digest=digest, client=4, round=round, dimension=len(codes), seeded=True)
        )
        FixedWidth(MECHANISM.code_count).pack(codes, writer.payload)
        yield from (Reply(client=client.client, frame=f) for client, f in zip(self.clients, frames, strict=True))
        yield Reply(client=4, frame=writer.seal())

    def seconds(self):
        return {}


@pytest.mark.parametrize(
    ("rule", "learns"),
    [("mean", False), ("median", True), ("trimmed-mean", True), ("krum", True), ("multi-krum", True)],
)
def test_one_liar_in_five(settings, make_client, rule, learns):
    config = settings(
        clients=5,
        rounds=40,
        levels=MECHANISM.levels,
        trials=MECHANISM.trials,
        aggregation=rule,
        byzantine=0 if rule == "mean" else 1,
    )
    clients = [make_client(config, client) for client in range(4)]
    server = Server(model=to_vector(clients[0].model), weights=dict.fromkeys(range(5), 1.0), config=config)
    test = torch.cat([c.samples.inputs for c in clients]), torch.cat([c.samples.targets for c in clients])
    task = Task(make_model=lambda: clients[0].model, test=test)
    engine = WithOneLiar(clients)
    for _ in range(config.run.rounds):
        assert all(entry.status == "ok" for entry in run_round(server, engine).clients)
    accuracy = task.evaluator(clients[0].model)(server.model).accuracy
    assert (accuracy > 0.9) == learns
    assert learns or accuracy < 0.6
