"""The task that the tests of all engines train on."""

from digits_fixtures import settings, task

__all__ = ["settings", "task"]
