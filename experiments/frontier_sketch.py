"""The first look behind the presets of secure sums: many settings in a few seconds each, on held-out training samples.

python -m experiments.frontier_sketch QUESTION     # mnist or imagenet; adds to results/frontier_sketch.json

It differs from `experiments.sum_simulation` in two ways. Scattering features are turned onto 600 principal directions
of 4,000 training samples (99 % of their energy on MNIST), which changes the noise of a linear model's scores hardly at
all and the time twentyfold. And the noise is Gaussian, of the variance that the accountant's trials M and the rounding
of n clients have together: M / 4 + n / 6 steps, where M trials bear as many steps of L2 as `Accountant` proves. Only
held-out accuracies come out of it, no claim.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.held_out import HELD_OUT, SPLIT_SEED
from experiments.runs import provenance
from torch import Tensor

from bqsgd import data
from bqsgd.params import Mechanism
from bqsgd.planner.plan import Budget
from bqsgd.planner.search import shift_per_round
from bqsgd.privacy.accountant import Accountant
from bqsgd.release import Release, Sampling, Sensitivity, Trust

RESULTS = Path(__file__).parent / "results" / "frontier_sketch.json"
CLASSES, DELTA, DIRECTIONS = 10, 1e-5, 600


def most_steps(*, rate: float, rounds: int, epsilon: float, trials: int, dimension: int, trust: Trust) -> float:
    """The largest L2 move of one sample, in steps, that `trials` bear within epsilon; to three thousandths."""

    def proven(steps: float) -> float:
        release = Release(
            mechanism=Mechanism(levels=1, trials=trials),
            dimension=dimension,
            sensitivity=Sensitivity(linf=steps, l2=steps),
            sampling=Sampling(scheme="poisson", rate=rate) if rate < 1 else Sampling(scheme="no sampling"),
            trust=trust,
        )
        return Accountant().compose(release, rounds).epsilon(DELTA)

    budget = Budget(bits=8, epsilon=epsilon, delta=DELTA)
    low, high = 0.0, 2 * shift_per_round(budget, rate=rate, rounds=rounds) * math.sqrt(trials) / 2
    while high - low > 0.003 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if proven(middle) <= epsilon else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """Training and held-out samples, and the squared norms of the whole features."""

    inputs: Tensor
    labels: Tensor
    held: Tensor
    held_labels: Tensor
    squares: Tensor
    width: int

    @classmethod
    def of(cls, dataset: str, features: str) -> Sketch:
        """On principal directions where there are many features."""
        found = data.load(dataset, quiet=True)
        split = data.whole_features(features, "train", of=found)
        whole = np.array(split.inputs).reshape(len(split), -1)
        rows = np.random.default_rng(SPLIT_SEED).permutation(len(whole))
        train, held = np.sort(rows[HELD_OUT:]), np.sort(rows[:HELD_OUT])
        squares = torch.from_numpy((whole[train] ** 2).sum(axis=1))
        inputs, width = torch.from_numpy(whole), whole.shape[1]
        if width > 2 * DIRECTIONS:
            some = inputs[torch.from_numpy(rows[HELD_OUT : HELD_OUT + 4000])]
            inputs = inputs @ torch.svd_lowrank(some, q=DIRECTIONS, niter=1)[2]
        labels = torch.from_numpy(split.labels)
        return cls(
            inputs=inputs[train], labels=labels[train], held=inputs[held], held_labels=labels[held], squares=squares,
            width=width,
        )  # fmt: skip

    def accuracy(
        self,
        *,
        rate: float,
        rounds: int,
        epsilon: float,
        clients: int = 4,
        sums: bool = True,
        clip: float = 1.0,
        learning_rate: float,
        average: float = 0.95,
        schedule: str = "constant",
        noise: float = 1.0,
    ) -> float:
        """Held-out accuracy of one setting."""
        trials = max(1000, 12 * clients) if sums else 1000
        steps = most_steps(
            rate=rate, rounds=rounds, epsilon=epsilon, trials=trials, dimension=(self.width + 1) * CLASSES,
            trust=Trust.SUMS_ONLY if sums else Trust.EACH_CLIENT,
        )  # fmt: skip
        spread = noise * math.sqrt(trials / 4 + (clients if sums else 1) / 6) / steps * clip
        spread *= 1 if sums else math.sqrt(clients)
        generator = torch.Generator().manual_seed(0)
        model = torch.zeros(self.inputs.shape[1] + 1, CLASSES)
        velocity, averaged, weight = torch.zeros_like(model), torch.zeros_like(model), 0.0
        for round in range(rounds):
            drawn = (torch.rand(len(self.inputs), generator=generator) < rate).nonzero()[:, 0]
            batch, labels = self.inputs[drawn], self.labels[drawn]
            errors = torch.softmax(batch @ model[:-1] + model[-1], dim=1)
            errors[torch.arange(len(drawn)), labels] -= 1
            norms = errors.norm(dim=1) * torch.sqrt(self.squares[drawn] + 1)
            errors *= torch.clamp(clip / norms.clamp_min(1e-12), max=1.0)[:, None]
            total = torch.cat([batch.T @ errors, errors.sum(dim=0, keepdim=True)])
            total += spread * torch.randn(model.shape, generator=generator)
            velocity = 0.9 * velocity + total / (rate * len(self.inputs))
            model = model - learning_rate * (1 - round / rounds if schedule == "linear" else 1) * velocity
            averaged, weight = average * averaged + (1 - average) * model, average * weight + 1 - average
        found = (self.held @ averaged[:-1] + averaged[-1]).argmax(dim=1)
        return float((found == self.held_labels).float().mean())


MNIST: dict[str, Any] = {"rate": 0.0683, "rounds": 300, "epsilon": 3.0, "learning_rate": 0.4}
FULL = {"rate": 1.0, "rounds": 60, "learning_rate": 2.0}
IMAGENET: dict[str, Any] = {
    "rate": 1.0, "rounds": 50, "epsilon": 0.59, "clients": 1000, "learning_rate": 1.0, "average": 0.9,
}  # fmt: skip
QUESTIONS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "mnist": (
        "mnist",
        "scattering",
        [
            MNIST,
            MNIST | {"learning_rate": 0.8},
            MNIST | {"learning_rate": 0.8, "schedule": "linear"},
            MNIST | {"clip": 5.0, "learning_rate": 0.08},
            MNIST | {"clip": 5.0, "learning_rate": 0.16},
            MNIST | {"clip": 20.0, "learning_rate": 0.02},
            MNIST | {"clip": 20.0, "learning_rate": 0.06},
            MNIST | FULL,
            MNIST | FULL | {"learning_rate": 4.0},
            MNIST | FULL | {"rounds": 100},
        ],
    ),
    "imagenet": (
        "cifar-10",
        "imagenet",
        [
            IMAGENET | {"learning_rate": 0.5},
            IMAGENET,
            IMAGENET | {"learning_rate": 2.0},
            IMAGENET | {"noise": 0.0},
            IMAGENET | {"clip": 5.0, "learning_rate": 0.2},
            IMAGENET | {"clip": 10.0, "learning_rate": 0.1},
            IMAGENET | {"rounds": 25, "learning_rate": 1.5, "average": 0.8},
            IMAGENET | {"rounds": 100, "learning_rate": 0.7, "average": 0.95},
            IMAGENET | {"rate": 0.3, "rounds": 100, "learning_rate": 0.5},
            IMAGENET | {"learning_rate": 2.0, "schedule": "linear"},
        ],
    ),
}


def main() -> None:
    """Answer the questions named, keeping every answer as it comes."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium")
    for name in sys.argv[1:] or QUESTIONS:
        dataset, features, candidates = QUESTIONS[name]
        sketch = Sketch.of(dataset, features)
        for candidate in candidates:
            kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            rows = kept.setdefault(name, [])
            if any(row["varied"] == candidate for row in rows):
                continue
            rows.append({"varied": candidate, "held_out_accuracy": sketch.accuracy(**candidate), **provenance()})
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{name} {candidate}: {rows[-1]['held_out_accuracy']:.2%}", flush=True)


if __name__ == "__main__":
    main()
