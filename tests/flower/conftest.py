"""The task that the tests of all engines train on, and a clock that waits for nobody."""

import pytest

from digits_fixtures import settings, task

__all__ = ["settings", "task"]


class Time:
    """Time that passes by sleeping alone, however busy the machine is."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    """The clock by which a server waits for its nodes."""
    clock = Time()
    for place in ("messages", "engine"):
        monkeypatch.setattr(f"bqsgd._src.flower.{place}.time", clock)
    return clock
