"""What a message costs a node in CPU time: with `flower-supernode`, and with `bqsgd flower supernode`.

Two clients with TLS and node keys on this machine, digits, a message per client and round. Both nodes take turns,
because the machine may be busy.

    python -m experiments.scale.flower_processes  # writes experiments/results/flower_processes.json
"""

from __future__ import annotations

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bqsgd._src.cli.flower import demo_settings
from bqsgd._src.flower import federation
from bqsgd._src.flower.federation import LocalFederation, write_app
from bqsgd._src.flower.processes import Processes
from bqsgd._src.flower.settings import LEDGER_FOLDER_VARIABLE
from experiments import lab, pages

RESULTS = lab.RESULTS / "flower_processes.json"
CLIENTS, ROUNDS, TURNS = 2, 4, 1
NODES = {"flower-supernode": ("flower-supernode",), "bqsgd flower supernode": federation.SUPERNODE}
_NAME = {"flower-supernode": "flower-supernode", "bqsgd flower supernode": "`bqsgd flower supernode`"}


def cpu_seconds(pids: list[int]) -> float:
    """CPU seconds of processes and of all below them, those that have ended among them."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.Error):
                    total += sum(member.cpu_times()[:4])
    return total


def one(program: tuple[str, ...]) -> dict[str, Any]:
    """One run: CPU seconds of the nodes per message, and seconds of a round after the first."""
    settings = demo_settings(clients=CLIENTS, rounds=ROUNDS, tls=True, epsilon=3.0, seed=None)
    with tempfile.TemporaryDirectory() as place, Processes(Path(place) / "demo") as processes:
        folder = processes.folder
        write_app(folder / "app")
        processes.environment[LEDGER_FOLDER_VARIABLE] = str(folder / "nodes")
        local = LocalFederation(processes, tls=True)
        local.start_superlink()
        names = [f"node-{client}" for client in range(CLIENTS)]
        for client, (name, key) in enumerate(zip(names, local.register(names), strict=True)):
            local.start_node(name, client=client, key=key, program=program)
        pids = [processes.running[name].pid for name in names]
        time.sleep(20)  # the nodes load what they need before the first message
        before, began, rounds = cpu_seconds(pids), time.monotonic(), list[float]()

        def heard(line: str) -> None:
            if "frames" in line and "round " in line:
                rounds.append(time.monotonic() - began)

        command = local.command(folder / "app", settings=settings, clients=CLIENTS)
        processes.run("run", *command, seconds=900, heard=heard)
        spent = cpu_seconds(pids) - before
    messages = CLIENTS * (ROUNDS + 1)  # the first asks who the client is
    return {
        "start": round(before, 1),
        "per_message": round(spent / messages, 2),
        "round": round(float(np.diff(rounds).mean()), 1),
    }


def section(fields: dict[str, Any]) -> str:
    """The table of the page."""
    rows = ["| node | start, CPU seconds | a message, CPU seconds | a round, seconds |", "|---|---:|---:|---:|"]
    for name, runs in fields["nodes"].items():
        start, message, wall = (
            min(run[key] for run in runs) for key in ("start", "per_message", "round")
        )  # fmt: skip
        rows.append(f"| {_NAME[name]} | {start:.1f} | {message:.2f} | {wall:.1f} |")
    note = (
        f"{fields['clients']} clients over TLS, {fields['rounds']} rounds of one message each, one run after the "
        f"other; load of the machine {fields['load']:.0f} on two cores."
    )
    return "\n".join(rows) + "\n\n" + lab.wrapped(note) + "\n"


def main() -> None:
    """Run both in turns and write what they took."""
    nodes: dict[str, list[dict[str, Any]]] = {name: [] for name in NODES}
    for _ in range(TURNS):
        for name, program in reversed(NODES.items()):
            nodes[name].append(one(program))
            print(name, nodes[name][-1], flush=True)
    lab.write_json(RESULTS, {"clients": CLIENTS, "rounds": ROUNDS, "nodes": nodes, "load": psutil.getloadavg()[0]})
    pages.write()


if __name__ == "__main__":
    main()
