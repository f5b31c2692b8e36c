"""A rank that does not serve: it answers the server's messages until the run is over."""

from __future__ import annotations

import json
import logging
import queue
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from bqsgd._src.client.client import Client
from bqsgd._src.client.least_squares import message_dimension
from bqsgd._src.client.sum_setup import SumSetup, most_sum_bytes, with_roster
from bqsgd._src.engines.engine import Setup, make_client
from bqsgd._src.engines.torch_distributed._transport import (
    MOST_BYTES,
    ServerConnection,
    SettingsDiffer,
    read_greeting,
    reply_to_greeting,
)
from bqsgd._src.engines.torch_distributed.ranks import SERVER, Channel, MessageKind, PeerLost, RankGroup, as_tensor
from bqsgd._src.errors import AccountingError, BqsgdError, InvalidParameter, ModelMessageError
from bqsgd._src.ledger.spending import Spending
from bqsgd._src.release import Unit
from bqsgd._src.runtime.interrupts import stop_signals
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.settings.config import Config
from bqsgd._src.settings.node_limits import NodeLimits
from bqsgd._src.tasks.task import Samples, Task
from bqsgd._src.wire.model_message import MODEL_HEADER_BYTES
from bqsgd._src.wire.reply import Reply

_log = logging.getLogger("bqsgd.engines.torch_distributed")
_GRACE_SECONDS = 20.0
"""After SIGTERM or SIGINT a client answers the current round, then waits this long for the server to end the run."""


class RunDeclined(InvalidParameter):
    """The run is outside this rank's limits; nothing was read or sent."""


Answering = Callable[[memoryview], Reply]
"""A client's `answer`: its reply to one message."""


@contextmanager
def joined_run(
    task: Task,
    config: Config,
    *,
    group: RankGroup,
    folder: str | Path | None = None,
    resuming: bool = False,
    limits: NodeLimits | None = None,
) -> Iterator[tuple[Client, Channel, ServerConnection]]:
    """Agree with the server on run and settings; gives the client with its ledger open, and the ways to the server.

    limits: what this rank agrees to. Without any, the settings it was started with, which the server must share, and
    models and planning times as `NodeLimits.unlimited` has them.

    Raises:
        SettingsDiffer: the server runs with other settings, or resumes where this rank does not; nothing was sent.
        RunDeclined: the run is outside the limits; nothing was read or sent.
    """
    limits = limits or NodeLimits.unlimited()
    refusal = limits.refusal(config, client=group.rank)
    if refusal is not None:
        decline(group, refusal)
    share = share_of(task, config, group)
    channel, model = group.channel(SERVER), task.make_model()
    dimension = message_dimension(config.run.method, model)
    longest = max(MOST_BYTES, MODEL_HEADER_BYTES + 4 * dimension, most_sum_bytes(config))
    connection = ServerConnection(channel, most_bytes=longest)
    kind, message = connection.get()
    try:
        config = with_roster(config)
        run, server_resumes = read_greeting(message if kind is MessageKind.GREETING else memoryview(b""), config, task)
        if server_resumes and not resuming:
            raise SettingsDiffer("the server resumes a run, this rank was not started with --resume")
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
        channel.send(MessageKind.REFUSAL, str(error).encode()[:500])
        raise
    with client.spending.ledger or nullcontext():
        stated = None if client.terms.unit is Unit.CLIENT else client.public_size
        channel.send(MessageKind.ACCEPTED, reply_to_greeting(samples=stated))
        with one_thread():
            yield client, channel, connection


def decline(group: RankGroup, reason: str) -> NoReturn:
    """Answer the server's greeting with the reason why this rank does not take part, and raise it as RunDeclined."""
    channel = group.channel(SERVER)
    channel.receive(most_bytes=MOST_BYTES)
    channel.send(MessageKind.REFUSAL, reason.encode()[:500])
    raise RunDeclined(reason)


def work(task: Task, config: Config, **options: Any) -> None:
    """Be client number `group.rank` until the server ends the run; options as of `joined_run`.

    The ledger is in `folder`, on this rank's own disk, and holds a round before its frame leaves.

    Raises:
        PeerLost: the server is gone. The ledger is closed and holds everything that was sent.
    """
    with joined_run(task, config, **options) as (client, channel, connection):
        answer_rounds(client.answer, client.spending, channel, connection)


def share_of(task: Task, config: Config, group: RankGroup) -> Samples:
    """This rank's data: its part of all shares, or the one share that the task holds."""
    if config.clients.count != group.size:
        raise InvalidParameter(
            f"clients={config.clients.count}, but {group.size} ranks were started: one rank is one client"
        )
    if len(task.shares) not in (1, config.clients.count):
        raise InvalidParameter(
            f"a rank's task holds its own share or all {config.clients.count}, got {len(task.shares)}"
        )
    return task.shares[0 if len(task.shares) == 1 else group.rank]


def answer_rounds(answering: Answering, spending: Spending, channel: Channel, connection: ServerConnection) -> None:
    """Answer one message after another until the server says stop, or until some time after a signal to stop."""
    asked_to_stop: list[float] = []
    with stop_signals(lambda number: asked_to_stop.append(time.monotonic())):
        while (message := _wait(connection, asked_to_stop)) is not None:
            kind, body = message
            if kind is MessageKind.STOP:
                return
            if kind is MessageKind.MODEL:
                _send_answer(answering, channel, body)
            elif kind is MessageKind.REPORT and len(body) == 8:
                channel.send(MessageKind.GUARANTEE, _stated(spending, struct.unpack("<d", body)[0]))
            else:
                raise PeerLost(f"the server sent a message of kind {kind.name} where none belongs")
    _log.warning("asked to stop, and the server has not ended the run: leaving it")


def _stated(spending: Spending, delta: float) -> bytes:
    """What the client has spent, at the delta that the server names; nothing when there is no such figure."""
    try:
        guarantee = spending.guarantee(delta=delta)
    except (InvalidParameter, AccountingError) as error:
        _log.warning("asked for a guarantee at delta %g: %s", delta, error)
        return b""
    return b"" if guarantee is None else json.dumps(guarantee.to_dict()).encode()


def _send_answer(answering: Answering, channel: Channel, message: memoryview) -> None:
    try:
        reply = answering(message)
    except ModelMessageError as error:
        _log.warning("the server's message was refused: %s", error)
        channel.send(MessageKind.DECLINED, b"the model message arrived damaged")
        return
    if reply.frame is None:
        channel.send(MessageKind.DECLINED, (reply.reason or "").encode())
    else:
        channel.send(MessageKind.FRAME, as_tensor(reply.frame))


def _wait(connection: ServerConnection, asked_to_stop: list[float]) -> tuple[MessageKind, memoryview] | None:
    while not asked_to_stop or time.monotonic() - asked_to_stop[0] < _GRACE_SECONDS:
        with suppress(queue.Empty):
            return connection.get(seconds=0.5)
    return None
