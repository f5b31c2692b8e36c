"""Several runs on one page: overlaid curves, one table, and a warning where their epsilons do not mean the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.records.folder import SHOWN, History, read_history
from bqsgd.reports.chart import Chart, Point, Quantity, Series, short
from bqsgd.reports.figures import measured, running_total
from bqsgd.reports.page import claim_terms, epsilon_text, render
from bqsgd.storage import write_atomic

MAX_RUNS = 16
TERMS = "Proven epsilon of the client that spent most; its delta and terms are in the table."
NOTES = {
    "accuracy": "On the public test split.",
    "accuracy-bytes": "Further left is cheaper: measured frames, headers included.",
    "accuracy-epsilon": f"Further left is more private. {TERMS}",
    "loss": "On the public test split.",
    "epsilon": TERMS,
    "bytes": "Measured frames, headers included, summed over clients and rounds.",
}
COLOURS = (0, 1, 2, 4, 6, 7, 5, 3)


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Read the run folders and write one page that compares them."""
    write_atomic(Path(out), comparison_page([read_history(folder) for folder in folders]).encode(), mode=SHOWN)
    return Path(out)


def comparison_page(runs: Sequence[History]) -> str:
    """The comparison of 2 to 16 runs as HTML."""
    if not 2 <= len(runs) <= MAX_RUNS:
        raise InvalidParameter(f"a comparison takes 2 to {MAX_RUNS} runs, got {len(runs)}")
    runs = _distinct(runs)
    return render(
        "compare.html",
        title=f"{len(runs)} runs compared",
        runs=[_row(index, run) for index, run in enumerate(runs)],
        seeded=[run.name for run in runs if run.seeded],
        differing=differing_terms(runs),
        charts=comparison_figures(runs),
    )


def comparison_figures(runs: Sequence[History]) -> list[Chart]:
    """Accuracy against rounds, bytes and epsilon; loss, epsilon and bytes against rounds."""
    draw = _Overlay(runs)
    return [
        draw("accuracy", "Test accuracy", "round", "accuracy", _named("test_accuracy"), y_unit=Quantity.PERCENT),
        draw(
            "accuracy-bytes",
            "Accuracy for the bytes sent",
            "bytes up so far",
            "accuracy",
            _against("bytes_up"),
            x_unit=Quantity.BYTES,
            log_x=True,
            y_unit=Quantity.PERCENT,
        ),
        draw(
            "accuracy-epsilon",
            "Accuracy for the privacy spent",
            "proven epsilon so far",
            "accuracy",
            _against("epsilon_max"),
            x_unit=Quantity.EPSILON,
            y_unit=Quantity.PERCENT,
        ),
        draw("loss", "Test loss", "round", "loss", _named("test_loss")),
        draw(
            "epsilon", "Privacy spent", "round", "proven epsilon so far", _named("epsilon_max"), y_unit=Quantity.EPSILON
        ),
        draw(
            "bytes",
            "Bytes sent by the clients",
            "round",
            "bytes up so far",
            lambda run: running_total(run.rounds, "bytes_up"),
            y_unit=Quantity.BYTES,
        ),
    ]


def differing_terms(runs: Sequence[History]) -> list[str]:
    """The terms (delta, neighbours, unit, trust) in which the runs' guarantees differ; then epsilons do not compare."""
    claims = [run.summary.guarantee for run in runs if run.summary is not None and run.summary.guarantee is not None]
    terms: dict[str, set[object]] = {
        "delta": {claim.delta for claim in claims},
        "neighbours": {claim.relation for claim in claims},
        "unit": {claim.unit for claim in claims},
        "trust": {claim.trust for claim in claims},
    }
    return [name for name, stated in terms.items() if len(stated) > 1]


class _Overlay:
    """Draws one figure of every run in the run's colour; beyond eight runs the curves are dashed."""

    def __init__(self, runs: Sequence[History]) -> None:
        self.runs = runs

    def __call__(
        self, key: str, title: str, x_label: str, y_label: str, points: Callable[[History], list[Point]], **options: Any
    ) -> Chart:
        series = [
            Series(label=run.name, points=points(run), colour=COLOURS[i % 8], dashed=i >= 8)
            for i, run in enumerate(self.runs)
        ]
        options = {"x_unit": Quantity.COUNT, "note": NOTES.get(key, ""), **options}
        return Chart(key=key, title=title, x_label=x_label, y_label=y_label, series=series, **options)


def _named(name: str) -> Callable[[History], list[Point]]:
    return lambda run: measured(run.rounds, name)


def _against(name: str) -> Callable[[History], list[Point]]:
    """(what was spent when, accuracy) over the rounds where both are known."""

    def points(run: History) -> list[Point]:
        spent = dict(running_total(run.rounds, name) if name.startswith("bytes") else measured(run.rounds, name))
        return [(spent[at], value) for at, value in measured(run.rounds, "test_accuracy") if at in spent]

    return points


def _row(index: int, run: History) -> dict[str, Any]:
    claim = run.summary.guarantee if run.summary is not None else None
    return {
        "name": run.name,
        "colour": COLOURS[index % 8],
        "accuracy": short(run.accuracy, Quantity.PERCENT, 4),
        "epsilon": "none" if claim is None else f"ε {epsilon_text(claim)} at δ = {short(claim.delta)}",
        "terms": "" if claim is None else "; ".join(value for _, value in claim_terms(claim)[:5]),
        "seeded": run.seeded,
        "bytes_up": short(run.total("bytes_up"), Quantity.BYTES),
        "saving": "–" if run.saving is None else f"{short(run.saving)}×",
        "bits": short(run.bits_per_coordinate, digits=4),
        "rounds": short(run.round_count, Quantity.COUNT),
        "seconds": short(run.seconds, Quantity.SECONDS),
        "finished": run.summary is not None,
    }


def _distinct(runs: Sequence[History]) -> list[History]:
    """Runs whose folders share a name get a number."""
    shared, seen = Counter(run.name for run in runs), Counter[str]()
    named = []
    for run in runs:
        seen[run.name] += 1
        named.append(replace(run, name=f"{run.name} ({seen[run.name]})") if shared[run.name] > 1 else run)
    return named
