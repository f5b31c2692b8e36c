"""Clients that differ, in cohorts: shares of different sizes and label skew, weighted or not, and what it costs.

MNIST, a linear model, 200 clients of which 20 are asked in a round, 30 rounds, planned for epsilon 8 at delta 1e-5 for
each client's samples. Sizes: equal, or log-normal (deviation 1 of the logarithm). Skew: Dirichlet, which makes sizes
unequal too. Weights: *equal* and *size* with L samples of each client a round, or *rate*, one rate for all, at which a
client sends the sum over its batch and every sample counts alike. Settings were not tuned to any row. Each size needs a
plan of its own, so shares are cut to powers of the square root of two: 2, 4, 5, 8, 11, 16, 22 ... samples.

    python -m experiments.scale.heterogeneity  # writes experiments/results/heterogeneity.json
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

from bqsgd import data
from bqsgd._src import models
from bqsgd._src.data.shares import rows_by_client
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from experiments import lab, pages

RESULTS = lab.RESULTS / "heterogeneity.json"
CLIENTS, COHORT, ROUNDS = 200, 20, 30
SEEDS = (0,)
SPLITS: dict[str, float | str | None] = {
    "equal sizes": None,
    "log-normal sizes": "sizes",
    "Dirichlet 1": 1.0,
    "Dirichlet 0.1": 0.1,
}
WEIGHTS = ("equal", "size", "rate")
BATCH = 60


def shares(kind: float | str | None, seed: int) -> list[Any]:
    """The clients' data, cut to few sizes."""
    return [(inputs[: (size := _size(len(labels)))], labels[:size]) for inputs, labels in _divided(kind, seed)]


def _size(samples: int) -> int:
    """The largest power of the square root of two, rounded down, that is no more."""
    return int(2 ** (int(2 * np.log2(samples) + 1e-9) / 2))


def _divided(kind: float | str | None, seed: int) -> list[Any]:
    train = data.load("mnist").train
    if kind == "sizes":
        rng = np.random.default_rng(seed)
        parts = rng.lognormal(0.0, 1.0, CLIENTS)
        cuts = np.rint(np.cumsum(parts)[:-1] / parts.sum() * (len(train) - 10 * CLIENTS)).astype(int)
        cuts += 10 * np.arange(1, CLIENTS)  # ten samples at least
        rows = np.split(rng.permutation(len(train)), cuts)
        return [(train.inputs[some], train.labels[some]) for some in rows]
    concentration = None if kind is None else float(kind)
    rows = rows_by_client(train.labels, CLIENTS, seed=seed, concentration=concentration, smallest=2)
    split = [train.take(share) for share in rows]
    return [(share.inputs, share.labels) for share in split]


def one(kind: str, weights: str, seed: int) -> dict[str, Any]:
    """One run."""
    test = data.load("mnist").test
    held = shares(SPLITS[kind], seed)
    mean = sum(len(labels) for _, labels in held) / CLIENTS
    config = Config.of(
        clients=CLIENTS,
        cohort=COHORT,
        rounds=ROUNDS,
        epsilon=8.0,
        batch_size=BATCH,
        rate=BATCH / mean if weights == "rate" else None,
        weights="size" if weights == "size" else "equal",
        clip="l2",
        clip_norm=1.0,
        range=0.1,
        learning_rate=0.5,
        momentum=0.5,
        schedule="linear",
        seed=seed,
        evaluate_every=ROUNDS,
    )
    task = Task(
        make_model=lambda: models.build("linear", input_shape=(1, 28, 28), classes=10, seed=0),
        shares=held,
        test=(test.inputs, test.labels),
    )
    with Run.start(task, config, force=True) as run:
        records = list(run.rounds())
    sizes = np.array([len(labels) for _, labels in held])
    return {
        "shares": kind,
        "weights": weights,
        "seed": seed,
        "accuracy": run.close().accuracy,
        "frames": sum(record.used for record in records),
        "without_plan": sum(len(record.trouble) for record in records),
        "sizes": [int(value) for value in np.percentile(sizes, [0, 50, 100])],
    }


def main() -> None:
    """All runs that the JSON does not hold yet; delete it to begin anew."""
    rows: list[dict[str, Any]] = lab.read_json(RESULTS)["runs"] if RESULTS.exists() else []
    done = {(row["seed"], row["shares"], row["weights"]) for row in rows}
    for seed in SEEDS:
        for kind in SPLITS:
            for weights in WEIGHTS:
                if (seed, kind, weights) in done:
                    continue
                rows.append(one(kind, weights, seed))
                print(json.dumps(rows[-1]), flush=True)
                result = {"clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS, "load": os.getloadavg()[0]}
                lab.write_json(RESULTS, result | {"runs": rows})
    pages.write()


if __name__ == "__main__":
    main()
