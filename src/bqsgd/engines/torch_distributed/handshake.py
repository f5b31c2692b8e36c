"""What server and clients tell each other before the first round: run, settings, sizes. JSON of bounded size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bqsgd.engines.torch_distributed.transport import PeerLost
from bqsgd.errors import InvalidParameter
from bqsgd.training.settings import Config
from bqsgd.training.task import Task

FORMAT = "bqsgd.distributed.v1"
MOST_BYTES = 1 << 16
_OWN = ("run", "workers", "private_metrics", "data.data_folder")
"""Settings that may differ between ranks: each has its own disk."""


class SettingsDiffer(InvalidParameter):
    """A rank was started with other settings than the server; it has sent nothing."""


def greeting(config: Config, task: Task, *, resuming: bool) -> bytes:
    """The server's first message: the run's name, whether it is resumed, and the settings all ranks must share."""
    return _bytes({"format": FORMAT, "run": config.run.name, "resuming": resuming, "settings": shared(config, task)})


def reply_to_greeting(*, samples: int) -> bytes:
    """A client's answer: how many samples it holds, which is its weight in the mean and public."""
    return _bytes({"format": FORMAT, "samples": samples})


def read_greeting(message: memoryview, config: Config, task: Task) -> tuple[str, bool]:
    """(run name, whether it is resumed), once the server's settings are found to be this rank's own."""
    found = _object(message)
    settings, run, resuming = found.get("settings"), found.get("run"), found.get("resuming")
    if not isinstance(settings, dict) or not isinstance(run, str) or not run or not isinstance(resuming, bool):
        raise PeerLost("the server's first message does not name run, settings and whether it is resumed")
    own = shared(config, task)
    differing = sorted(name for name in own.keys() | settings.keys() if own.get(name) != settings.get(name))
    if differing:
        raise SettingsDiffer(
            f"this rank was started with other settings than the server: {', '.join(differing)}; start all ranks with "
            "the same options"
        )
    if config.run.name is not None and config.run.name != run:
        raise SettingsDiffer(f"this rank's folder holds run {config.run.name!r}, the server's run {run!r}")
    return run, resuming


def read_reply(message: memoryview) -> int:
    """The number of samples a client holds."""
    samples = _object(message).get("samples")
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= 2**53:
        raise PeerLost(f"a client said it holds {samples!r} samples")
    return samples


def shared(config: Config, task: Task) -> dict[str, Any]:
    """The settings that must be the same on every rank: the run's, and those of a named task."""
    named = {} if task.source is None else {f"data.{name}": value for name, value in vars(task.source).items()}
    plain: dict[str, Any] = json.loads(json.dumps(config.flat() | named, default=vars))
    return {name: value for name, value in plain.items() if name not in _OWN}


def _bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, allow_nan=False).encode()


def _object(message: memoryview) -> dict[str, Any]:
    try:
        found = json.loads(bytes(message))
    except (ValueError, RecursionError) as error:
        raise PeerLost("the first message is not JSON") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise PeerLost(f"the first message is not of format {FORMAT}")
    return found
