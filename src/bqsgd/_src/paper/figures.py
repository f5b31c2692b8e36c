"""The paper's Figures 1 and 2 and its trade-off curves, drawn from formulas; nothing in them is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.properties import noise_density, noise_variance
from bqsgd._src.noise import binomial_pmf
from bqsgd._src.paper.tradeoffs import Curve
from bqsgd._src.params import Mechanism, check_positive
from bqsgd._src.privacy.guarantee import as_given

_Array = npt.NDArray[np.float64]
_COLOURS = ("#0b6e99", "#d1495b", "#3d8c40", "#8a5aa8", "#b8860b", "#444444")
_INK, _MUTED = "#222222", "#666666"


@dataclass(frozen=True, kw_only=True)
class _Panel:
    """Two neighbouring values, and the mechanism that must hide which of them it was given."""

    title: str
    mechanism: Mechanism
    values: tuple[float, float]


FIGURE_1 = (
    _Panel(title="(a) quantised, one interval", mechanism=Mechanism(levels=10, trials=0), values=(0.23, 0.28)),
    _Panel(title="(b) quantised, two intervals", mechanism=Mechanism(levels=10, trials=0), values=(0.23, 0.43)),
    _Panel(title="(c) BQ: one trial added", mechanism=Mechanism(levels=10, trials=1), values=(0.23, 0.43)),
)
"""s = 10 and C = 1 as in the paper; its values of g and g' are given only by their intervals."""
FIGURE_2 = Mechanism(levels=2, trials=10)
_CAPTION = (
    "Nominal epsilon of one round at delta {delta:g}: as published; not a guarantee. Gaps: no integers fit the budget."
)


def outcome_law(value: float, mechanism: Mechanism, *, range: float = 1.0) -> tuple[_Array, _Array]:
    """Points (C/s)(sigma rho + o), before the server subtracts m/2, and the probability of each; Eqs. (8) to (11).

    >>> points, law = outcome_law(0.25, Mechanism(levels=10, trials=0))
    >>> [(round(float(x), 2), round(float(p), 2)) for x, p in zip(points, law) if p > 0]
    [(0.2, 0.5), (0.3, 0.5)]
    """
    s = mechanism.levels
    place = value / check_positive("range", range) * s
    if not -s <= place <= s:
        raise InvalidParameter(f"value must lie in [-{range}, {range}], got {value}")
    low = min(int(np.floor(place)), s - 1)
    rounded = np.zeros(2 * s + 1)
    rounded[low + s], rounded[low + s + 1] = 1 - (place - low), place - low
    noise = binomial_pmf(mechanism.trials)
    law = np.convolve(rounded, noise.pmf)
    return (np.arange(len(law)) + noise.first - s) * range / s, law


def indistinguishable_mass(panel: _Panel) -> float:
    """Probability that the outcome is one that both values can lead to: 0 when they can always be told apart."""
    first, second = (outcome_law(value, panel.mechanism)[1] for value in panel.values)
    return float(0.5 * (first[second > 0].sum() + second[first > 0].sum()))


def draw_figure_1(path: Path) -> dict[str, Any]:
    """Write Figure 1 as PNG; return what was drawn."""
    figure, panels = _figure(width=11, height=3.9, columns=3)
    drawn = []
    for axes, panel in zip(panels, FIGURE_1, strict=True):
        _marks(axes)
        laws = [outcome_law(value, panel.mechanism) for value in panel.values]
        for shift, (points, law), value, colour, name in zip(
            (-0.011, 0.011), laws, panel.values, _COLOURS[:2], ("g", "g′"), strict=True
        ):
            shown = law > 0
            axes.bar(points[shown] + shift, law[shown], width=0.02, color=colour, label=f"{name} = {value:g}")
            axes.plot([value], [-0.045], marker="^", color=colour, markersize=8, clip_on=False)
        shared = indistinguishable_mass(panel)
        axes.set(title=panel.title, xlim=(0.13, 0.67), ylim=(-0.09, 1.0), xlabel="decoded value before centring")
        axes.set_xticks(np.arange(2, 7) / 10)
        axes.legend(frameon=False, loc="upper right", title=f"shared outcomes: {shared:.0%}", alignment="left")
        fields: dict[str, Any] = {
            "title": panel.title,
            "levels": panel.mechanism.levels,
            "trials": panel.mechanism.trials,
        }
        drawn.append(
            fields | {"values": list(panel.values), "shared_mass": shared, "laws": [_law(*law) for law in laws]}
        )
    panels[0].set_ylabel("probability")
    figure.suptitle("Two neighbouring values after quantisation and after BQ (s = 10, C = 1)", x=0.01, ha="left")
    figure.savefig(path)
    return {"panels": drawn}


def draw_figure_2(path: Path, mechanism: Mechanism = FIGURE_2) -> dict[str, Any]:
    """Write Figure 2 as PNG: Proposition 1's density beside the binomial law and the Gaussian of the same variance."""
    figure, (axes,) = _figure(width=7.5, height=4.4, columns=1)
    s, m = mechanism.levels, mechanism.trials
    deviation = float(np.sqrt(noise_variance(mechanism)))
    error = np.linspace(-4 * deviation, 4 * deviation, 801)
    bq = noise_density(error, mechanism, range=1.0)
    gaussian = np.exp(-0.5 * (error / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    noise = binomial_pmf(m)
    atoms, law = (np.arange(len(noise.pmf)) + noise.first - m / 2) / s, noise.pmf
    _marks(axes)
    axes.vlines(atoms, 0, law * s, color="#b8860b", linewidth=3, alpha=0.55, label="binomial alone (atoms, times s/C)")
    axes.plot(error, bq, color=_COLOURS[0], linewidth=2.2, label="BQ, Proposition 1")
    axes.plot(error, gaussian, color=_COLOURS[1], linewidth=1.6, linestyle="--", label="Gaussian of the same variance")
    axes.set(xlabel="error of one coordinate, in units of C", ylabel="density", xlim=(error[0], error[-1]))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    figure.suptitle(f"Noise of BQ against binomial and Gaussian (s = {s}, m = {m})", x=0.01, ha="left")
    figure.savefig(path)
    return {
        "levels": s,
        "trials": m,
        "variance": deviation**2,
        "largest_gap_to_gaussian": float(np.abs(bq - gaussian).max()),
        "error": error[::10].tolist(),
        "bq": bq[::10].tolist(),
        "gaussian": gaussian[::10].tolist(),
        "binomial": _law(atoms, law),
    }


def draw_tradeoffs(curves: Sequence[Curve], path: Path, *, delta: float) -> None:
    """Write one PNG with four panels for curves of one kind: V, its excess, levels and trials, bound of Theorem 1."""
    over_bits = curves[0].fixed == "epsilon"
    axis = "bits per coordinate" if over_bits else "nominal ε of one round"
    figure, panels = _figure(width=11, height=8, rows=2, columns=2, shared=False)
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
        style = {"color": _COLOURS[index % len(_COLOURS)], "linewidth": 1.4 + 1.3 * (len(curves) - 1 - index)}
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


def _law(points: _Array, law: _Array) -> list[list[float]]:
    return [[float(x), float(p)] for x, p in zip(points, law, strict=True) if p > 0]


def _figure(*, width: float, height: float, columns: int, rows: int = 1, shared: bool = True) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=shared).ravel())


def _marks(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", alpha=0.2)
    axes.tick_params(colors=_MUTED, labelcolor=_INK)


def _draw_curve(curve: Curve, panels: Sequence[Any], *, style: dict[str, Any], over_bits: bool) -> None:
    error, excess, parameters, bound = panels
    label = f"nominal ε = {as_given(curve.value)}" if over_bits else f"{curve.value:g} bits"
    x = [point.bits if over_bits else point.epsilon for point in curve.points]

    def column(name: str) -> list[float]:
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
