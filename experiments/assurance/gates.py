"""Flower's and NVFlare's quickstarts, as they are and private: accuracy and epsilon per round, kill -9, bytes, logs.

python -m experiments.assurance.gates            # what is missing of it, then the tables of docs/gate.md
python -m experiments.assurance.gates --only flower-training

Real processes on one machine. The frameworks' own quickstarts on CIFAR-10, with their files, clients, rounds and models
(`flower_quickstart` and `nvflare_hello_pt` in `examples/`), and small ones on scikit-learn's digits (`flower_gate` and
`nvflare_gate`). `gate_runs.py` says what a run is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.assurance import site_units
from experiments.assurance.gate_runs import FLOWER, HELLO_PT, QUICKSTART, flower, nvflare

import bqsgd
from experiments import lab, pages

PATH = lab.RESULTS / "gates.json"


def sizes() -> dict[str, Any]:
    """Bytes of one update as Flower carries it: the models of the examples and one of a million parameters."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.common.serde import recorddict_to_proto

    from bqsgd._src.integrations.flower import _packed

    result = {}
    for dimension in (650, 62_006, 1_000_000):
        values = np.random.default_rng(0).normal(0, 0.01, dimension).astype(np.float32)
        before = RecordDict({"arrays": ArrayRecord({"w": Array(values)})})
        sizes = {"unchanged": recorddict_to_proto(before).ByteSize()}
        for bits in (2, 4, 8):
            frame, ranges = bqsgd.thin_update([values], bits=bits)
            sizes[f"thin, {bits} bits"] = recorddict_to_proto(_packed(frame, ranges, {"num-examples": 1})).ByteSize()
        with tempfile.TemporaryDirectory() as folder:
            settings = {"study": "t", "rounds": 5, "epsilon": 8.0, "delta": 1e-5, "clip_norm": 1.0}
            with bqsgd.UpdateGate(Path(folder) / "l", **settings) as gate:  # type: ignore[arg-type]
                frame = gate.send(lambda values=values: values, dimension=dimension)
                packed = _packed(frame, [gate.range], {"num-examples": 1, "epsilon": 1.0})
                sizes["private, 8 bits"] = recorddict_to_proto(packed).ByteSize()
        result[str(dimension)] = sizes
    return result


_FRESH = """
import json, sys, time
began = time.process_time()
import torch
from quickstart import task
loaded = time.process_time()
import bqsgd
make = bqsgd.make_private
def timed(*given, **named):
    start = time.process_time()
    try:
        return make(*given, **named)
    finally:
        seconds.append(time.process_time() - start)
seconds = []
bqsgd.make_private = timed
train, _ = task.load_data(0, 2, 128)
task.train(task.Net(), train, 4, 0.5, 5, sys.argv[1])
over = time.process_time()
print(json.dumps({"import": loaded - began, "make_private": seconds[0], "steps": over - loaded - seconds[0]}))
"""


def fresh(folder: Path) -> list[dict[str, float]]:
    """CPU seconds of three rounds of the private training, each in a process of its own."""
    app = folder / "app"
    shutil.copytree(FLOWER, app, ignore=shutil.ignore_patterns("*.diff", "__pycache__"))
    subprocess.run(["patch", "-s", "-p1", "-i", FLOWER / "private_training.diff"], cwd=app, check=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(app), str(lab.ROOT / "src"))),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", _FRESH, str(folder / "me.ledger")]
    rounds = []
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        rounds.append({name: round(value, 2) for name, value in json.loads(done.stdout.splitlines()[-1]).items()})
    return rounds


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    **{
        f"flower-{kind}": (lambda folder, kind=kind: flower(kind, folder))
        for kind in ("unchanged", "training", "updates", "node", "sums")
    },  # type: ignore[misc]
    **{
        f"nvflare-{kind}": (lambda folder, kind=kind: nvflare(kind, folder))
        for kind in ("unchanged", "training", "updates")
    },  # type: ignore[misc]
    **{
        f"quickstart-{kind}": (lambda folder, kind=kind: flower(kind, folder, QUICKSTART))
        for kind in ("unchanged", "training", "updates")
    },  # type: ignore[misc]
    **{
        f"hello-pt-{kind}": (lambda folder, kind=kind: nvflare(kind, folder, HELLO_PT))
        for kind in ("unchanged", "training", "updates")
    },  # type: ignore[misc]
    "sizes": lambda folder: sizes(),
    "fresh": lambda folder: {"cpu_seconds": fresh(folder)},
    "site-units": lambda folder: site_units.rows(),
}


def section(fields: dict[str, Any]) -> str:
    """The tables of docs/gate.md, of what was run."""
    lines = [
        "| | accuracy at the start and after each round | epsilon of the sites after each round | CPU minutes |",
        "|---|---|---|--:|",
    ]
    for name, title in _TITLES.items():
        if name in fields:
            accuracy, epsilon = (_listed(fields[name][key]) for key in ("accuracy", "epsilon"))
            lines.append(f"| {title} | {accuracy} | {epsilon or '-'} | {fields[name].get('cpu_minutes', '')} |")
    if "sizes" in fields:
        sizes = {int(name): by_kind for name, by_kind in fields["sizes"].items() if name.isdigit()}
        lines += ["", "Bytes of one update as Flower carries it, by the number of parameters:", ""]
        lines += ["| | " + " | ".join(f"{size:,}" for size in sizes) + " |", "|---|" + "--:|" * len(sizes)]
        for kind in next(iter(sizes.values())):
            lines.append(f"| {kind} | " + " | ".join(f"{by_kind[kind]:,}" for by_kind in sizes.values()) + " |")
    if "fresh" in fields:
        first, *_, later = fields["fresh"]["cpu_seconds"]
        lines += [
            "",
            "A process for every round of private training takes, on one core, "
            f"{later['import']:.1f} s to import torch and scikit-learn, "
            f"{later['make_private']:.1f} s for `make_private` "
            f"and {later['steps']:.1f} s for the round's 20 steps and the rest of bqsgd; the first, which plans, "
            f"{first['make_private']:.1f} s for `make_private`.",
        ]
    return "\n".join(lines + (site_units.section(fields["site-units"]) if "site-units" in fields else []))


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


_TITLES = {
    "quickstart-unchanged": "quickstart-pytorch, unchanged",
    "quickstart-training": "quickstart-pytorch, private training, epsilon 3",
    "quickstart-updates": "quickstart-pytorch, private updates, epsilon 8",
    "hello-pt-unchanged": "hello-pt, unchanged",
    "hello-pt-training": "hello-pt, private training, epsilon 3",
    "hello-pt-updates": "hello-pt, private updates, epsilon 8",
    "flower-unchanged": "Flower, as it is",
    "flower-training": "Flower, private training, epsilon 3",
    "flower-updates": "Flower, private updates, epsilon 8",
    "flower-node": "Flower, the node's own gate, epsilon 8",
    "flower-sums": "Flower, secure sums of three sites, epsilon 8",
    "nvflare-unchanged": "NVFlare, as it is",
    "nvflare-training": "NVFlare, private training, epsilon 3",
    "nvflare-updates": "NVFlare, private updates, epsilon 8",
}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS, nargs="*", help="these, even if they were made before")
    asked = parser.parse_args()
    results = lab.read_json(PATH) if PATH.exists() else {}
    for name in asked.only or [name for name in RUNS if name not in results]:
        with tempfile.TemporaryDirectory() as folder:
            made = RUNS[name](Path(folder))
        print(name, json.dumps(made, indent=1), flush=True)
        results = lab.read_json(PATH) if PATH.exists() else {}
        lab.write_json(PATH, results | {name: made | {"provenance": lab.provenance()}})
    pages.write()


if __name__ == "__main__":
    sys.exit(main())
