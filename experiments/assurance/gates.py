"""Flower's and NVFlare's quickstarts, as they are and private: accuracy and epsilon per round, kill -9, bytes, logs.

python -m experiments.assurance.gates            # what is missing of it, then the tables of docs/gate.md
python -m experiments.assurance.gates --only flower-training

Real processes on one machine. The frameworks' own quickstarts on CIFAR-10, with their files, clients, rounds and models
(`flower_quickstart` and `nvflare_hello_pt` in `examples/`), and small ones on scikit-learn's digits (`flower_gate` and
`nvflare_gate`). The private ones are asked for one round more than their sites' studies have. Site 1 is killed (kill
-9, with all of its processes) when a round in the middle begins, and started again; NVFlare's simulator is killed as a
whole and the job started again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from experiments.assurance import quickstarts

import bqsgd
from bqsgd._src.flower.federation import SUPERNODE, free_port
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import identity_path, write_identities
from bqsgd._src.settings.config import Config
from experiments import lab, pages

PATH = lab.RESULTS / "gates.json"
EXAMPLES = lab.ROOT / "examples"
FLOWER = EXAMPLES / "flower_gate"
PYTHON = lab.ROOT / ".venv-nvflare" / "bin" / "python"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STUDY = 'gate-study="trial-7" gate-rounds=5 gate-epsilon=8.0 gate-delta=1e-5 gate-clip-norm=1.0'
_TOLD = re.compile(r"study |declined|refused|spent|all are taken|budget|killed|PrivacyBudget|update \d")


_DIFFS = {
    "training": "private_training.diff",
    "updates": "private_updates.diff",
    "node": "private_updates.diff",
    "sums": "secure_sums.diff",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """An app or job as its framework has it, with a diff beside it for each private kind.

    rounds: of the sites' studies. killed: the round, counted from 1, at whose beginning a site is killed.
    """

    folder: Path
    sites: int = 2
    rounds: int = 5
    killed: int = 3
    environment: Callable[[], Mapping[str, str]] = field(default=dict)
    data: Path | None = None
    """A folder that the app's processes find in their own."""

    def copied(self, kind: str, folder: Path) -> Path:
        """A copy of its own, with the diff of the kind."""
        copy = folder / "app"
        shutil.copytree(self.folder, copy, ignore=shutil.ignore_patterns("*.diff", "__pycache__"))
        if kind != "unchanged":
            subprocess.run(["patch", "-s", "-p1", "-i", self.folder / _DIFFS[kind]], cwd=copy, check=True)
        return copy


DIGITS = Example(folder=FLOWER)
QUICKSTART = Example(
    folder=EXAMPLES / "flower_quickstart", sites=10, rounds=3, killed=2,
    environment=quickstarts.environment, data=quickstarts.FOLDER / "uoft-cs",
)  # fmt: skip
NVFLARE_DIGITS = Example(folder=EXAMPLES / "nvflare_gate")
HELLO_PT = Example(
    folder=EXAMPLES / "nvflare_hello_pt", rounds=2, killed=2, environment=quickstarts.environment
)  # fmt: skip


@contextmanager
def cpu_minutes() -> Iterator[list[float]]:
    """The list holds, at the end, what the processes below this one have used, seen once a second."""
    used, over, answer = dict[int, float](), threading.Event(), list[float]()

    def look() -> None:
        while not over.wait(1):
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    times = child.cpu_times()
                    used[child.pid] = max(used.get(child.pid, 0.0), times.user + times.system)

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    try:
        yield answer
    finally:
        over.set()
        watching.join()
        answer.append(round(sum(used.values()) / 60, 1))


def told(text: str, most: int = 8) -> list[str]:
    """The lines of a log that are about privacy, without colours and repetitions."""
    lines = [_COLOURS.sub("", line).strip()[:300] for line in text.splitlines() if _TOLD.search(line)]
    return list(dict.fromkeys(lines))[:most]


def ledger_of(path: Path) -> dict[str, Any] | None:
    """What a site's ledger holds at the end."""
    if not path.exists():
        return None
    with bqsgd.Ledger(path) as ledger:
        guarantee = ledger.guarantee()
        return {
            "messages": ledger.spent_rounds,
            "epsilon": None if guarantee is None else guarantee.epsilon,
            "guarantee": str(guarantee),
        }


def kill(process: subprocess.Popen[bytes]) -> None:
    """kill -9 a process and all below it, which may be in sessions of their own."""
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)


def flower(kind: str, folder: Path, example: Example = DIGITS) -> dict[str, Any]:
    """One deployment: a SuperLink, its SuperNodes (three for sums), and the app with or without a diff."""
    app = example.copied(kind, folder)
    sites, rounds = range(3 if kind == "sums" else example.sites), example.rounds + (kind != "unchanged")
    settings = f"num-server-rounds={rounds}"
    if kind == "sums":
        roster = write_identities(Config.of(clients=len(sites)), folder / "keys")
        settings += f' roster="{roster}"'
    if kind == "node":  # the client's half of the app stays as Flower's quickstart has it
        shutil.copy(example.folder / "quickstart" / "client_app.py", app / "quickstart" / "client_app.py")
    with cpu_minutes() as used, Processes(folder / "run") as processes:
        processes.environment |= example.environment()
        if example.data is not None:
            (processes.folder / example.data.name).symlink_to(example.data)
        port = free_port()
        place = ("--host", "127.0.0.1", "--port", str(port))
        processes.start(
            "superlink", "flower-superlink", "--insecure", "--disable-runtime-dependency-installation", *place
        )
        processes.wait_for("superlink", "running on http", seconds=300)
        (processes.folder / "flwr-home" / "config.toml").write_text(
            tomli_w.dumps(
                {"superlink": {"default": "here", "here": {"address": f"127.0.0.1:{port}", "insecure": True}}}
            )
        )

        def start(site: int, name: str) -> None:
            ledgers = folder / f"site-{site}"
            ledgers.mkdir(exist_ok=True)
            config = f'client={site} units="client" epsilon=10.0 ledger-folder="{ledgers}" '
            config += f'partition-id={site} num-partitions={len(sites)} ledger="{ledgers}/train.ledger"'
            config += f" {_STUDY}" if kind == "node" else ""
            if kind == "sums":
                config += f' roster="{roster}" identity="{identity_path(roster.parent, site)}"'
            options = ("--insecure", "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1")
            processes.start(name, *SUPERNODE, *options, "--port", str(free_port()), "--node-config", config)

        for site in sites:
            start(site, f"site-{site}")
        for site in sites:  # the strategy asks those that are there
            processes.wait_for(f"site-{site}", "SuperNode ID", seconds=600)
        began, killed = time.monotonic(), list[float]()
        processes.start("run", "flwr", "run", str(app), "here", "--stream", "--run-config", settings)

        def heard(line: str) -> None:
            if kind in ("updates", "training") and not killed and f"[ROUND {example.killed}/" in line:
                kill(processes.running["site-1"])
                start(1, "site-1-again")
                killed.append(round(time.monotonic() - began, 1))

        log = _COLOURS.sub("", processes.finish("run", seconds=3000, heard=heard))
        logs = _logs(processes)
        nodes = {name: processes.text(name) for name in ("site-0", "site-1", "site-1-again") if name in logs}
    name = "train.ledger" if kind == "training" else "client-{:04}.ledger"
    return {
        "accuracy": [float(value) for value in re.findall(r"'accuracy': ([0-9.e-]+)", log)][: rounds + 1],
        "epsilon": [float(value) for value in re.findall(r"Aggregated MetricRecord: .*'epsilon': ([0-9.e-]+)", log)],
        "killed_after_seconds": killed,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_minutes": used[0],
        "ledgers": [ledger_of(folder / f"site-{site}" / name.format(site)) for site in sites],
        "server_log": told(log),
        "node_logs": {node: told(text) for node, text in nodes.items()},
    }


def _logs(processes: Processes) -> set[str]:
    return {path.stem for path in (processes.folder / "logs").iterdir()}


def nvflare(kind: str, folder: Path, example: Example = NVFLARE_DIGITS) -> dict[str, Any]:
    """The simulator with two sites; the private job is killed in the middle, and started again."""
    logs, killed = list[str](), list[float]()
    private = kind != "unchanged"
    if example is HELLO_PT:
        command, working = ["job.py", "--num_rounds"], example.copied(kind, folder)
        options = ["--ledger", str(folder / "{site}.ledger")] if private else []
    else:
        command, working = [str(example.folder / "job.py"), "--rounds"], folder
        options = ["--folder", str(folder / "job"), *(["--private", kind] if private else [])]
    environment = os.environ | {"PYTHONPATH": str(lab.ROOT / "src"), "OMP_NUM_THREADS": "1"} | example.environment()
    begins = f"Round {example.killed - 1} started"
    with cpu_minutes() as used:
        for attempt in range(2 if private else 1):
            left = example.rounds + private if attempt == 0 else example.rounds + 2 - example.killed
            began, printed = time.monotonic(), folder / f"printed-{attempt}.txt"
            with printed.open("wb") as stream:
                process = subprocess.Popen(
                    [str(PYTHON), *command, str(left), *options], cwd=working, stdout=stream,
                    stderr=subprocess.STDOUT, env=environment, start_new_session=True,
                )  # fmt: skip
            while process.poll() is None and time.monotonic() - began < 3000:
                time.sleep(0.2)
                if private and not attempt and begins in printed.read_text("utf-8", "replace"):
                    killed.append(round(time.monotonic() - began, 1))
                    kill(process)
            logs.append(_COLOURS.sub("", printed.read_text("utf-8", "replace")))
            if killed and not attempt:
                time.sleep(5)
    text = "\n".join(logs)
    accuracy = [float(value) for value in re.findall(r"round \d+: accuracy ([0-9.]+)", text)]
    accuracy += [float(value) / 100 for value in re.findall(r"test images: (\d+) %", text)]
    ledgers = folder if example is HELLO_PT else folder / "job" / "ledgers"
    return {
        "accuracy": accuracy[::2],
        "epsilon": [float(value) for value in re.findall(r"epsilon ([0-9.]+) at delta", text)][::2],
        "killed_after_seconds": killed,
        "cpu_minutes": used[0],
        "ledgers": [ledger_of(ledgers / f"site-{site}.ledger") for site in (1, 2)],
        "log": told(text, most=16),
    }


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
}


def section(fields: dict[str, Any]) -> str:
    """The tables of docs/gate.md, of what was run."""
    lines = [
        "| | accuracy at the start and after each round | epsilon of the sites after each round |",
        "|---|---|---|",
    ]
    for name, title in _TITLES.items():
        if name in fields:
            accuracy, epsilon = (_listed(fields[name][key]) for key in ("accuracy", "epsilon"))
            lines.append(f"| {title} | {accuracy} | {epsilon or '-'} |")
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
    return "\n".join(lines)


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


_TITLES = {
    "quickstart-unchanged": "Flower's quickstart-pytorch, unchanged",
    "quickstart-training": "the same, private training, epsilon 3",
    "quickstart-updates": "the same, private updates, epsilon 8",
    "hello-pt-unchanged": "NVFlare's hello-pt, unchanged",
    "hello-pt-training": "the same, private training, epsilon 3",
    "hello-pt-updates": "the same, private updates, epsilon 8",
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
