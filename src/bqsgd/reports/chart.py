"""A chart as numbers: domains, ticks and paths in a unit square, which the page's template draws.

The drawing is an SVG stretched over its box with unscaled strokes, and text is HTML placed in percent. So one page is
sharp from phone to projector, needs no script to be read, and weighs kilobytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.privacy.guarantee import rounded_up
from bqsgd.reports.axis import Axis
from bqsgd.reports.units import Unit, short

Point = tuple[float, float]
MAX_POINTS = 360
LARGEST, SMALLEST = 1e100, 1e-100
SIDE = 1000  # of the SVG's own square


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `fill` shades under it, `dashed` marks what is a reference, `colour` is a place in the palette."""

    label: str
    points: Sequence[Point]
    colour: int
    dashed: bool = False
    fill: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over a shared pair of axes. With `stacked`, each series must hold the same x and adds onto the former."""

    key: str
    title: str
    note: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_unit: Unit = Unit.NUMBER
    x_unit: Unit = Unit.NUMBER
    log_y: bool = False
    log_x: bool = False
    stacked: bool = False
    y_from_zero: bool = True
    ends: bool = True

    def drawing(self) -> dict[str, Any] | None:
        """What the template needs, or None when no point can be drawn."""
        drawn = [[p for p in curve.points if _drawable(p, log_x=self.log_x, log_y=self.log_y)] for curve in self.series]
        hidden = sum(len(curve.points) for curve in self.series) - sum(map(len, drawn))
        if not any(drawn):
            return None
        levels = _stack(drawn) if self.stacked else drawn
        x_axis = Axis.over([x for points in drawn for x, _ in points], log=self.log_x, tight=True)
        y_axis = Axis.over([y for points in levels for _, y in points], log=self.log_y, from_zero=self.y_from_zero)
        curves: list[dict[str, Any]] = []
        floor: list[Point] = []
        for curve, points, level in zip(self.series, drawn, levels, strict=True):
            kept = thin(level)
            place = [(SIDE * x_axis.place(x), SIDE * (1 - y_axis.place(y))) for x, y in kept]
            line = _path(place)
            area = ""
            if place and (curve.fill or self.stacked):
                base = floor or [(place[0][0], float(SIDE)), (place[-1][0], float(SIDE))]
                area = _path([*place, *reversed(base)]) + "Z"
            floor = place if self.stacked else []
            values = points if self.stacked else kept
            curves.append(
                {
                    "label": curve.label,
                    "colour": curve.colour,
                    "dashed": curve.dashed,
                    "line": line,
                    "area": area,
                    "end": None
                    if not place or self.stacked or not self.ends
                    else [place[-1][0] / 10, place[-1][1] / 10],
                    "data": [[_round(x, self.x_unit), _round(y, self.y_unit)] for x, y in values],
                }
            )
        return {
            "curves": curves,
            "hidden": hidden,
            "x_ticks": [(100 * x_axis.place(t), _tick(t, self.x_unit)) for t in x_axis.ticks],
            "y_ticks": [(100 * y_axis.place(t), _tick(t, self.y_unit)) for t in y_axis.ticks],
            "hover": {
                "x": [x_axis.low, x_axis.high, self.log_x],
                "y": [y_axis.low, y_axis.high, self.log_y],
                "units": [str(self.x_unit), str(self.y_unit)],
                "xLabel": self.x_label,
                "stacked": self.stacked,
                "curves": [{"label": c["label"], "colour": c["colour"], "data": c["data"]} for c in curves],
            },
            "alt": self._alt(drawn),
        }

    def _alt(self, drawn: Sequence[Sequence[Point]]) -> str:
        parts = []
        for curve, points in zip(self.series, drawn, strict=True):
            if points:
                (x0, y0), (x1, y1) = points[0], points[-1]
                low, high = min(y for _, y in points), max(y for _, y in points)
                first, last, lowest, highest = (short(y, self.y_unit) for y in (y0, y1, low, high))
                ends = f"{first} at {short(x0, self.x_unit)}, {last} at {short(x1, self.x_unit)}"
                parts.append(f"{curve.label}: {ends}, lowest {lowest}, highest {highest}")
        return f"{self.title}. {self.y_label} against {self.x_label}. " + "; ".join(parts) + "."


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points that keep both ends and, in each stretch, the lowest and the highest."""
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], (limit - 2) // 2
    kept = [points[0]]
    for i in range(stretches):
        stretch = range(i * len(inner) // stretches, (i + 1) * len(inner) // stretches)
        lowest = min(stretch, key=lambda j: inner[j][1])
        highest = max(stretch, key=lambda j: inner[j][1])
        kept.extend(inner[j] for j in sorted({lowest, highest}))
    return [*kept, points[-1]]


def _stack(drawn: Sequence[Sequence[Point]]) -> list[list[Point]]:
    """Running sums of series over the same x; thinning would tear the layers apart, so they must come short."""
    levels: list[list[Point]] = []
    for points in drawn:
        below = levels[-1] if levels else [(x, 0.0) for x, _ in points]
        if [x for x, _ in points] != [x for x, _ in below] or len(points) > MAX_POINTS:
            raise InvalidParameter(f"stacked series need the same x in each and at most {MAX_POINTS} points")
        levels.append([(x, y + under) for (x, y), (_, under) in zip(points, below, strict=True)])
    return levels


def _drawable(point: Point, *, log_x: bool, log_y: bool) -> bool:
    x, y = point
    # The bounds keep sums and ticks away from overflow and underflow; no figure worth drawing lies beyond them.
    return abs(x) < LARGEST and abs(y) < LARGEST and (x > SMALLEST or not log_x) and (y > SMALLEST or not log_y)


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points) if points else ""


def _tick(value: float, unit: Unit) -> str:
    """A mark of the axis, a round number already: nobody's epsilon."""
    return short(value, Unit.NUMBER if unit is Unit.EPSILON else unit)


def _round(value: float, unit: Unit) -> float:
    if unit is Unit.EPSILON:
        return float(rounded_up(value))  # as many digits as the page's script shows
    return float(f"{value:.5g}") if abs(value) < 1e5 or value != int(value) else int(value)
