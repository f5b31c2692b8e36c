"""The range that the recipe fits to the data set `digits`, beside half, twice and four times it.

python -m experiments.frontier.digits_range  # writes results/digits_range.json

There is no preset for `digits` to compare with: this is `bqsgd train --dataset digits`, with and without `--range`. The
noise is seeded so that the sweep can be repeated (no privacy claim). Half the range has half the levels and as many
trials: the same step, so the runs are the same bit for bit as long as no mean is clamped.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from experiments.lab import RESULTS, provenance, write_json

from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.run import train
from bqsgd._src.tasks.resolve import resolve
from experiments import pages

FACTORS, SEEDS = (0.5, 1.0, 2.0, 4.0), range(5)


def accuracy(seed: int, **settings: float) -> float:
    """On the test set, of one run."""
    run = resolve({"dataset": "digits", "init_seed": seed, "seed": seed, "workers": 1, **settings})
    return float(train(run.make_task(), run.config).accuracy or 0.0)


def section(fields: dict[str, Any]) -> str:
    """One sentence with the means."""
    fitted = next(row for row in fields["rows"] if row["factor"] == 1.0)
    others = ", ".join(
        f"{_shown(row)} with {row['factor']:g} times that" for row in fields["rows"] if row is not fitted
    )
    return (
        f"`digits` has no preset. `bqsgd train --dataset digits` at epsilon {as_given(fields['epsilon'])} fits the "
        f"range {fields['range']:g} and reaches {_shown(fitted)} in {len(fitted['accuracies'])} runs; {others}. A test "
        f"sample is {100 / fields['test_samples']:.2f} points, so a tenth of a point cannot be seen here."
    )


def _shown(row: dict[str, Any]) -> str:
    accuracies = row["accuracies"]
    error = statistics.stdev(accuracies) / len(accuracies) ** 0.5
    return f"{100 * statistics.mean(accuracies):.2f} ± {100 * error:.2f} %"


def main() -> None:
    """Run the sweep, and write the page."""
    torch.set_num_threads(1)
    fitted = resolve({"dataset": "digits"})
    span = fitted.config.clip.range
    assert fitted.sizes is not None
    rows = [
        {"factor": factor, "accuracies": [accuracy(seed, range=factor * span) for seed in SEEDS]} for factor in FACTORS
    ]
    fields = {"epsilon": fitted.config.privacy.epsilon, "range": span, "rows": rows}
    test = fitted.make_task().test
    assert test is not None
    write_json(RESULTS / "digits_range.json", fields | {"test_samples": len(test[1])} | provenance())
    pages.write()


if __name__ == "__main__":
    main()
