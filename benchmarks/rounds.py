"""Where a round's time goes on LeNet-5, and what a thousand clients in one process need.

Overhead: 4 clients x 32 samples of MNIST-shaped random data on one core, with ledgers on disk; everything but forward,
backward and clipping (which is one fused stage) against the whole round. Each figure is the least over the rounds.
Scale: 1,000 clients of LeNet-5 in one process, a round each, with ledgers; peak resident memory.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import tempfile
import time

import numpy as np
import torch

import benchmarks
from bqsgd._src import models
from bqsgd._src.engines.round import run_round
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task


def task_of(clients: int, samples: int) -> Task:
    rng = np.random.default_rng(0)
    shares = [
        (rng.normal(size=(samples, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, samples)) for _ in range(clients)
    ]
    return Task(make_model=lambda: models.build("lenet5", input_shape=(1, 28, 28), classes=10, seed=0), shares=shares)


def overhead(rounds: int) -> dict[str, object]:
    """Least seconds of a round by stage over `rounds` rounds, and the share that is not gradients."""
    config = Config.of(
        clients=4, rounds=rounds, batch_size=32, clip="clamp", clip_bound=0.0015, levels=2, trials=251, epsilon=900.0,
        reserve_rounds=50, workers=1, seed=1,
    )  # fmt: skip
    stages: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, Run.start(task_of(4, 1500), config, folder=folder) as run:
        for _ in range(rounds):
            started = time.perf_counter()
            outcome = run_round(run.server, run.engine)
            stages.setdefault("round", []).append(time.perf_counter() - started)
            for stage, seconds in outcome.seconds.items():
                stages.setdefault(stage, []).append(seconds)
    rest = [whole - gradients for whole, gradients in zip(stages["round"], stages["gradients"], strict=True)]
    least = {stage: min(values) for stage, values in stages.items()}
    return {
        "what": "LeNet-5, 4 clients x 32 samples, levels 2, trials 251, one core, ledgers on disk",
        "rounds": rounds,
        "least_seconds": least,
        "least_seconds_beside_gradients": min(rest),
        "share_beside_gradients": min(rest) / (min(rest) + least["gradients"]),
        "median_share_beside_gradients": float(np.median(np.array(rest) / np.array(stages["round"]))),
        "most_ledger_seconds": max(stages["ledger"]),
    }


def thousand() -> dict[str, object]:
    """One round each of 1,000 clients, after one round that compiles and plans."""
    config = Config.of(
        clients=1000, rounds=3, batch_size=8, clip="clamp", clip_bound=0.0015, levels=2, trials=251, epsilon=900.0,
        workers=1, seed=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, Run.start(task_of(1000, 60), config, folder=folder) as run:
        run_round(run.server, run.engine)
        started = time.perf_counter()
        outcome = run_round(run.server, run.engine)
        elapsed = time.perf_counter() - started
    used = outcome.used
    return {
        "what": "LeNet-5, 1,000 clients x 8 samples in one process, ledgers on disk",
        "frames_used": used,
        "round_seconds": elapsed,
        "bytes_up": outcome.bytes_up,
        "peak_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = benchmarks.parser("rounds", __doc__)
    parser.add_argument("--rounds", type=int, default=200, help="over which the least time of each stage is taken")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "overhead": overhead(options.rounds),
        "thousand_clients": thousand(),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
    }
    benchmarks.write(options.output, result)
    print(json.dumps(result, indent=2))
