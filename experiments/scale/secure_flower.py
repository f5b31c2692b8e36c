"""What secure sums cost over Flower: round trips and seconds of `bqsgd flower demo`, with and without them.

python -m experiments.scale.secure_flower  # minutes; writes experiments/results/secure_flower.json and the page
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from bqsgd._src.cli.flower import demo_settings, run_demo
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.records.folder import read_rounds
from experiments import lab, pages

RESULTS = lab.RESULTS / "secure_flower.json"
CLIENTS = 4


def measured(*, secure: bool, tls: bool) -> dict[str, Any]:
    """One demo: its round trips, its seconds by round, and what it came to."""
    settings = demo_settings(clients=CLIENTS, rounds=None, tls=tls, epsilon=3.0, seed=None, secure=secure)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "demo"
        load = os.getloadavg()[0]
        fields = run_demo(folder, settings, tls=tls, limit_seconds=3000)
        times = [record.time for record in read_rounds(folder / "server")]
        log = (folder / "logs" / "run.log").read_text()
    trips = re.search(r"(\d+) round trips", log)
    assert trips is not None
    return {
        "secure": secure,
        "tls": tls,
        "rounds": fields["rounds"],
        "round_trips": int(trips.group(1)),
        "load_before": load,
        "first_round_seconds": times[0],
        "later_round_seconds": [after - before for before, after in pairwise(times)],
        **{name: fields[name] for name in ("bytes_up", "accuracy", "guarantee")},
        **{name: fields[name] for name in ("frames_received", "rounds_in_ledgers", "processes_left")},
    }


def section(results: dict[str, Any]) -> str:
    """The lines of the page, every figure from the results."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    loads = [run["load_before"] for run in results["runs"]]
    text = (
        f"`bqsgd flower demo`, `--secure` and `--tls`: {results['clients']} clients on one machine of "
        f"{results['cores']} cores, one run each, epsilon 3 at delta 1e-5, noise from the operating "
        f"system ({versions}). Without `--tls` the clients are simulated, and stay in memory; "
        "with it they are deployed, and every message starts a process. "
        "Seconds are the median over the rounds after the first."
    )
    if max(loads) > results["cores"]:
        text += (
            f" The machine was busy with other work (load average {min(loads):.0f} to {max(loads):.0f} when a run "
            "began): the seconds, and their ratios, are not those of a quiet one. Round trips and bytes are exact."
        )
    lines = [
        text,
        "",
        "| clients are | sums | rounds | round trips | seconds a round | kB up a round | frames, rounds in ledgers | "
        "accuracy, % (epsilon) |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in results["runs"]:
        cells = (
            "deployed" if run["tls"] else "simulated",
            "secure" if run["secure"] else "plain",
            run["rounds"],
            run["round_trips"],
            f"{statistics.median(run['later_round_seconds']):.1f}",
            f"{run['bytes_up'] / run['rounds'] / 1e3:.1f}",
            f"{run['frames_received']}, {run['rounds_in_ledgers']}",
            f"{100 * run['accuracy']:.1f} ({rounded_up(run['guarantee']['epsilon'])})",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """All four, one after another."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "flwr")}
    fields: dict[str, Any] = {"clients": CLIENTS, "cores": os.cpu_count(), "versions": versions, "runs": []}
    for tls in (True, False):
        for secure in (False, True):
            fields["runs"].append(measured(secure=secure, tls=tls))
            lab.write_json(RESULTS, fields)
    pages.write()


if __name__ == "__main__":
    main()
