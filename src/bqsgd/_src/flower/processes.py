"""Flower's programs as child processes that do not outlive this one, and a Ray that nobody else can reach.

Started as a program, this file is the watchdog of a family of processes: it ends them after the process that started
them has ended, even by kill -9. `Processes` holds the other end of its standard input, which the operating system then
closes. A parent-death signal would not suffice: it is not inherited, so it never reaches the processes that Flower and
Ray start in turn. The family is found by a mark in its environment instead, which every descendant inherits. A watchdog
must start at once, so nothing heavy is imported here.
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
from collections.abc import Callable, Iterator, Sequence
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
"""Scans in a row that must find no process: between fork and exec, a process does not show its mark."""
_LOOK_SECONDS = 0.2
_CLUSTER, _MODE, _TOKEN = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
_RAY_FOLDER = "RAY_TMPDIR"


class FlowerFailed(BqsgdError, RuntimeError):
    """One of Flower's programs failed or took too long; the message ends with its last lines."""


class Processes:
    """A family of processes that share a folder and an environment; leaving the `with` block ends all of them.

    A mark in their environment finds them, so that descendants in process groups of their own end too. A watchdog does
    the same if this process is killed; SIGTERM and SIGHUP leave the `with` block as Ctrl-C does.

    Args:
        folder: for logs and what the processes write; no other user can read it.
        temporary: make the folder, which must be new, and delete it when the family ends.
    """

    def __init__(self, folder: Path, *, temporary: bool = False) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._began: dict[str, int] = {}
        self._mark = uuid.uuid4().hex
        self._handlers: dict[signal.Signals, Any] = {}
        home = folder / "flwr-home"
        # A short path: Ray puts sockets below it, and their paths have a limit of about 100 characters.
        ray_folder = Path(tempfile.gettempdir()) / f"bqsgd-ray-{self._mark[:16]}"
        made = [ray_folder, folder] if temporary else [ray_folder]
        # First: a process that is killed between making a folder and starting the watchdog would leave it behind.
        self._watchdog = subprocess.Popen(
            [sys.executable, "-P", __file__, self._mark, *made],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for place in made:
            place.mkdir(mode=0o700)  # raises if it exists: the folder would belong to somebody else
        for place in (folder, home, folder / "logs"):
            private_folder(place)
        programs = str(Path(sys.executable).parent)  # Flower starts its own programs by name
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join((programs, os.environ.get("PATH", ""))),
            **ray_on_loopback(),
            _RAY_FOLDER: str(ray_folder),
            MARK: self._mark,
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a program in the background; its output goes to logs/`name`.log."""
        if name in self.running:
            raise FlowerFailed(f"{name} is running already")
        program = shutil.which(command[0], path=self.environment["PATH"])
        if program is None:
            raise FlowerFailed(f"{command[0]} is not installed beside {sys.executable}: pip install 'bqsgd[flower]'")
        with self._log(name).open("ab") as stream:
            self._began[name] = stream.tell()
            # A new session: Ctrl-C in the terminal reaches this process alone, which then ends the others in order.
            self.running[name] = subprocess.Popen(
                [program, *command[1:]],
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
                umask=0o077,  # for databases and logs that these programs would leave readable to all users
            )
        return self.running[name]

    def run(self, name: str, *command: str, seconds: float, heard: Callable[[str], None] | None = None) -> str:
        """Run a program to its end and return what it printed; raises FlowerFailed if it fails or takes too long."""
        self.start(name, *command)
        return self.finish(name, seconds=seconds, heard=heard)

    def finish(self, name: str, *, seconds: float, heard: Callable[[str], None] | None = None) -> str:
        """Wait for the end of a program that was started; `heard` gets each line when it is printed."""
        told = 0
        for code in self._codes(name, seconds, "was not done after"):
            if heard is not None:
                lines = self.text(name).split("\n")[:-1]  # what follows the last line break is not a whole line yet
                for line in lines[told:]:
                    heard(line)
                told = len(lines)
            if code is not None:
                break
        del self.running[name]
        if code:
            raise FlowerFailed(f"{name} ended with code {code}\n{self.tail(name)}")
        return self.text(name)

    def wait_for(self, name: str, text: str, *, seconds: float) -> None:
        """Wait until a program has printed `text`."""
        for code in self._codes(name, seconds, f"did not print {text!r} within"):
            if text in self.text(name):
                return
            if code is not None:
                raise FlowerFailed(f"{name} ended with code {code}\n{self.tail(name)}")

    def _codes(self, name: str, seconds: float, overdue: str) -> Iterator[int | None]:
        """The exit code of a program, None while it runs, again and again until the time is over."""
        end = time.monotonic() + seconds
        while time.monotonic() <= end:
            # The caller reads the output after this, so after the last code it has all of it.
            yield self.running[name].poll()
            time.sleep(_LOOK_SECONDS)
        raise FlowerFailed(f"{name} {overdue} {seconds:g} s\n{self.tail(name)}")

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def text(self, name: str) -> str:
        """All that a program has printed since it was last started."""
        with self._log(name).open("rb") as stream:
            stream.seek(self._began[name])
            return stream.read().decode(errors="replace")

    def tail(self, name: str, lines: int = 15) -> str:
        """The last lines that a program has printed."""
        return "\n".join(self.text(name).splitlines()[-lines:])

    def stop(self, *, seconds: float = 5.0) -> None:
        """End all programs: with SIGTERM, and those that are left after `seconds` with SIGKILL."""
        known = _family(self._mark)  # now: descendants without the mark are found only while their parents live
        for process in self.running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.running.values()):
            time.sleep(0.1)
        _end_family(self._mark, known)
        for process in self.running.values():
            process.wait(10)
        self.running.clear()

    def left_over(self) -> list[int]:
        """Ids of the family's processes that still live."""
        return [process.pid for process in _family(self._mark)]

    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread can listen for signals
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._handlers:
            signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
        try:
            self.stop()
        finally:
            assert self._watchdog.stdin is not None
            # The watchdog now scans once more, deletes the folders and ends.
            self._watchdog.stdin.close()
            self._watchdog.wait(60)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def ray_on_loopback() -> dict[str, str]:
    """Environment variables that keep Ray on loopback, protected by a new random token."""
    return {_CLUSTER: "0", _MODE: "token", _TOKEN: secrets.token_hex(32)}


def keep_ray_on_loopback() -> None:
    """Set `ray_on_loopback` for this process, unless its user has named a Ray cluster or a mode of authentication.

    Ray reads its environment when Flower imports it, which is after Flower has loaded the app.
    """
    if not os.environ.keys() & {"RAY_ADDRESS", _CLUSTER, _MODE, _TOKEN}:
        os.environ.update(ray_on_loopback())


def _family(mark: str, sessions: set[int] | None = None) -> list[psutil.Process]:
    """The living processes that carry the mark, their descendants and every process in their sessions.

    Descendants and sessions find processes that have lost the mark. No session is shared with others, because `start`
    makes new ones. `sessions` remembers them from one call to the next, as their leaders may be gone by then.
    """
    processes = list(psutil.process_iter())
    family: dict[int, psutil.Process] = {}
    sessions = set() if sessions is None else sessions
    for process in processes:
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                sessions.add(os.getsid(process.pid))
                family |= {member.pid: member for member in (process, *process.children(recursive=True))}
    for process in processes:
        with suppress(OSError):
            if os.getsid(process.pid) in sessions:
                family[process.pid] = process
    return [process for process in family.values() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _end_family(mark: str, known: Sequence[psutil.Process] = ()) -> None:
    """kill -9 the processes that carry the mark, and those known before, until none is left."""
    end, quiet = time.monotonic() + _END_SECONDS, 0
    sessions: set[int] = set()
    while quiet < _QUIET_SCANS and time.monotonic() < end:
        left = _family(mark, sessions)
        quiet = 0 if left else quiet + 1
        # psutil compares start times, so it does not kill a program that has got the id of an ended process.
        for process in (*left, *known):
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)


def _watch(mark: str, folders: Sequence[str]) -> None:
    """Wait for the end of standard input, then end the family and delete the folders."""
    # A Ctrl-C in the terminal, or a shutdown, signals the watchdog too: it must still do its work.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    _end_family(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2:])
