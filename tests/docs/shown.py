"""Text that a document shows against text that a program prints."""

import re

POINTS = 6
"""Noise is drawn anew in every run: an accuracy may differ by this many points, all else is equal."""
PERCENTAGE = re.compile(r"([\d.]+) ?%")


def assert_prints_as_shown(printed: str, shown: str) -> None:
    """The same lines, with percentages within `POINTS` of each other."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in PERCENTAGE.sub("%", text).rstrip().splitlines()]

    assert lines(printed) == lines(shown)
    pairs = zip(PERCENTAGE.findall(printed), PERCENTAGE.findall(shown), strict=True)
    far = [pair for pair in pairs if abs(float(pair[0]) - float(pair[1])) > POINTS]
    assert far == [], f"printed and shown differ by more than {POINTS} points: {far}"
