"""Rank 0 is a hostile server that sends its own models, rank 1 an honest client. argv: see distributed_processes."""

import json
import logging
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from hostile_servers import (
    LOSS,
    NOT_FINITE,
    UNITS_AND_CLIPS,
    few_data_sets,
    finite_models,
    message,
    settings,
    shared_network,
)

from bqsgd._src.engines.torch_distributed.client import RunDeclined, greeting
from bqsgd._src.engines.torch_distributed.ranks import MessageKind
from bqsgd._src.ledger import Ledger
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.tasks.task import Task
from bqsgd.distributed import join, work

ANY_MODEL = replace(NodeLimits.unlimited(), largest_parameter=3.5e38)
TASK = Task(make_model=lambda: shared_network("linear"), loss_fn=LOSS)
MODELS = [*finite_models(8).values(), *(np.full(8, value, np.float32) for value in NOT_FINITE.values())]


def cases(few):
    for unit, clip in UNITS_AND_CLIPS[::4] if few else UNITS_AND_CLIPS:
        for name, data in few_data_sets().items():
            run = f"{unit}-{clip}-{name}".replace(" ", "-")
            yield run, settings(unit, clip, run=run, seed=None), data


def serve(channel, config):
    """What the server sees of the client in one run."""
    channel.send(MessageKind.GREETING, greeting(config, TASK, resuming=False))
    kind, _ = channel.receive(most_bytes=1 << 20)
    assert kind is MessageKind.ACCEPTED, kind
    answers = []
    for round, model in enumerate(MODELS):
        channel.send(MessageKind.MODEL, message(model, round=round))
        kind, body = channel.receive(most_bytes=1 << 20)
        answers.append([kind.name, len(body) if kind is MessageKind.FRAME else bytes(body).decode()])
    for delta in (0.0, 2.0, float("nan"), float("-inf")):  # no delta at all: nothing is stated, and nobody fails
        channel.send(MessageKind.REPORT, struct.pack("<d", delta))
        kind, body = channel.receive(most_bytes=1 << 20)
        assert (kind, len(body)) == (MessageKind.GUARANTEE, 0)
    channel.send(MessageKind.STOP)
    return answers


def declined(group, folder):
    """A run that the client's strict limits do not allow: what the server hears. The client has no data to read."""
    config = settings("client", "dual", run="declined", seed=None)
    if group.serves:
        group.channel(1).send(MessageKind.GREETING, greeting(config, TASK, resuming=False))
        kind, body = group.channel(1).receive(most_bytes=1 << 20)
        (folder / "declined.json").write_text(json.dumps([kind.name, bytes(body).decode()]))
        return
    try:
        work(TASK, config, group=group, folder=folder / "declined", limits=NodeLimits())
    except RunDeclined:
        assert not (folder / "declined").exists()


def main():
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    torch.set_num_threads(1)
    logging.getLogger("bqsgd").setLevel(logging.ERROR)
    with join(timeout_seconds=600) as group:
        seen = []
        declined(group, folder)
        for run, config, data in cases(asked["settings"]["few"]):
            place = folder / run
            if group.serves:
                answers = serve(group.channel(1), config)
                group.channel(1).receive(most_bytes=0)  # its ledger is closed
                with Ledger(place / "ledgers" / "client-0001.ledger") as ledger:
                    seen.append({"run": run, "answers": answers, "spent": ledger.spent_rounds})
            else:
                work(replace(TASK, shares=[data]), config, group=group, folder=place, limits=ANY_MODEL)
                group.channel(0).send(MessageKind.STOP)
        if group.serves:
            (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
