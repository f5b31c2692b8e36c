"""On a machine with other users: nothing listens beyond loopback, and nothing outlives its parent, however it ends."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from listeners import listeners, marked, on_loopback

from bqsgd._src.flower.processes import Processes, keep_ray_on_loopback, ray_on_loopback

SERVER = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print('listening', flush=True); time.sleep(600)"
)
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL)


def wait_until(condition, *, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def ports_of(numbers):
    return {(ip, port) for ip, port, _ in numbers}


def all_ports():
    return ports_of(listeners(psutil.process_iter()))


def test_ray_is_told_to_stay_on_loopback_and_to_ask_for_a_token(tmp_path, monkeypatch):
    with Processes(tmp_path) as one, Processes(tmp_path) as other:
        for processes in (one, other):
            assert processes.environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
            assert processes.environment["RAY_AUTH_MODE"] == "token"
        tokens = {processes.environment["RAY_AUTH_TOKEN"] for processes in (one, other)}
        assert len(tokens) == 2
        assert all(len(token) == 64 for token in tokens)
        ray_folder = Path(one.environment["RAY_TMPDIR"])
        assert stat.S_IMODE(ray_folder.stat().st_mode) == 0o700
    assert not ray_folder.exists()
    for name in ray_on_loopback():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster of the user's own")
    keep_ray_on_loopback()
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.delenv("RAY_ADDRESS")
    for name, value in ray_on_loopback().items():
        monkeypatch.setenv(name, value)  # so that what is set below is undone
        monkeypatch.delenv(name)
    keep_ray_on_loopback()
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_what_other_programs_write_is_private(tmp_path):
    with Processes(tmp_path / "here") as processes:
        processes.run("writer", "bash", "-c", "echo secret > superlink.db; mkdir state", seconds=60)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "here").iterdir()}
    assert modes == {"superlink.db": 0o600, "state": 0o700, "flwr-home": 0o700, "logs": 0o700}
    assert stat.S_IMODE((tmp_path / "here").stat().st_mode) == 0o700


def family_in(folder, ready):
    """A server, and sleepers that have left session, environment or parent behind; runs until somebody ends it."""
    with Processes(folder, temporary=True) as processes:
        processes.start("server", sys.executable, "-I", "-c", SERVER)
        sleepers = "setsid sleep 600 & env -i setsid sleep 600 & (env -i sleep 600 &)"
        processes.start("parent", "bash", "-c", f"{sleepers}; echo started; wait")
        processes.wait_for("server", "listening", seconds=60)
        processes.wait_for("parent", "started", seconds=60)
        os.write(ready, b"!")
        processes.wait_for("server", "never printed", seconds=600)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_nothing_is_left_when_the_parent_is_ended(tmp_path, number):
    folder, (waiting, ready) = tmp_path / "family", os.pipe()
    parent = os.fork()
    if parent == 0:  # the parent of the family; a fork, since importing all this anew takes seconds
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under `nohup` it would be ignored, here and in the family
        try:
            family_in(folder, ready)
        except SystemExit as error:
            os._exit(error.code)
        finally:
            os._exit(1)
    assert os.read(waiting, 1) == b"!"
    family = psutil.Process(parent).children(recursive=True)
    sessions = {each.pid for each in family}
    family += [each for each in psutil.process_iter() if each not in family and session(each) in sessions]
    assert len(family) == 6, "the watchdog, the server, the shell and its three sleepers"
    ports = ports_of(listeners(family))
    assert len(ports) == 1
    os.kill(parent, number)
    code = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
    assert code == {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 1, signal.SIGKILL: -9}[number]
    wait_until(lambda: not any(alive(each) for each in family))
    assert not ports & all_ports()
    wait_until(lambda: not folder.exists())


class Demo:
    """`bqsgd flower demo` as a process, whose listeners are looked at until it ends."""

    def __init__(self, folder, *options):
        self.folder, self.seen, self.members, self.said = folder, {}, {}, []
        command = [sys.executable, "-m", "bqsgd", "flower", "demo", "--json", "--out", str(folder), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._hear, self._look)]
        for thread in self._threads:
            thread.start()

    def _hear(self):
        for line in self.process.stderr:
            self.said.append(line)

    def _look(self):
        while self.process.poll() is None:
            family = marked(FLWR_HOME=str(self.folder / "flwr-home"))
            self.members |= {each.pid: each for each in family}
            self.seen |= {(ip, port): program for ip, port, program in listeners(family)}
            time.sleep(0.2)

    def output(self):
        """What it printed, once it has ended."""
        text = self.process.stdout.read()
        self.process.wait(60)
        for thread in self._threads:
            thread.join(60)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()
        return text

    def ended(self):
        """Nothing of it lives and no port of it is open."""
        return not any(alive(each) for each in self.members.values()) and not self.seen.keys() & all_ports()


def session(process):
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["simulation", "tls"])
def test_a_demo_listens_on_loopback_only(tmp_path, options):
    demo = Demo(tmp_path / "demo", "--rounds", "2", *options)
    output = demo.output()
    assert demo.process.returncode == 0, "".join(demo.said[-30:])
    print(*(f"{ip}:{port} {program}" for (ip, port), program in sorted(demo.seen.items())), sep="\n")
    assert len(demo.seen) >= 5, "the SuperLink, and Ray's processes or the SuperNodes"
    assert all(on_loopback(ip) for ip, _ in demo.seen), demo.seen
    assert demo.ended()
    assert json.loads(output)["processes_left"] == 0
    private = [*tmp_path.rglob("*.ledger"), *tmp_path.rglob("superlink.db"), *tmp_path.rglob("*.safetensors")]
    private += [path for path in (tmp_path / "demo").rglob("keys/*") if path.suffix != ".pub"]
    assert len(private) >= 5
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("options", [(), ("--tls",)], ids=["simulation", "tls"])
def test_nothing_of_a_demo_is_left(tmp_path, options, number):
    demo = Demo(tmp_path / "demo", *options)
    wait_until(lambda: len(demo.seen) >= 5 and any("flwr run" in line for line in demo.said), seconds=600)
    many = len([each for each in demo.members.values() if alive(each)])
    demo.process.send_signal(number)
    demo.output()
    wait_until(demo.ended)
    print(f"{number.name}: {many} processes and {len(demo.seen)} ports before, none after")
    assert many >= 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stranger_without_the_token_is_not_heard_by_ray(tmp_path):
    stranger = "import ray; ray.init(address='{}'); print(ray.get(ray.remote(lambda: 'ran').remote()))"
    host = (
        "import ray\nray.init(include_dashboard=False, num_cpus=1)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\ninput()"
    )
    with Processes(tmp_path) as processes:
        environment = processes.environment
        ours = subprocess.Popen(
            [sys.executable, "-c", host], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        address = ours.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")
        for token, code in (("0" * 64, 1), (environment["RAY_AUTH_TOKEN"], 0)):
            tried = subprocess.run(
                [sys.executable, "-c", stranger.format(address)],
                env=environment | {"RAY_AUTH_TOKEN": token},
                capture_output=True,
                text=True,
            )
            assert tried.returncode == code, tried.stderr
        assert tried.stdout.strip().endswith("ran")
        ours.communicate("\n")
