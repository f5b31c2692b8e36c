"""The convergence bound of Theorem 1, and its trade-off curves: fix epsilon and vary the bits, or the reverse.

`draw_tradeoffs` draws them with matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bqsgd._src.errors import Infeasible
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.paper.nominal import NominalSetting, closed_form, nominal_epsilon, privacy_level, strict_mechanism
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.planner.plan import Budget
from bqsgd._src.privacy.guarantee import as_given


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A learning problem for Theorem 1.

    dimension: of the model, not d_P. learning_rate: eta. initial_gap: F(theta_0) - F*, and gradient_variance: sigma^2
    (Assumption 1); both are assumed, not measured. How many clients there are makes no difference to the curves.
    """

    setting: NominalSetting
    dimension: int
    clip: float
    rounds: int
    learning_rate: float
    initial_gap: float
    gradient_variance: float

    def __post_init__(self) -> None:
        check_int("dimension", self.dimension, 1, 2**53)
        check_int("rounds", self.rounds, 1, 2**53)
        for name in ("clip", "learning_rate", "initial_gap", "gradient_variance"):
            check_positive(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One budget of a curve: the real-valued optimum, and the integers (None where the budget is infeasible).

    variance_floor is 1 / (4 R^2), the error that privacy alone costs; more bits reduce what lies above it.
    """

    bits: int
    epsilon: float
    levels_real: float
    trials_real: float
    variance_real: float
    variance_floor: float
    levels: int | None = None
    trials: int | None = None
    variance: float | None = None
    nominal_epsilon: float | None = None
    sgd_error: float | None = None
    quantisation_error: float | None = None
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points that share one constraint: `fixed` is "epsilon" or "bits", `value` what it is fixed at."""

    fixed: str
    value: float
    points: tuple[Point, ...]


def trade_off_curves(
    problem: Problem, *, fixed: str, epsilons: Sequence[float], bits: Sequence[int]
) -> tuple[Curve, ...]:
    """A curve for each nominal epsilon, over the bits, if `fixed` is "epsilon"; for "bits" the other way round."""
    points = [[_point(problem, bits=b, epsilon=epsilon) for b in bits] for epsilon in epsilons]
    if fixed == "epsilon":
        return tuple(Curve(fixed=fixed, value=e, points=tuple(row)) for e, row in zip(epsilons, points, strict=True))
    columns = zip(*points, strict=True)
    return tuple(Curve(fixed=fixed, value=b, points=column) for b, column in zip(bits, columns, strict=True))


def _point(problem: Problem, *, bits: int, epsilon: float) -> Point:
    """Plan one budget (strict integers beside the real optimum) and evaluate Theorem 1's bound for it.

    On the real optimum V = 1 / (4 R^2) + 1 / (6 s^2) (Eq. 22). The bound is on the mean of ||grad F(theta_t)||^2 over T
    rounds, 2 [F(theta_0) - F*] / (T eta) + sigma^2 / L + d C^2 V. Its first two terms are the error of distributed SGD.
    The number of clients cancels, because all have the same weight and mechanism.
    """
    setting = problem.setting
    budget = Budget(bits=bits, epsilon=epsilon, delta=setting.delta)
    levels, trials = closed_form(budget, setting)
    floor = 1 / (4 * privacy_level(epsilon, setting) ** 2)
    real = Point(
        bits=bits,
        epsilon=epsilon,
        levels_real=levels,
        trials_real=trials,
        variance_real=floor + 1 / (6 * levels**2),
        variance_floor=floor,
    )
    try:
        mechanism = strict_mechanism(budget, setting)
    except Infeasible:
        # A gap in the curve. The real-valued optimum exists even where no integers fit.
        return real
    variance = noise_variance(mechanism)
    descent = 2 * problem.initial_gap / (problem.rounds * problem.learning_rate)
    sgd_error = descent + problem.gradient_variance / setting.batch_size
    quantisation_error = problem.dimension * problem.clip**2 * variance
    return replace(
        real,
        levels=mechanism.levels,
        trials=mechanism.trials,
        variance=variance,
        nominal_epsilon=nominal_epsilon(mechanism, setting),
        sgd_error=sgd_error,
        quantisation_error=quantisation_error,
        bound=sgd_error + quantisation_error,
    )


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
