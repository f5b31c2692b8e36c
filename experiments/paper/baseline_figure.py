"""BQ and its baselines on the same axes: accuracy against bytes of an update, accuracy against proven epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLOURS = ("#444444", "#b8860b", "#8a5aa8", "#0b6e99", "#7fb2d0", "#3d8c40", "#d1495b")
_MARKERS = ("o", "s", "^", "D", "X", "v", "P")
_SHOWN, _FAR = 1000.0, 10.0
"""Beyond the first epsilon says nothing; such rows, and rows without noise, stand side by side at the right edge."""


def draw_baselines(rows: Sequence[Mapping[str, Any]], path: Path, *, delta: float) -> None:
    """Write the PNG; rows without a finished run are left out.

    A row has label, mean and deviation of the accuracy, frame_bytes, and exact (a guarantee's fields, or None).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    by_bytes, by_epsilon = figure.subplots(1, 2, sharey=True)
    edge = [row for row in rows if math.isinf(place_of(row["exact"]))]
    for index, (row, colour, marker) in enumerate(zip(rows, _COLOURS, _MARKERS, strict=False)):
        if row["mean"] is None:
            continue
        # Later markers are smaller, so that one lying on another still shows both.
        style = {"color": colour, "marker": marker, "linestyle": "", "markersize": 14 - index, "capsize": 3}
        accuracy = 100 * row["mean"]
        spread = None if row["deviation"] is None else [100 * row["deviation"]]
        place = place_of(row["exact"])
        if math.isinf(place):
            place = _SHOWN * _FAR ** ((edge.index(row) + 0.5) / len(edge))
        by_bytes.errorbar([row["frame_bytes"] / 1000], [accuracy], yerr=spread, label=row["label"], **style)
        by_epsilon.errorbar([place], [accuracy], yerr=spread, **style)
    by_bytes.set(xlabel="kilobytes of one update, measured", ylabel="test accuracy, per cent", xlim=(0, None))
    by_epsilon.set(xlabel=f"proven epsilon, all rounds, at delta {delta:g}", xscale="log", xlim=(1, _FAR * _SHOWN))
    by_epsilon.axvspan(_SHOWN, _FAR * _SHOWN, color="#d1495b", alpha=0.08)
    by_epsilon.set_xticks([1, 10, 100, _SHOWN * _FAR**0.5], ["1", "10", "100", "no meaningful\nguarantee"])
    by_epsilon.minorticks_off()
    for panel in (by_bytes, by_epsilon):
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("MNIST, LeNet-5: the same clients, batches and server; only the message differs", x=0.01, ha="left")
    figure.savefig(path)


def place_of(guarantee: Mapping[str, Any] | None) -> float:
    """Where a row stands on the axis of epsilon; infinity when its epsilon says nothing.

    >>> place_of({"epsilon": 4.5}), place_of(None)
    (4.5, inf)
    """
    epsilon = math.inf if guarantee is None else float(guarantee["epsilon"])
    return epsilon if epsilon <= _SHOWN else math.inf
