"""A chart as numbers: axes, ticks and paths, which the page's template draws.

The drawing is an SVG stretched over its box with strokes that do not scale; text is HTML placed in per cent. A page is
therefore sharp on any screen, readable without scripts, and a few kilobytes large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.text import one_line

Point = tuple[float, float]
# More points than this do not show on a screen, and would only make the page larger.
MAX_POINTS = 360
LARGEST, SMALLEST = 1e100, 1e-100
# The SVG is a square with this side, in its own units; the page stretches it.
SIDE = 1000
MAX_DECADES = 6
STEPS = 5


class Quantity(StrEnum):
    """The kind of a figure, which decides how it is written."""

    NUMBER = "number"
    EPSILON = "epsilon"
    COUNT = "count"
    PERCENT = "percent"
    BYTES = "bytes"
    SECONDS = "seconds"


def short(value: float | None, unit: Quantity = Quantity.NUMBER, digits: int = 3) -> str:
    """A figure for a label, with at least `digits` significant digits and no trailing zeros. An epsilon is rounded up.

    >>> short(61788, Quantity.BYTES), short(0.9712, Quantity.PERCENT), short(0.0042, Quantity.SECONDS), short(1e-5)
    ('61.8 kB', '97.1 %', '4.2 ms', '1e-5')
    >>> short(0.18111), short(0.18111, Quantity.EPSILON)
    ('0.181', '0.182')
    """
    if value is None or math.isnan(value):
        return "–" if value is None else "not a number"
    if math.isinf(value):
        return _trimmed(value, digits)
    if unit is Quantity.EPSILON:
        return _trimmed(float(rounded_up(value, digits)), digits)
    if unit is Quantity.PERCENT:
        return f"{_trimmed(100 * value, digits)} %"
    if unit is Quantity.BYTES:
        return _scaled(value, digits, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))
    if unit is Quantity.SECONDS:
        if value >= 120:
            minutes, seconds = divmod(round(value), 60)
            return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
        return _scaled(value, digits, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))
    if unit is Quantity.COUNT:
        return f"{round(value):,}"
    return _trimmed(value, digits)


def _scaled(value: float, digits: int, steps: tuple[tuple[float, str], ...]) -> str:
    if value == 0:
        return f"0 {steps[-1][1] if steps[-1][1] == 'B' else 's'}"
    size, name = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{_trimmed(value / size, digits)} {name}"


def _trimmed(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value < 0:
        return "−" + _trimmed(-value, digits)
    if not 1e-4 <= value < 1e6:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(power)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(value)))
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high` with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, from_zero: bool = False, tight: bool = False) -> Axis:
        """An axis that covers finite `values`, which must be positive if `log`.

        It ends at ticks: at whole decades if `log`, at round numbers otherwise. With `tight` it ends where the data
        end.

        >>> Axis.over([0.1, 0.97], from_zero=True).ticks[-1]
        1.0
        """
        values = list(values)
        low, high = min(values), max(values)
        return (
            _decades(low, high, tight=tight) if log else _steps(min(low, 0.0) if from_zero else low, high, tight=tight)
        )

    def place(self, value: float) -> float:
        """The position of `value` on the axis: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _steps(low: float, high: float, *, tight: bool) -> Axis:
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-100):  # a flat line gets room above it
        high = low + (abs(low) if abs(low) > 1e-100 else 1.0)
    step = _round_step((high - low) / STEPS)
    # The slack keeps a value that is a tick, up to rounding, from adding another step.
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Through text, because 3 * 0.1 is 0.30000000000000004.
    ticks = tuple(float(f"{step * i:.12g}") for i in range(first, last + 1))
    if tight:
        room = 1e-9 * (high - low)
        return Axis(low=low, high=high, ticks=tuple(t for t in ticks if low - room <= t <= high + room))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def _decades(low: float, high: float, *, tight: bool) -> Axis:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    stride = math.ceil((last - first) / MAX_DECADES)
    if not tight or high <= low * (1 + 1e-9):
        ticks = tuple(10.0**power for power in range(first, last + 1, stride))
        return Axis(low=ticks[0], high=10.0**last, ticks=ticks, log=True)
    factors = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
    fine = (factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors)
    return Axis(low=low, high=high, ticks=tuple(t for t in fine if low <= t <= high), log=True)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * (1 - 1e-9))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve. `fill` shades the area under it, `dashed` marks a reference, `colour` is an index into the palette."""

    label: str
    points: Sequence[Point]
    colour: int
    dashed: bool = False
    fill: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves on one pair of axes. If `stacked`, all series have the same x and each is drawn on top of the last."""

    key: str
    title: str
    note: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_unit: Quantity = Quantity.NUMBER
    x_unit: Quantity = Quantity.NUMBER
    log_y: bool = False
    log_x: bool = False
    stacked: bool = False
    y_from_zero: bool = True
    ends: bool = True

    def drawing(self) -> dict[str, Any] | None:
        """What the template needs, or None if no point can be drawn."""
        drawn = [[p for p in curve.points if _drawable(p, log_x=self.log_x, log_y=self.log_y)] for curve in self.series]
        hidden = sum(len(curve.points) for curve in self.series) - sum(map(len, drawn))
        if not any(drawn):
            return None
        levels = _stack(drawn) if self.stacked else drawn
        x_axis = Axis.over([x for points in drawn for x, _ in points], log=self.log_x, tight=True)
        y_axis = Axis.over([y for points in levels for _, y in points], log=self.log_y, from_zero=self.y_from_zero)
        curves: list[dict[str, Any]] = []
        hovered: list[dict[str, Any]] = []
        floor: list[Point] = []
        for curve, points, level in zip(self.series, drawn, levels, strict=True):
            kept = thin(level)
            place = [(SIDE * x_axis.place(x), SIDE * (1 - y_axis.place(y))) for x, y in kept]
            area, end = "", None
            if place and (curve.fill or self.stacked):
                base = floor or [(place[0][0], float(SIDE)), (place[-1][0], float(SIDE))]
                area = _path([*place, *reversed(base)]) + "Z"
            if place and self.ends and not self.stacked:
                end = [100 * place[-1][0] / SIDE, 100 * place[-1][1] / SIDE]
            # The next layer of a stack is filled down to this line.
            floor = place if self.stacked else []
            look = {"label": one_line(curve.label), "colour": curve.colour}
            curves.append(look | {"dashed": curve.dashed, "line": _path(place), "area": area, "end": end})
            # A stack is drawn as running sums, but a reader who points at it wants the layer's own value.
            values = points if self.stacked else kept
            hovered.append(look | {"data": [[_round(x, self.x_unit), _round(y, self.y_unit)] for x, y in values]})
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
                "curves": hovered,
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
    """At most `limit` of the points: both ends and, in each stretch, the lowest and the highest, so that peaks stay."""
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
    """Running sums of series over the same x. They must be short: thinning the layers would tear them apart."""
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


def _tick(value: float, unit: Quantity) -> str:
    """The text of a tick. A tick is a round number and not a run's epsilon, so it need not be rounded up."""
    return short(value, Quantity.NUMBER if unit is Quantity.EPSILON else unit)


def _round(value: float, unit: Quantity) -> float:
    if unit is Quantity.EPSILON:
        # As many digits as the page's script shows: the script would otherwise round, perhaps down.
        return float(rounded_up(value))
    return float(f"{value:.5g}") if abs(value) < 1e5 or value != int(value) else int(value)
