"""A SuperNode whose client app answers every message in a process forked from one that has torch loaded.

`flower-supernode` starts `flower-superexec`, which starts a new Python for every message; importing torch and this
library then takes longer than the answer. Here the same SuperExec asks a fork server, which has imported both and
nothing else. A message still has a process of its own, so what a message leaves behind does not last, and what kills it
ends nothing else. The fork server reads no data and makes no random draw, so forked processes share neither.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

from flwr.supercore.constant import TaskType
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

_LOADED = [
    "flwr.supernode.runtime.run_clientapp",
    "bqsgd._src.flower.client_app",
    "bqsgd._src.tasks.named",
    "bqsgd._src.models",
    # What these import only when it is used.
    "torch._inductor.standalone_compile",
    "dp_accounting.pld.privacy_loss_distribution",
    "sklearn.datasets",
]
_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
_POLL_SECONDS = "0.25"
"""SuperExec looks for a message this often; by default once a second, which short messages would mostly wait for."""


def answer(spec: ExecutionSpec) -> None:
    """Answer one message, in a process of its own, as `flwr-clientapp` does."""
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=validate_and_resolve_root_certificates(spec.root_certificates_path, spec.insecure),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=spec.runtime_dependency_install,
    )


class ForkingExecutor(SubprocessExecutor):  # type: ignore[misc]
    """Starts client apps by fork, and everything else as Flower does."""

    def __init__(self, answer: Callable[[ExecutionSpec], None] = answer) -> None:
        self._context, self._answer = multiprocessing.get_context("forkserver"), answer
        self._context.set_forkserver_preload([*_LOADED, answer.__module__])
        self._running: list[BaseProcess] = []

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the process of one message."""
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        process = self._context.Process(target=self._answer, args=(spec,))
        process.start()
        self._running.append(process)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Forget the processes that have ended."""
        self._running = [process for process in self._running if process.is_alive()]

    def close(self) -> None:
        """End what still runs; the messages get no answer."""
        for process in self._running:
            process.terminate()


def superexec(options: Sequence[str], *, answer: Callable[[ExecutionSpec], None] = answer) -> None:
    """Run `flower-superexec` with these options, in this process, with a ForkingExecutor.

    answer: answers one message in a process of its own; a function of a module, since its name is all that travels.
    """
    from flwr.supercore.cli import flower_superexec
    from flwr.supercore.superexec import run_superexec

    os.environ.setdefault(_POLL, _POLL_SECONDS)
    module: Any = run_superexec
    chosen = module.get_executor

    def get_executor(kind: str, **settings: Any) -> Any:
        return ForkingExecutor(answer) if kind == "subprocess" else chosen(kind, **settings)

    module.get_executor = get_executor
    sys.argv = ["flower-superexec", *options]
    flower_superexec()


def supernode(options: Sequence[str], *, start: Callable[[Sequence[str]], None] = superexec) -> None:
    """Run `flower-supernode` with these options, in this process, until it is stopped.

    start: starts the client apps, in a process of its own; a function of a module, like `superexec`.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    os.umask(0o077)  # for what it installs and logs, which it would leave readable to all users
    module: Any = start_client_internal
    module.subprocess = SimpleNamespace(Popen=partial(_start_superexec, start))
    sys.argv = ["flower-supernode", *options]
    flower_supernode()


def _start_superexec(start: Callable[[Sequence[str]], None], command: Sequence[str]) -> subprocess.Popen[bytes]:
    """In place of `flower-superexec`, the one program that a SuperNode starts: that function."""
    # -P: a folder in which a SuperNode is started must not replace modules.
    program = f"from {start.__module__} import {start.__name__} as start; start({list(command[1:])!r})"
    return subprocess.Popen([sys.executable, "-P", "-c", program])
