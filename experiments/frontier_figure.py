"""The frontier drawn: accuracy against proven epsilon beside published figures, and against the bytes sent up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"mnist": "#0b6e99", "fashion-mnist": "#d1495b"}
_TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}


def draw_frontier(rows: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the PNG; rows without a finished run are left out.

    A row has dataset, bits, mean and deviation of the accuracy, guarantee and bytes_up of one run; a reference has
    name, dataset, accuracy and epsilon.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if row["mean"] is not None]
    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_epsilon, by_bytes = figure.subplots(1, 2)
    for dataset in dict.fromkeys(row["dataset"] for row in done):
        ours = [row for row in done if row["dataset"] == dataset and row["bits"] == 8]
        style = {"color": COLOURS[dataset], "capsize": 3, "linestyle": ""}
        by_epsilon.errorbar(
            [row["guarantee"]["epsilon"] for row in ours],
            [100 * row["mean"] for row in ours],
            yerr=[100 * (row["deviation"] or 0.0) for row in ours],
            marker="o",
            markersize=8,
            label=f"bqsgd, {_TITLES[dataset]}: server not trusted, 8 bits",
            **style,
        )
        others = [one for one in references if one["dataset"] == dataset]
        by_epsilon.plot(
            [one["epsilon"] for one in others],
            [100 * one["accuracy"] for one in others],
            color=COLOURS[dataset],
            linestyle="",
            marker="x",
            markersize=8,
            label=f"published, {_TITLES[dataset]}: server trusted, 32 bits",
        )
        for one in others:
            place = (one["epsilon"], 100 * one["accuracy"])
            side, aligned = (7, "left") if one["epsilon"] > 3 else (-7, "right")
            by_epsilon.annotate(
                one["name"], place, xytext=(side, -3), textcoords="offset points", ha=aligned, fontsize=8
            )
    curve = sorted((row for row in done if row["dataset"] == "mnist" and _near(row, 3.0)), key=lambda row: row["bits"])
    by_bytes.errorbar(
        [row["bytes_up"] / 1e6 for row in curve],
        [100 * row["mean"] for row in curve],
        yerr=[100 * (row["deviation"] or 0.0) for row in curve],
        color=COLOURS["mnist"],
        marker="o",
        capsize=3,
    )
    for row in curve:
        place = (row["bytes_up"] / 1e6, 100 * row["mean"])
        by_bytes.annotate(f"{row['bits']} bits", place, xytext=(0, 18), textcoords="offset points", ha="center")
    for one in (one for one in references if one["dataset"] == "mnist" and abs(one["epsilon"] - 3) < 0.2):
        by_bytes.axhline(100 * one["accuracy"], color="#888888", linestyle=":", linewidth=1)
        by_bytes.annotate(
            f"{one['name']} (trusted server)", (0.01, 100 * one["accuracy"]), xycoords=("axes fraction", "data"),
            ha="left", va="bottom", fontsize=8, color="#555555",
        )  # fmt: skip
    delta = done[0]["guarantee"]["delta"] if done else 0.0
    by_epsilon.set(xlabel=f"total epsilon at delta {delta:g}", ylabel="test accuracy, per cent", xlim=(0, 3.7))
    by_bytes.set(xlabel="megabytes sent up in a run, all clients, measured", xlim=(0, None))
    by_bytes.margins(x=0.08, y=0.12)
    by_bytes.set_title("MNIST at epsilon 3", fontsize=10)
    for panel in (by_epsilon, by_bytes):
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path)


def _near(row: Mapping[str, Any], epsilon: float) -> bool:
    return abs(float(row["config"]["epsilon"]) - epsilon) < 1e-9
