"""Figures 1 and 2 of the paper, and the trade-off as curves (the MNIST setting); nothing is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from experiments.lab import Options
from experiments.paper.published import MNIST, ROWS

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.laws import Binomial
from bqsgd._src.mechanism.properties import noise_density, noise_variance
from bqsgd._src.paper.tradeoffs import COLOURS, Problem, blank_figure, draw_tradeoffs, trade_off_curves
from bqsgd._src.params import Mechanism, check_positive

_Array = npt.NDArray[np.float64]
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

PROBLEM = Problem(
    setting=MNIST.nominal,
    dimension=61_706,
    clip=MNIST.clip,
    rounds=MNIST.rounds,
    learning_rate=MNIST.learning_rate,
    initial_gap=float(np.log(10)),
    gradient_variance=1.0,
)
"""initial_gap: ten classes, untrained. gradient_variance is assumed; it moves the bound of all curves alike."""


def figure1(options: Options) -> dict[str, Any]:
    """What quantisation and BQ make of two neighbouring values (s = 10, m = 1); the law of every outcome is exact."""
    return draw_figure_1(options.figures / "figure1.png")


def figure2(options: Options) -> dict[str, Any]:
    """The density of BQ's noise against the binomial law and the Gaussian.

    For s = 2 and m = 10: few enough trials to see the steps (the paper does not name its own).
    """
    return draw_figure_2(options.figures / "figure2.png")


def tradeoffs(options: Options) -> dict[str, Any]:
    """Both families of curves, at the budgets of the published MNIST rows."""
    rows = [row for row in ROWS if row.setting is MNIST]
    over_bits = trade_off_curves(
        PROBLEM, fixed="epsilon", epsilons=sorted({row.epsilon for row in rows}), bits=range(6, 17)
    )
    grid = [float(value) for value in np.geomspace(0.5, 50, 41)]
    over_epsilon = trade_off_curves(PROBLEM, fixed="bits", epsilons=grid, bits=sorted({row.bits for row in rows}))
    for name, curves in zip(("fixed_epsilon", "fixed_bits"), (over_bits, over_epsilon), strict=True):
        draw_tradeoffs(curves, options.figures / f"tradeoffs_{name}.png", delta=MNIST.delta)
    return {
        "caveat": "nominal epsilon: as published; not a guarantee",
        "problem": asdict(PROBLEM),
        "fixed_epsilon": [asdict(curve) for curve in over_bits],
        "fixed_bits": [asdict(curve) for curve in over_epsilon],
    }


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
    noise = Binomial(mechanism.trials)
    law = np.convolve(rounded, noise.pmf)
    return (np.arange(len(law)) + noise.first - s) * range / s, law


def indistinguishable_mass(panel: _Panel) -> float:
    """Probability that the outcome is one that both values can lead to: 0 when they can always be told apart."""
    first, second = (outcome_law(value, panel.mechanism)[1] for value in panel.values)
    return float(0.5 * (first[second > 0].sum() + second[first > 0].sum()))


def draw_figure_1(path: Path) -> dict[str, Any]:
    """Write Figure 1 as PNG; return what was drawn."""
    figure, panels = blank_figure(width=11, height=3.9, columns=3)
    drawn = []
    for axes, panel in zip(panels, FIGURE_1, strict=True):
        _marks(axes)
        laws = [outcome_law(value, panel.mechanism) for value in panel.values]
        for shift, (points, law), value, colour, name in zip(
            (-0.011, 0.011), laws, panel.values, COLOURS[:2], ("g", "g′"), strict=True
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
    figure, (axes,) = blank_figure(width=7.5, height=4.4, columns=1)
    s, m = mechanism.levels, mechanism.trials
    deviation = float(np.sqrt(noise_variance(mechanism)))
    error = np.linspace(-4 * deviation, 4 * deviation, 801)
    bq = noise_density(error, mechanism, range=1.0)
    gaussian = np.exp(-0.5 * (error / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    noise = Binomial(m)
    atoms, law = (np.arange(len(noise.pmf)) + noise.first - m / 2) / s, noise.pmf
    _marks(axes)
    axes.vlines(atoms, 0, law * s, color="#b8860b", linewidth=3, alpha=0.55, label="binomial alone (atoms, times s/C)")
    axes.plot(error, bq, color=COLOURS[0], linewidth=2.2, label="BQ, Proposition 1")
    axes.plot(error, gaussian, color=COLOURS[1], linewidth=1.6, linestyle="--", label="Gaussian of the same variance")
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


def _law(points: _Array, law: _Array) -> list[list[float]]:
    return [[float(x), float(p)] for x, p in zip(points, law, strict=True) if p > 0]


def _marks(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, axis="y", alpha=0.2)
    axes.tick_params(colors=_MUTED, labelcolor=_INK)
