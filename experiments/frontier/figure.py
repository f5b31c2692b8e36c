"""The frontier drawn: accuracy against proven epsilon beside published figures, and against megabytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"ours": "#0b6e99", "sums": "#d1495b", "published": "#555555"}
_PANELS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar-10": "CIFAR-10"}
_MARKS = {
    "each": ("o", COLOURS["ours"], COLOURS["ours"], "each message seen, 4 clients"),
    "each of many": ("o", COLOURS["ours"], "white", "each message seen, 100 clients"),
    "sums": ("s", COLOURS["sums"], COLOURS["sums"], "only sums seen, 4 clients"),
    "sums of many": ("s", COLOURS["sums"], "white", "only sums seen, 100 or 1,000"),
    "trusted": ("x", COLOURS["published"], COLOURS["published"], "published, trusted server"),
    "published sums": ("P", COLOURS["published"], "white", "published, only sums seen"),
}
"""Kind -> marker, edge, face, words of the legend."""
_CURVES = {
    "MNIST, ε = 3": ("mnist-eps3", "mnist-eps3-100", "mnist-eps3-sums", "mnist-eps3-sums-100"),
    "Fashion-MNIST, ε = 3": ("fashion-eps3", "fashion-eps3-100", "fashion-eps3-sums", "fashion-eps3-sums-100"),
    "CIFAR-10, ImageNet, ε ≤ 1": (
        "cifar10-imagenet-eps1",
        "cifar10-imagenet-eps1-sums",
        "cifar10-imagenet-eps059-sums",
    ),
    "CIFAR-10, ε = 3": ("cifar10-eps3-sums", "cifar10-eps3-sums-100"),
}
"""Title of a panel of megabytes -> the presets whose points make its curves."""
_OFFSETS = {"each": -22, "each of many": -22, "sums": 11, "sums of many": 24}
"""Points by which the words of a curve stand above it; the two of sums are nearly one curve."""
_TICKS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_WORDS = {
    "cifar10-imagenet-eps1-sums": "ImageNet features",
    "cifar10-imagenet-eps01-one-message": "ImageNet, one message",
}
"""What stands beside a point; those around it are of the same kind."""
_LIFTS = {"DP-RandP": 10, "TF-Privacy": -8, "Opacus": 5, "Distributed DP-Helmet": -9}
"""Points by which the words of a reference are moved up, out of another's way."""


def draw_frontier(
    rows: Sequence[Mapping[str, Any]],
    references: Sequence[Mapping[str, Any]],
    path: Path,
) -> None:
    """Write the PNG; rows without a finished run are left out.

    A row is one of `experiments.frontier.points`; a reference has name, dataset, accuracy, epsilon and trust.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if row["mean"] is not None]
    figure = Figure(figsize=(8.6, 14.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(4, 2)
    drawn: dict[str, Any] = {}
    for panel, (dataset, title) in zip(panels[:3, 0], _PANELS.items(), strict=True):
        panel.set(title=title, xlim=(0, 9 if dataset == "cifar-10" else 3.6))
        _epsilon_panel(
            panel,
            [row for row in done if row["dataset"] == dataset and row["point"] == row["preset"]],
            [one for one in references if one["dataset"] == dataset],
            drawn,
        )
    for panel, (title, presets) in zip((*panels[:3, 1], panels[3, 0]), _CURVES.items(), strict=True):
        _bytes_panel(panel, [row for row in done if row["preset"].removesuffix("-whitened") in presets], drawn)
        panel.set(title=title)
    for panel in panels.ravel():
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(16)
        for text in (panel.xaxis.label, panel.yaxis.label, *panel.get_xticklabels(), *panel.get_yticklabels()):
            text.set_fontsize(14)
    panels[3, 1].axis("off")
    kinds = [kind for kind in _MARKS if kind in drawn]
    panels[3, 1].legend(
        [drawn[kind] for kind in kinds],
        [_MARKS[kind][3] for kind in kinds],
        title="1/20: a message carries one\nin 20 coordinates; stars:\nwhitened, fewer rounds",
        title_fontsize=14,
        alignment="left",
        loc="center",
        frameon=False,
        fontsize=14,
        labelspacing=0.9,
    )
    figure.savefig(path)


def _epsilon_panel(
    panel: Any, rows: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]], drawn: dict[str, Any]
) -> None:
    """Accuracy over epsilon, beside what others published. drawn: kind -> what the legend shows, filled here."""
    for one in references:
        kind = "published sums" if "sums" in one["trust"] else "trusted"
        drawn[kind] = _point(panel, kind, one["epsilon"], one["accuracy"])
        _label(panel, one["name"], one["epsilon"], one["accuracy"], lift=_LIFTS.get(one["name"], 0))
    for row in rows:
        kind, epsilon = _kind(row), row["guarantee"]["epsilon"]
        drawn[kind] = _point(panel, kind, epsilon, row["mean"], row["standard_error"])
        if row["point"] in _WORDS:
            _label(panel, _WORDS[row["point"]], epsilon, row["mean"])
    panel.set(xlabel="total epsilon at delta 1e-5", ylabel="test accuracy, %")


def _point(panel: Any, kind: str, epsilon: float, accuracy: float, spread: float | None = None) -> Any:
    marker, edge, face, _ = _MARKS[kind]
    return panel.errorbar(
        [epsilon], [100 * accuracy], yerr=[100 * (spread or 0.0)], marker=marker, color=edge, markerfacecolor=face,
        markersize=10, markeredgewidth=2, capsize=4, linestyle="",
        zorder=4 if edge == COLOURS["published"] else 3,  # a published cross stays readable on a square of ours
    )  # fmt: skip


def _label(panel: Any, words: str, epsilon: float, accuracy: float, *, lift: int = 0) -> None:
    right = epsilon < 0.45 * panel.get_xlim()[1]
    panel.annotate(
        words, (epsilon, 100 * accuracy), xytext=(9 if right else -9, lift - 4), textcoords="offset points",
        ha="left" if right else "right", fontsize=12, color=COLOURS["published"],
    )  # fmt: skip


def _bytes_panel(panel: Any, rows: Sequence[Mapping[str, Any]], drawn: dict[str, Any]) -> None:
    """Accuracy over megabytes from a client, one curve for each kind: over the share of coordinates and their bits.
    Runs on whitened features are stars of their own."""
    for row in (row for row in rows if row["features"] == "whitened"):
        _, edge, face, _ = _MARKS[_kind(row)]
        place = (row["bytes_up"] / row["clients"] / 1e6, 100 * row["mean"])
        panel.plot(*place, marker="*", markersize=15, color=edge, markerfacecolor=face, markeredgewidth=2, zorder=5)
    for kind in _MARKS:
        curve = sorted(
            (row for row in rows if _kind(row) == kind and row["features"] != "whitened" and not row["fitted"]),
            key=lambda row: row["bytes_up"],
        )
        if not curve:
            continue
        marker, edge, face, _ = _MARKS[kind]
        places = [(row["bytes_up"] / row["clients"] / 1e6, 100 * row["mean"]) for row in curve]
        drawn[kind] = panel.errorbar(
            *zip(*places, strict=True), yerr=[100 * (row["standard_error"] or 0.0) for row in curve],
            color=edge, marker=marker, markerfacecolor=face, markersize=9, markeredgewidth=2, capsize=4,
        )  # fmt: skip
        labelled: list[float] = []
        own = [number for number, row in enumerate(curve) if row["point"] == row["preset"]]
        for number in (len(curve) - 1, 0, *own, *range(len(curve))):
            megabytes, mean = places[number]
            if all(not 0.4 < megabytes / other < 2.5 for other in labelled):  # closer, the words would overlap
                labelled.append(megabytes)
                panel.annotate(
                    _words(curve[number]), (megabytes, mean), xytext=(0, _OFFSETS[kind]),
                    textcoords="offset points", ha="center", fontsize=12, color=edge,
                )  # fmt: skip
    means = [100 * row["mean"] for row in rows]
    if means:  # half a point above and below, so that a hundredth does not look like a slope
        room = max(0.5, 0.25 * (max(means) - min(means)))
        panel.set_ylim(min(means) - room, max(means) + room)
    panel.set(xlabel="MB sent by a client in a run", ylabel="test accuracy, %", xscale="log")
    sent = [row["bytes_up"] / row["clients"] / 1e6 for row in rows]
    low, high = min(sent, default=1.0) / 2, 2 * max(sent, default=1.0)
    panel.set_xlim(low, high)
    panel.set_xticks([tick for tick in _TICKS if low < tick < high], minor=False)
    panel.set_xticks([], minor=True)
    panel.xaxis.set_major_formatter("{x:g}")


def _kind(row: Mapping[str, Any]) -> str:
    return ("sums" if row["secure"] else "each") + (" of many" if row["clients"] > 4 else "")


def _words(row: Mapping[str, Any]) -> str:
    """The share of the coordinates, or else the bits of each if they are few."""
    if row["one_in"] > 1:
        return f"1/{row['one_in']}"
    return "all" if row["bits"] in (None, 8) else f"{row['bits']} bits"
