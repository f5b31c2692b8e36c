"""Processes that are forked from one that has imported what they need: that takes longer than all that most of them do.

A test run has one such server for each of its processes: the one of multiprocessing. Where `bqsgd flower supernode` has
started it first, for its own tests, a process imports what is missing. The server starts no thread, and torch's would
not survive a fork.
"""

import contextlib
import multiprocessing
import os
import signal
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

SECONDS = 540


def fork_server():
    """A context of multiprocessing; what it starts is forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fork_preloads"])
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):  # it does not take over this process's path
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def forked(function, *arguments, variables=None):
    """A process that calls `function`, and what returns what it has printed; killed at the end with all it started."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "printed.txt"
        path.touch()
        process = fork_server().Process(target=_call, args=(path, variables, function, arguments))
        process.start()
        try:
            yield process, path.read_text
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _call(path, variables, function, arguments):
    os.setsid()
    output = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    if variables is not None:
        os.environ.clear()
        os.environ |= variables
    function(*arguments)


def in_fork(function, *arguments, variables=None):
    """(exit code, what it printed) of a call in a process of its own; the code is None when it takes too long."""
    with forked(function, *arguments, variables=variables) as (process, printed):
        process.join(SECONDS)
        return process.exitcode, printed()
