"""The digits among four ranks of torch.distributed, every frame noted. argv: JSON of {folder, settings, ...}."""

import json
import sys
from pathlib import Path

import numpy as np
from distributed_worker import recording

from bqsgd import data, models
from bqsgd.engines.distributed import DistributedSession, joined
from bqsgd.engines.distributed.taking_part import answer_rounds, greeted
from bqsgd.engines.session import Task
from bqsgd.training.config import Config


def digits_task(clients):
    digits = data.load("digits")
    shares = data.partition(digits.train, clients, seed=0, concentration=0.5, smallest=32)
    return Task(
        make_model=lambda: models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0),
        shares=[(share.inputs, share.labels) for share in shares],
    )


def main():
    asked = json.loads(sys.argv[1])
    folder, config = Path(asked["folder"]), Config(**asked["settings"])
    task = digits_task(config.clients)
    with joined(timeout_seconds=120) as group:
        if not group.serves:
            with greeted(task, config, group=group, folder=folder / f"disk-{group.rank}", resuming=False) as (
                client,
                channel,
                listener,
            ):
                answer_rounds(client.answer, client.spending, channel, listener)
            return
        with DistributedSession.start(task, config, folder=folder / "disk-0", group=group) as session:
            recording(session.ranks, folder / "frames.jsonl")
            list(session.rounds())
        np.save(folder / "model.npy", session.result().model)


if __name__ == "__main__":
    main()
