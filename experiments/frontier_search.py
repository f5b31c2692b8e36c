"""How features and settings of the frontier's presets were chosen: on 10,000 training samples held out of the rest.

python -m experiments.frontier_search [QUESTION ...]   # continues where it stopped; writes frontier_search.json

A linear model, per-sample L2 clips of norm 1, and Gaussian noise of the given deviation on the sum of the clipped
gradients: what the plan of a secure sum comes to, or with twice the deviation four clients that each add their own.
Batches are runs of neighbours in shuffled data. Nothing is sent, no run makes a privacy claim, and the search is not
charged to epsilon. Differences below 0.2 points on MNIST and 0.5 on CIFAR-10 are noise.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.held_out import HELD_OUT, SPLIT_SEED
from experiments.runs import provenance
from torch import Tensor
from torch.nn.functional import group_norm, layer_norm

from bqsgd import data
from bqsgd.data.scattering import constants, each_position, opponents, transform_for

RESULTS = Path(__file__).parent / "results" / "frontier_search.json"
Normalise = Callable[[Tensor], Tensor]


def scaled(coefficients: Tensor, *, differences: bool = False) -> Tensor:
    """With the constants of dead leaves for each kind; those of grey images for each channel, or of the opponents."""
    channels = coefficients.shape[1] // 81
    means, deviations = constants(3) if differences else (part.repeat(channels, 1, 1) for part in constants(1))
    return (coefficients - means) / deviations


def _each_sample(found: Tensor) -> Tensor:
    return layer_norm(found, found.shape[1:])


NORMALISATIONS: dict[str, Normalise] = {
    "group norm, 27 groups": lambda found: group_norm(found, 27),
    "group norm, 27 groups, pixels in [0, 4]": lambda found: group_norm(4 * found, 27),
    "group norm, each channel, pixels in [0, 4]": lambda found: group_norm(4 * found, found.shape[1]),
    "logarithms, group norm, 27 groups": lambda found: group_norm((found.abs() + 0.005).log(), 27),
    "square roots, group norm, 27 groups": lambda found: group_norm(found.abs().sqrt(), 27),
    "dead leaves, each sample": lambda found: _each_sample(scaled(found)),
    "dead leaves, each position": lambda found: each_position(scaled(found)),
    "dead leaves, tanh, each position": lambda found: each_position(torch.tanh(scaled(found) / 2)),
    "dead leaves, each position, mirror": lambda found: each_position(scaled(found)),
    "dead leaves, each position, opponents": lambda found: each_position(scaled(found, differences=True)),
}
"""Of coefficients of the colours as they are, or of the opponents; with "mirror" averaged with the mirror image's. The
library's own, "scattering", is "dead leaves, each position" for grey images, and for colours both of the last."""


@lru_cache(maxsize=1)
def _order(samples: int) -> Tensor:
    rows = np.random.default_rng(SPLIT_SEED).permutation(samples)
    return torch.from_numpy(np.concatenate([rows[HELD_OUT:], rows[:HELD_OUT]]))


@lru_cache(maxsize=2)
def coefficients(dataset: str, *, differences: bool, mirrored: bool = False) -> Tensor:
    """Scattering coefficients of the training images, not normalised; times 64 in half precision."""
    found = data.load(dataset, quiet=True)
    images = np.asarray(found.train.inputs) * np.float32(found.deviation) + np.float32(found.mean)
    images = opponents(images) if differences else images
    images = np.ascontiguousarray(images[..., ::-1]) if mirrored else images
    count, channels, height, width = images.shape
    transform = transform_for(height, width)
    kept = torch.empty(count, 81 * channels, height // 4, width // 4, dtype=torch.float16)
    for row in range(count):
        kept[row] = (64 * transform(torch.from_numpy(images[row]))).reshape(kept.shape[1:])
    return kept


@lru_cache(maxsize=1)
def training(dataset: str, features: str) -> tuple[Tensor, Tensor]:
    """Features in half precision and labels, the held-out samples last. Features: as the library has them, or a
    normalisation's name."""
    found = data.load(dataset, quiet=True)
    order = _order(len(found.train))
    labels = torch.from_numpy(np.asarray(found.train.labels, dtype=np.int64))[order]
    if features in NORMALISATIONS:
        raw = coefficients(dataset, differences=features.endswith("opponents"))
    else:
        raw = torch.from_numpy(np.array(data.whole_features(features, "train", of=found).inputs))
    made = torch.empty(len(raw), raw[0].numel(), dtype=torch.bfloat16)
    for start in range(0, len(raw), 1000):
        part = raw[order[start : start + 1000]]
        if features in NORMALISATIONS:
            part = NORMALISATIONS[features](part.float() / 64)
        if features.endswith("mirror"):
            other = coefficients(dataset, differences=False, mirrored=True)[order[start : start + 1000]]
            part = each_position(part + NORMALISATIONS[features](other.float() / 64))
        made[start : start + 1000] = part.flatten(1).to(made.dtype)
    return made, labels


def accuracy(
    dataset: str,
    *,
    features: str,
    rate: float,
    rounds: int,
    noise: float,
    learning_rate: float,
    momentum: float = 0.9,
    average: float = 0.95,
    clip: float = 1.0,
    schedule: str = "constant",
    centre: bool = False,
    seed: int = 0,
) -> float:
    """On the held-out samples, after training on the others.

    noise: deviation on the sum, in clips. centre: the first round measures the mean of the features, each sample's
    scaled to the clip, and the others train on features less that mean.
    """
    inputs, labels = training(dataset, features)
    rng = torch.Generator().manual_seed(seed)
    width, count, classes = inputs.shape[1], len(inputs) - HELD_OUT, 10
    batch = round(rate * count)
    weights = torch.zeros(width + 1, classes)
    velocity, averaged, offset = torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros(width)
    squares = torch.cat([(part.float() ** 2).sum(1) for part in inputs.split(1000)])
    typical = float(squares[:1000].mean().sqrt())
    for number in range(rounds):
        start = int(torch.randint(0, count - batch + 1, (1,), generator=rng))
        rows = slice(start, start + batch)
        if centre and number == 0:
            scaled = inputs[rows].float() / squares[rows].sqrt()[:, None]
            offset = (scaled.sum(0) + noise * torch.randn(width, generator=rng)) / batch * typical
            squares = squares - 2 * (inputs @ offset.to(inputs.dtype)).float() + float(offset @ offset)
            continue
        outputs = _outputs(inputs[rows], weights, offset)
        errors = torch.softmax(outputs, 1)
        errors[torch.arange(batch), labels[rows]] -= 1
        norms = errors.norm(dim=1) * torch.sqrt(squares[rows] + 1)
        errors *= torch.clamp(clip / norms.clamp_min(1e-12), max=1)[:, None]
        summed = errors.sum(0, keepdim=True)
        product = (errors.to(inputs.dtype).T @ inputs[rows]).T.float()  # far faster than the transposed product
        upper = product - offset[:, None] * summed
        gradient = torch.cat([upper, summed]) + noise * clip * torch.randn(width + 1, classes, generator=rng)
        velocity = momentum * velocity + gradient / batch
        weights = weights - learning_rate * (1 if schedule == "constant" else 1 - number / rounds) * velocity
        decay = min(average, (1 + number) / (10 + number))
        averaged = decay * averaged + (1 - decay) * weights
    found = _outputs(inputs[count:], averaged, offset).argmax(1)
    return float((found == labels[count:]).float().mean())


def _outputs(inputs: Tensor, weights: Tensor, offset: Tensor) -> Tensor:
    return (inputs @ weights[:-1].to(inputs.dtype)).float() + weights[-1] - offset @ weights[:-1]


CIFAR = {"features": "scattering", "rate": 0.2, "rounds": 200, "noise": 4.11, "learning_rate": 0.4, "average": 0.98}
MNIST = {"features": "scattering", "rate": 0.1366, "rounds": 300, "noise": 3.47, "learning_rate": 0.5}
EACH = MNIST | {"noise": 6.9, "learning_rate": 0.2}
IMAGENET = {"features": "imagenet", "rate": 1.0, "rounds": 50, "noise": 42.9, "learning_rate": 1.0, "average": 0.9}
EACH_1 = IMAGENET | {"noise": 54.0, "learning_rate": 0.5}
GREY = ("group norm, 27 groups", "dead leaves, each sample", "dead leaves, tanh, each position")
QUESTIONS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "CIFAR-10, scattering, epsilon 3, sums": (
        "cifar-10",
        [
            *(CIFAR | {"features": name} for name in NORMALISATIONS if "tanh" not in name and "mirror" not in name),
            CIFAR,
            CIFAR | {"centre": True},
            CIFAR | {"learning_rate": 0.6},
            CIFAR | {"learning_rate": 0.25},
            CIFAR | {"rate": 0.1, "noise": 2.17},
            CIFAR | {"rounds": 300, "noise": 4.97},
        ],
    ),
    "MNIST, scattering, epsilon 3, sums": (
        "mnist",
        [
            MNIST,
            *(MNIST | {"features": name} for name in GREY),
            MNIST | {"rate": 0.0682, "noise": 1.9},
            MNIST | {"rate": 0.25, "noise": 6.28},
            MNIST | {"rate": 0.2, "rounds": 100, "noise": 3.02, "learning_rate": 1.6},
            MNIST | {"rounds": 600, "rate": 0.0682, "noise": 2.5},
            MNIST | {"learning_rate": 0.8},
            MNIST | {"learning_rate": 0.3},
            MNIST | {"average": 0.98},
            MNIST | {"clip": 3.0, "learning_rate": 0.17},
            MNIST | {"schedule": "linear", "learning_rate": 1.0},
            MNIST | {"centre": True},
            MNIST | {"noise": 0.0},
        ],
    ),
    "MNIST, scattering, epsilon 3, each of four": (
        "mnist",
        [
            EACH,
            EACH | {"features": "dead leaves, each sample"},
            EACH | {"learning_rate": 0.1},
            EACH | {"learning_rate": 0.4},
            EACH | {"centre": True},
        ],
    ),
    "MNIST, scattering, epsilon 3, each of a hundred": (
        "mnist",
        [EACH | {"noise": 34.7, "learning_rate": value} for value in (0.05, 0.1, 0.025)],
    ),
    "Fashion-MNIST, scattering, epsilon 3, sums": (
        "fashion-mnist",
        [
            MNIST,
            *(MNIST | {"features": name} for name in (*GREY, "dead leaves, each position, mirror")),
            MNIST | {"learning_rate": 0.8},
            MNIST | {"average": 0.98},
            MNIST | {"schedule": "linear", "learning_rate": 1.0},
            MNIST | {"centre": True},
            MNIST | {"noise": 0.0},
        ],
    ),
    "Fashion-MNIST, scattering, epsilon 3, each of four": (
        "fashion-mnist",
        [
            EACH | {"learning_rate": 0.4},
            EACH | {"learning_rate": 0.4, "features": "dead leaves, each sample"},
            EACH,
            EACH | {"learning_rate": 0.6},
            EACH | {"learning_rate": 0.4, "centre": True},
        ],
    ),
    "Fashion-MNIST, scattering, epsilon 3, each of a hundred": (
        "fashion-mnist",
        [EACH | {"noise": 34.7, "learning_rate": value} for value in (0.05, 0.1, 0.025)],
    ),
    "CIFAR-10, ImageNet features, epsilon 0.59, sums": (
        "cifar-10",
        [
            IMAGENET,
            IMAGENET | {"learning_rate": 0.5},
            IMAGENET | {"learning_rate": 2.0},
            IMAGENET | {"average": 0.95},
            IMAGENET | {"centre": True},
            IMAGENET | {"rounds": 100, "noise": 60.7, "learning_rate": 0.7},
            IMAGENET | {"noise": 0.0},
        ],
    ),
    "CIFAR-10, ImageNet features, epsilon 1, each of four": (
        "cifar-10",
        [EACH_1 | {"learning_rate": value} for value in (0.5, 0.25, 1.0)],
    ),
}


def search(names: list[str]) -> None:
    """Try what has not been tried, keeping every answer as it comes."""
    for name in names:
        dataset, candidates = QUESTIONS[name]
        for candidate in candidates:
            kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"held_out": HELD_OUT}
            rows = kept.setdefault(name, [])
            if any(row["varied"] == candidate for row in rows):
                continue
            found = accuracy(dataset, **candidate)
            assert math.isfinite(found)
            rows.append({"varied": candidate, "held_out_accuracy": found, **provenance()})
            RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print(f"{name} {candidate}: held-out accuracy {found:.2%}", flush=True)


def main() -> None:
    """Answer the questions named, or all of them."""
    torch.set_num_threads(1)
    search(sys.argv[1:] or list(QUESTIONS))


if __name__ == "__main__":
    main()
