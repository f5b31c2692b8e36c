"""Table 1: the experiment setting, with d and d_P measured beside the published ones.

d_P = ||grad l||_1 / C (the paper's footnote) is measured on batches of 32 at the initial model and after some rounds
without noise. It depends on data and model, so it cannot stand for the dimension in a guarantee.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from experiments.lab import Options, provenance
from experiments.paper.published import FASHION_MNIST, MNIST, PublishedSetting
from experiments.paper.runs import simulation, task
from experiments.paper.tables import DATASETS, job

from bqsgd._src.engines.round import run_round
from bqsgd._src.models import load_vector
from bqsgd._src.params import Mechanism

NOISELESS = Mechanism(levels=127, trials=0)
MEASURED_AFTER, BATCHES = (0, 20, 100), 20


def table1(options: Options) -> dict[str, Any]:
    """Both columns."""
    return {"columns": [column(setting, quick=options.quick) for setting in (MNIST, FASHION_MNIST)], **provenance()}


def column(setting: PublishedSetting, *, quick: bool) -> dict[str, Any]:
    """The published column, our model, and d_P as training proceeds."""
    training = job(setting, NOISELESS, clip="batch-mean", seed=0, quick=quick)
    after = MEASURED_AFTER[:1] if quick else MEASURED_AFTER
    measured = []
    with simulation(task(training), training.config) as (server, engine, _):
        client = engine.clients[0]
        for rounds in after:
            while server.round < rounds:
                run_round(server, engine)
            load_vector(client.model, server.model)
            norms = [_norm(client, number, setting.batch_size) for number in range(2 if quick else BATCHES)]
            measured.append({"rounds": rounds, "nominal_dimension": float(np.mean(norms)) / setting.clip})
        dimension = server.model.size
    return {
        "published": asdict(setting),
        "model": DATASETS[setting.dataset][1],
        "dimension": dimension,
        "nominal_dimension_measured": measured,
    }


def _norm(client: Any, number: int, size: int) -> float:
    """||grad l||_1 of the mean loss over one batch."""
    first = number * size % (len(client.samples) - size)
    loss = client.objective.mean_loss(client.samples.read(range(first, first + size)), client.model)
    gradients = torch.autograd.grad(loss, list(client.model.parameters()))
    return float(sum(gradient.abs().sum() for gradient in gradients))
