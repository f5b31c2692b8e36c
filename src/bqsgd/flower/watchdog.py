"""Ends a family of processes once the process that started them has ended, however it ended: kill -9 included.

`Processes` starts this file as a program of its own, in a session of its own, and holds the other end of its standard
input, which the operating system closes with it. A parent-death signal would not do: it is not inherited, so it never
reaches the processes that Flower and Ray start in turn. The family is found by a mark in its environment instead, which
every descendant inherits. Only psutil beside the standard library: a watchdog must be there at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

MARK = "BQSGD_PROCESS_MARK"
_SECONDS = 20.0
_QUIET_SCANS = 3
"""Scans in a row that must find nobody: a process between fork and exec does not show its mark yet."""


def family(mark: str, sessions: set[int] | None = None) -> list[psutil.Process]:
    """The living processes that carry the mark, their descendants and whoever is in their sessions.

    The latter two find those that have lost the mark. Every session here is one of the family's own; `sessions` keeps
    them from one call to the next.
    """
    living = list(psutil.process_iter())
    found: dict[int, psutil.Process] = {}
    sessions = set() if sessions is None else sessions
    for process in living:
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                sessions.add(os.getsid(process.pid))
                found |= {each.pid: each for each in (process, *process.children(recursive=True))}
    for process in living:
        with suppress(OSError):
            if os.getsid(process.pid) in sessions:
                found[process.pid] = process
    return [process for process in found.values() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def end_family(mark: str, known: Sequence[psutil.Process] = ()) -> None:
    """kill -9 everybody who carries the mark, and those known before, until nobody is left."""
    end, quiet = time.monotonic() + _SECONDS, 0
    sessions: set[int] = set()
    while quiet < _QUIET_SCANS and time.monotonic() < end:
        left = family(mark, sessions)
        quiet = 0 if left else quiet + 1
        for process in (*left, *known):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def watch(mark: str, folders: Sequence[str]) -> None:
    """Wait for the end of standard input, then end the family and delete the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_family(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1], sys.argv[2:])
