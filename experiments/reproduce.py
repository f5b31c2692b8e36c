"""The paper's tables and figures again, published figures beside ours; the baselines; or the presets of the frontier.

python -m experiments.reproduce table2 --workers 2      # a full table takes hours on two cores
python -m experiments.reproduce all --quick             # every row for one round; nothing is kept

Finished runs are kept in experiments/results and not repeated; one that was stopped continues from its checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from experiments.lab import DOCS, RESULTS, Options

from bqsgd._src.cli.output import to_json
from bqsgd._src.errors import BqsgdError
from experiments import pages

PAPER = {
    "table1": "experiments.paper.table1",
    "table2": "experiments.paper.tables",
    "table3": "experiments.paper.tables",
    "figure1": "experiments.paper.figures",
    "figure2": "experiments.paper.figures",
    "tradeoffs": "experiments.paper.figures",
}
SUBJECTS = {**PAPER, "compare": "experiments.paper.compare", "frontier": "experiments.frontier.points"}
"""Name -> the module whose function of that name makes it."""


def gather(names: Sequence[str], *, quick: bool, seeds: int, workers: int, train: bool) -> dict[str, Any]:
    """Make what is named; keep the JSON, with the pages made from it, unless `quick`."""
    torch.set_num_threads(1)  # the runs go side by side, and sums then do not depend on the number of cores
    fields: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) if quick else DOCS / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        options = Options(figures=figures, seeds=range(seeds), workers=workers, quick=quick, train=train)
        for name in names:
            fields[name] = getattr(importlib.import_module(SUBJECTS[name]), name)(options)
            if not quick:
                (RESULTS / f"{name}.json").write_text(to_json(fields[name]) + "\n", encoding="utf-8")
    return fields


def main() -> None:
    """Read the options and make what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=(*SUBJECTS, "all"), help="tables and figures, or all of the paper")
    parser.add_argument("--quick", action="store_true", help="every row for one round on padded digits; keep nothing")
    parser.add_argument("--seeds", type=_positive, default=3, help="how many seeds, counted from 0 (default 3)")
    parser.add_argument("--workers", type=_positive, default=1, help="runs at the same time, one core each (default 1)")
    parser.add_argument("--finished-only", action="store_true", help="train nothing; gather the runs that are done")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    options = parser.parse_args()
    names = list(dict.fromkeys(name for what in options.what for name in (PAPER if what == "all" else [what])))
    try:
        made = gather(
            names,
            quick=options.quick,
            seeds=options.seeds,
            workers=options.workers,
            train=not options.finished_only,
        )
    except BqsgdError as error:
        parser.error(str(error))
    if options.json:
        print(to_json(made))
        return
    for name, fields in made.items():
        print(pages.section(name, fields))
    if not options.quick:
        pages.write()


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()
