"""A thousand simulated clients on Flower (Ray), of which a hundred are asked in a round; and the same in one process.

MNIST in shares of 60 samples, a linear model, planned noise, one register of ledgers; once with a message per client
and once with secure sums over each cohort. With a seed both engines give the same model bit for bit.

    python -m experiments.scale.flower_clients  # writes experiments/results/flower_clients.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bqsgd._src.cli.flower import run_demo
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run
from bqsgd._src.tasks.named import settings_of
from experiments import lab, pages

RESULTS = lab.RESULTS / "flower_clients.json"
SETTINGS: dict[str, Any] = {
    "dataset": "mnist",
    "model": "linear",
    "epsilon": 8.0,
    "batch_size": 30,
    "clip": "l2",
    "clip_norm": 1.0,
    "range": 0.1,
    "learning_rate": 0.5,
    "momentum": 0.0,
    "schedule": "constant",
    "weights": "equal",
    "evaluate_every": 5,
    "seed": 1,
    "run": "many",
}
SECURE: dict[str, Any] = {"secure": True, "rate": 0.5}
"""Clients of a sum share one rate: half of the 60 samples that each holds."""
_LOOK_SECONDS = 5.0


@contextmanager
def memory_of_children() -> Iterator[list[int]]:
    """The memory of all processes below this one, in bytes, each time that it was looked at.

    Pages that several share are divided among them.
    """
    seen: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            total = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            seen.append(total)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def one(settings: dict[str, Any]) -> dict[str, Any]:
    """One run on Flower and the same in one process: what both took."""
    with tempfile.TemporaryDirectory() as place, memory_of_children() as memory:
        folder = Path(place)
        more = {"join_seconds": 3000.0, "round_seconds": 1800.0}
        fields = run_demo(folder, settings | more, tls=False, limit_seconds=5400)
        records = list(read_rounds(folder / "server"))
        checkpoint = load_checkpoint(folder / "server")
        assert checkpoint is not None
        model = checkpoint[0]["model"]
    named, config = settings_of(**settings)
    began = time.monotonic()
    with Run.start(named.task(config), config, force=True) as run:
        here = [record.used for record in run.rounds()]
    seconds = time.monotonic() - began
    times = np.diff([0.0, *(record.time for record in records)])
    assert here == [record.used for record in records]
    return {
        "settings": settings,
        "frames": here,
        "rounds_in_ledgers": fields["rounds_in_ledgers"],
        "accuracy": fields["accuracy"],
        "seconds_in_all": round(fields["seconds"], 1),
        "seconds_by_round": [round(float(value), 1) for value in times],
        "seconds_in_one_process": round(seconds, 1),
        "same_model_as_in_one_process": model.tobytes() == run.server.model.tobytes(),
        "peak_mib": round(max(memory, default=0) / 2**20),
        "bytes_up": sum(record.bytes_up for record in records),
        "bytes_down": sum(record.bytes_down for record in records),
        "processes_left": fields["processes_left"],
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Run both, without and with secure sums, and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("plain", "secure"))
    asked = parser.parse_args()
    settings = SETTINGS | {"clients": asked.clients, "cohort": asked.cohort, "rounds": asked.rounds}
    result = lab.read_json(RESULTS) if RESULTS.exists() else {}
    for name, more in {"plain": {}, "secure": SECURE}.items():
        if asked.only in (None, name):
            result[name] = one(settings | more)
            print(json.dumps(result[name]), flush=True)
            lab.write_json(RESULTS, result)
    pages.write()


if __name__ == "__main__":
    main()
