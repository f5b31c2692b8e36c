"""SIGINT and SIGTERM as requests to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Each Ctrl-C or SIGTERM calls `note` with its number, until the end of the block.

    Only the main thread can listen for signals; in any other they are left to whoever does.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        note(number)

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
