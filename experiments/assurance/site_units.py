"""How many sites it takes to learn when each update hides its whole site: digits, a linear model, epsilon 8.

Every round of every setting uses the noise of a real plan, for frames (each site adds its own) and for secure sums (all
add one together). Rounds and clip norm are chosen on a fifth of the training data, which no site trains on; the test
data are looked at once, with what was chosen.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import one_hot

from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.persample.clips import L2
from bqsgd._src.planner.plan import Budget
from bqsgd._src.private.gate import update_range, update_sum, update_terms
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.settings.client_plan import plan_release

SITES, ROUNDS, CLIPS, SEEDS = (2, 10, 30, 100, 300), (1, 2, 5, 20), (0.3, 1.0, 3.0, 10.0), 3
QUICKSTART = 62_006
"""Parameters of the model in both quickstarts."""
_TEST, _STEPS, _RATE, _DIMENSION = 360, 8, 0.5, 650
_Data = tuple[Tensor, Tensor]


@cache
def noise(rounds: int, *, dimension: int = _DIMENSION, sums_of: int | None = None) -> float:
    """The standard deviation of the noise on a coordinate, in clip norms: of one update, or of a whole sum."""
    budget, clip = Budget(bits=8, epsilon=8.0, delta=1e-5), L2(norm=1.0)
    reach = update_range(budget, clip_norm=1.0, rounds=rounds)
    if sums_of is None:
        mechanism = plan_release(update_terms(clip, range=reach, dimension=dimension), budget, rounds=rounds).mechanism
    else:
        rule = thresholds(clients=sums_of, dropouts=0, colluders=0)
        terms = update_terms(clip, range=reach, dimension=dimension, rule=rule)
        mechanism = update_sum(budget.privacy, terms, rule, rounds=rounds).mechanism
    return float(np.sqrt(noise_variance(mechanism))) * reach


def accuracy(sites: int, rounds: int, clip: float, *, deviation: float, data: tuple[_Data, _Data], seed: int) -> float:
    """Accuracy after all rounds. deviation: of the noise on a coordinate of the sites' mean, in clip norms."""
    (x, y), (tested, labels) = data
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)[: len(y) // sites * sites].view(sites, -1)
    inputs = torch.cat([x[order], torch.ones(*order.shape, 1)], 2)
    targets, server = one_hot(y[order], 10).float(), torch.zeros(inputs.shape[2], 10)
    for _ in range(rounds):
        weights = server.repeat(sites, 1, 1)
        for _ in range(_STEPS):
            error = torch.softmax(inputs @ weights, 2) - targets
            weights = weights - _RATE * inputs.transpose(1, 2) @ error / inputs.shape[1]
        update = weights - server
        norms = update.flatten(1).norm(dim=1).clamp(min=1e-12)
        mean = (update * (clip / norms).clamp(max=1.0)[:, None, None]).mean(0)
        server = server + mean + deviation * clip * torch.randn(server.shape, generator=generator)
    guessed = (torch.cat([tested, torch.ones(len(tested), 1)], 1) @ server).argmax(1)
    return float((guessed == labels).float().mean())


def deviation(kind: str, sites: int, rounds: int) -> float:
    """Of the noise on a coordinate of the sites' mean, in clip norms."""
    if kind == "sums":
        return noise(rounds, sums_of=sites) / sites
    return noise(rounds) / float(np.sqrt(sites)) if kind == "updates" else 0.0


def mean_accuracy(kind: str, sites: int, rounds: int, clip: float, data: tuple[_Data, _Data]) -> float:
    """Over the seeds."""
    spread = deviation(kind, sites, rounds)
    return sum(accuracy(sites, rounds, clip, deviation=spread, data=data, seed=s) for s in range(SEEDS)) / SEEDS


def rows() -> dict[str, Any]:
    """For each number of sites: the chosen settings and the mean accuracy on the test data."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    split = _TEST + (len(y) - _TEST) * 4 // 5
    train, chosen_on, test = ((x[part], y[part]) for part in (slice(_TEST, split), slice(split, None), slice(_TEST)))
    settings, table = list(product(ROUNDS, CLIPS)), []
    for sites, kind in product(SITES, ("without noise", "updates", "sums")):
        reached = [mean_accuracy(kind, sites, *setting, (train, chosen_on)) for setting in settings]
        rounds, clip = settings[reached.index(max(reached))]
        table.append(
            {
                "sites": sites, "kind": kind, "rounds": rounds, "clip_norm": clip,
                "accuracy": mean_accuracy(kind, sites, rounds, clip, (train, test)),
                # The length of the noise on the mean, when no update is longer than 1.
                "noise_norm": deviation(kind, sites, rounds) * _DIMENSION**0.5,
            }
        )  # fmt: skip
    own, quickstart = noise(5), noise(3, dimension=QUICKSTART)
    return {
        "rows": table,
        "one_update": {"rounds": 5, "deviation": own, "norm": own * _DIMENSION**0.5},
        "quickstart": {"rounds": 3, "deviation": quickstart, "norm": quickstart * QUICKSTART**0.5},
    }


def section(units: dict[str, Any]) -> list[str]:
    """The table of docs/gate.md."""
    own, theirs = units["one_update"], units["quickstart"]
    lines = [
        "",
        f"One private update at epsilon 8 over {own['rounds']} rounds has noise of {own['deviation']:.2f} clip norms "
        f"on each coordinate: over 650 parameters it is {own['norm']:.0f} times as long as an update may be, and "
        f"over the {QUICKSTART:,} parameters of the quickstarts in {theirs['rounds']} rounds "
        f"{theirs['norm']:.0f} times. In the mean of S sites it is shorter by the root of S, in a secure sum by S. "
        "With the rounds and the clip norm that are best on data that no site trains on, the linear model reaches (in "
        "brackets: rounds, clip norm, and the length of the noise on the mean in clip norms):",
        "",
        "| sites | " + " | ".join(kinds := list(dict.fromkeys(row["kind"] for row in units["rows"]))) + " |",
        "|--:|" + "--:|" * len(kinds),
    ]
    for sites in dict.fromkeys(row["sites"] for row in units["rows"]):
        rows = [row for row in units["rows"] if row["sites"] == sites]
        cells = [
            f"{row['accuracy']:.3f} ({row['rounds']}, {row['clip_norm']:g}, {row['noise_norm']:.2f})" for row in rows
        ]
        lines.append(f"| {sites} | " + " | ".join(cells) + " |")
    return lines
