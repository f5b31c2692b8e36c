"""Accuracy with the model's changes in few bits beside whole float32 models, and the bytes of both: three seeds.

MNIST with scattering features, 4 clients, planned for epsilon 3, 60 rounds. Runs of one seed draw the same batches and
the same noise, so that they differ by the way down alone. The seeds void the privacy claim of these runs.

    python -m experiments.scale.way_down  # writes experiments/results/way_down.json
"""

from __future__ import annotations

import json
import os
from typing import Any

from bqsgd._src.run import Run
from bqsgd._src.tasks.named import preset, settings_of
from experiments import lab, pages

RESULTS = lab.RESULTS / "way_down.json"
SEEDS = (0, 1, 2)
BITS = (None, 7, 4)
ROUNDS = 60


def one(seed: int, bits: int | None) -> dict[str, Any]:
    """One run."""
    settings = preset("mnist-eps3") | {"rounds": ROUNDS, "evaluate_every": ROUNDS, "seed": seed, "init_seed": seed}
    named, config = settings_of(**settings, down_bits=bits)
    with Run.start(named.task(config), config) as run:
        for _ in run.rounds():
            pass
    summary = run.close()
    return {
        "seed": seed,
        "down_bits": bits,
        "accuracy": summary.accuracy,
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
        "bytes_down_float32": summary.bytes_down_float32,
    }


def main() -> None:
    """All runs, each written when it is done."""
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for bits in BITS:
            rows.append(one(seed, bits))
            print(json.dumps(rows[-1]), flush=True)
    means: dict[str, float] = {}
    for bits in BITS:
        accuracies = [row["accuracy"] for row in rows if row["down_bits"] == bits]
        means["whole" if bits is None else str(bits)] = sum(accuracies) / len(accuracies)
    points = {bits: 100 * (value - means["whole"]) for bits, value in means.items()}
    result = {"rounds": ROUNDS, "load": os.getloadavg()[0], "means": means, "points_from_whole": points, "runs": rows}
    lab.write_json(RESULTS, result)
    pages.write()


if __name__ == "__main__":
    main()
