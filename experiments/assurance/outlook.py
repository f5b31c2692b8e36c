"""What noise to signal leaves to be learnt: seeded runs at the recipe's settings, from hardly any noise to nothing but.

python -m experiments.assurance.outlook     # all runs that are missing, then the section of the page

Each run trains with the settings that `bqsgd train` would choose, at one epsilon. Beside the accuracy stands the
outlook's noise to signal, which was known before the first round. *Learnt* is the share of what can be learnt: 0 for
the accuracy of the most frequent class, 1 for the best that any epsilon of the same case reached. The thresholds of
`settings.outlook` are chosen from it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from experiments.lab import RESULTS, provenance, read_json, write_json
from torch import nn

from bqsgd import data
from bqsgd._src.data.shares import rows_by_client
from bqsgd._src.run import Run
from bqsgd._src.settings.outlook import NOTHING, WELL, Verdict, foresee, verdict_of
from bqsgd._src.tasks.task import Task
from experiments import pages

RESULT = RESULTS / "outlook.json"
EPSILONS = (0.03, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 8.0)
SEEDS = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is learnt: a model of one kind, from so many samples of a data set that so many clients share."""

    kind: str
    dataset: str
    samples: int
    clients: int
    layers: Callable[[], list[nn.Module]]

    def task(self) -> Task:
        """The same samples and initial weights in every run."""
        whole = data.load(self.dataset)
        rows = np.random.default_rng(1).permutation(len(whole.train.labels))[: self.samples]
        train = whole.train.take(rows)
        shares = [train.take(own) for own in rows_by_client(train.labels, self.clients, seed=0)]
        return Task(
            make_model=self.model,
            shares=[(share.inputs, share.labels) for share in shares],
            test=(whole.test.inputs, whole.test.labels),
        )

    def model(self) -> nn.Module:
        """The model; a linear one starts at zero, as the built-in one does."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(*self.layers())
        if self.kind == "linear":
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        return model


def _linear(inputs: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, 10)]


def _mlp(inputs: int, hidden: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 10)]


def _deep() -> list[nn.Module]:
    return [*_mlp(64, 256)[:3], nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)]


def _cnn() -> list[nn.Module]:
    return [
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 10),
    ]


CASES = (
    Case(kind="linear", dataset="digits", samples=180, clients=1, layers=lambda: _linear(64)),
    Case(kind="linear", dataset="digits", samples=1400, clients=1, layers=lambda: _linear(64)),
    Case(kind="linear", dataset="digits", samples=1400, clients=4, layers=lambda: _linear(64)),
    Case(kind="linear", dataset="mnist", samples=6000, clients=4, layers=lambda: _linear(784)),
    Case(kind="CNN", dataset="digits", samples=180, clients=1, layers=_cnn),
    Case(kind="CNN", dataset="digits", samples=1400, clients=1, layers=_cnn),
    Case(kind="MLP", dataset="digits", samples=1400, clients=1, layers=lambda: _mlp(64, 16)),
    Case(kind="MLP", dataset="digits", samples=1400, clients=4, layers=lambda: _mlp(64, 256)),
    Case(kind="deep MLP", dataset="digits", samples=1400, clients=1, layers=_deep),
    Case(kind="MLP", dataset="mnist", samples=6000, clients=1, layers=lambda: _mlp(784, 64)),
)


def measure(case: Case, *, epsilon: float, seed: int) -> dict[str, Any]:
    """Train once. The noise is seeded, so the row makes no privacy claim and comes out the same again."""
    task, began = case.task(), time.perf_counter()
    config = task.config(epsilon=epsilon, seed=seed, evaluate_every=1000)
    with Run.start(task, config, force=True) as run:
        forecast = foresee(
            config, run.engine.samples, dimension=run.server.dimension, learnt=run.server.model.size,
            weights=run.server.weights,
        ).forecast  # fmt: skip
        for _ in run.rounds():
            pass
    accuracy = run.close().accuracy
    return {
        "kind": case.kind, "dataset": case.dataset, "samples": case.samples, "clients": case.clients,
        "dimension": run.server.model.size, "epsilon": epsilon, "seed": seed, "rounds": config.run.rounds,
        "noise_length": forecast.noise_length, "signal": forecast.signal, "noise_to_signal": forecast.noise_to_signal,
        "chance": float(np.bincount(task.test[1]).max() / len(task.test[1])), "accuracy": accuracy,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def measure_all() -> list[dict[str, Any]]:
    """Every run, written after each; those that are in the file are not repeated."""
    rows: list[dict[str, Any]] = read_json(RESULT)["rows"] if RESULT.exists() else []
    done = {(row["case"], row["epsilon"], row["seed"]) for row in rows}
    for number, case in enumerate(CASES):
        for epsilon in EPSILONS:
            for seed in SEEDS:
                if (number, epsilon, seed) not in done:
                    rows.append({"case": number} | measure(case, epsilon=epsilon, seed=seed))
                    write_json(RESULT, {"provenance": provenance(), "rows": rows})
    return rows


def learnt(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Each row with the share that it learnt of what the best epsilon of its case did."""
    for row in rows:
        alike = [other for other in rows if other["case"] == row["case"]]
        best = max(
            statistics.fmean(other["accuracy"] for other in alike if other["epsilon"] == epsilon)
            for epsilon in {other["epsilon"] for other in alike}
        )
        yield row, (row["accuracy"] - row["chance"]) / (best - row["chance"])


def section(results: dict[str, Any]) -> str:
    """Share learnt by noise to signal, for every case, and what the verdicts were worth."""
    shares = list(learnt(results["rows"]))
    edges = (0.0, 0.05, 0.1, WELL, 0.3, 0.5, NOTHING, 2.0, float("inf"))
    bands = list(itertools.pairwise(edges))
    titles = [f"up to {high:g}" if high < float("inf") else f"above {low:g}" for low, high in bands]
    lines = [
        f"| model | data | clients | d | {' | '.join(titles)} |",
        f"|---|---|--:|--:|{'--:|' * len(bands)}",
    ]
    for number in sorted({row["case"] for row, _ in shares}):
        own = [(row, share) for row, share in shares if row["case"] == number]
        row = own[0][0]
        cells = []
        for low, high in bands:
            inside = [share for each, share in own if low < each["noise_to_signal"] <= high]
            cells.append(f"{100 * statistics.fmean(inside):.0f} %" if inside else "")
        lines.append(
            f"| {row['kind']} | {row['dataset']}, {row['samples']:,} samples | {row['clients']} | "
            f"{row['dimension']:,} | {' | '.join(cells)} |"
        )
    lines += ["", "| verdict | runs | learnt: least | median | most |", "|---|--:|--:|--:|--:|"]
    for verdict in Verdict:
        inside = sorted(share for row, share in shares if verdict_of(row["noise_to_signal"]) is verdict)
        figures = (f"{100 * figure:.0f} %" for figure in (inside[0], statistics.median(inside), inside[-1]))
        lines.append(f"| {verdict} | {len(inside)} | {' | '.join(figures)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    measure_all()
    pages.write()
