"""One message instead of rounds: both methods side by side on held-out training samples.

python -m experiments.frontier.one_message  # writes results/one_message.json; continues where it stopped

Runs of the preset are points of the frontier (`experiments.frontier.points`).

The comparison is a simulation with Gaussian noise and has no guarantee. What decides is the noise multiplier z of one
release over all clients: that of epsilon at delta 1e-5 where only their sum is seen, and twice that where each of four
clients' messages is. T rounds over all samples have noise of sqrt(T) z each. For rounds 13,000 of the 40,000 training
samples stand for all, with the noise in proportion; 10,000 others are held out.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from experiments.frontier.held_out import HELD_OUT, SPLIT_SEED
from experiments.lab import RESULTS, provenance, read_json, write_json

from bqsgd import data
from bqsgd._src.client.least_squares import LeastSquares
from bqsgd._src.data.features import whole_features
from bqsgd._src.descent.optimizers import average, schedule
from bqsgd._src.persample import moments
from bqsgd._src.persample.clips import L2
from bqsgd._src.planner.plan import Budget
from bqsgd._src.planner.search import total_shift
from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.server import least_squares as solving

PLACE = RESULTS / "one_message.json"
EPSILONS, DELTA, CLIENTS = (0.05, 0.1, 0.2, 0.3, 0.59, 1.0), 1e-5, 4
SUMS, EACH = "only sums seen", f"each of {CLIENTS} messages seen"
LOUD = ((1, 1.0), (5, 0.4), (5, 1.6), (8, 0.8), (8, 2.4), (15, 0.3), (15, 0.6), (15, 1.2), (15, 2.4), (30, 0.15),
        (30, 0.5), (50, 0.2), (50, 0.8))  # fmt: skip
QUIET = ((1, 1.0), (5, 0.4), (5, 1.6), (15, 0.3), (15, 1.2), (50, 0.2), (50, 0.8), (50, 1.6), (100, 0.4), (100, 0.8))
NOISES = {115.0: LOUD, 61.5: LOUD, 30.7: QUIET, 6.05: QUIET}
"""z -> rounds and learning rates that are tried. The first model is zero, momentum 0.9, the rate falls to 0, and every
gradient exceeds the clip of 0.5; from 15 rounds on the model is averaged with decay 0.9."""
FEW, CLIP = 13_000, 0.5
WEIGHTS, RIDGES, LOUD_NOISE = (1.0, moments.CLASS_WEIGHT, 2.0), (0.35, solving.RIDGE, 1.4), 61.5
"""Values of the library's two constants that are tried at this z."""
NEAR = 0.02
"""How near, in proportion, the noise of rounds is to that of the message they are shown beside."""
_Values = npt.NDArray[np.float32]


def multiplier(epsilon: float) -> float:
    """z: the deviation of Gaussian noise over the norm of what a sample adds."""
    return 1 / total_shift(Budget(bits=8, epsilon=epsilon, delta=DELTA))


def compare() -> None:
    """What is missing of both methods, written down as it comes."""
    kept = read_json(PLACE) if PLACE.exists() else {"one_message": [], "rounds": []}
    kept |= provenance()
    train, held = _split()
    if not kept["one_message"]:
        sent = _moments(train)
        for epsilon in EPSILONS:
            for trust, factor in ((SUMS, 1.0), (EACH, math.sqrt(CLIENTS))):
                noise = factor * multiplier(epsilon)
                accuracy = _one_message(sent, noise / len(train[0]), held)
                kept["one_message"].append({"epsilon": epsilon, "trust": trust, "noise": noise, "accuracy": accuracy})
                print(kept["one_message"][-1], flush=True)
        write_json(PLACE, kept)
    if "constants" not in kept:
        kept["constants"] = _constants(train, held)
        write_json(PLACE, kept)
    done = {(row["noise"], row["rounds"], row["learning_rate"]) for row in kept["rounds"]}
    for noise, tried in NOISES.items():
        for rounds, rate in tried:
            if (noise, rounds, rate) not in done:
                accuracy = _by_rounds(train, held, noise, rounds, rate)
                row = {"noise": noise, "rounds": rounds, "learning_rate": rate, "accuracy": accuracy}
                kept["rounds"].append(row)
                print(row, flush=True)
                write_json(PLACE, kept)


def _split() -> tuple[tuple[_Values, Any], tuple[_Values, Any]]:
    cifar = data.load("cifar-10", quiet=True)
    features = whole_features("imagenet", "train", of=cifar)
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(features))
    parts = rows[HELD_OUT:], rows[:HELD_OUT]
    train, held = ((np.array(features.inputs[np.sort(part)]), features.labels[np.sort(part)]) for part in parts)
    return train, held


def _moments(train: tuple[_Values, Any]) -> npt.NDArray[np.float64]:
    batch = torch.from_numpy(train[0]), torch.from_numpy(train[1])
    return moments.clipped_moments(batch, classes=10, clip=L2(1.0), batch_size=len(train[0])).mean.numpy()


def _constants(train: tuple[_Values, Any], held: tuple[_Values, Any]) -> list[dict[str, float]]:
    """The accuracy with other values of the weight of the class sums and of the ridge."""
    rows = []
    for weight in WEIGHTS:
        with patch.object(moments, "CLASS_WEIGHT", weight):
            sent = _moments(train)
        for ridge in RIDGES:
            with patch.object(solving, "RIDGE", ridge):
                accuracy = _one_message(sent, LOUD_NOISE / len(train[0]), held)
            rows.append({"weight": weight, "ridge": ridge, "noise": LOUD_NOISE, "accuracy": accuracy})
            print(rows[-1], flush=True)
    return rows


def _one_message(sent: npt.NDArray[np.float64], noise: float, held: tuple[_Values, Any]) -> float:
    """The accuracy on held-out samples of what is solved from moments with noise of this deviation; mean of two."""
    problem = LeastSquares(features=held[0].shape[1], classes=10, offset=False)
    accuracies = []
    for seed in range(2):
        noisy = sent + noise * np.random.default_rng(seed).standard_normal(len(sent))
        weights = solving.solve(problem, noisy, noise_variance=noise**2).reshape(10, -1)
        accuracies.append(float(((held[0] @ weights.T.astype(np.float32)).argmax(1) == held[1]).mean()))
    return sum(accuracies) / len(accuracies)


def _by_rounds(train: tuple[_Values, Any], held: tuple[_Values, Any], noise: float, rounds: int, rate: float) -> float:
    """The accuracy on held-out samples after so many rounds over all samples."""
    rows = np.sort(np.random.default_rng(0).permutation(len(train[0]))[:FEW])
    x, y = torch.from_numpy(train[0][rows]), torch.from_numpy(train[1][rows]).long()
    deviation = noise * CLIP * math.sqrt(rounds) / len(train[0])
    generator = torch.Generator().manual_seed(0)
    lengths, every = torch.sqrt(x.square().sum(1) + 1), torch.arange(len(x))
    model = torch.zeros(x.shape[1] + 1, 10)
    velocity, averaged = torch.zeros_like(model), np.zeros(model.numel())
    for round in range(rounds):
        errors = torch.softmax(x @ model[:-1] + model[-1], 1)
        errors[every, y] -= 1
        errors *= torch.clamp(CLIP / (errors.norm(dim=1) * lengths).clamp_min(1e-12), max=1.0)[:, None]
        mean = torch.cat([x.T @ errors, errors.sum(0, keepdim=True)]) / len(x)
        velocity = 0.9 * velocity + mean + deviation * torch.randn(model.shape, generator=generator)
        model = model - rate * schedule("linear", round=round, rounds=rounds) * velocity
        averaged = average(averaged, model.reshape(-1).numpy(), decay=0.9 if rounds >= 15 else 0.0, round=round)
    best = torch.from_numpy(averaged.astype(np.float32)).view_as(model)
    return float(((torch.from_numpy(held[0]) @ best[:-1] + best[-1]).argmax(1).numpy() == held[1]).mean())


def table(results: dict[str, Any]) -> str:
    """Both methods for every noise, as the page has them."""
    lines = ["| z | epsilon, who sees what | one message | best of rounds |", "|---:|---|---:|---:|"]
    for row in sorted(results["one_message"], key=lambda row: float(row["noise"])):
        near = [other for other in results["rounds"] if abs(other["noise"] / row["noise"] - 1) < NEAR]
        best = max((other["accuracy"] for other in near), default=None)
        rounds = "not tried" if best is None else f"{100 * best:.1f} % ({len(near)})"
        who = f"{as_given(row['epsilon'])}, {row['trust']}"
        lines.append(f"| {row['noise']:.3g} | {who} | {100 * row['accuracy']:.1f} % | {rounds} |")
    return "\n".join(lines) + "\n"


def constants_table(results: dict[str, Any]) -> str:
    """Weights of the class sums down, ridges across, as the page has them."""
    lines = [
        "| class sums times \\ ridge | " + " | ".join(f"{ridge:g}" for ridge in RIDGES) + " |",
        "|---|" + "---:|" * len(RIDGES),
    ]
    accuracies = {(row["weight"], row["ridge"]): row["accuracy"] for row in results["constants"]}
    for weight in WEIGHTS:
        cells = " | ".join(f"{100 * accuracies[weight, ridge]:.1f} %" for ridge in RIDGES)
        lines.append(f"| {weight:.3g} | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare()
