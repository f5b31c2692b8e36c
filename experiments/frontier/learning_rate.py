"""How a learning rate was chosen for the small convolutional model: on 10,000 samples held out of the training data.

python -m experiments.frontier.learning_rate  # runs the sweep, writes results/learning_rate.json
"""

from __future__ import annotations

import torch
from experiments.frontier.held_out import HELD_OUT, try_out
from experiments.lab import RESULTS, provenance, write_json

RATES = (0.5, 1.0, 2.0, 4.0)
NOISE_SEED = 1
SETTINGS = {"dataset": "mnist", "rounds": 150, "evaluate_every": 15, "reserve_rounds": 150, "workers": 1}


def main() -> None:
    """Sweep, and name the best."""
    torch.set_num_threads(1)
    rows = []
    for rate in RATES:
        settings = {**SETTINGS, "learning_rate": rate, "seed": NOISE_SEED}
        row = {"learning_rate": rate, **try_out(**settings)}
        print(f"learning rate {rate}: held-out accuracy {row['held_out_accuracy']:.2%}", flush=True)
        rows.append(row)
    best = max(rows, key=lambda row: float(row["held_out_accuracy"]))
    print(f"best: {best['learning_rate']}")
    fields = {"held_out": HELD_OUT, "best": best["learning_rate"], "rows": rows, **provenance()}
    write_json(RESULTS / "learning_rate.json", fields)


if __name__ == "__main__":
    main()
