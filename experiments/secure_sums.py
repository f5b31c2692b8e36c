"""What a secure sum gains: the same run with and without it, at the same proven epsilon of every client.

python -m experiments.secure_sums                       # all that is missing
python -m experiments.secure_sums mnist-100-secure      # one by name

Four clients of 15,000 samples and a hundred of 600, MNIST and Fashion-MNIST, linear on scattering features, settings of
the presets `mnist-eps3` and `fashion-eps3` with the batch and the range of a client's share. Noise comes from the
operating system, so a run has a guarantee; it is one run, not a mean. A run that is stopped continues from its last
checkpoint: the rounds since then are counted twice, and as many are missing at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from experiments.runs import provenance

from bqsgd.privacy.guarantee import rounded_up
from bqsgd.run import Run
from bqsgd.tasks import preset, settings_of

HERE = Path(__file__).parent
RESULTS, FOLDERS = HERE / "results" / "secure_sums", HERE.parent / "runs" / "secure_sums"
SAMPLES, RATE = 60_000, 1024 / 15_000
PRESETS = {"mnist": "mnist-eps3", "fashion": "fashion-eps3"}
LEARNING_RATES = {"mnist-100-plain": 0.2, "fashion-100-plain": 0.2}
"""The noise of a hundred clients that each stand alone is that of a smaller epsilon: the step of `mnist-eps1`."""


def names() -> list[str]:
    """Every run, the ones with few clients first."""
    return [f"{data}-{clients}-{kind}" for clients in (4, 100) for data in PRESETS for kind in ("secure", "plain")]


def settings(name: str) -> dict[str, Any]:
    """All settings of one run."""
    dataset, clients, kind = name.split("-")
    given = preset(PRESETS[dataset])
    count, batch = int(clients), round(RATE * SAMPLES / int(clients))
    given |= {
        "clients": count,
        "batch_size": batch,
        "rate": RATE,
        "range": float(f"{given['range'] * given['batch_size'] / batch:.3g}"),
        "checkpoint_every": 1,
        "workers": 1,
    }
    if kind == "secure":
        given |= {"secure": True, "dropouts": count // 10, "colluders": 0, "key_rounds": 20}
    return given | ({"learning_rate": LEARNING_RATES[name]} if name in LEARNING_RATES else {})


def run(name: str, *, rounds: int | None = None) -> dict[str, Any]:
    """Train to the end, from the checkpoint where there is one, and write the result down."""
    given = settings(name) | ({} if rounds is None else {"rounds": rounds})
    named, config = settings_of(**given)
    task, folder, started = named.task(config), FOLDERS / name, time.monotonic()
    begun = (folder / "config.toml").exists()
    opened = Run.resume(task, folder=folder) if begun else Run.start(task, config, folder=folder)
    with opened as training:
        for record in training.rounds():
            if record.test_accuracy is not None:
                print(
                    f"{name}: round {record.round}, {record.test_accuracy:.2%}, "
                    f"epsilon {rounded_up(record.epsilon_max or 0.0)}, "
                    f"{time.monotonic() - started:.0f} s",
                    flush=True,
                )
    summary = training.close()
    assert summary.guarantee is not None
    fields = {
        "name": name,
        "accuracy": summary.accuracy,
        "rounds": summary.rounds,
        "steps": training.steps,
        "guarantee": summary.guarantee.to_dict(),
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
        "seconds": summary.seconds,
        "resumed": begun,
        "settings": given,
        **provenance(),
    }
    if training.server.sums is not None:
        plan = training.server.sums
        fields["plan"] = {"levels": plan.levels, "trials": plan.trials, "drawn": plan.noise.drawn, "bits": plan.width}
    return fields


def main() -> None:
    """Run what is named, or all that is missing."""
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or names():
        path = RESULTS / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(run(name), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
