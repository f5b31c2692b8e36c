"""A rank that does not serve: it answers the server's messages until the run is over."""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bqsgd.engines.distributed.group import SERVER, Group
from bqsgd.engines.distributed.hello import MOST_BYTES, SettingsDiffer, read_hello, welcome_of
from bqsgd.engines.distributed.link import Listener
from bqsgd.engines.distributed.transport import Channel, Kind, PeerLost
from bqsgd.engines.stopping import stop_signals
from bqsgd.engines.task import Pair, PrivateLogs, Task, make_client
from bqsgd.errors import BqsgdError, InvalidParameter, ModelMessageError
from bqsgd.ledger.spending import Spending
from bqsgd.training.client import Client, Declined
from bqsgd.training.config import Config
from bqsgd.training.vector import dimension_of
from bqsgd.wire.model_message import MODEL_HEADER_BYTES

log = logging.getLogger("bqsgd.distributed")
GRACE_SECONDS = 20.0
"""After SIGTERM or SIGINT a client still answers the round in hand and waits this long for the server's last word."""


Answering = Callable[[memoryview], bytearray | Declined]
"""A client's `answer`: the frame for one message, or the reason for none."""


@contextmanager
def greeted(
    task: Task,
    config: Config,
    *,
    group: Group,
    folder: str | Path | None = None,
    resuming: bool = False,
    private_log: PrivateLogs | None = None,
) -> Iterator[tuple[Client, Channel, Listener]]:
    """Agree with the server on run and settings; gives the client with its ledger open, and the ways to the server.

    Raises:
        SettingsDiffer: the server runs with other settings, or resumes where this rank does not; nothing was sent.
    """
    share = share_of(task, config, group)
    torch.set_num_threads(1)  # sums must not depend on how many cores this machine has
    channel, model = group.channel(SERVER), task.make_model()
    listener = Listener(channel, most_bytes=max(MOST_BYTES, MODEL_HEADER_BYTES + 4 * dimension_of(model)))
    kind, message = _first(listener)
    try:
        run, server_resumes = read_hello(message if kind is Kind.HELLO else memoryview(b""), config)
        if server_resumes and not resuming:
            raise SettingsDiffer("the server resumes a run, this rank was not started with --resume")
        place = None if folder is None else Path(folder)
        client = make_client(
            task,
            config,
            number=group.rank,
            model=model,
            share=share,
            folder=place,
            run=run,
            resuming=server_resumes,
            private_logs=private_log,
        )
    except BqsgdError as error:
        channel.send(Kind.REFUSAL, str(error).encode()[:500])
        raise
    try:
        channel.send(Kind.WELCOME, welcome_of(samples=len(client.inputs)))
        yield client, channel, listener
    finally:
        if client.spending.ledger is not None:
            client.spending.ledger.close()


def take_part(task: Task, config: Config, **options: Any) -> None:
    """Be client number `group.rank` until the server ends the run; options as of `greeted`. The ledger is in `folder`,
    on this rank's own disk, and holds a round before its frame leaves.

    Raises:
        PeerLost: the server is gone. The ledger is closed and holds everything that was sent.
    """
    with greeted(task, config, **options) as (client, channel, listener):
        answer_rounds(client.answer, client.spending, channel, listener)


def share_of(task: Task, config: Config, group: Group) -> Pair:
    """This rank's data: its part of all shares, or the one share that the task holds."""
    if config.clients != group.size:
        raise InvalidParameter(f"clients={config.clients}, but {group.size} ranks were started: one rank is one client")
    if len(task.shares) not in (1, config.clients):
        raise InvalidParameter(f"a rank's task holds its own share or all {config.clients}, got {len(task.shares)}")
    return task.shares[0 if len(task.shares) == 1 else group.rank]


def answer_rounds(answering: Answering, spending: Spending, channel: Channel, listener: Listener) -> None:
    """Answer one message after another until the server says stop, or until some time after a signal to stop."""
    asked_to_stop: list[float] = []
    with stop_signals(lambda number: asked_to_stop.append(time.monotonic())):
        while (message := _wait(listener, asked_to_stop)) is not None:
            kind, body = message
            if kind is Kind.STOP:
                return
            if kind is Kind.MODEL:
                _send_answer(answering, channel, body)
            elif kind is Kind.REPORT and len(body) == 8:
                guarantee = spending.guarantee(delta=struct.unpack("<d", body)[0])
                fields = b"" if guarantee is None else json.dumps(guarantee.to_dict()).encode()
                channel.send(Kind.GUARANTEE, fields)
            else:
                raise PeerLost(f"the server sent a message of kind {kind.name} where none belongs")
    log.warning("asked to stop, and the server has not ended the run: leaving it")


def _send_answer(answering: Answering, channel: Channel, message: memoryview) -> None:
    try:
        answer = answering(message)
    except ModelMessageError as error:
        log.warning("the server's message was refused: %s", error)
        answer = Declined(reason="the model message came damaged")
    if isinstance(answer, Declined):
        channel.send(Kind.DECLINED, answer.reason.encode())
    else:
        channel.send(Kind.FRAME, answer)


def _first(listener: Listener) -> tuple[Kind, memoryview]:
    while (message := listener.get(seconds=3600.0)) is None:
        pass
    return message


def _wait(listener: Listener, asked_to_stop: list[float]) -> tuple[Kind, memoryview] | None:
    while not asked_to_stop or time.monotonic() - asked_to_stop[0] < GRACE_SECONDS:
        message = listener.get(seconds=0.5)
        if message is not None:
            return message
    return None
