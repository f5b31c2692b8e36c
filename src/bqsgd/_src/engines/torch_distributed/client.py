"""A rank that is not the server: it agrees with the server on run and settings, then answers its messages.

The first message in each direction is JSON of bounded size: run, settings, number of samples.
"""

from __future__ import annotations

import json
import logging
import queue
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from bqsgd._src.client.client import Client
from bqsgd._src.client.objectives import message_dimension
from bqsgd._src.client.sums import SumSetup, most_sum_bytes, with_roster
from bqsgd._src.descent.optimizers import optimizer_of
from bqsgd._src.engines.engine import Setup, make_client
from bqsgd._src.engines.torch_distributed.ranks import SERVER, Channel, MessageKind, PeerLost, RankGroup
from bqsgd._src.errors import AccountingError, BqsgdError, InvalidParameter, ModelMessageError
from bqsgd._src.models import dimension_of
from bqsgd._src.release import Unit
from bqsgd._src.runtime.interrupts import stop_signals
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.tasks.task import Samples, Task
from bqsgd._src.text import one_line
from bqsgd._src.wire.frame import Buffer
from bqsgd._src.wire.model_message import model_bytes

_log = logging.getLogger("bqsgd.engines.torch_distributed")
_GRACE_SECONDS = 20.0
"""After SIGTERM or SIGINT a client answers the current round, then waits this long for the server to end the run."""

_FORMAT = "bqsgd.distributed.v1"
MOST_BYTES = 1 << 16
_MAY_DIFFER = ("run", "workers", "private_metrics", "sizes", "roster", "identity", "data.data_folder")
"""Settings that may differ between ranks, because each rank has its own disk."""


class RunDeclined(InvalidParameter):
    """The run is outside this rank's limits; nothing was read or sent."""


class SettingsDiffer(InvalidParameter):
    """A rank was started with other settings than the server; it has sent nothing."""


Message = tuple[MessageKind, memoryview]


class ServerConnection:
    """A client's side. A thread reads the server's messages, so that the main thread still receives signals."""

    def __init__(self, channel: Channel, *, most_bytes: int) -> None:
        self._channel, self._most_bytes = channel, most_bytes
        self.send = channel.send
        self._messages: queue.SimpleQueue[Message | PeerLost] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="server", daemon=True).start()

    def get(self, *, seconds: float | None = None) -> Message:
        """The next message; waits without end if `seconds` is None.

        Raises:
            queue.Empty: no message came in time.
            PeerLost: the server is gone.
        """
        message = self._messages.get(timeout=seconds)
        if isinstance(message, PeerLost):
            raise message
        return message

    def _work(self) -> None:
        try:
            while True:
                message = self._channel.receive(most_bytes=self._most_bytes)
                self._messages.put(message)
                if message[0] is MessageKind.STOP:
                    return
        except PeerLost as error:
            self._messages.put(error)


@contextmanager
def joined_run(
    task: Task,
    config: Config,
    *,
    group: RankGroup,
    folder: str | Path | None = None,
    resuming: bool = False,
    limits: NodeLimits | None = None,
) -> Iterator[tuple[Client, ServerConnection]]:
    """Agree with the server on run and settings, then yield the client, its ledger open, and its way to the server.

    limits: what this rank agrees to. Without limits it agrees to the settings that it was started with, which the
    server must share, and to any model and planning time that `NodeLimits.unlimited` allows.

    Raises:
        SettingsDiffer: the server runs with other settings, or resumes where this rank does not; nothing was sent.
        RunDeclined: the run is outside the limits; nothing was read or sent.
    """
    # Before anything is read or made: the reason depends on settings and limits alone.
    limits = limits or NodeLimits.unlimited()
    refusal = limits.refusal(config, client=group.rank)
    if refusal is not None:
        decline(group, refusal)
    share, model = share_of(task, config, group), task.make_model()
    dimension = message_dimension(config, model)
    memory = optimizer_of(config.server).memory_size(dimension_of(model)) if config.repeats_steps else 0
    longest = max(MOST_BYTES, model_bytes(dimension_of(model), memory=memory), most_sum_bytes(config))
    connection = ServerConnection(group.channel(SERVER), most_bytes=longest)
    kind, message = connection.get()
    try:
        config = with_roster(config)
        # Another kind of message is read as an empty one, which is refused.
        run, server_resumes = read_greeting(message if kind is MessageKind.GREETING else memoryview(b""), config, task)
        if server_resumes and not resuming:
            raise SettingsDiffer("the server resumes a run, but this rank was started without --resume")
        setup = Setup(
            task=task,
            config=config.but(run=run),
            folder=None if folder is None else Path(folder),
            resuming=server_resumes,
            dimension=dimension,
            sums=SumSetup.of(config, run=run, dimension=dimension),
        )
        client = make_client(setup, number=group.rank, model=model, share=share, limits=limits)
    except BqsgdError as error:
        # The server waits for an answer from every rank. Without one it would wait until this process has ended.
        connection.send(MessageKind.REFUSAL, str(error).encode()[:500])
        raise
    # Closing the ledger returns what was reserved and not sent, also when the server is lost.
    with client.spending.ledger or nullcontext():
        stated = None if client.terms.unit is Unit.CLIENT else client.public_size
        connection.send(MessageKind.ACCEPTED, reply_to_greeting(samples=stated))
        with one_thread():
            yield client, connection


def decline(group: RankGroup, reason: str) -> NoReturn:
    """Answer the server's greeting with the reason why this rank does not take part, and raise it as RunDeclined."""
    channel = group.channel(SERVER)
    channel.receive(most_bytes=MOST_BYTES)
    channel.send(MessageKind.REFUSAL, reason.encode()[:500])
    raise RunDeclined(reason)


def work(task: Task, config: Config, **options: Any) -> None:
    """Be client number `group.rank` until the server ends the run.

    The ledger is in `folder`, on this rank's own disk. A round is in it before the round's frame leaves.

    Args:
        task: with this rank's share of the data, or with all shares.
        config: the settings that the server has too.
        options: group (from `join`), folder, resuming (whether the ledger may be one of an earlier process), and limits
            (what this rank agrees to; by default, the settings in `config`).

    Raises:
        PeerLost: the server is gone. The ledger is closed and holds everything that was sent.
    """
    with joined_run(task, config, **options) as (client, connection):
        answer_rounds(client, connection)


def share_of(task: Task, config: Config, group: RankGroup) -> Samples:
    """This rank's data: its part of all shares, or the only share of the task."""
    if config.clients.count != group.size:
        raise InvalidParameter(
            f"clients={config.clients.count}, but {group.size} ranks were started: one rank is one client"
        )
    if len(task.shares) not in (1, config.clients.count):
        raise InvalidParameter(
            f"a rank's task holds its own share or all {config.clients.count}, got {len(task.shares)}"
        )
    return task.shares[0 if len(task.shares) == 1 else group.rank]


def answer_rounds(client: Client, connection: ServerConnection) -> None:
    """Answer one message after another until the server says stop, or until some time after a signal to stop."""
    asked_to_stop: list[float] = []
    with stop_signals(lambda number: asked_to_stop.append(time.monotonic())):
        while (message := _wait(connection, asked_to_stop)) is not None:
            kind, body = message
            if kind is MessageKind.STOP:
                return
            if kind is MessageKind.MODEL:
                connection.send(*_answer(client, body))
            elif kind is MessageKind.REPORT and len(body) == 8:
                connection.send(MessageKind.GUARANTEE, _stated(client, struct.unpack("<d", body)[0]))
            else:
                raise PeerLost(f"the server sent a message of kind {kind.name}, which a client does not expect")
    _log.warning("asked to stop, and the server has not ended the run: leaving it")


def _answer(client: Client, message: memoryview) -> tuple[MessageKind, Buffer]:
    try:
        reply = client.answer(message)
    except ModelMessageError as error:
        _log.warning("the server's message was refused: %s", one_line(error))
        return MessageKind.DECLINED, b"the model message arrived damaged"
    if reply.frame is None:
        return MessageKind.DECLINED, (reply.reason or "").encode()
    return MessageKind.FRAME, reply.frame


def _stated(client: Client, delta: float) -> bytes:
    """What the client has spent at the delta that the server names; empty if there is nothing to state."""
    try:
        guarantee = client.spending.guarantee(delta=delta)
    except (InvalidParameter, AccountingError) as error:
        _log.warning("the server asked for a guarantee at delta %g: %s", delta, one_line(error))
        return b""
    return b"" if guarantee is None else json.dumps(guarantee.to_dict()).encode()


def _wait(connection: ServerConnection, asked_to_stop: list[float]) -> Message | None:
    while not asked_to_stop or time.monotonic() - asked_to_stop[0] < _GRACE_SECONDS:
        with suppress(queue.Empty):
            return connection.get(seconds=0.5)  # short, so that a signal to stop is noticed
    return None


def greeting(config: Config, task: Task, *, resuming: bool) -> bytes:
    """The server's first message: the run's name, whether it is resumed, and the settings that all ranks share."""
    return _bytes({"format": _FORMAT, "run": config.run.name, "resuming": resuming, "settings": _shared(config, task)})


def reply_to_greeting(*, samples: int | None) -> bytes:
    """A client's answer: how many samples it holds. None hides the number, for a guarantee that hides whole clients."""
    return _bytes({"format": _FORMAT} | ({} if samples is None else {"samples": samples}))


def read_greeting(message: memoryview, config: Config, task: Task) -> tuple[str, bool]:
    """(name of the run, whether it is resumed), if the server's settings equal this rank's."""
    fields = _fields(message)
    settings, run, resuming = fields.get("settings"), fields.get("run"), fields.get("resuming")
    if not isinstance(settings, dict) or not isinstance(run, str) or not run or not isinstance(resuming, bool):
        raise PeerLost("the server's first message must name the run, its settings and whether it is resumed")
    expected = _shared(config, task)
    differing = sorted(name for name in expected.keys() | settings.keys() if expected.get(name) != settings.get(name))
    if differing:
        raise SettingsDiffer(
            f"this rank was started with other settings than the server: {one_line(', '.join(differing))}; start all "
            "ranks with the same options"
        )
    if config.run.name is not None and config.run.name != run:
        raise SettingsDiffer(f"this rank's folder holds run {config.run.name!r}, but the server's run is {run!r}")
    return run, resuming


def read_reply(message: memoryview) -> object:
    """The number of samples that a client claims, not yet checked; None if it claims none."""
    return _fields(message).get("samples")


def _shared(config: Config, task: Task) -> dict[str, Any]:
    """The settings that must be equal on all ranks: the run's, and those of a named task."""
    named = {} if task.source is None else {f"data.{name}": value for name, value in vars(task.source).items()}
    # Through JSON, so that they compare equal to what the other side reads from its message.
    plain: dict[str, Any] = json.loads(json.dumps(config.flat() | named, default=vars))
    return {name: value for name, value in plain.items() if name not in _MAY_DIFFER}


def _bytes(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, allow_nan=False).encode()


def _fields(message: memoryview) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(message))
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested thousands deep
        raise PeerLost("the first message is not JSON") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise PeerLost(f"the first message is not of format {_FORMAT}")
    return fields
