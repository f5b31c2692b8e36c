"""The frontier: presets over their seeds, MNIST at epsilon 3 in 2, 3, 4, 6 and 8 bits per coordinate, simulated sums.

python -m experiments.reproduce frontier    # continues where it stopped; finished runs are files in results/frontier/

A seed here is that of the shares of data and of the initial model, both public. The noise comes from the operating
system, so every run has the guarantee that its ledgers state, and none can be repeated bit for bit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from experiments.frontier_figure import draw_frontier
from experiments.runs import provenance

from bqsgd.cli.output import shown
from bqsgd.data import PUBLIC_DATA
from bqsgd.privacy.guarantee import rounded_up
from bqsgd.records.record import Summary
from bqsgd.run import Run
from bqsgd.tasks import NamedTask, plain_settings, preset, settings_of
from bqsgd.training.settings import Config

HERE = Path(__file__).parent
RUNS, FOLDERS = HERE / "results" / "frontier", HERE.parent / "runs" / "frontier"
FIGURES = ("frontier.png",)
QUICK = {"dataset": "digits", "rounds": 2, "batch_size": 64, "epsilon": 8.0}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the frontier; `target` is the accuracy asked of its mean, that of the reference named."""

    preset: str
    bits: int
    target: float | None = None
    reference: str | None = None

    @property
    def name(self) -> str:
        """Of its runs."""
        return f"{self.preset}-{self.bits}bits"

    def settings(self, seed: int, *, quick: bool) -> tuple[NamedTask, Config]:
        """Its settings with this seed."""
        settings = preset(self.preset) | {"bits": self.bits, "init_seed": seed, "run": f"{self.name}-seed{seed}"}
        return settings_of(**settings | (QUICK if quick else {}))


POINTS = (
    Point(preset="mnist-eps3", bits=8, target=0.981, reference="tuned tanh CNN"),
    Point(preset="mnist-eps1", bits=8, target=0.95, reference="Opacus 1.16"),
    Point(preset="fashion-eps3", bits=8, target=0.861, reference="tanh CNN, Fashion"),
    Point(preset="mnist-eps3-4bit", bits=4),
    Point(preset="mnist-eps3-4bit", bits=2),
    Point(preset="mnist-eps3-4bit", bits=3),
    Point(preset="mnist-eps3-4bit", bits=6),
)
SIMULATED = (
    ("mnist-eps3-sums", 0.987),
    ("mnist-eps3-sums-100", 0.987),
    ("fashion-eps3-sums", 0.897),
    ("fashion-eps3-sums-100", 0.897),
    ("cifar10-eps3-sums", 0.67),
    ("cifar10-eps3-sums-100", 0.67),
    ("cifar10-imagenet-eps059-sums", 0.797),
    ("cifar10-imagenet-eps1", None),
)
"""Presets whose accuracy is that of `experiments.sum_simulation`, and what is asked of the mean."""
_TRUSTED, _SUMS = "server trusted with all data", "server sees only sums"
REFERENCES = (
    {"name": "Opacus", "dataset": "mnist", "accuracy": 0.9678, "epsilon": 2.91, "trust": _TRUSTED},
    {"name": "TF-Privacy", "dataset": "mnist", "accuracy": 0.966, "epsilon": 3.01, "trust": _TRUSTED},
    {"name": "tuned tanh CNN", "dataset": "mnist", "accuracy": 0.981, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "Opacus 1.16", "dataset": "mnist", "accuracy": 0.9463, "epsilon": 1.16, "trust": _TRUSTED},
    {"name": "tanh CNN, Fashion", "dataset": "fashion-mnist", "accuracy": 0.861, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "mnist", "accuracy": 0.987, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "fashion-mnist", "accuracy": 0.897, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "cifar-10", "accuracy": 0.67, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering, CNN", "dataset": "cifar-10", "accuracy": 0.693, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "Wide-ResNet", "dataset": "cifar-10", "accuracy": 0.814, "epsilon": 8.0, "trust": _TRUSTED},
    {"name": "DPHelmet", "dataset": "cifar-10", "accuracy": 0.797, "epsilon": 0.59, "trust": _SUMS,
     "other_data": "features of SimCLR, pretrained"},
    {"name": "Distributed DP-Helmet", "dataset": "cifar-10", "accuracy": 0.86, "epsilon": 0.4, "trust": _SUMS,
     "other_data": "features of SimCLR, pretrained"},
)  # fmt: skip
"""Published figures at delta 1e-5. Scattering: Tramer and Boneh 2021. Wide-ResNet: De et al. 2022. Helmets: Kirschte et
al. 2022 and 2024, 1,000 users, of 50 samples each in the first; delta of the second as in its code. With a trusted
server all samples are in one place, at 32 bits per coordinate."""


def reproduce(
    *, seeds: Sequence[int] = (0, 1, 2), quick: bool = False, train: bool = True, figures: Path, **unused: Any
) -> dict[str, Any]:
    """Run what is missing, gather all, draw."""
    runs: dict[str, list[dict[str, Any]]] = {point.name: [] for point in POINTS}
    for seed in seeds:  # a seed fixes the shares, so that the features of one are computed once
        for point in POINTS:
            if train or _place(point, seed).exists():
                runs[point.name].append(_finished(point, seed, quick=quick))
    rows = [_row(point, runs[point.name]) for point in POINTS]
    found = {"quick": quick, "references": list(REFERENCES), "rows": rows, "simulated": simulated_rows()}
    if not quick:
        draw_frontier(rows, found["simulated"], REFERENCES, figures / FIGURES[0])
    return found


def simulated_rows() -> list[dict[str, Any]]:
    """What `experiments.sum_simulation` found for each preset that was simulated on the test split."""
    rows = []
    for name, target in SIMULATED:
        place = RUNS / f"{name}-simulated.json"
        if not place.exists():
            continue
        kept = json.loads(place.read_text(encoding="utf-8"))
        runs, named = kept["runs"], settings_of(**preset(name))[0]
        accuracies = [one["accuracy"] for one in runs]
        rows.append(
            {
                "preset": name,
                "dataset": named.dataset,
                "features": named.features,
                "public_data": PUBLIC_DATA.get(named.features),
                "clients": runs[0]["config"]["clients"],
                "trust": _SUMS if runs[0]["config"].get("secure") else "server sees each message",
                "epsilon": max(one["epsilon"] for one in runs),
                "bits": runs[0]["bits"],
                "target": target,
                "accuracies": accuracies,
                "mean": statistics.mean(accuracies),
                "standard_error": _standard_error(accuracies),
            }
        )
    return rows


def _standard_error(accuracies: Sequence[float]) -> float | None:
    return statistics.stdev(accuracies) / len(accuracies) ** 0.5 if len(accuracies) > 1 else None


def _place(point: Point, seed: int) -> Path:
    return RUNS / f"{point.name}-seed{seed}.json"


def _finished(point: Point, seed: int, *, quick: bool) -> dict[str, Any]:
    """The run's fields, running it when there is none yet."""
    named, config = point.settings(seed, quick=quick)
    if quick:
        with TemporaryDirectory() as scratch:
            return _fields(_trained(named, config, Path(scratch), force=True), named, config)
    place = _place(point, seed)
    if not place.exists():
        folder = FOLDERS / place.stem
        found = _fields(_trained(named, config, folder), named, config)
        RUNS.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(found | provenance(), indent=1) + "\n", encoding="utf-8")
        print(
            f"{place.stem}: {found['accuracy']:.2%} at epsilon {rounded_up(found['guarantee']['epsilon'])}", flush=True
        )
    return dict(json.loads(place.read_text(encoding="utf-8")))


def _trained(named: NamedTask, config: Config, folder: Path, *, force: bool = False) -> Summary:
    task = named.task(config)
    resuming = (folder / "config.toml").exists()
    with Run.resume(task, folder=folder) if resuming else Run.start(task, config, folder=folder, force=force) as run:
        for _ in shown(run.rounds(), config=config, first_round=run.round):
            pass
    return run.close()


def _fields(summary: Summary, named: NamedTask, config: Config) -> dict[str, Any]:
    kept = ("accuracy", "loss", "rounds", "guarantee", "bytes_up", "bytes_up_float32", "bits_per_coordinate")
    fields = summary.to_dict()
    return {name: fields[name] for name in (*kept, "seeded", "seconds")} | {"config": plain_settings(named, config)}


def _row(point: Point, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the finished runs of a point came to; the guarantee is that of the run with the largest epsilon."""
    accuracies = [one["accuracy"] for one in runs]
    worst = max(runs, key=lambda one: float(one["guarantee"]["epsilon"]), default=None)
    return {
        "preset": point.preset,
        "dataset": point.settings(0, quick=False)[0].dataset,
        "bits": point.bits,
        "target": point.target,
        "reference": point.reference,
        "accuracies": accuracies,
        "mean": statistics.mean(accuracies) if accuracies else None,
        "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "guarantee": None if worst is None else worst["guarantee"],
        "bits_measured": None if worst is None else max(one["bits_per_coordinate"] for one in runs),
        "bytes_up": None if worst is None else worst["bytes_up"],
        "bytes_up_float32": None if worst is None else worst["bytes_up_float32"],
        "seeded": any(one["seeded"] for one in runs),
        "config": None if worst is None else worst["config"],
    }
