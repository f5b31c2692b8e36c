"""Thousands of clients in one process: memory, time beside the gradients', bytes both ways.

Each row is a process of its own with n clients of 128 made-up images (28 x 28, made when a client is asked), LeNet-5,
Poisson batches of 64 on average, L2 clip, 8 bits, noise from the operating system, and a durable register of ledgers.
Every client is asked at least once. One worker, one thread.

Writes its section of the pages as well.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks
from experiments import pages

SIZES = {10: (10, 30), 100: (100, 3), 1_000: (100, 10), 10_000: (1_000, 10)}
"""Clients -> (asked in a round, rounds)."""
SAMPLES, BATCH = 128, 64


class MadeUp(Sequence[Any]):
    """Shares of made-up images: a client's seed until it is looked up."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < self.clients:
            raise IndexError(number)
        rng = np.random.default_rng(number)
        return rng.random((SAMPLES, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, SAMPLES)


def one(clients: int, *, down_bits: int | None) -> dict[str, Any]:
    """One run: what it took."""
    import torch

    from bqsgd._src import models
    from bqsgd._src.run import Run
    from bqsgd._src.settings.config import Config
    from bqsgd._src.tasks.task import Task

    torch.set_num_threads(1)
    asked, rounds = SIZES[clients]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = Config.of(
        clients=clients,
        cohort=None if asked == clients else asked,
        rounds=rounds,
        batch_size=BATCH,
        clip="l2",
        clip_norm=1.0,
        range=0.05,
        levels=16,
        trials=203,
        epsilon=1e6,
        learning_rate=0.1,
        workers=1,
        evaluate_every=2**30,
        checkpoint_every=2**30,
        down_bits=down_bits,
    )
    task = Task(
        make_model=lambda: models.build("lenet5", input_shape=(1, 28, 28), classes=10, seed=0), shares=MadeUp(clients)
    )
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with Run.start(task, config, folder=folder, force=True) as run:
            start = time.perf_counter() - began
            seconds: Counter[str] = Counter()
            used, cpu, wall = 0, time.process_time(), time.perf_counter()
            rounds_of = run.rounds()
            for record in rounds_of:
                seconds.update(record.seconds)
                used += record.used
                if record.round + 1 == rounds:
                    break
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rounds_of.close()
        summary = run.summary
        register = sum(path.stat().st_size for path in (Path(folder) / "ledgers").iterdir())
    assert summary is not None
    gradients = seconds["gradients"]
    return {
        "clients": clients,
        "asked": asked,
        "rounds": rounds,
        "frames": used,
        "down_bits": down_bits,
        "start_seconds": round(start, 2),
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "gradient_seconds": round(gradients, 2),
        "times_gradients": round(wall / gradients, 3),
        "seconds_by_stage": {stage: round(value, 2) for stage, value in seconds.items()}
        | {"other": round(wall - sum(seconds.values()), 2)},
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "libraries_mib": round(before / 1024, 1),
        "ledger_bytes": register,
        "bytes_up_per_frame": summary.bytes_up // max(1, used),
        "bytes_down_per_frame": summary.bytes_down // max(1, asked * rounds),
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
        "bytes_down_float32": summary.bytes_down_float32,
    }


def main() -> None:
    """Each row in a process of its own; without arguments all rows, written to the JSON."""
    parser = benchmarks.parser("clients", __doc__)
    parser.add_argument("--one", type=int)
    parser.add_argument("--down-bits", type=int)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(one(asked.one, down_bits=asked.down_bits)))
        return
    rows = []
    for clients in SIZES:
        for bits in ([], ["--down-bits", "4"]) if clients < 10_000 else ([],):
            command = [sys.executable, "-m", "benchmarks", "clients", "--one", str(clients), *bits]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]) | {"load": round(os.getloadavg()[0], 1)})
            print(json.dumps(rows[-1]), flush=True)
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if benchmarks.write(asked.output, {"machine": machine, "rows": rows}):
        pages.write()
