"""Axes: the range a chart covers, its ticks, and where a value lies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_DECADES = 6
STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high` with its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], *, log: bool = False, from_zero: bool = False, tight: bool = False) -> Axis:
        """Cover finite `values` (positive ones when log).

        The ends are ticks: whole decades when log, round steps when linear; `tight` keeps the ends of the data instead.

        >>> Axis.over([0.1, 0.97], from_zero=True).ticks[-1]
        1.0
        """
        values = list(values)
        low, high = min(values), max(values)
        return (
            _decades(low, high, tight=tight) if log else _steps(min(low, 0.0) if from_zero else low, high, tight=tight)
        )

    def place(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _steps(low: float, high: float, *, tight: bool) -> Axis:
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-100):  # a flat line: give it room above
        high = low + (abs(low) if abs(low) > 1e-100 else 1.0)
    step = _round_step((high - low) / STEPS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
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
