"""Programs of Flower as child processes that do not outlive us, and a Ray that nobody else can reach.

Started as a program, this file is the watchdog of a family of processes: it ends them once the process that started
them has ended, kill -9 included. `Processes` holds the other end of its standard input, which the operating system
closes. A parent-death signal would not do: it is not inherited, so it never reaches the processes that Flower and Ray
start in turn. The family is found by a mark in its environment instead, which every descendant inherits. A watchdog
must be there at once, so nothing heavy is imported here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil

from bqsgd._src.errors import BqsgdError
from bqsgd._src.storage import private_folder

MARK = "BQSGD_PROCESS_MARK"
_END_SECONDS = 20.0
_QUIET_SCANS = 3
"""Scans in a row that must find nobody: a process between fork and exec does not show its mark yet."""
_LOOK_SECONDS = 0.2
_CLUSTER, _MODE, _TOKEN = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_RAY_FOLDER = "RAY_TMPDIR"


class FlowerFailed(BqsgdError, RuntimeError):
    """One of Flower's programs failed or did not answer in time; the message ends with its last lines."""


class Processes:
    """A family of processes that share a folder and an environment; leaving the `with` block ends all of them.

    They are found again by a mark in their environment, so that grandchildren that left their group end too. A watchdog
    does the same should this process be killed; SIGTERM and SIGHUP leave the `with` block as Ctrl-C does.

    Args:
        folder: of logs and of whatever the processes write; nobody else can read it.
        temporary: make the folder, which must be new, and delete it when the family ends.
    """

    def __init__(self, folder: Path, *, temporary: bool = False) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._began: dict[str, int] = {}
        self._mark = uuid.uuid4().hex
        self._handlers: dict[signal.Signals, Any] = {}
        home = folder / "flwr-home"
        ray_folder = (
            Path(tempfile.gettempdir()) / f"bqsgd-ray-{self._mark[:16]}"
        )  # short: paths of sockets have a limit
        self._watchdog = subprocess.Popen(  # before there is anything to leave behind
            [sys.executable, "-P", __file__, self._mark, ray_folder, *([folder] if temporary else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for place in (ray_folder, *([folder] if temporary else [])):
            place.mkdir(mode=0o700)  # a folder that is there already is somebody else's
        for place in (folder, home, folder / "logs"):
            private_folder(place)
        beside = str(Path(sys.executable).parent)  # Flower starts its own programs by name
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join((beside, os.environ.get("PATH", ""))),
            **ray_on_loopback(),
            _RAY_FOLDER: str(ray_folder),
            MARK: self._mark,
        }

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program in the background; its output goes to logs/`name`.log."""
        if name in self.running:
            raise FlowerFailed(f"{name} is running already")
        with self.log(name).open("ab") as stream:
            self._began[name] = stream.tell()
            process = subprocess.Popen(
                self._resolved(command),
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment | environment,
                cwd=self.folder,
                start_new_session=True,
                umask=0o077,  # databases and logs of other people's programs
            )
        self.running[name] = process
        return process

    def run(self, name: str, *command: str, seconds: float, heard: Callable[[str], None] | None = None) -> str:
        """Run a program to its end and return what it printed; failing or overdue raises."""
        self.start(name, *command)
        return self.finish(name, seconds=seconds, heard=heard)

    def finish(self, name: str, *, seconds: float, heard: Callable[[str], None] | None = None) -> str:
        """Wait for the end of a program that was started; `heard` is given each line as it is printed."""
        process = self.running[name]
        end, told = time.monotonic() + seconds, 0
        while True:
            code = process.poll()
            if heard is not None:
                lines = self.text(name).split("\n")[:-1]  # what follows the last line break is not a line yet
                for line in lines[told:]:
                    heard(line)
                told = len(lines)
            if code is not None or time.monotonic() > end:
                break
            time.sleep(_LOOK_SECONDS)
        if code is None:
            self.kill(name)
            raise FlowerFailed(f"{name} was not done after {seconds:g} s\n{self.tail(name)}")
        self.running.pop(name, None)
        if code:
            raise FlowerFailed(f"{name} ended with code {code}\n{self.tail(name)}")
        return self.text(name)

    def _resolved(self, command: tuple[str, ...]) -> list[str]:
        found = shutil.which(command[0], path=self.environment["PATH"])
        if found is None:
            raise FlowerFailed(f"{command[0]} is not installed beside {sys.executable}: pip install 'bqsgd[flower]'")
        return [found, *command[1:]]

    def log(self, name: str) -> Path:
        """Where a program's output goes."""
        return self.folder / "logs" / f"{name}.log"

    def text(self, name: str) -> str:
        """All that a program has printed since it was started last."""
        if name not in self._began:
            return ""
        with self.log(name).open("rb") as stream:
            stream.seek(self._began[name])
            return stream.read().decode(errors="replace")

    def tail(self, name: str, lines: int = 15) -> str:
        """Its last lines."""
        return "\n".join(self.text(name).splitlines()[-lines:])

    def wait_for(self, name: str, text: str, *, seconds: float) -> None:
        """Wait until a program has printed `text`."""
        end = time.monotonic() + seconds
        while text not in self.text(name):
            process = self.running.get(name)
            if process is not None and process.poll() is not None:
                raise FlowerFailed(f"{name} ended with code {process.returncode}\n{self.tail(name)}")
            if time.monotonic() > end:
                raise FlowerFailed(f"{name} did not print {text!r} within {seconds:g} s\n{self.tail(name)}")
            time.sleep(_LOOK_SECONDS)

    def kill(self, name: str) -> None:
        """kill -9 a program, its group and all its descendants at once, as a power cut would."""
        process = self.running.pop(name)
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(process.pid).children(recursive=True)
            _signal_group(process.pid, signal.SIGKILL)
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        process.wait(10)

    def stop(self, *, seconds: float = 5.0) -> None:
        """End everything: politely, then not."""
        known = _family(self._mark)  # while parents live, descendants without the mark are found by them
        for process in self.running.values():
            _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.running.values()):
            time.sleep(0.1)
        _end_family(self._mark, known)
        for process in self.running.values():
            process.wait(10)
        self.running.clear()

    def left_over(self) -> list[int]:
        """Numbers of living processes that carry our mark."""
        return [process.pid for process in _family(self._mark)]

    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread can listen for signals
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # we are leaving already
        try:
            self.stop()
        finally:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()
            self._watchdog.wait(60)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


def ray_on_loopback() -> dict[str, str]:
    """Environment variables that keep Ray on loopback, behind a token drawn just now."""
    return {_CLUSTER: "0", _MODE: "token", _TOKEN: secrets.token_hex(32)}


def keep_ray_on_loopback() -> None:
    """Set them for this process, unless its user has decided about Ray: named a cluster or a mode of authentication.

    Ray reads its environment when it is imported, which Flower does after it has loaded the app.
    """
    if not os.environ.keys() & {"RAY_ADDRESS", _CLUSTER, _MODE, _TOKEN}:
        os.environ.update(ray_on_loopback())


def _family(mark: str, sessions: set[int] | None = None) -> list[psutil.Process]:
    """The living processes that carry the mark, their descendants and every process in their sessions.

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


def _end_family(mark: str, known: Sequence[psutil.Process] = ()) -> None:
    """kill -9 everybody who carries the mark, and those known before, until nobody is left."""
    end, quiet = time.monotonic() + _END_SECONDS, 0
    sessions: set[int] = set()
    while quiet < _QUIET_SCANS and time.monotonic() < end:
        left = _family(mark, sessions)
        quiet = 0 if left else quiet + 1
        for process in (*left, *known):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _watch(mark: str, folders: Sequence[str]) -> None:
    """Wait for the end of standard input, then end the family and delete the folders."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end_family(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2:])
