"""One training run of the reproduction: clients and server of the library, every update a real frame, resumable.

A finished run is one file under results/training/; a stopped run continues from its checkpoint and ends with the same
model bit for bit, because every seeded draw depends on (seed, purpose, client, round) alone. The noise is seeded:
that is right for a reproduction, and voids any privacy claim of the run itself.
"""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from experiments.paper.padded_digits import padded_digits

from bqsgd._src.engines.engine import Setup
from bqsgd._src.engines.in_process import InProcess, in_process
from bqsgd._src.engines.round import run_round
from bqsgd._src.models import to_vector
from bqsgd._src.records.checkpoint import load_checkpoint, save_checkpoint
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.server.server import Server
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.named import NamedTask, plain_settings
from bqsgd._src.tasks.task import Evaluate, Task
from experiments import lab

RESULTS, CHECKPOINTS = lab.RESULTS / "training", lab.ROOT / "runs" / "reproduce"
EVALUATIONS = 10


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run by name. quick: the digits of scikit-learn padded to 28 x 28 stand in for the data set, nothing is kept."""

    name: str
    named: NamedTask
    config: Config
    quick: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by name, for the record."""
        return plain_settings(self.named, self.config)

    @property
    def result(self) -> Path:
        """Where the finished run is written."""
        return RESULTS / f"{self.name}.json"


def results(jobs: Sequence[Job], *, workers: int = 1) -> dict[str, dict[str, Any]]:
    """The finished runs by name, running those that are missing, `workers` at a time."""
    missing = [job for job in jobs if job.quick or not job.result.exists()]
    if workers == 1 or len(missing) < 2:
        fresh = {job.name: run(job, left=len(missing) - number) for number, job in enumerate(missing)}
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            fresh = dict(zip((job.name for job in missing), pool.map(run, missing), strict=True))
    kept = {job.name: lab.read_json(job.result) for job in jobs if job.name not in fresh}
    return {job.name: fresh.get(job.name) or kept[job.name] for job in jobs}


def run(job: Job, *, left: int = 1) -> dict[str, Any]:
    """Train to the end, from the checkpoint where there is one."""
    if job.quick:
        return _quick(job)
    folder = CHECKPOINTS / job.name
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it: wait, then take its result
        if not job.result.exists():
            fields = _train(job, folder, left)
            lab.write_json(job.result.with_suffix(".part"), fields)
            job.result.with_suffix(".part").replace(job.result)
            (folder / "checkpoint.safetensors").unlink(missing_ok=True)
    return dict(lab.read_json(job.result))


@lru_cache
def _quick(job: Job) -> dict[str, Any]:
    """Tables share some of their rows, and a quick run is kept nowhere else."""
    return _train(job, None, left=1)


def _train(job: Job, folder: Path | None, left: int) -> dict[str, Any]:
    config, started = job.config, time.monotonic()
    totals: dict[str, Any] = {"bytes_up": 0, "frames": 0, "seconds": 0.0, "curve": []}
    with simulation(task(job), config) as (server, engine, evaluate):
        if folder is not None and (checkpoint := load_checkpoint(folder)) is not None:
            server.restore(checkpoint[0], round=int(checkpoint[1]["round"]))
            totals = checkpoint[1]["totals"]
            started -= totals["seconds"]
        while server.round < config.run.rounds:
            outcome = run_round(server, engine)
            totals["bytes_up"] += outcome.bytes_up
            totals["frames"] += outcome.used
            if server.round % max(1, config.run.rounds // EVALUATIONS) == 0 or server.round == config.run.rounds:
                evaluation = evaluate(server.best_model)
                accuracy, loss = evaluation.accuracy, evaluation.loss
                totals["seconds"] = time.monotonic() - started
                totals["curve"].append({"round": server.round, "accuracy": accuracy, "loss": loss})
                _show(job, totals, left)
                if folder is not None:
                    save_checkpoint(folder, server.arrays(), {"round": server.round, "totals": totals})
        dimension = server.model.size
    return {
        "name": job.name,
        "quick": job.quick,
        "claim": "seeded: no privacy claim" if config.privacy.seed is not None else "none",
        "accuracy": totals["curve"][-1]["accuracy"],
        "loss": totals["curve"][-1]["loss"],
        "dimension": dimension,
        "bits_per_coordinate": 8 * totals["bytes_up"] / (dimension * totals["frames"]),
        **totals,
        "config": job.settings,
        **lab.provenance(),
    }


@contextmanager
def simulation(task: Task, config: Config) -> Iterator[tuple[Server, InProcess, Evaluate]]:
    """Server, clients and evaluation of a run that keeps nothing, for experiments with a loop of their own."""
    model = task.make_model()
    initial = to_vector(model)
    evaluate = task.evaluator(model)
    assert evaluate is not None
    engine = in_process(Setup(task=task, config=config, folder=None, resuming=False, dimension=initial.size))
    try:
        with one_thread():
            yield Server(model=initial, weights=engine.samples, config=config), engine, evaluate
    finally:
        engine.close()


def task(job: Job) -> Task:
    """The model and data of a job; channels last is the same mathematics in a third less time."""
    named_task = padded_digits(job.named, job.config) if job.quick else job.named.task(job.config)
    make = named_task.make_model
    return replace(named_task, make_model=lambda: make().to(memory_format=torch.channels_last))


def _show(job: Job, totals: dict[str, Any], left: int) -> None:
    point, seconds = totals["curve"][-1], totals["seconds"]
    remaining = seconds / point["round"] * (left * job.config.run.rounds - point["round"])
    print(
        f"{job.name}: round {point['round']}/{job.config.run.rounds}, test accuracy {point['accuracy']:.2%}, "
        f"{seconds:.0f} s; {left} runs left, about {remaining / 60:.1f} min if alike",
        file=sys.stderr,
        flush=True,
    )
