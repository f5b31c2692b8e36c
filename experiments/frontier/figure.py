"""The frontier drawn: accuracy against proven epsilon beside published figures, and against megabytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"ours": "#0b6e99", "sums": "#d1495b", "published": "#555555"}
_PANELS = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar-10": "CIFAR-10"}
_MARKS = {
    "each": ("o", COLOURS["ours"], COLOURS["ours"], "bqsgd, server sees each message"),
    "sums": ("s", COLOURS["sums"], COLOURS["sums"], "bqsgd, server sees only sums"),
    "trusted": ("x", COLOURS["published"], COLOURS["published"], "published, trusted server"),
    "published sums": ("P", COLOURS["published"], "white", "published, server sees only sums"),
}
"""Kind -> marker, edge, face, words of the legend."""
_WORDS = {
    "cifar10-imagenet-eps1-sums": "ImageNet features",
    "cifar10-imagenet-eps01-one-message": "ImageNet features, one message",
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
    figure = Figure(figsize=(10, 13.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 2).ravel()
    drawn: dict[str, Any] = {}
    for panel, (dataset, title) in zip(panels[:3], _PANELS.items(), strict=True):
        panel.set_xlim(0, 9 if dataset == "cifar-10" else 3.6)
        for one in (one for one in references if one["dataset"] == dataset):
            kind = "published sums" if "sums" in one["trust"] else "trusted"
            drawn[kind] = _point(panel, kind, one["epsilon"], one["accuracy"])
            _label(panel, one["name"], one["epsilon"], one["accuracy"], lift=_LIFTS.get(one["name"], 0))
        for row in (row for row in done if row["dataset"] == dataset and row["point"] == row["preset"]):
            kind, epsilon = "sums" if row["secure"] else "each", row["guarantee"]["epsilon"]
            drawn[kind] = _point(panel, kind, epsilon, row["mean"], row["standard_error"])
            if row["point"] in _WORDS:
                _label(panel, _WORDS[row["point"]], epsilon, row["mean"])
            elif row["clients"] > 4 and not row["secure"]:  # with sums they lie on those of four
                _label(panel, f"{row['clients']} clients", epsilon, row["mean"])
        panel.set_title(title)
        panel.set_xlabel("total epsilon at delta 1e-5")
        panel.set_ylabel("test accuracy, per cent")
    imagenet = {"each": "cifar10-imagenet-eps1", "sums": "cifar10-imagenet-eps1-sums"}
    _curves_panel(panels[3], done, imagenet, lambda row: f"{round(row['bits_measured'])}")
    panels[3].set(title="CIFAR-10, ε = 1: bits", xlim=(0, None))
    for panel, clients in zip(panels[4:], ("", "-100"), strict=True):
        mnist = {"each": f"mnist-eps3{clients}", "sums": f"mnist-eps3-sums{clients}"}
        _curves_panel(panel, done, mnist, lambda row: f"1/{row['one_in']}" if row["one_in"] > 1 else "all")
        panel.margins(x=0.12)
        panel.set(title=f"MNIST, {clients[1:] or 4} clients: share sent", xscale="log")
    panels[3].margins(x=0.12)
    for panel in panels:
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.title.set_fontsize(17)
        for text in (panel.xaxis.label, panel.yaxis.label, *panel.get_xticklabels(), *panel.get_yticklabels()):
            text.set_fontsize(14)
    kinds = [kind for kind in _MARKS if kind in drawn]
    figure.legend(
        [drawn[kind] for kind in kinds],
        [_MARKS[kind][3] for kind in kinds],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=13,
    )
    figure.savefig(path)


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


def _curves_panel(
    panel: Any, done: Sequence[Mapping[str, Any]], presets: Mapping[str, str], words: Callable[[Mapping[str, Any]], str]
) -> None:
    """Accuracy over megabytes per client. presets: kind -> the preset whose points make a curve."""
    means: list[float] = []
    for kind, preset in presets.items():
        points = (row for row in done if row["preset"] == preset and not row["point"].endswith("-fitted"))
        curve = sorted(points, key=lambda row: row["bytes_up"])
        if not curve:
            continue
        marker, edge, face, _ = _MARKS[kind]
        places = [(row["bytes_up"] / row["clients"] / 1e6, 100 * row["mean"]) for row in curve]
        panel.errorbar(
            *zip(*places, strict=True), yerr=[100 * (row["standard_error"] or 0.0) for row in curve],
            color=edge, marker=marker, markerfacecolor=face, markersize=9, capsize=4,
        )  # fmt: skip
        for row, place in zip(curve, places, strict=True):
            panel.annotate(
                words(row), place, xytext=(0, 12 if kind == "sums" else -24),
                textcoords="offset points", ha="center", fontsize=12, color=edge,
            )  # fmt: skip
        means += [mean for _, mean in places]
    panel.set(xlabel="megabytes sent up by a client", ylabel="test accuracy, per cent")
    if means:  # a point above and below, so that a hundredth does not look like a slope
        panel.set_ylim(min(means) - 1, max(means) + 1)
