"""Ending one of Flower's programs as a power cut would."""

import os
import signal
from contextlib import suppress

import psutil


def kill(processes, name):
    """kill -9 a program, its group and all its descendants at once."""
    process = processes.running.pop(name)
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()
    process.wait(10)
