"""Ctrl-C during a step: the step is completed first, and what a record raises is never taken for a Ctrl-C.

A record whose code raises KeyboardInterrupt or SystemExit costs that record alone, so everything it raises is caught. A
real Ctrl-C must not be caught there: it would cost a record, and the program would go on. Inside `interrupts_deferred`
the two are told apart: the first Ctrl-C is raised at the end of the block, and the second one at once, as `StopNow`,
which `errors_dropped` lets pass: use it wherever the code of a record runs.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_log = logging.getLogger("bqsgd.samples")


class StopNow(KeyboardInterrupt):
    """The user pressed Ctrl-C a second time before the step was complete."""


@contextmanager
def errors_dropped(logged_as: str = "") -> Iterator[None]:
    """Drop whatever the block raises, SystemExit and a record's own KeyboardInterrupt included.

    For code that runs on private data after the spend: an error would tell a peer something about the data. The user's
    second Ctrl-C (`StopNow`) is raised.

    logged_as: what failed, for the debug log of this machine. Leave it out where a server chooses the model that the
    data meet: with many clients in one process, that server may read the log.
    """
    try:
        yield
    except StopNow:
        raise
    except BaseException:
        if logged_as:
            _log.debug("%s (keep this line private)", logged_as, exc_info=True)


class _Deferral:
    """What the program's own handler of SIGINT raises while a block is at work."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self.raised: list[BaseException] = []
        self.firm = 0
        """How many blocks are at work that not even the second Ctrl-C may interrupt."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)  # one that only takes a note does so at once
        except BaseException as error:
            self.raised.append(error)
            self.stop_if_asked_twice()

    def stop_if_asked_twice(self) -> None:
        if len(self.raised) > 1 and not self.firm:
            raise StopNow


_current: _Deferral | None = None
"""Of the main thread, the only one that receives signals."""


@contextmanager
def interrupts_deferred(*, firm: bool = False) -> Iterator[None]:
    """Raise the first Ctrl-C at the end of the block, and the second one at once.

    In other threads than the main one nothing is to be done: Python delivers signals to the main thread. A block within
    a block is part of the outer one.

    firm: the second Ctrl-C waits for the end of the block too; for what must happen as a whole and does not take long.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _current is not None:
        with _firm(_current, firm):
            yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # ignored, or left to the operating system, which ends the process
        yield
        return
    with _handled(_Deferral(handler)) as deferral, _firm(deferral, firm):
        yield


@contextmanager
def _handled(deferral: _Deferral) -> Iterator[_Deferral]:
    global _current
    _current, before = deferral, signal.signal(signal.SIGINT, deferral.handle)
    try:
        yield deferral
    finally:
        # In this order: a Ctrl-C between the two lines still meets our handler, and is raised below.
        _current = None
        signal.signal(signal.SIGINT, before)
        if deferral.raised:
            raise deferral.raised[0]


@contextmanager
def _firm(deferral: _Deferral, firm: bool) -> Iterator[None]:
    deferral.firm += firm
    try:
        yield
    finally:
        deferral.firm -= firm
        deferral.stop_if_asked_twice()


@contextmanager
def stop_signals(note: Callable[[int], None]) -> Iterator[None]:
    """Each Ctrl-C or SIGTERM calls `note` with its number, until the end of the block.

    Only the main thread can listen for signals. In any other thread this does nothing.
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
