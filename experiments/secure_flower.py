"""What secure sums cost over Flower: round trips and seconds, with and without, on one machine with TLS and node keys.

python -m experiments.secure_flower            # minutes; writes experiments/results/secure_flower.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from bqsgd.cli.flower import demo_settings, run_demo
from bqsgd.records.folder import read_rounds

RESULTS = Path(__file__).parent / "results" / "secure_flower.json"
CLIENTS, ROUNDS = 4, 4


def measured(*, secure: bool, tls: bool, rounds: int) -> dict[str, Any]:
    """One demo: its round trips, and the seconds of every round but the first."""
    settings = demo_settings(clients=CLIENTS, rounds=rounds, tls=tls, epsilon=3.0, seed=None, secure=secure)
    if secure:
        settings |= {"key_rounds": rounds}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "demo"
        fields = run_demo(folder, settings, tls=tls, limit_seconds=3000)
        times = [record.time for record in read_rounds(folder / "server")]
        log = (folder / "logs" / "run.log").read_text()
    trips = re.search(r"(\d+) round trips", log)
    assert trips is not None
    return {
        "secure": secure,
        "tls": tls,
        "rounds": rounds,
        "round_trips": int(trips.group(1)),
        "first_round_seconds": times[0],
        "later_round_seconds": [after - before for before, after in pairwise(times)],
        "bytes_up": fields["bytes_up"],
        "accuracy": fields["accuracy"],
        "epsilon": fields["guarantee"]["epsilon"],
    }


def main() -> None:
    """All four, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    runs = [
        measured(secure=secure, tls=tls, rounds=rounds * (1 if tls else 5))
        for tls in (True, False)
        for secure in (False, True)
    ]
    versions = {name: importlib.metadata.version(name) for name in ("torch", "flwr")}
    found = {
        "clients": CLIENTS,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[1],
        "versions": versions,
        "runs": runs,
    }
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
