"""The frontier: every preset over its seeds, and CIFAR-10 on ImageNet features in fewer bits per coordinate.

python -m experiments.reproduce frontier --seeds 5  # continues where it stopped; runs are files in results/frontier/
python -m experiments.frontier.points POINT SEED  # one run

A seed here is that of the shares of data and of the initial model, both public. The noise comes from the operating
system, so every run has the guarantee that its ledgers state, and none can be repeated bit for bit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from experiments.frontier.figure import draw_frontier
from experiments.lab import RESULTS, ROOT, Options, provenance, read_json, write_json

from bqsgd._src.cli.output import shown
from bqsgd._src.data.features import PUBLIC_DATA
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.records.record import Summary
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.groups import CENTRED
from bqsgd._src.tasks.named import NamedTask, plain_settings, preset, settings_of
from bqsgd._src.tasks.resolve import resolve

RUNS, FOLDERS = RESULTS / "frontier", ROOT / "runs" / "frontier"
QUICK = {"dataset": "digits", "features": "scattering", "clients": 4, "rounds": 2, "batch_size": 64, "epsilon": 8.0}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the frontier; `target` is the accuracy asked of its mean."""

    preset: str
    bits: int | None = None
    """Bits per coordinate in place of the preset's own; of a sum, its modulus."""
    sum_of: tuple[int, int] | None = None
    """Levels and trials of a sum in so many bits, as `bqsgd plan --secure --bits` finds them."""
    one_in: int | None = None
    """In place of the preset's own: a message carries one in so many coordinates."""
    centred: bool = False
    """Whether the first round measures the centre of the features (`--method centred`)."""
    fitted: bool = False
    """Whether the recipe chooses the range and the share of the coordinates, instead of the preset."""
    target: float | None = None

    @property
    def name(self) -> str:
        """Of its runs."""
        bits = "" if self.bits is None else f"-{self.bits}bits"
        share = "" if self.one_in is None else f"-one-in-{self.one_in}"
        return self.preset + bits + share + "-centred" * self.centred + "-fitted" * self.fitted

    def settings(self, seed: int, *, quick: bool) -> tuple[NamedTask, Config]:
        """Its settings with this seed."""
        settings = preset(self.preset) | {"init_seed": seed, "run": f"{self.name}-seed{seed}"}
        if self.sum_of is not None:
            settings |= {"levels": self.sum_of[0], "trials": self.sum_of[1]}
        elif self.bits is not None:
            settings |= {"bits": self.bits}
        if self.one_in is not None:
            settings |= {"one_in": self.one_in}
        if self.centred:
            settings |= {"method": CENTRED}
        if self.fitted and not quick:
            chosen = resolve({name: value for name, value in settings.items() if name not in ("range", "one_in")})
            assert isinstance(chosen.source, NamedTask)
            return chosen.source, chosen.config
        if not quick:
            return settings_of(**settings)
        if settings.get("method") == "least-squares":
            return settings_of(**settings | QUICK | {"rounds": 1, "rate": 1.0})
        plans = {"levels": None, "trials": None, "rate": 0.2 if settings.get("secure") else None}
        return settings_of(**settings | QUICK | plans)


CURVES = {
    "mnist-eps3": (1, 10, 50, 100),
    "mnist-eps3-100": (1, 20, 300),
    "mnist-eps3-sums": (1, 10, 100),
    "mnist-eps3-sums-100": (1, 10, 100),
    "mnist-eps1": (1,),
    "fashion-eps3": (1, 50),
    "fashion-eps3-100": (1, 20),
    "fashion-eps3-sums": (1, 30),
    "fashion-eps3-sums-100": (1,),
    "cifar10-eps3-sums": (1, 30),
    "cifar10-eps3-sums-100": (1,),
}
"""Preset -> N of the points beside its own at which a message carries one in N coordinates."""
FITTED = (
    "mnist-eps3",
    "mnist-eps3-100",
    "mnist-eps3-sums",
    "fashion-eps3",
    "cifar10-imagenet-eps1",
    "cifar10-imagenet-eps1-sums",
)
MEASURED = ("cifar10-eps3-sums", "cifar10-eps1-sums", "cifar10-imagenet-eps059-sums", "cifar10-imagenet-eps1-sums")
"""Presets of the points whose first round measures the centre of the features."""
POINTS = (
    Point(preset="mnist-eps3-sums", target=0.987),
    Point(preset="mnist-eps3-sums-100", target=0.987),
    Point(preset="fashion-eps3-sums", target=0.897),
    Point(preset="fashion-eps3-sums-100", target=0.897),
    Point(preset="mnist-eps3", target=0.985),
    Point(preset="fashion-eps3", target=0.892),
    Point(preset="mnist-eps3-100"),
    Point(preset="fashion-eps3-100"),
    Point(preset="cifar10-eps3-sums", target=0.693),
    Point(preset="cifar10-eps3-sums-100", target=0.693),
    Point(preset="cifar10-eps1-sums", target=0.723),
    Point(preset="cifar10-imagenet-eps059-sums", target=0.85),
    Point(preset="cifar10-imagenet-eps1"),
    Point(preset="cifar10-imagenet-eps1-sums"),
    Point(preset="cifar10-imagenet-pair-eps1-sums", target=0.91),
    Point(preset="cifar10-imagenet-pair-eps1"),
    Point(preset="cifar10-imagenet-eps01-one-message"),
    Point(preset="mnist-eps1-sums", target=0.985),
    Point(preset="fashion-eps1-sums", target=0.885),
    Point(preset="mnist-eps1-sums-whitened", target=0.985),
    Point(preset="fashion-eps1-sums-whitened", target=0.885),
    Point(preset="mnist-eps3-sums-whitened", target=0.987),
    Point(preset="fashion-eps3-sums-whitened", target=0.897),
    Point(preset="mnist-eps3-whitened", target=0.985),
    Point(preset="mnist-eps3-100-whitened", target=0.982),
    Point(preset="mnist-eps1"),
    Point(preset="mnist-eps3-4bit"),
    *(Point(preset="cifar10-imagenet-eps1", bits=bits) for bits in (6, 4, 3, 2)),
    *(
        Point(preset="cifar10-imagenet-eps1-sums", bits=bits, sum_of=pair)
        for bits, pair in ((8, (6, 183)), (7, (4, 90)), (6, (2, 43)))
    ),
    *(Point(preset=preset, one_in=one_in) for preset, curve in CURVES.items() for one_in in curve),
    *(Point(preset=preset, centred=True) for preset in MEASURED),
    Point(preset="cifar10-imagenet-pair-eps1-sums", centred=True, target=0.91),
    *(Point(preset=preset, fitted=True) for preset in FITTED),
)
_TRUSTED, _SUMS = "server trusted with all data", "server sees only sums"
REFERENCES = (
    {"name": "Opacus", "dataset": "mnist", "accuracy": 0.9678, "epsilon": 2.91, "trust": _TRUSTED},
    {"name": "TF-Privacy", "dataset": "mnist", "accuracy": 0.966, "epsilon": 3.01, "trust": _TRUSTED},
    {"name": "tuned tanh CNN", "dataset": "mnist", "accuracy": 0.981, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "Opacus", "dataset": "mnist", "accuracy": 0.9463, "epsilon": 1.16, "trust": _TRUSTED},
    {"name": "tanh CNN", "dataset": "fashion-mnist", "accuracy": 0.861, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "mnist", "accuracy": 0.987, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "fashion-mnist", "accuracy": 0.897, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering", "dataset": "cifar-10", "accuracy": 0.67, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "scattering, CNN", "dataset": "cifar-10", "accuracy": 0.693, "epsilon": 3.0, "trust": _TRUSTED},
    {"name": "Wide-ResNet", "dataset": "cifar-10", "accuracy": 0.814, "epsilon": 8.0, "trust": _TRUSTED},
    {"name": "DP-RandP", "dataset": "cifar-10", "accuracy": 0.723, "epsilon": 1.0, "trust": _TRUSTED,
     "other_data": "pretrained on images of random processes"},
    {"name": "SimCLR v2", "dataset": "cifar-10", "accuracy": 0.924, "epsilon": 2.0, "trust": _TRUSTED,
     "other_data": "features of SimCLR v2, ImageNet without labels"},
    {"name": "DPHelmet", "dataset": "cifar-10", "accuracy": 0.797, "epsilon": 0.59, "trust": _SUMS,
     "other_data": "features of SimCLR, pretrained"},
    {"name": "Distributed DP-Helmet", "dataset": "cifar-10", "accuracy": 0.86, "epsilon": 0.4, "trust": _SUMS,
     "other_data": "features of SimCLR, pretrained"},
)  # fmt: skip
"""Published figures at delta 1e-5. Scattering, and SimCLR v2 as in the repository of the paper: Tramer and Boneh 2021.
Wide-ResNet: De et al. 2022. DP-RandP: Tang et al. 2023. Helmets: Kirschte et al. 2022 and 2024, 1,000 users, of 50
samples each in the first; delta of the second as in its code. With a trusted server all samples are in one place, at 32
bits per coordinate."""


def frontier(options: Options) -> dict[str, Any]:
    """Run what is missing, gather all, draw."""
    runs: dict[str, list[dict[str, Any]]] = {point.name: [] for point in POINTS}
    for seed in options.seeds:  # a seed fixes the shares, so that the features of one are computed once
        for point in POINTS:
            if options.train or _place(point, seed).exists():
                runs[point.name].append(_finished(point, seed, quick=options.quick))
    rows = [_row(point, runs[point.name]) for point in POINTS]
    if not options.quick:
        draw_frontier(rows, REFERENCES, options.figures / "frontier.png")
    return {"quick": options.quick, "references": list(REFERENCES), "rows": rows}


def _standard_error(accuracies: Sequence[float]) -> float | None:
    return statistics.stdev(accuracies) / len(accuracies) ** 0.5 if len(accuracies) > 1 else None


def _place(point: Point, seed: int) -> Path:
    return RUNS / f"{point.name}-seed{seed}.json"


def _finished(point: Point, seed: int, *, quick: bool) -> dict[str, Any]:
    """The run's fields, running it when there is none yet."""
    named, config = point.settings(seed, quick=quick)
    if quick:
        with TemporaryDirectory() as scratch:
            return fields_of(trained(named, config, Path(scratch), force=True), named, config)
    place = _place(point, seed)
    if not place.exists():
        folder = FOLDERS / place.stem
        fields = fields_of(trained(named, config, folder), named, config)
        write_json(place, fields | provenance())
        print(
            f"{place.stem}: {fields['accuracy']:.2%} at epsilon {rounded_up(fields['guarantee']['epsilon'])}",
            flush=True,
        )
    return dict(read_json(place))


def trained(named: NamedTask, config: Config, folder: Path, *, force: bool = False) -> Summary:
    task = named.task(config)
    resuming = (folder / "config.toml").exists()
    with Run.resume(task, folder=folder) if resuming else Run.start(task, config, folder=folder, force=force) as run:
        for _ in shown(run.rounds(), config=config, first_round=run.round):
            pass
    return run.close()


def fields_of(summary: Summary, named: NamedTask, config: Config) -> dict[str, Any]:
    kept = (
        "accuracy",
        "loss",
        "rounds",
        "guarantee",
        "bytes_up",
        "bytes_up_float32",
        "bytes_down",
        "bits_per_coordinate",
    )
    fields = summary.to_dict()
    return {name: fields[name] for name in (*kept, "seeded", "seconds")} | {"config": plain_settings(named, config)}


def _row(point: Point, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the finished runs of a point came to; the guarantee is that of the run with the largest epsilon."""
    accuracies = [one["accuracy"] for one in runs]
    worst = max(runs, key=lambda one: float(one["guarantee"]["epsilon"]), default=None)
    named, config = point.settings(0, quick=False)
    return {
        "point": point.name,
        "preset": point.preset,
        "dataset": named.dataset,
        "features": named.features,
        "public_data": PUBLIC_DATA.get(named.features),
        "clients": config.clients.count,
        "secure": config.secure.on,
        "one_in": config.clients.one_in,
        "bits": point.bits if config.secure.on else config.privacy.bits,
        "fitted": point.fitted,
        "target": point.target,
        "accuracies": accuracies,
        "mean": statistics.mean(accuracies) if accuracies else None,
        "standard_error": _standard_error(accuracies),
        "guarantee": None if worst is None else worst["guarantee"],
        "bits_measured": None if worst is None else max(one["bits_per_coordinate"] for one in runs),
        "bytes_up": None if worst is None else max(one["bytes_up"] for one in runs),
        "bytes_up_float32": None if worst is None else max(one["bytes_up_float32"] for one in runs),
        # Older runs did not keep what was sent down.
        "bytes_down": max((one["bytes_down"] for one in runs if "bytes_down" in one), default=None),
        "seeded": any(one["seeded"] for one in runs),
        "changed": any(one.get("changed", False) for one in runs),
        "config": None if worst is None else worst["config"],
    }


def main() -> None:
    """One run of one point, kept."""
    torch.set_num_threads(1)
    name, seed = sys.argv[1:]
    point = next(point for point in POINTS if point.name == name)
    _finished(point, int(seed), quick=False)


if __name__ == "__main__":
    main()
