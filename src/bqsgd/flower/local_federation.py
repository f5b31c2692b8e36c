"""A whole Flower federation on one machine: SuperLink and SuperNodes as child processes, or a simulation.

Each process is in its own group, with a log, listens on loopback only, and does not outlive us.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import psutil

from bqsgd.errors import BqsgdError, InvalidParameter
from bqsgd.flower import watchdog
from bqsgd.flower.deployment import Certificates, make_certificates, make_node_key
from bqsgd.flower.simulation import RAY_FOLDER_VARIABLE, ray_on_loopback
from bqsgd.storage import private_folder

_LOOK_SECONDS = 0.2
_START_SECONDS = 90.0
_CONNECTION = "one-machine"
_PACKAGE = "private_app"


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
            [sys.executable, "-P", watchdog.__file__, self._mark, ray_folder, *([folder] if temporary else [])],
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
            RAY_FOLDER_VARIABLE: str(ray_folder),
            watchdog.MARK: self._mark,
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
        known = watchdog.family(self._mark)  # while parents live, descendants without the mark are found by them
        for process in self.running.values():
            _signal_group(process.pid, signal.SIGTERM)
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.running.values()):
            time.sleep(0.1)
        watchdog.end_family(self._mark, known)
        for process in self.running.values():
            process.wait(10)
        self.running.clear()

    def left_over(self) -> list[int]:
        """Numbers of living processes that carry our mark."""
        return [process.pid for process in watchdog.family(self._mark)]

    def __enter__(self) -> Self:
        with suppress(ValueError):  # only the main thread can listen for signals
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, _leave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, number)


@dataclass(kw_only=True)
class LocalFederation:
    """A federation in `folder`: certificates, keys, the nodes' ledgers, logs. Loopback only."""

    folder: Path
    processes: Processes
    certificates: Certificates | None = None
    simulation: bool = False
    port: int = field(default_factory=free_port)

    @property
    def address(self) -> str:
        """Where the SuperLink listens."""
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> None:
        """Start the SuperLink; with certificates it takes only TLS and only nodes whose keys are registered."""
        program: tuple[str, ...] = ("flower-superlink",)
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--disable-runtime-dependency-installation"]
        if self.simulation:
            options += ["--insecure", "--simulation"]
        elif self.certificates is None:
            options += ["--insecure", "--database", str(self.folder / "superlink.db")]
        else:
            made = self.certificates
            program = (sys.executable, "-m", "bqsgd", "flower", "superlink")
            options += ["--ssl-ca-certfile", str(made.authority), "--ssl-certfile", str(made.server)]
            options += ["--ssl-keyfile", str(made.key), "--enable-supernode-auth"]
            options += ["--database", str(self.folder / "superlink.db")]
        self.processes.start("superlink", *program, *options)
        self.processes.wait_for("superlink", "running on http", seconds=_START_SECONDS)
        self._write_connection()

    def _write_connection(self) -> None:
        lines = ["[superlink]", f'default = "{_CONNECTION}"', f"[superlink.{_CONNECTION}]"]
        lines.append(f'address = "{self.address}"')
        if self.certificates is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self.certificates.authority))}")
        (self.folder / "flwr-home" / "config.toml").write_text("\n".join(lines) + "\n")

    def make_key(self, name: str) -> Path:
        """A node key that is not registered."""
        return make_node_key(self.folder / "keys", name=name)[0]

    def register(self, names: Sequence[str]) -> list[Path]:
        """Node keys that the SuperLink knows, one per name; returns the private ones."""
        made = {name: make_node_key(self.folder / "keys", name=name) for name in names}
        for name, (_, public) in made.items():
            self.processes.start(f"register-{name}", "flwr", "supernode", "register", str(public), _CONNECTION)
        for name in names:
            self.processes.finish(f"register-{name}", seconds=_START_SECONDS + 10 * len(names))
        return [made[name][0] for name in names]

    def start_node(
        self, name: str, *, client: int, key: Path | None, epsilon: float = 10.0, **environment: str
    ) -> None:
        """Start a SuperNode; its ledger is in nodes/`name`, with a budget of `epsilon`."""
        ledgers = self.folder / "nodes" / name
        options = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        limits = f"epsilon={float(epsilon)} allow-no-privacy=true"
        options += ["--node-config", f'client={client} ledger-folder="{ledgers}" {limits}']
        if self.certificates is None:
            options.append("--insecure")
        else:
            options += ["--root-certificates", str(self.certificates.authority)]
        if key is not None:
            options += ["--auth-supernode-private-key", str(key)]
        self.processes.start(name, "flower-supernode", *options, **environment)

    def submit(
        self,
        app: Path,
        *,
        settings: Mapping[str, object],
        clients: int,
        seconds: float,
        heard: Callable[[str], None] | None = None,
    ) -> str:
        """`flwr run` to the end of the run; returns its log, which `heard` is given line by line."""
        command = self.command(app, settings=settings, clients=clients)
        return self.processes.run("run", *command, seconds=seconds, heard=heard)

    def command(self, app: Path, *, settings: Mapping[str, object], clients: int) -> tuple[str, ...]:
        """The `flwr run` command itself."""
        options = [
            "--stream",
            "--run-config",
            " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()),
        ]
        if self.simulation:
            options += ["--federation-config", f"num-supernodes={clients}"]
        return ("flwr", "run", str(app), _CONNECTION, *options)


def make_federation(folder: Path, processes: Processes, *, tls: bool, simulation: bool) -> LocalFederation:
    """A federation that has not begun."""
    certificates = make_certificates(folder / "certificates") if tls else None
    return LocalFederation(folder=folder, processes=processes, certificates=certificates, simulation=simulation)


def write_app(folder: Path) -> list[Path]:
    """Write the app; a folder with anything in it is refused. Returns the files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidParameter(f"{folder} exists and is not empty; name another folder")
    (folder / _PACKAGE).mkdir(parents=True, exist_ok=True)
    written = []
    for source in sorted(files("bqsgd.flower").joinpath("template").iterdir(), key=lambda file: file.name):
        if not source.name.endswith(".in"):
            continue
        name = source.name.removesuffix(".in")
        target = folder / name if name == "pyproject.toml" else folder / _PACKAGE / name
        target.write_text(source.read_text())
        written.append(target)
    return written


def read_overrides(app: Path, run_config: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration in an app's pyproject.toml and what `--run-config` changes of it, as Flower reads both."""
    from flwr.common.config import flatten_dict, get_project_config, parse_config_args

    try:
        project = flatten_dict(get_project_config(app)["tool"]["flwr"]["app"].get("config", {}))
        overrides = parse_config_args([run_config] if run_config else None)
    except (OSError, KeyError, ValueError, SystemExit) as error:
        raise InvalidParameter(
            f"{app} and {run_config!r} cannot be read as a Flower app and settings: {error}"
        ) from error
    return project, overrides
