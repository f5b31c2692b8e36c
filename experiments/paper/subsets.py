"""The published settings, if a message carried one in N coordinates: the proven epsilon of the same mechanism.

python -m experiments.paper.subsets  # a minute; writes results/paper_subsets.json and the section

The paper clips single coordinates, so nothing is rotated, and a message of k coordinates counts with k in the place of
d (claim 14).
"""

from __future__ import annotations

import math
from typing import Any

from experiments.paper.privacy_table import DELTA, DIMENSIONS, pair, release
from experiments.paper.published import ROWS
from experiments.paper.tables import guarantee_fields

from bqsgd._src.privacy.accountant import Accountant
from experiments import lab, pages

RESULTS = lab.RESULTS / "paper_subsets.json"
ONE_IN = (1, 10, 100)


def compute() -> dict[str, Any]:
    """All ten rows, with the clamp of every sample."""
    rows = []
    for row in ROWS:
        setting = row.setting
        kept = {one_in: math.ceil(DIMENSIONS[setting.model] / one_in) for one_in in ONE_IN}
        messages = {n: release(row, scheme="poisson", linf=None, dimension=count) for n, count in kept.items()}
        proven = {n: Accountant().compose(what, setting.rounds).guarantee(delta=DELTA) for n, what in messages.items()}
        rows.append(
            {
                "dataset": setting.dataset,
                "model": setting.model,
                "rounds": setting.rounds,
                "bits": row.bits,
                "mechanism": pair(row.corrected),
                "guarantees": {str(one_in): guarantee_fields(proven[one_in]) for one_in in ONE_IN},
            }
        )
    return {"delta": DELTA, "rows": rows}


def section(results: dict[str, Any]) -> str:
    """The table of docs/paper.md."""
    total = results["rows"][0]["guarantees"]["1"]
    names = [f"one in {one_in}" for one_in in ONE_IN[1:]]
    lines = [
        "### The published settings with fewer coordinates",
        "",
        "The same levels, trials and rounds with the per-sample clamp, if a message carried "
        "[one in N coordinates](training.md#subsets): proven epsilon over all rounds at delta "
        f"{results['delta']:g}, {total['relation']} {total['unit']}, {total['trust']}; upper bounds. The bits of a run "
        "fall by N as well. What it costs is signal: one in N coordinates is updated in a round.",
        "",
        f"| setting | levels, trials | all coordinates | {' | '.join(names)} |",
        "|---|---|---|" + "---|" * len(names),
    ]
    for row in results["rows"]:
        figures = " | ".join(row["guarantees"][str(one_in)]["epsilon_text"] for one_in in ONE_IN)
        mechanism = row["mechanism"]
        lines.append(
            f"| {row['dataset']}, {row['model']}, {row['bits']} bits, {row['rounds']} rounds "
            f"| {mechanism['levels']}, {mechanism['trials']} | {figures} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compute, keep, and write the page."""
    lab.write_json(RESULTS, compute() | lab.provenance())
    pages.write()


if __name__ == "__main__":
    main()
