"""How the report prints a number: short, with its unit, the same in Python and in the page's script."""

from __future__ import annotations

import math
from enum import StrEnum

from bqsgd.privacy.guarantee import rounded_up


class Unit(StrEnum):
    """What a figure counts."""

    NUMBER = "number"
    EPSILON = "epsilon"
    COUNT = "count"
    PERCENT = "percent"
    BYTES = "bytes"
    SECONDS = "seconds"


def short(value: float | None, unit: Unit = Unit.NUMBER, digits: int = 3) -> str:
    """A figure for a label: at least `digits` significant digits, trailing zeros gone.

    An epsilon is rounded up.

    >>> short(61788, Unit.BYTES), short(0.9712, Unit.PERCENT), short(0.0042, Unit.SECONDS), short(1e-5)
    ('61.8 kB', '97.1 %', '4.2 ms', '1e-5')
    >>> short(0.18111), short(0.18111, Unit.EPSILON)
    ('0.181', '0.182')
    """
    if value is None or math.isnan(value):
        return "–" if value is None else "not a number"
    if math.isinf(value):
        return _trimmed(value, digits)
    if unit is Unit.EPSILON:
        return _trimmed(float(rounded_up(value, digits)), digits)
    if unit is Unit.PERCENT:
        return f"{_trimmed(100 * value, digits)} %"
    if unit is Unit.BYTES:
        return _scaled(value, digits, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))
    if unit is Unit.SECONDS:
        if value >= 120:
            minutes, seconds = divmod(round(value), 60)
            return f"{minutes} min {seconds} s" if seconds else f"{minutes} min"
        return _scaled(value, digits, ((1, "s"), (1e-3, "ms"), (1e-6, "µs")))
    if unit is Unit.COUNT:
        return f"{round(value):,}".replace(",", "\u202f")
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
