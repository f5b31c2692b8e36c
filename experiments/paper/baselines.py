"""Training with float32 messages on the same clients, batches and server: plain, and Gaussian DP-SGD.

Messages are the library's checked float32 vectors, so that bytes are measured on real ones here too.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from experiments.lab import provenance, read_json, write_json
from experiments.paper.runs import EVALUATIONS, Job, simulation, task

from bqsgd._src.client.draws import Purpose, draw_batch, seed_for
from bqsgd._src.client.objective import Objective
from bqsgd._src.descent.optimizers import optimizer_of, schedule
from bqsgd._src.models import load_vector
from bqsgd._src.persample import L2, BatchMean
from bqsgd._src.release import Scheme
from bqsgd._src.wire.model_message import read_model, write_model

NO_CLIP = BatchMean(1e6)


def gaussian_event(noise_multiplier: float, *, rate: float, rounds: int) -> dp_accounting.DpEvent:
    """`rounds` Poisson-sampled Gaussian messages of one client."""
    one = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier))
    return dp_accounting.SelfComposedDpEvent(one, rounds)


def noise_for(epsilon: float, *, delta: float, rate: float, rounds: int) -> float:
    """The least noise multiplier whose total is at most (epsilon, delta)."""
    return float(
        dp_accounting.calibrate_dp_mechanism(
            lambda: pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3),
            lambda noise: gaussian_event(noise, rate=rate, rounds=rounds),
            epsilon,
            delta,
            bracket_interval=dp_accounting.ExplicitBracketInterval(0.3, 20.0),
            tol=1e-3,
        )
    )


def run_float32(job: Job, *, noise_multiplier: float, clip_norm: float | None) -> dict[str, Any]:
    """Train with float32 messages, or read the finished run. Noise has the deviation noise * clip_norm / L."""
    if not job.quick and job.result.exists():
        return dict(read_json(job.result))
    fields = _train(job, noise_multiplier, clip_norm)
    if not job.quick:
        write_json(job.result, fields)
    return fields


def _train(job: Job, noise_multiplier: float, clip_norm: float | None) -> dict[str, Any]:
    config, started, sent, frames = job.config, time.monotonic(), 0, 0
    clip = NO_CLIP if clip_norm is None else L2(clip_norm)
    deviation = noise_multiplier * (clip_norm or 0.0) / config.privacy.batch_size
    with simulation(task(job), config) as (server, engine, evaluate):
        objectives = {
            number: Objective(
                client.model,
                client.objective.loss_fn,
                clip=clip,
                batch_size=config.privacy.batch_size,
                forward=client.objective.forward,
            )
            for number, client in engine.clients.items()
        }
        model, optimizer = server.model, optimizer_of(config.server)
        state = optimizer.init(model.size)
        for round in range(config.run.rounds):
            total = np.zeros(model.size)
            for client in engine.clients.values():
                load_vector(client.model, model)
                rows = draw_batch(
                    Scheme.POISSON,
                    batch_size=config.privacy.batch_size,
                    dataset_size=len(client.samples),
                    rng=client.sources.at(Purpose.BATCH, round),
                )
                mean, _ = objectives[client.client].mean(client.samples.read(rows))
                mean = mean.astype(np.float32)
                if deviation:
                    seed = seed_for(int(config.privacy.seed or 0), Purpose.NOISE, client=client.client, round=round)
                    noise = np.random.default_rng(seed).standard_normal(mean.size, dtype=np.float32)
                    mean = mean + np.float32(deviation) * noise
                message = write_model(mean, round=round)
                sent, frames = sent + len(message), frames + 1
                total += read_model(message, dimension=mean.size).model / len(engine.clients)
            decay = schedule(config.server.schedule, round=round, rounds=config.run.rounds)
            rate = config.server.learning_rate * decay
            state, step = optimizer.update(state, total, learning_rate=rate)
            model = (model - step).astype(np.float32)
            if (round + 1) % max(1, config.run.rounds // EVALUATIONS) == 0:
                seconds = time.monotonic() - started
                left = seconds / (round + 1) * (config.run.rounds - round - 1)
                done = f"{job.name}: round {round + 1}/{config.run.rounds}"
                print(f"{done}, {left:.0f} s left", file=sys.stderr, flush=True)
        evaluation = evaluate(model)
        accuracy, loss = evaluation.accuracy, evaluation.loss
    return {
        "name": job.name,
        "claim": "seeded: no privacy claim" if deviation else "no privacy",
        "accuracy": accuracy,
        "loss": loss,
        "dimension": model.size,
        "bits_per_coordinate": 8 * sent / (model.size * frames),
        "bytes_up": sent,
        "frames": frames,
        "seconds": time.monotonic() - started,
        "noise_multiplier": noise_multiplier,
        "clip_norm": clip_norm,
        "config": job.settings,
        **provenance(),
    }
