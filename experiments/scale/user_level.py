"""User-level privacy that learns: the preset `mnist-users`, beside the same run without privacy.

1,000 clients of 60 samples of MNIST each take five local steps; the whole update of each is clipped, and the server
sees only the secure sum over all. One unseeded run of the preset, one with the same clip and without noise, masks
or ledger, and one without a clip that binds.

    python -m experiments.scale.user_level --run FOLDER  # writes experiments/results/user_level.json

FOLDER is that of `bqsgd train --preset mnist-users --out FOLDER`; it is run here where there is none.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bqsgd._src.records.folder import read_history, read_rounds
from bqsgd._src.run import Run
from bqsgd._src.tasks.named import preset, settings_of
from experiments import lab, pages

RESULTS = lab.RESULTS / "user_level.json"
_NO_NOISE: dict[str, Any] = {"secure": False, "levels": 1 << 16, "trials": 0, "evaluate_every": 16}


def without_privacy(**changes: Any) -> float | None:
    """The test accuracy of the same settings without noise."""
    named, config = settings_of(**preset("mnist-users") | _NO_NOISE | {"seed": 0} | changes)
    with Run.start(named.task(config), config) as run:
        for _ in run.rounds():
            pass
    return run.close().accuracy


def main() -> None:
    """The private run, then the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True)
    folder = parser.parse_args().run
    if not (folder / "summary.json").exists():
        named, config = settings_of(**preset("mnist-users"))
        with Run.start(named.task(config), config, folder=folder) as run:
            for record in run.rounds():
                print(record.round, record.test_accuracy, flush=True)
    summary, rounds = read_history(folder).summary, list(read_rounds(folder))
    assert summary is not None
    assert summary.guarantee is not None
    assert not summary.seeded
    result: dict[str, Any] = {
        "accuracy": summary.accuracy,
        "accuracy_by_round": [record.test_accuracy for record in rounds],
        "used_by_round": [record.used for record in rounds],
        "guarantee": summary.guarantee.to_dict(),
        "bytes_up_per_client_and_round": summary.bytes_up // sum(record.used for record in rounds),
        "bytes_down_per_client_and_round": summary.bytes_down // sum(record.used for record in rounds),
        "seconds": summary.seconds,
        "load": round(os.getloadavg()[0], 1),
    }
    _write(result)
    result["without_privacy"] = without_privacy()
    _write(result)
    result["without_privacy_or_clip"] = without_privacy(clip_norm=100.0, range=10.0)
    _write(result)


def _write(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)
    lab.write_json(RESULTS, result)
    pages.write()


if __name__ == "__main__":
    main()
