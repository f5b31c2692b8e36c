"""BQ and its baselines on the same axes: accuracy against bytes of an update, accuracy against exact epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#444444", "#b8860b", "#8a5aa8", "#0b6e99", "#3d8c40", "#d1495b")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_SHOWN = 1000.0
"""Beyond this epsilon says nothing; such rows, and rows without noise, stand at the right edge."""


def draw_baselines(rows: Sequence[Mapping[str, Any]], path: Path, *, delta: float) -> None:
    """Write the PNG; rows without a finished run are left out.

    A row has label, mean and deviation of the accuracy, frame_bytes, and exact (a guarantee's fields, or None).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_bytes, by_epsilon = figure.subplots(1, 2, sharey=True)
    far = 3 * _SHOWN
    for row, colour, marker in zip(rows, _COLOURS, _MARKERS, strict=False):
        if row["mean"] is None:
            continue
        style = {"color": colour, "marker": marker, "linestyle": "", "markersize": 9, "capsize": 3, "alpha": 0.9}
        accuracy, spread = 100 * row["mean"], 100 * (row["deviation"] or 0.0)
        by_bytes.errorbar([row["frame_bytes"] / 1000], [accuracy], yerr=[spread], label=row["label"], **style)
        by_epsilon.errorbar([place_of(row["exact"], far=far)], [accuracy], yerr=[spread], **style)
    by_bytes.set(xlabel="kilobytes of one update, measured", ylabel="test accuracy, per cent", xlim=(0, None))
    by_epsilon.set(xlabel=f"exact epsilon, all rounds, at delta {delta:g}", xscale="log", xlim=(1, 2 * far))
    by_epsilon.axvspan(_SHOWN, 2 * far, color="#d1495b", alpha=0.08)
    by_epsilon.set_xticks([1, 10, 100, far], ["1", "10", "100", "no meaningful\nguarantee"])
    by_epsilon.minorticks_off()
    for panel in (by_bytes, by_epsilon):
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("MNIST, LeNet-5: the same clients, batches and server; only the message differs", x=0.01, ha="left")
    figure.savefig(path)


def place_of(guarantee: Mapping[str, Any] | None, *, far: float) -> float:
    """Where a row stands on the axis of epsilon; `far` when its epsilon says nothing.

    >>> place_of({"epsilon": 4.5}, far=3000.0), place_of(None, far=3000.0)
    (4.5, 3000.0)
    """
    epsilon = math.inf if guarantee is None else float(guarantee["epsilon"])
    return epsilon if epsilon <= _SHOWN else far
