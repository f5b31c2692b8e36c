"""The decorator of the compiled loops, and a line that says when they are compiled.

Machine code fits one processor, so a wheel cannot carry it. A loop is compiled when it is first used, and numba keeps
it beside the package or, where that cannot be written, in the user's cache folder. NUMBA_CACHE_DIR names another one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numba
from numba.core import event

if TYPE_CHECKING:
    from rich.status import Status

NOTICE = "bqsgd compiles its loops for this processor: up to half a minute, the first time that it needs them"


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba.njit; where no folder can be written, a loop that should be kept is compiled in every process."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(**options)(function)
        except RuntimeError:  # numba found no folder: a package nobody may write to and a user without a home
            return numba.njit(**options | {"cache": False})(function)

    return decorate


class _Notice(event.Listener):  # type: ignore[misc]
    """Shows the notice: while a loop is compiled on a terminal, once per process elsewhere."""

    said = False

    def __init__(self) -> None:
        self._depth = 0
        self._status: Status | None = None

    def on_start(self, event: Any) -> None:
        name = _name_of_ours(event)
        self._depth += bool(name)
        if name and self._depth == 1:  # loops called by a loop are compiled within it
            with suppress(OSError, ValueError):  # nobody reads: no reason to end a step
                self._status = _status(f"{NOTICE} ({name})")
                if self._status is None and not self.said and sys.stderr is not None:
                    print(NOTICE, file=sys.stderr, flush=True)
                    self.said = True

    def on_end(self, event: Any) -> None:
        self._depth -= bool(_name_of_ours(event))
        if self._depth == 0 and self._status is not None:
            self._status.stop()
            self._status = None


def _name_of_ours(event: Any) -> str:
    """The name of the loop that is compiled, empty for what numba compiles for itself."""
    function = event.data["dispatcher"].py_func
    return str(function.__name__).strip("_") if function.__module__.startswith("bqsgd.") else ""


def _status(text: str) -> Status | None:
    """A line of its own on a terminal; None elsewhere and beside a progress bar, which would be torn."""
    from rich.console import Console
    from rich.file_proxy import FileProxy

    console = Console(stderr=True)
    if isinstance(sys.stderr, FileProxy) or not console.is_terminal:
        return None
    status = console.status(text)
    status.start()
    return status


notice = _Notice()
event.register("numba:compile", notice)  # type: ignore[no-untyped-call]
