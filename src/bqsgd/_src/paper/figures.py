"""Draws the trade-off curves of `paper.tradeoffs` with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.paper.tradeoffs import Curve
from bqsgd._src.privacy.guarantee import as_given

_Array = npt.NDArray[np.float64]
COLOURS = ("#0b6e99", "#d1495b", "#3d8c40", "#8a5aa8", "#b8860b", "#444444")


_CAPTION = (
    "Nominal epsilon of one round at delta {delta:g}: as published; not a guarantee. Gaps: no integers fit the budget."
)


def draw_tradeoffs(curves: Sequence[Curve], path: Path, *, delta: float) -> None:
    """Write one PNG with four panels for curves of one kind: V, its excess, levels and trials, bound of Theorem 1."""
    over_bits = curves[0].fixed == "epsilon"
    axis = "bits per coordinate" if over_bits else "nominal ε of one round"
    figure, panels = blank_figure(width=11, height=8, rows=2, columns=2, shared=False)
    for panel in panels:
        panel.set_xlabel(axis)
        panel.set_yscale("log")
        panel.grid(visible=True, which="major", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if over_bits:
            panel.set_xticks([point.bits for point in curves[0].points])
        else:
            panel.set_xscale("log")
            _plain_ticks(panel, [point.epsilon for point in curves[0].points])
    for index, curve in enumerate(curves):
        # Later curves are thinner, so that one lying on another still shows both.
        style = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.4 + 1.3 * (len(curves) - 1 - index)}
        _draw_curve(curve, panels, style=style, over_bits=over_bits)
    titles = (
        "Error V of one coordinate (in C²)",
        "V above the floor 1/(4R²) that privacy sets, per cent",
        "Levels s (solid) and trials m (dashed)",
        "Theorem 1: bound (solid), quantisation part (dashed)",
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, fontsize=11)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(curves), frameon=False)
    what = "Privacy fixed, bits vary" if over_bits else "Bits fixed, privacy varies"
    figure.suptitle(what, fontsize=13, fontweight="bold", x=0.02, ha="left")
    figure.supxlabel(_CAPTION.format(delta=delta), fontsize=8, color="#555555")
    figure.savefig(path)


def blank_figure(
    *, width: float, height: float, columns: int, rows: int = 1, shared: bool = True
) -> tuple[Any, list[Any]]:
    """An empty figure and its panels, row by row. `shared`: all panels have the same y axis.

    It is built without pyplot, which would keep every figure open and choose a backend for the whole process.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=shared).ravel())


def _draw_curve(curve: Curve, panels: Sequence[Any], *, style: dict[str, Any], over_bits: bool) -> None:
    error, excess, parameters, bound = panels
    label = f"nominal ε = {as_given(curve.value)}" if over_bits else f"{curve.value:g} bits"
    x = [point.bits if over_bits else point.epsilon for point in curve.points]

    def column(name: str) -> list[float]:
        # matplotlib leaves a gap at NaN: an infeasible budget must not look like a value.
        return [float("nan") if (value := getattr(point, name)) is None else value for point in curve.points]

    style = {**style, "marker": "o", "markersize": style["linewidth"] + 1.5}
    error.plot(x, column("variance"), label=label, **style)
    floors = column("variance_floor")
    excess.plot(x, [100 * (v / f - 1) for v, f in zip(column("variance"), floors, strict=True)], **style)
    parameters.plot(x, column("levels"), **style)
    parameters.plot(x, column("trials"), linestyle="--", **style)
    bound.plot(x, column("bound"), **style)
    bound.plot(x, column("quantisation_error"), linestyle="--", **style)


def _plain_ticks(panel: Any, values: Sequence[float]) -> None:
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    low, high = min(values), max(values)
    ticks = [t * 10**e for e in range(-6, 7) for t in (1, 2, 5) if low * 0.99 <= t * 10**e <= high * 1.01]
    panel.set_xticks(ticks or [low, high])
    panel.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    panel.xaxis.set_minor_locator(NullLocator())
