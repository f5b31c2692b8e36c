"""Your own model, data and loss: four clients, a proven guarantee for every sample, in one file."""

import sys
from pathlib import Path

import numpy as np
from torch import nn

from bqsgd import Config, Run, Task


def data(samples, rng):
    """Two rings of points: which one is it?"""
    labels = rng.integers(0, 2, samples)
    radius, angle = 1 + labels + rng.normal(0, 0.15, samples), rng.uniform(0, 2 * np.pi, samples)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).astype(np.float32), labels


rng = np.random.default_rng(0)
task = Task(
    make_model=lambda: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)),
    shares=[data(3000, rng) for _ in range(4)],
    test=data(1000, rng),
    loss_fn=nn.CrossEntropyLoss(reduction="none"),  # one loss per sample: each is clipped on its own
)
config = Config.of(
    clients=4, rounds=60, batch_size=300, clip_norm=1.0, clip_bound=0.5, bits=8, epsilon=3.0, delta=1e-5,
    learning_rate=1.0, evaluate_every=20, reserve_rounds=60,
)  # fmt: skip
folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/own_model")
begun = (folder / "config.toml").exists()  # a run that is there continues; a finished one only says what it came to
with Run.resume(task, folder=folder) if begun else Run.start(task, config, folder=folder) as run:
    for record in run.rounds():
        if record.test_accuracy is not None:
            print(f"round {record.round + 1}: accuracy {record.test_accuracy:.1%}")
print(f"accuracy {run.summary.accuracy:.1%}, {run.summary.guarantee}")
