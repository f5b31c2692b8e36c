"""A node that forks a process per message: processes of their own, randomness of their own, Flower's own options."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.types import ExecutionSpec
from flwr.supernode import start_client_internal

from bqsgd._src.flower import supernode
from bqsgd._src.noise import privacy_rng


def draw(place, task):
    """In the place of `answer`: what a message's process draws, and who it is."""
    (place / f"{task}").write_text(f"{privacy_rng().words(4).tolist()} {os.getpid()}")
    if task == 2:
        os.kill(os.getpid(), 9)


def spec(task, kind=TaskType.CLIENT_APP):
    return ExecutionSpec(
        task_type=kind,
        runtime_api_address="127.0.0.1:1",
        token="0" * 32,
        insecure=True,
        root_certificates_path=None,
        runtime_dependency_install=False,
        parent_pid=os.getpid(),
        suppress_output=True,
        task_id=task,
    )


def test_messages_share_no_process_and_no_randomness(tmp_path, monkeypatch):
    monkeypatch.setattr(supernode, "_LOADED", ["bqsgd._src.noise"])
    executor = supernode.ForkingExecutor()
    start = executor._context.Process
    monkeypatch.setattr(
        executor,
        "_context",
        SimpleNamespace(Process=lambda *, target, args: start(target=draw, args=(tmp_path, args[0].task_id))),
    )
    running = []
    for task in (1, 2, 3):
        executor.launch(spec(task))
        running += executor._running[-1:]
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, -9, 0], "what kills one leaves the others alone"
    drawn = [(tmp_path / str(task)).read_text().split("] ") for task in (1, 2, 3)]
    assert len({words for words, _ in drawn}) == 3
    assert len({pid for _, pid in drawn} | {str(os.getpid())}) == 4
    executor.reconcile()
    assert executor._running == []
    executor.close()


def test_other_tasks_start_as_flower_starts_them(monkeypatch):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command[0]))
    supernode.ForkingExecutor().launch(spec(1, TaskType.SERVER_APP))
    assert started == ["flwr-serverapp"]


def test_a_node_starts_this_superexec_with_the_options_of_flowers(monkeypatch):
    """Both names belong to Flower: another version of it must not fall back to slow nodes without a word."""
    started = []
    monkeypatch.setattr(start_client_internal, "subprocess", start_client_internal.subprocess)
    monkeypatch.setattr(run_superexec, "get_executor", run_superexec.get_executor)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: started.append(command))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(os, "umask", lambda mask: None)
    monkeypatch.setattr(
        "flwr.supernode.cli.flower_supernode",
        lambda: start_client_internal.subprocess.Popen(["flower-superexec", "--x"]),
    )
    supernode.supernode(["--superlink", "here:1"])
    assert sys.argv == ["flower-supernode", "--superlink", "here:1"]
    assert started[0][:3] == [sys.executable, "-P", "-c"]
    assert started[0][3] == "from bqsgd._src.flower.supernode import superexec as start; start(['--x'])"
    monkeypatch.setattr("flwr.supercore.cli.flower_superexec", lambda: None)
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
    supernode.superexec(["--x"])
    assert isinstance(run_superexec.get_executor("subprocess", executor_config=None), supernode.ForkingExecutor)
