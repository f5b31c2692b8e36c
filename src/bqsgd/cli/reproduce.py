"""`bqsgd reproduce`: the paper's tables and figures again, from the scripts in the checkout's experiments/ folder."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd.cli.output import Json, emit, to_json
from bqsgd.errors import InvalidParameter

Quick = Annotated[bool, typer.Option("--quick", help="Every row for two rounds on padded digits; nothing is kept.")]
Seeds = Annotated[int, typer.Option(min=1, max=100, help="How many seeds, counted from 0.")]
Workers = Annotated[int, typer.Option(min=1, max=64, help="Runs at the same time, one core each.")]
Finished = Annotated[bool, typer.Option("--finished-only", help="Train nothing; gather the runs that are done.")]


class Subject(StrEnum):
    """What can be reproduced."""

    TABLE1 = "table1"
    TABLE2 = "table2"
    TABLE3 = "table3"
    FIGURE1 = "figure1"
    FIGURE2 = "figure2"
    TRADEOFFS = "tradeoffs"
    ALL = "all"
    FRONTIER = "frontier"


PAPER = tuple(subject.value for subject in Subject if subject not in (Subject.ALL, Subject.FRONTIER))


def reproduce(
    what: Annotated[Subject, typer.Argument(help="A table or figure of the paper, all of them, or the frontier.")],
    quick: Quick = False,
    seeds: Seeds = 3,
    workers: Workers = 1,
    finished_only: Finished = False,
    json: Json = False,
) -> None:
    """Run a table or figure of the paper again, published figures beside ours; or the presets of the frontier.

    Runs already finished are kept in experiments/results and not repeated; one that was stopped goes on from its
    checkpoint. A full table takes hours on two cores.

    Example: bqsgd reproduce table2 --workers 2
    """
    names = PAPER if what is Subject.ALL else (what.value,)
    gather(names, quick=quick, seeds=seeds, workers=workers, train=not finished_only, json=json)


def gather(names: Sequence[str], *, quick: bool, seeds: int, workers: int, train: bool, json: bool) -> None:
    """Run the scripts called `names`, keep what they found unless `quick`, and print it."""
    import torch

    root = checkout()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    torch.set_num_threads(1)  # runs are what is done side by side; and sums do not depend on the machine
    page = importlib.import_module("experiments.page")
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) if quick else root / "docs" / "figures"
        figures.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        for name in names:
            script = importlib.import_module(f"experiments.{name}")
            found[name] = script.reproduce(
                seeds=range(seeds), workers=workers, quick=quick, train=train, figures=figures
            )
            if not quick:
                place = root / "experiments" / "results" / f"{name}.json"
                place.write_text(to_json(found[name]) + "\n", encoding="utf-8")
    if json:
        typer.echo(to_json(found))
        return
    for name, fields in found.items():
        typer.echo(page.section(name, fields))
    if not quick:
        written = [str(place) for place in page.write()]
        emit({"pages": written, "results": [f"{name}.json" for name in names]}, as_json=False, title="Written")


def checkout(here: Path = Path(__file__)) -> Path:
    """The checkout that this package is installed from."""
    root = here.resolve().parents[3]
    if not (root / "experiments" / "runs.py").is_file():
        raise MissingCheckout(
            "experiments/ is not part of the installed package; clone the repository, install it with "
            "`pip install --editable .` and run the command again"
        )
    return root


class MissingCheckout(InvalidParameter):
    """The scripts of the reproduction are not there."""
