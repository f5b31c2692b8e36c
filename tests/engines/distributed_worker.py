"""One rank of a small run over torch.distributed, with the mischief a test asks of it. Started as a process of its own.

argv: JSON of {folder, settings, resume, mischief: {rank: {round: what}}}.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bqsgd._src.codec import encode_frame
from bqsgd._src.engines.torch_distributed.client import answer_rounds, joined_run
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.model_message import read_model
from bqsgd._src.wire.reply import Reply
from bqsgd.distributed import join, torch_distributed
from fault_book import write_down
from tiny_task import linear, points

DIMENSION = 6


def task(clients):
    return Task(make_model=linear, shares=[points(60 + 10 * client, client) for client in range(clients)])


def recording(engine, path):
    """The engine's exchange, with a line a frame: round, client, SHA-256."""
    exchange = engine.exchange

    def recorded(messages, *, round, enough=None):
        with path.open("a") as stream:
            for answer in exchange(messages, round=round, enough=enough):
                if answer.frame is not None:
                    line = {"round": round, "client": answer.client, "sha": hashlib.sha256(answer.frame).hexdigest()}
                    stream.write(json.dumps(line) + "\n")
                    stream.flush()
                yield answer

    engine.exchange = recorded


class Mischief:
    """A client that does as it should, but for the rounds in `plan`."""

    def __init__(self, client, plan, folder):
        self.real, self.plan, self.client = client.answer, plan, client.client
        self.notes, self.rounds = folder / f"sent-{client.client}.jsonl", folder / "rounds.jsonl"

    def __call__(self, message):
        round = read_model(message, dimension=DIMENSION).round
        what = self.plan.get(str(round))
        frame = self.real(message).frame  # counted in the ledger from here on
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "late":
            while f'"round": {round},' not in self.rounds.read_text():  # until the server has closed the round
                time.sleep(0.05)
        if what == "corrupt":
            frame[-1] ^= 1
        if what == "foreign":
            mechanism, rng = Mechanism(levels=20, trials=200), seeded_rng(seed=0)
            frame = encode_frame(
                np.zeros(DIMENSION, np.float32), mechanism, range=0.5, rng=rng, client=self.client + 40, round=round
            )
        if what == "flood":
            import torch.distributed as dist

            head = b"BQSD" + (18).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")
            dist.send(torch.frombuffer(bytearray(head), dtype=torch.uint8), 0)
        write_down(self.notes, round=round, frame_digest=hashlib.sha256(frame).hexdigest())
        return Reply(client=self.client, frame=frame)


def prepare():
    """One round in this process: what is done for the first time then falls in no round with a deadline."""
    settings = json.loads(sys.argv[1])["settings"]
    if settings.get("deadline_seconds") is None:
        return
    config = Config.of(**settings).but(deadline_seconds=None)
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.start(task(config.clients.count), config, folder=folder) as run,
    ):
        next(run.rounds())


def main():
    asked = json.loads(sys.argv[1])
    folder, config = Path(asked["folder"]), Config.of(**asked["settings"])
    with join(timeout_seconds=500) as group:
        plan = asked["mischief"].get(str(group.rank), {})
        if not group.serves:
            with joined_run(
                task(group.size), config, group=group, folder=folder / f"disk-{group.rank}", resuming=asked["resume"]
            ) as (client, connection):
                client.answer = Mischief(client, plan, folder)
                answer_rounds(client, connection)
            return
        how = {"folder": folder / "disk-0", "engine": torch_distributed(group)}
        with (
            Run.resume(task(group.size), **how)
            if asked["resume"]
            else Run.start(task(group.size), config, force=True, **how)
        ) as run:
            own = run.engine.client
            own.answer = Mischief(own, plan, folder)
            recording(run.engine, folder / "frames.jsonl")
            with (folder / "rounds.jsonl").open("a") as stream:
                for record in run.rounds():
                    stream.write(json.dumps(record.to_dict()) + "\n")
                    stream.flush()
        np.save(folder / "model.npy", run.model)
        print("finished after round", run.round, "guarantee", run.summary.guarantee)


if __name__ == "__main__":
    main()
