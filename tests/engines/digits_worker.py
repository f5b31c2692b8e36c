"""The digits among four ranks of torch.distributed, every frame noted. argv: JSON of {folder, settings, ...}."""

import json
import sys
from pathlib import Path

import numpy as np
from distributed_worker import recording

from bqsgd import data
from bqsgd._src import models
from bqsgd._src.data.shares import rows_by_client
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd.distributed import join, torch_distributed, work


def digits_task(clients):
    digits = data.load("digits")
    rows = rows_by_client(digits.train.labels, clients, seed=0, concentration=0.5, smallest=32)
    shares = [digits.train.take(share) for share in rows]
    return Task(
        make_model=lambda: models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=0),
        shares=[(share.inputs, share.labels) for share in shares],
    )


def main():
    asked = json.loads(sys.argv[1])
    folder, config = Path(asked["folder"]), Config.of(**asked["settings"])
    task = digits_task(config.clients.count)
    with join(timeout_seconds=500) as group:
        if not group.serves:
            work(task, config, group=group, folder=folder / f"disk-{group.rank}")
            return
        with Run.start(task, config, folder=folder / "disk-0", engine=torch_distributed(group), force=True) as run:
            recording(run.engine, folder / "frames.jsonl")
            list(run.rounds())
        np.save(folder / "model.npy", run.model)


if __name__ == "__main__":
    main()
