"""How features and settings of the frontier's presets were chosen: on 10,000 training samples held out of the rest.

python -m experiments.frontier.search [QUESTION ...]  # continues where it stopped; writes frontier_search.json

A linear model or a small CNN, per-sample L2 clips of norm 1, and Gaussian noise of the given deviation on the sum of
the clipped gradients: what the plan of a secure sum comes to, or with twice the deviation four clients that each add
their own. Batches are runs of neighbours in shuffled data. Nothing is sent, no run makes a privacy claim, and the
search is not charged to epsilon. Differences below 0.2 points on MNIST and 0.5 on CIFAR-10 are noise.

How many coordinates a message carries (`SHARES`) is tried with the library's own runs instead, its noise seeded. A
single client that holds all samples stands for the clients of a secure sum: one subset and one noise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from experiments.frontier.held_out import HELD_OUT, SPLIT_SEED, try_out
from experiments.lab import provenance, read_json, write_json
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, group_norm, layer_norm, linear, max_pool2d, unfold

from bqsgd import data
from bqsgd._src.data.features import whole_features
from bqsgd._src.data.scattering import constants, each_position, opponents, transform_for
from bqsgd._src.settings.groups import CENTRED
from bqsgd._src.tasks.named import presets
from experiments import lab

RESULTS = lab.RESULTS / "frontier_search.json"
CLASSES = 10
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
        kept[row] = (64 * transform.coefficients(transform.padded(torch.from_numpy(images[row])))).reshape(
            kept.shape[1:]
        )
    return kept


@lru_cache(maxsize=2)
def training(dataset: str, features: str, *, mirrored: bool = False) -> tuple[Tensor, Tensor]:
    """Features in half precision and labels, the held-out samples last. Features: as the library has them, or a
    normalisation's name; the latter also of the mirror images."""
    found = data.load(dataset, quiet=True)
    order = _order(len(found.train))
    labels = torch.from_numpy(np.asarray(found.train.labels, dtype=np.int64))[order]
    if features in NORMALISATIONS:
        raw = coefficients(dataset, differences=features.endswith("opponents"), mirrored=mirrored)
    else:
        assert not mirrored, "the library's own features are averaged with the mirror image already"
        raw = torch.from_numpy(np.array(whole_features(features, "train", of=found).inputs))
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
    model: str = "linear",
    seed: int = 0,
) -> float:
    """On the held-out samples, after training on the others.

    noise: deviation on the sum, in clips. centre: the first round measures the mean of the features, each sample's
    scaled to the clip, and the others train on features less that mean. model: "linear"; "cnn" on the features; or
    "linear, mirror": the gradient of a sample is the mean of its image's and the mirror image's, clipped as one.
    """
    inputs, labels = training(dataset, features)
    rng = torch.Generator().manual_seed(seed)
    count = len(inputs) - HELD_OUT
    batch = round(rate * count)
    trained: Linear | Convolutions
    if model == "cnn":
        trained = Convolutions(inputs, labels, rng=rng)
    else:
        mirrored = [training(dataset, features, mirrored=True)[0]] if model == "linear, mirror" else []
        trained = Linear([inputs, *mirrored], labels)
    weights = trained.initial
    velocity, averaged = torch.zeros_like(weights), torch.zeros_like(weights)
    for number in range(rounds):
        start = int(torch.randint(0, count - batch + 1, (1,), generator=rng))
        rows = slice(start, start + batch)
        if centre and number == 0:
            assert isinstance(trained, Linear)
            trained.centre(rows, noise=noise, rng=rng)
            continue
        summed = trained.clipped_sum(weights, rows, clip)
        gradient = summed + noise * clip * torch.randn(weights.shape, generator=rng)
        velocity = momentum * velocity + gradient / batch
        weights = weights - learning_rate * (1 if schedule == "constant" else 1 - number / rounds) * velocity
        decay = min(average, (1 + number) / (10 + number))
        averaged = decay * averaged + (1 - decay) * weights
    found = trained.outputs(averaged, slice(count, None)).argmax(1)
    return float((found == labels[count:]).float().mean())


class Linear:
    """One layer on the features, from zero. A sample has one view or several: its gradient is the mean of theirs, and
    the norm of that comes from the products of features and of errors."""

    def __init__(self, views: Sequence[Tensor], labels: Tensor) -> None:
        self.views, self.labels = views, labels
        self.offset = torch.zeros(views[0].shape[1])
        self.products = torch.stack([torch.stack([_products(one, other) for other in views], 1) for one in views], 1)
        self.initial = torch.zeros(len(self.offset) + 1, CLASSES)

    def centre(self, rows: slice, *, noise: float, rng: torch.Generator) -> None:
        """Measure the mean of the features, and take them less that mean from here on."""
        assert len(self.views) == 1
        inputs, squares = self.views[0], self.products[:, 0, 0]
        typical = float(squares[:1000].mean().sqrt())
        summed = (inputs[rows].float() / squares[rows].sqrt()[:, None]).sum(0)
        noised = summed + noise * torch.randn(len(self.offset), generator=rng)
        self.offset = noised / len(inputs[rows]) * typical
        along = (inputs @ self.offset.to(inputs.dtype)).float()
        self.products = (squares - 2 * along + float(self.offset @ self.offset))[:, None, None]

    def outputs(self, weights: Tensor, rows: slice) -> Tensor:
        """One row for each sample."""
        return torch.stack([self._outputs(weights, view[rows]) for view in self.views]).mean(0)

    def clipped_sum(self, weights: Tensor, rows: slice, clip: float) -> Tensor:
        """Of the samples' gradients."""
        found = torch.stack([torch.softmax(self._outputs(weights, view[rows]), 1) for view in self.views], 1)
        found[torch.arange(len(found)), :, self.labels[rows]] -= 1
        errors = found / len(self.views)
        squares = torch.einsum("nac,nbc,nab->n", errors, errors, self.products[rows] + 1)
        errors *= _factors(squares.sqrt(), clip)[:, None, None]
        summed = errors.sum((0, 1))[None]
        product = sum(  # the errors transposed: far faster than the features transposed
            (errors[:, number].to(view.dtype).T @ view[rows]).T.float() for number, view in enumerate(self.views)
        )
        return torch.cat([product - self.offset[:, None] * summed, summed])

    def _outputs(self, weights: Tensor, part: Tensor) -> Tensor:
        return (part @ weights[:-1].to(part.dtype)).float() + weights[-1] - self.offset @ weights[:-1]


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Of each sample's features, row by row."""
    pairs = zip(one.split(1000), other.split(1000), strict=True)
    return torch.cat([(left.float() * right.float()).sum(1) for left, right in pairs])


class Convolutions:
    """The small CNN that Tramer and Boneh put on the features of CIFAR-10: two convolutions of 3 x 3 with tanh and a
    maximum over 2 x 2 after each, then one layer. The gradient of each sample is made, a few hundred at a time."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> None:
        self.labels, side = labels, 8
        self.channels = inputs.shape[1] // side**2
        self.inputs = inputs.view(-1, self.channels, side, side)
        self.shapes = [(64, self.channels, 3, 3), (64,), (60, 64, 3, 3), (60,), (CLASSES, 240), (CLASSES,)]
        spans = [math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.0 for shape in self.shapes]
        drawn = [
            span * (2 * torch.rand(math.prod(shape), generator=rng) - 1)
            for shape, span in zip(self.shapes, spans, strict=True)
        ]
        self.initial = torch.cat(drawn)

    def outputs(self, weights: Tensor, rows: slice) -> Tensor:
        """One row for each sample."""
        with torch.no_grad():
            return torch.cat([self._passed(weights, part)[-1] for part in self.inputs[rows].split(250)])

    def clipped_sum(self, weights: Tensor, rows: slice, clip: float) -> Tensor:
        """Of the samples' gradients."""
        summed = torch.zeros_like(weights)
        for part, labels in zip(self.inputs[rows].split(250), self.labels[rows].split(250), strict=True):
            summed += _clipped(self._gradients(weights, part, labels), clip)
        return summed

    def _passed(self, weights: Tensor, part: Tensor) -> list[Tensor]:
        """Inputs and outputs of the three layers, in turn."""
        parts = weights.split([math.prod(shape) for shape in self.shapes])
        first, bias1, second, bias2, last, bias3 = (
            found.view(shape) for found, shape in zip(parts, self.shapes, strict=True)
        )
        one = conv2d(part, first.to(part.dtype), padding=1).float() + bias1[:, None, None]
        middle = max_pool2d(torch.tanh(one), 2)
        two = conv2d(middle, second, bias2, padding=1)
        end = max_pool2d(torch.tanh(two), 2).flatten(1)
        return [part, one, middle, two, end, linear(end, last, bias3)]

    def _gradients(self, weights: Tensor, part: Tensor, labels: Tensor) -> list[Tensor]:
        """Of every parameter, one row for each sample."""
        part, one, middle, two, end, outputs = self._passed(weights.requires_grad_(), part)
        errors = torch.autograd.grad(cross_entropy(outputs, labels, reduction="sum"), [one, two, outputs])
        weights.requires_grad_(False)
        with torch.no_grad():
            found = []
            for inputs, error in ((part, errors[0]), (middle, errors[1])):
                error = error.flatten(2)
                found += [torch.bmm(error.to(inputs.dtype), _patches(inputs)), error.sum(2)]
            return [*found, errors[2][:, :, None] * end[:, None, :], errors[2]]


def _patches(images: Tensor) -> Tensor:
    """Each position's neighbourhood of 3 x 3, in the order of a convolution's weights: (sample, position, weight)."""
    count, channels, height, width = images.shape
    return unfold(images, 3, padding=1).view(count, 9 * channels, height * width).transpose(1, 2)


def _clipped(gradients: list[Tensor], clip: float) -> Tensor:
    norms = torch.stack([found.flatten(1).float().norm(dim=1) for found in gradients]).norm(dim=0)
    factors = _factors(norms, clip)
    return torch.cat([factors.to(found.dtype) @ found.flatten(1) for found in gradients]).float()


def _factors(norms: Tensor, clip: float) -> Tensor:
    return torch.clamp(clip / norms.clamp_min(1e-12), max=1)


CIFAR = {"features": "scattering", "rate": 0.2, "rounds": 200, "noise": 4.11, "learning_rate": 0.4, "average": 0.98}
CIFAR_1 = CIFAR | {"rate": 1.0, "rounds": 60, "noise": 28.9, "average": 0.9}
MNIST = {"features": "scattering", "rate": 0.1366, "rounds": 300, "noise": 3.47, "learning_rate": 0.5}
EACH = MNIST | {"noise": 6.9, "learning_rate": 0.2}
IMAGENET = {"features": "imagenet", "rate": 1.0, "rounds": 50, "noise": 42.9, "learning_rate": 1.0, "average": 0.9}
EACH_1 = IMAGENET | {"noise": 54.0, "learning_rate": 0.5}
PAIR = {
    "features": "imagenet-pair", "rate": 1.0, "rounds": 50, "noise": 26.4, "learning_rate": 4.0, "momentum": 0.5,
    "average": 0.9,
}  # fmt: skip
FEWER = {
    "features": "whitened", "rate": 1.0, "rounds": 50, "noise": 26.4, "learning_rate": 4.0, "momentum": 0.5,
    "average": 0.8,
}  # fmt: skip
FEWER_TRIED: list[dict[str, Any]] = [
    FEWER,
    FEWER | {"features": "scattering"},
    FEWER | {"learning_rate": 2.0},
    FEWER | {"learning_rate": 8.0},
    FEWER | {"learning_rate": 2.0, "momentum": 0.9},
    FEWER | {"rounds": 30, "noise": 20.4},
    FEWER | {"rounds": 150, "rate": 0.3, "noise": 13.7, "learning_rate": 1.5, "momentum": 0.7, "average": 0.9},
]
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
            *(CIFAR | {"rate": 0.1, "noise": 2.17, "learning_rate": step, "model": "cnn"} for step in (0.4, 1.0, 2.0)),
            CIFAR | {"features": "dead leaves, each position, opponents", "model": "linear, mirror"},
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
    "MNIST, scattering, epsilon 1.16, each of four": ("mnist", [EACH | {"noise": 17.9}]),
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
    "MNIST, scattering, epsilon 1, sums": (
        "mnist",
        [MNIST | {"noise": 9.7, "learning_rate": value} for value in (0.2, 0.12)],
    ),
    "Fashion-MNIST, scattering, epsilon 1, sums": (
        "fashion-mnist",
        [MNIST | {"noise": 9.7, "learning_rate": value} for value in (0.4, 0.25)],
    ),
    "MNIST, fewer rounds, epsilon 1, sums": ("mnist", FEWER_TRIED),
    "Fashion-MNIST, fewer rounds, epsilon 1, sums": ("fashion-mnist", FEWER_TRIED),
    "MNIST, fewer rounds, epsilon 3, each of a hundred": (
        "mnist",
        [
            FEWER | {"noise": 104.0, "average": 0.9, "learning_rate": rate, "momentum": momentum}
            for rate, momentum in ((1.0, 0.5), (2.0, 0.5), (0.5, 0.5), (0.2, 0.8))
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
    "CIFAR-10, scattering, epsilon 1, sums": (
        "cifar-10",
        [CIFAR_1, CIFAR_1 | {"learning_rate": 0.8}, CIFAR_1 | {"learning_rate": 0.2}, CIFAR_1 | {"centre": True}],
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
    "CIFAR-10, features of two networks, epsilon 1, sums": (
        "cifar-10",
        [
            PAIR,
            PAIR | {"features": "imagenet"},
            PAIR | {"learning_rate": 1.0, "momentum": 0.9},
            PAIR | {"centre": True},
            PAIR | {"learning_rate": 2.5},
            PAIR | {"learning_rate": 6.0},
            PAIR | {"rounds": 30, "noise": 20.4, "average": 0.8},
            PAIR | {"average": 0.8},
            PAIR | {"noise": 0.0},
        ],
    ),
    "CIFAR-10, features of two networks, epsilon 1, each of four": (
        "cifar-10",
        [PAIR | {"noise": 54.0, "learning_rate": value} for value in (1.5, 3.0)],
    ),
    "CIFAR-10, ImageNet features, epsilon 1, each of four": (
        "cifar-10",
        [EACH_1 | {"learning_rate": value} for value in (0.5, 0.25, 1.0)],
    ),
}
NOISE_SEED = 1


def share(preset: str, one_in: int, **others: Any) -> dict[str, Any]:
    """A preset whose messages carry one in so many coordinates."""
    return {"preset": preset, "one_in": one_in, **others}


SHARES: dict[str, list[dict[str, Any]]] = {
    "Coordinates, Fashion-MNIST, each of four": [share("fashion-eps3", one_in) for one_in in (20, 50)],
    "Coordinates, Fashion-MNIST, each of a hundred": [share("fashion-eps3-100", 100)],
    "Coordinates, MNIST, epsilon 1.16, each of four": [share("mnist-eps1", one_in) for one_in in (20, 50)],
    "Coordinates, CIFAR-10, ImageNet features, epsilon 1, each of four": [
        share("cifar10-imagenet-eps1", 10, bits=4, range=0.0006),
        share("cifar10-imagenet-eps1", 7, bits=3, range=0.0008),
        share("cifar10-imagenet-eps1", 20, bits=8, range=0.002),
        share("cifar10-imagenet-eps1", 5, bits=8, range=0.002),
    ],
    "Coordinates, Fashion-MNIST, sums": [share("fashion-eps3-sums", one_in) for one_in in (10, 20)],
    "Coordinates, CIFAR-10, ImageNet features, epsilon 1, sums": [
        *(share("cifar10-imagenet-eps1-sums", one_in) for one_in in (10, 5, 3, 1)),
        share("cifar10-imagenet-eps1-sums", 1, method=CENTRED),
        share("cifar10-imagenet-eps1-sums", 1, learning_rate=1.5),
        share("cifar10-imagenet-eps1-sums", 1, method=CENTRED, learning_rate=1.5),
    ],
    "Coordinates, CIFAR-10, features of two networks, epsilon 1, sums": [
        share("cifar10-imagenet-pair-eps1-sums", 1),
        share("cifar10-imagenet-pair-eps1-sums", 3),
        share("cifar10-imagenet-pair-eps1-sums", 1, method=CENTRED),
    ],
    "Coordinates, CIFAR-10, features of two networks, epsilon 1, each of four": [
        share("cifar10-imagenet-pair-eps1", 1, bits=3),
        share("cifar10-imagenet-pair-eps1", 7, bits=3, range=0.0008),
    ],
    "Coordinates, CIFAR-10, ImageNet features, epsilon 0.59, sums": [
        *(share("cifar10-imagenet-eps059-sums", one_in, range=0.004) for one_in in (10, 5, 3, 1)),
        share("cifar10-imagenet-eps059-sums", 1, range=0.004, method=CENTRED),
    ],
    "Coordinates, CIFAR-10, scattering, epsilon 3, sums": [
        *(share("cifar10-eps3-sums", one_in) for one_in in (10, 20, 1, 3, 5)),
        share("cifar10-eps3-sums", 10, method=CENTRED),
        share("cifar10-eps3-sums", 1, method=CENTRED, range=0.02),
    ],
    "Centre, Fashion-MNIST, whitened features, epsilon 3, sums": [
        share("fashion-eps3-sums-whitened", 7),
        share("fashion-eps3-sums-whitened", 7, method=CENTRED),
    ],
    "Centre, MNIST, whitened features, epsilon 1, sums": [
        share("mnist-eps1-sums-whitened", 10),
        share("mnist-eps1-sums-whitened", 10, method=CENTRED),
    ],
}
"""What every coordinate gives is in the questions above, except for ImageNet features in sums at epsilon 1."""


def share_accuracy(preset: str, **changed: Any) -> float:
    """On the held-out samples, of the preset's run on the others."""
    settings = presets()[preset] | changed | {"seed": NOISE_SEED, "workers": 1}
    samples = len(data.load(settings["dataset"], quiet=True).train)
    # As many samples less: the rate stays that of the preset.
    settings["batch_size"] = round(settings["batch_size"] * (samples - HELD_OUT) / samples)
    if settings.get("secure"):
        settings |= {"secure": False, "clients": 1, "batch_size": settings["batch_size"] * settings.get("clients", 4)}
    return float(try_out(**settings)["held_out_accuracy"])


def _kept() -> dict[str, Any]:
    return dict(read_json(RESULTS)) if RESULTS.exists() else {"held_out": HELD_OUT}


def search(names: list[str]) -> None:
    """Try what has not been tried, keeping every answer as it comes."""
    for name in names:
        candidates = SHARES[name] if name in SHARES else QUESTIONS[name][1]
        for candidate in candidates:
            if any(row["varied"] == candidate for row in _kept().get(name, [])):
                continue
            found = share_accuracy(**candidate) if name in SHARES else accuracy(QUESTIONS[name][0], **candidate)
            assert math.isfinite(found)
            kept = _kept()  # read again: another process may have answered another question meanwhile
            kept.setdefault(name, []).append({"varied": candidate, "held_out_accuracy": found, **provenance()})
            write_json(RESULTS, kept)
            print(f"{name} {candidate}: held-out accuracy {found:.2%}", flush=True)


def main() -> None:
    """Answer the questions named, or all of them."""
    torch.set_num_threads(1)
    search(sys.argv[1:] or [*QUESTIONS, *SHARES])


if __name__ == "__main__":
    main()
