"""What a round over torch.distributed costs beyond the model's own work: LeNet-5, four ranks on loopback, gloo.

`python -m benchmarks distributed` starts the ranks, prints the table, writes benchmarks/results/distributed.json and
exits with 1 if the target is missed. "carry" rounds do everything but the gradients, which are a fixed vector: write,
send, check and read the model, spend in the ledger, encode, send, check, decode, aggregate, step. "train" rounds do it
all.
Wall time: ranks wait for one another, so a busy machine shows; the load average and the CPU time are in the result.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benchmarks
from bqsgd._src import models
from bqsgd._src.client.client import Client
from bqsgd._src.engines.round import run_round
from bqsgd._src.engines.torch_distributed.client import answer_rounds, joined_run
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.reply import Reply
from bqsgd.distributed import join, torch_distributed

RANKS, BATCH, SAMPLES, TARGET_MS = 4, 64, 1024, 10.0
WARM = 20


def task() -> Task:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(SAMPLES, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (SAMPLES,), generator=generator)
    return Task(
        make_model=lambda: models.build("lenet5", input_shape=(1, 28, 28), classes=10, seed=0),
        shares=[(inputs, targets)] * RANKS,
    )


def settings(rounds: int) -> Config:
    return Config.of(
        clients=RANKS, rounds=rounds, batch_size=BATCH, levels=16, trials=203, epsilon=1e4, run="bench", workers=1
    )


def without_model_work(client: Client) -> None:
    """The client's gradient is a fixed vector from now on."""
    values = np.random.default_rng(client.client).normal(0, 1e-3, client.terms.dimension).astype(np.float32)
    client._values = lambda model, round: values  # type: ignore[method-assign]


def timed_rounds(run: Run, cpu: list[float]) -> list[float]:
    """Wall seconds of each round after the warm ones; `cpu` gets this process's CPU seconds of one of them."""
    seconds: list[float] = []
    while run.server.round < run.config.run.rounds:
        if len(seconds) == WARM:
            cpu.append(time.process_time())
        started = time.perf_counter()
        outcome = run_round(run.server, run.engine)
        seconds.append(time.perf_counter() - started)
        assert not outcome.trouble, outcome
    cpu[:] = [(time.process_time() - cpu[0]) / len(seconds[WARM:])]
    return seconds[WARM:]


def count_seconds(client: Client, cpu: list[float], rounds: int) -> None:
    """`cpu` gets this process's CPU seconds of one of the client's rounds after the warm ones."""
    asked, answer = [], client.answer

    def counting(message: memoryview) -> Reply:
        asked.append(time.process_time())
        if len(asked) == rounds:
            cpu[:] = [(asked[-1] - asked[WARM]) / (rounds - 1 - WARM)]
        return answer(message)

    client.answer = counting  # type: ignore[method-assign]


def rank(kind: str, rounds: int, folder: Path) -> None:
    cpu: list[float] = []
    with join() as group:
        place = folder / f"disk-{group.rank}"
        if not group.serves:
            with joined_run(task(), settings(rounds), group=group, folder=place) as (client, connection):
                if kind == "carry":
                    without_model_work(client)
                count_seconds(client, cpu, rounds)
                answer_rounds(client, connection)
            (folder / f"cpu-{group.rank}.json").write_text(json.dumps(cpu[0]))
            return
        with Run.start(task(), settings(rounds), folder=place, engine=torch_distributed(group)) as run:
            if kind == "carry":
                without_model_work(run.engine.client)
            (folder / "seconds.json").write_text(json.dumps(timed_rounds(run, cpu)))
        (folder / "cpu-0.json").write_text(json.dumps(cpu[0]))


def over_ranks(kind: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        place = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks", "distributed", "--rank", kind, "--rounds", str(rounds)]
        started = [
            subprocess.Popen([*command, "--folder", folder], env={**os.environ, **place, "RANK": str(number)})
            for number in range(RANKS)
        ]
        try:
            assert [process.wait(timeout=600) for process in started] == [0] * RANKS
        finally:
            for process in started:
                process.kill()
        cpu = [1e3 * json.loads((Path(folder) / f"cpu-{number}.json").read_text()) for number in range(RANKS)]
        return figures(json.loads((Path(folder) / "seconds.json").read_text())) | {
            "cpu_ms_rank_0": cpu[0],
            "cpu_ms_all_ranks": sum(cpu),
        }


def in_process(kind: str, rounds: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.start(task(), settings(rounds), folder=folder) as run,
    ):
        if kind == "carry":
            for client in run.engine.clients.values():
                without_model_work(client)
        cpu: list[float] = []
        times = figures(timed_rounds(run, cpu))
        return times | {"cpu_ms": 1e3 * cpu[0]}


def figures(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e3 * entry for entry in seconds)
    return {
        "min_ms": ordered[0],
        "median_ms": statistics.median(ordered),
        "mean_ms": statistics.fmean(ordered),
        "p90_ms": ordered[int(0.9 * len(ordered))],
        "rounds": len(ordered),
    }


def main() -> int:
    parser = benchmarks.parser("distributed", __doc__)
    parser.add_argument("--rank", choices=("carry", "train"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rounds", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank is not None:
        rank(arguments.rank, arguments.rounds, arguments.folder)
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that the ranks are ended as well
    before = os.getloadavg()
    kinds: dict[str, Any] = {
        kind: {"ranks": over_ranks(kind, rounds), "in_process": in_process(kind, rounds)}
        for kind, rounds in (("carry", arguments.rounds), ("train", WARM + 60))
    }
    dimension = sum(parameter.numel() for parameter in task().make_model().parameters())
    met = kinds["carry"]["ranks"]["median_ms"] <= TARGET_MS
    result = {
        "what": __doc__.splitlines()[0],
        "dimension": dimension,
        "ranks": RANKS,
        "batch_size": BATCH,
        "target_median_ms": TARGET_MS,
        "target_met": met,
        **kinds,
        "load_average_before": before,
        "load_average_after": os.getloadavg(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
    }
    benchmarks.write(arguments.output, result)
    for kind, entry in kinds.items():
        for place, row in entry.items():
            shown = "  ".join(f"{name} {value:.2f}" for name, value in row.items())
            print(f"{kind:6} {place:11} {shown}")
    print(f"target: median of carry over ranks <= {TARGET_MS:g} ms: {'met' if met else 'MISSED'}; load {before[0]:.1f}")
    return 0 if met else 1
