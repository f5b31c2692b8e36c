"""Starting ranks as processes of their own, with a time limit, a free port, and nothing left behind."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from forked import SECONDS, in_fork
from forked_ranks import fork_ranks

WORKER = Path(__file__).parent / "engines" / "distributed_worker.py"
FORKED_RANKS = Path(__file__).parent / "forked_ranks.py"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **more}


@contextlib.contextmanager
def processes(commands):
    """(command, environment) pairs as processes, each in a session of its own; killed at the end if still there."""
    started = []
    try:
        for command, variables in commands:
            started.append(
                subprocess.Popen(
                    command,
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()


def finish(started):
    """(exit code, output) of each; fails when they take too long."""
    until = time.monotonic() + SECONDS
    return [
        (process.returncode, output)
        for process in started
        for output, _ in [process.communicate(timeout=max(1.0, until - time.monotonic()))]
    ]


def run_ranks(folder, settings, *, mischief=None, resume=False, script=WORKER, ranks=None):
    """Run the worker on every rank to its end; (exit code, output) by rank."""
    size, port = ranks or settings["clients"], free_port()
    asked = json.dumps({"folder": str(folder), "settings": settings, "resume": resume, "mischief": mischief or {}})
    with tempfile.TemporaryDirectory() as outputs:
        arguments = (str(script), str(size), outputs, asked)
        variables = environment(WORLD_SIZE=str(size), MASTER_PORT=str(port))
        if "LD_PRELOAD" in variables:  # heeded by a program that starts, not by a fork
            with processes([([sys.executable, str(FORKED_RANKS), *arguments], variables)]) as started:
                [(code, printed)] = finish(started)
        else:
            code, printed = in_fork(fork_ranks, *arguments, variables=variables)
        assert code == 0, printed
        said = [(Path(outputs) / f"{rank}.txt").read_text() for rank in range(size)]
        return list(zip(json.loads(printed.splitlines()[-1]), said, strict=True))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
