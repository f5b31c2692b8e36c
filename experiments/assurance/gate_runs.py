"""One run of an example, as its framework has it or private: real processes, kill -9 in the middle, what they print.

An example is an app or a job with a diff beside it for each private kind. The private ones are asked for one round more
than their sites' studies have. Site 1 is killed (kill -9, with all of its processes) when a round in the middle begins,
and started again; NVFlare's simulator is killed as a whole and the job started again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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
from experiments import lab

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
