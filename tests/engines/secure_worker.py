"""One rank of a run with secure sums; it may be killed or late at any step. argv: JSON of {folder, settings, ...}.

mischief: rank -> {"STEP:round": what}; the steps are those of `bqsgd._src.secure.messages`, and MODEL. what is "kill",
"late", "garbage" or "long" (an answer of other bytes or of another length), "share" or "seed" (an unmasking with a
random share of the one missing client, or with a random seed of its own), "memory" (from here on the process gets no
more memory), or "clock SECONDS" (from here on the clock of the day is that much ahead, in all ranks).
"""

import hashlib
import json
import os
import resource
import signal
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bqsgd._src.client.sums import made_identities
from bqsgd._src.engines.torch_distributed.client import answer_rounds, joined_run
from bqsgd._src.run import Run
from bqsgd._src.secure.messages import is_sum_message, message_kind
from bqsgd._src.secure.roster import write_identity
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd.distributed import join, torch_distributed
from tiny_task import points

SEED = 9


DIMENSION = 180


def wide():
    """Large enough that steps are shorter than models."""
    torch.manual_seed(0)
    return torch.nn.Linear(2, 60)


def small_task(clients):
    return Task(make_model=wide, shares=[points(60, client) for client in range(clients)])


def write_keys(folder, clients, *, generation=0):
    """Identity keys and their roster, as one process with this seed would make them (generation 0)."""
    folder.mkdir(parents=True, exist_ok=True)
    identities, roster = made_identities(Config.of(clients=clients, seed=SEED + generation))
    for client, identity in identities.items():
        write_identity(folder / f"{generation}-{client}.key", identity)
    path = folder / f"roster-{generation}.toml"
    path.write_text(roster.to_toml())
    return {"roster": str(path), "identity": str(folder / f"{generation}-{{client}}.key")}


def step_of(message):
    """The step of a message of the server, and its round."""
    if is_sum_message(message):
        return message_kind(message).name, struct.unpack_from("<Q", message, 32)[0]
    return "MODEL", struct.unpack_from("<Q", message, 8)[0]


DAMAGE = {
    "garbage": lambda frame: os.urandom(len(frame)),
    "long": lambda frame: frame + bytes(7),
    "share": lambda frame: frame[:-32] + os.urandom(16) + frame[-16:],
    "seed": lambda frame: frame[:-16] + os.urandom(16),
}


class Mischief:
    """A client that does as it should, but at the steps in `plan`; notes what it sends."""

    def __init__(self, client, plan, folder):
        self.real, self.plan, self.rounds = client.answer, plan, folder / "rounds.jsonl"
        self.notes = folder / f"sent-{client.client}.jsonl"

    def __call__(self, message):
        step, round = step_of(message)
        what = self.plan.get(f"{step}:{round}")
        if what == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))  # less than it has
        if what is not None and what.startswith("clock "):
            Path(os.environ["CLOCK_SHIFT"]).write_bytes(struct.pack("<d", float(what.split()[1])))
        answer = self.real(message)  # a masked vector is counted in the ledger from here on
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "late":
            while not (self.rounds.exists() and f'"round": {round},' in self.rounds.read_text()):
                time.sleep(0.05)
        if what in DAMAGE and answer.frame is not None:
            answer = replace(answer, frame=DAMAGE[what](bytes(answer.frame)))
        if answer.frame is not None:
            with self.notes.open("a") as stream:
                note = {"step": step, "round": round, "sha": hashlib.sha256(answer.frame).hexdigest()}
                stream.write(json.dumps(note) + "\n")
        return answer


def main():
    asked = json.loads(sys.argv[1])
    folder, config = Path(asked["folder"]), Config.of(**asked["settings"])
    with join(timeout_seconds=500) as group:
        plan = asked["mischief"].get(str(group.rank), {})
        task, disk = small_task(group.size), folder / f"disk-{group.rank}"
        if not group.serves:
            with joined_run(task, config, group=group, folder=disk, resuming=asked["resume"]) as (client, connection):
                client.answer = Mischief(client, plan, folder)
                answer_rounds(client, connection)
            return
        how = {"folder": disk, "engine": torch_distributed(group)}
        with Run.resume(task, **how) if asked["resume"] else Run.start(task, config, **how) as run:
            own = run.engine.client
            own.answer = Mischief(own, plan, folder)
            with (folder / "rounds.jsonl").open("a") as stream:
                for record in run.rounds():
                    stream.write(json.dumps(record.to_dict()) + "\n")
                    stream.flush()
        np.save(folder / "model.npy", run.model)
        print("finished after round", run.round, "guarantee", run.summary.guarantee)


if __name__ == "__main__":
    main()
