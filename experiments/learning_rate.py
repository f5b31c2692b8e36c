"""How the demo's learning rate was chosen: on 10,000 samples held out of the *training* data, never on the test set.

python -m experiments.learning_rate            # runs the sweep, writes results/learning_rate.json

The search looks at data that clients hold, and like every search for hyper-parameters it is not charged to epsilon.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.runs import provenance

from bqsgd import data
from bqsgd.cli.demo import DEMO
from bqsgd.cli.training_run import task_of
from bqsgd.engines.session import Session, Task
from bqsgd.training.config import Config

RESULTS = Path(__file__).parent / "results" / "learning_rate.json"
RATES = (0.5, 1.0, 2.0, 4.0)
HELD_OUT, SPLIT_SEED, NOISE_SEED = 10_000, 7, 1


def held_out_task(config: Config) -> Task:
    """The run's own task, with 10,000 training samples as its test set and the rest shared among the clients."""
    train = data.load(config.dataset).train
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(train))
    kept = [np.sort(part) for part in np.array_split(rows[HELD_OUT:], config.clients)]
    shares = [train.take(part) for part in kept]
    held = train.take(np.sort(rows[:HELD_OUT]))
    return replace(
        task_of(config), shares=[(share.inputs, share.labels) for share in shares], test=(held.inputs, held.labels)
    )


def one(rate: float) -> dict[str, Any]:
    """The demo at one rate, noise seeded so that the sweep can be repeated (no privacy claim)."""
    config = Config(**{"dataset": "mnist", **DEMO["mnist"], "learning_rate": rate, "seed": NOISE_SEED, "workers": 1})
    with Session.start(held_out_task(config), config) as session:
        for _ in session.rounds():
            pass
        accuracy, loss = session.evaluate() or (float("nan"), float("nan"))
        guarantee = session.result().guarantee
    print(f"learning rate {rate}: held-out accuracy {accuracy:.2%}", flush=True)
    return {
        "learning_rate": rate,
        "held_out_accuracy": accuracy,
        "held_out_loss": loss,
        "guarantee": None if guarantee is None else guarantee.to_dict(),
        "config": config.to_dict(),
    }


def main() -> None:
    """Sweep, and name the best."""
    torch.set_num_threads(1)
    rows = [one(rate) for rate in RATES]
    best = max(rows, key=lambda row: float(row["held_out_accuracy"]))
    print(f"best: {best['learning_rate']}")
    fields = {"held_out": HELD_OUT, "best": best["learning_rate"], "rows": rows, **provenance()}
    RESULTS.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
