"""The paper's tables and figures again, published figures beside ours; or the presets of the frontier.

python -m experiments.reproduce table2 --workers 2      # a full table takes hours on two cores
python -m experiments.reproduce all --quick             # every row for two rounds; nothing is kept

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

from bqsgd.cli.output import to_json
from bqsgd.errors import BqsgdError
from experiments import page

ROOT = Path(__file__).parents[1]
PAPER = ("table1", "table2", "table3", "figure1", "figure2", "tradeoffs")
SUBJECTS = (*PAPER, "all", "frontier")


def gather(names: Sequence[str], *, quick: bool, seeds: int, workers: int, train: bool) -> dict[str, Any]:
    """Run the scripts called `names`; keep what they found, with the pages made from it, unless `quick`."""
    torch.set_num_threads(1)  # the runs are what goes side by side; and sums do not depend on the machine
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) if quick else ROOT / "docs" / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        for name in names:
            script = importlib.import_module(f"experiments.{name}")
            found[name] = script.reproduce(
                seeds=range(seeds), workers=workers, quick=quick, train=train, figures=figures
            )
            if not quick:
                place = ROOT / "experiments" / "results" / f"{name}.json"
                place.write_text(to_json(found[name]) + "\n", encoding="utf-8")
    return found


def main(names: Sequence[str] = (), *, description: str | None = __doc__) -> None:
    """Read the options and run `names`, or what the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if not names:
        parser.add_argument("what", choices=SUBJECTS, help="a table or figure, all of the paper, or the frontier")
    parser.add_argument("--quick", action="store_true", help="every row for two rounds on padded digits; keep nothing")
    parser.add_argument("--seeds", type=_positive, default=3, help="how many seeds, counted from 0 (default 3)")
    parser.add_argument("--workers", type=_positive, default=1, help="runs at the same time, one core each (default 1)")
    parser.add_argument("--finished-only", action="store_true", help="train nothing; gather the runs that are done")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of Markdown")
    options = parser.parse_args()
    if not names:
        names = PAPER if options.what == "all" else (options.what,)
    try:
        found = gather(
            names,
            quick=options.quick,
            seeds=options.seeds,
            workers=options.workers,
            train=not options.finished_only,
        )
    except BqsgdError as error:
        parser.error(str(error))
    if options.json:
        print(to_json(found))
        return
    for name, fields in found.items():
        print(page.section(name, fields))
    if not options.quick:
        print("Written:", ", ".join([*map(str, page.write()), *(f"{name}.json" for name in names)]))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    main()
