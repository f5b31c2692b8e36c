"""Byte messages between ranks, the process group they travel in, and what is said before the first round.

A message is a head of 16 bytes (magic, kind, length), then the body, as plain uint8 tensors. No object collective is
used, so nothing is ever unpickled, and a length is checked before anything is allocated for it. One thread per rank
waits on each side, so that no wait of ours ends in a timeout of gloo, which would cut off every rank. The first message
each way is JSON of bounded size: run, settings, number of samples.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bqsgd.errors import BqsgdError, InvalidParameter
from bqsgd.training.settings import Config
from bqsgd.training.task import Task

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"BQSD"
_BACKENDS = ("gloo", "nccl", "mpi")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVER = 0
"""The rank that serves; it is a client as well."""
_FOREVER = timedelta(days=3650)
"""A wait that a timeout of gloo must not end: its timeouts close the connections to *all* ranks. Waits with an end are
made in Python instead, beside a thread that waits here."""


class MessageKind(IntEnum):
    """What a message is. The server asks with the first four, a client answers with the others."""

    GREETING, MODEL, REPORT, STOP = 1, 2, 3, 4
    ACCEPTED, FRAME, DECLINED, GUARANTEE, REFUSAL = 17, 18, 19, 20, 21


class PeerLost(BqsgdError, ConnectionError):
    """A rank is gone, or what it sent cannot be a message of ours; nothing more can be said to it."""


class Channel:
    """Messages to and from one rank. One thread may send or receive at a time.

    Args:
        peer: the other rank.
        device: where the tensors must be: the CPU, or this rank's GPU for nccl.
    """

    def __init__(self, peer: int, *, device: torch.device | None = None) -> None:
        self.peer, self.device = peer, device or torch.device("cpu")

    def send(self, kind: MessageKind, body: bytes | bytearray | Tensor = b"") -> None:
        """Send one message; returns once it is sent."""
        content = as_tensor(body)
        head = as_tensor(_HEAD.pack(_MAGIC, kind, content.numel()))
        try:
            dist.send(head.to(self.device), self.peer)
            if content.numel():
                dist.send(content.to(self.device), self.peer)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error

    def receive(self, *, most_bytes: int) -> tuple[MessageKind, memoryview]:
        """Wait for one message; a body of more than `most_bytes` is refused unread.

        Raises:
            PeerLost: the connection is closed, or the bytes are not a message of ours.
        """
        magic, number, length = _HEAD.unpack(self._bytes(_HEAD.size))
        if magic != _MAGIC or number not in set(MessageKind):
            raise PeerLost(f"rank {self.peer} sent something that is not a message of this engine")
        if length > most_bytes:
            raise PeerLost(f"rank {self.peer} announced {length} bytes where at most {most_bytes} can be meant")
        return MessageKind(number), self._bytes(length) if length else memoryview(b"")

    def _bytes(self, count: int) -> memoryview:
        buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
        try:
            work = dist.irecv(buffer, self.peer)
            assert work is not None
            work.wait(_FOREVER)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return memoryview(buffer.cpu().numpy())  # type: ignore[arg-type]

    def _lost(self, error: Exception) -> PeerLost:
        closed = "closed by peer" in str(error).lower() or "reset by peer" in str(error).lower()
        reason = "the connection was closed by the other side" if closed else str(error).splitlines()[0][:200]
        return PeerLost(f"rank {self.peer} is gone: {reason}")


def as_tensor(body: bytes | bytearray | Tensor) -> Tensor:
    """The bytes as a uint8 tensor; a bytearray is not copied."""
    if isinstance(body, Tensor):
        return body
    if len(body) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(body if isinstance(body, bytearray) else bytearray(body), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came back from one rank: a message, or the reason why nothing ever will.

    asked: the number of the question it answers.
    """

    rank: int
    asked: int
    kind: MessageKind | None = None
    body: memoryview | bytes = b""
    arrived: float = 0.0
    lost: str | None = None


class RankConnection:
    """The server's end of one rank: questions go out one at a time, replies land in a queue shared by all ranks.

    A rank that is still at work gets no second question; when it is done it gets the latest one, and those between
    are dropped.
    """

    def __init__(self, channel: Channel, replies: queue.SimpleQueue[Reply], *, most_bytes: int) -> None:
        self.rank = channel.peer
        self._channel, self._replies, self._most_bytes = channel, replies, most_bytes
        self._questions: queue.SimpleQueue[tuple[int, MessageKind, bytes | Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"rank-{self.rank}", daemon=True)
        self._thread.start()

    def ask(self, number: int, kind: MessageKind, body: bytes | Tensor = b"") -> None:
        """Send a question when the rank is free."""
        self._questions.put((number, kind, body))

    def stop(self, *, wait_seconds: float) -> None:
        """Tell the rank that the run is over; a rank that is still at work is left behind after the wait."""
        self._questions.put(None)
        self._thread.join(wait_seconds)

    def _work(self) -> None:
        number = -1
        try:
            while (question := self._latest()) is not None:
                number, kind, body = question
                self._channel.send(kind, body)
                answered, content = self._channel.receive(most_bytes=self._most_bytes)
                self._replies.put(
                    Reply(rank=self.rank, asked=number, kind=answered, body=content, arrived=time.monotonic())
                )
            self._channel.send(MessageKind.STOP)
        except PeerLost as error:
            self._replies.put(Reply(rank=self.rank, asked=number, lost=str(error)))

    def _latest(self) -> tuple[int, MessageKind, bytes | Tensor] | None:
        question = self._questions.get()
        while question is not None and not self._questions.empty():
            question = self._questions.get()
        return question


class ServerConnection:
    """A client's end: messages of the server, read by a thread so that signals reach the waiting main thread."""

    def __init__(self, channel: Channel, *, most_bytes: int) -> None:
        self._channel, self._most_bytes = channel, most_bytes
        self._messages: queue.SimpleQueue[tuple[MessageKind, memoryview] | PeerLost] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="server", daemon=True).start()

    def get(self, *, seconds: float) -> tuple[MessageKind, memoryview] | None:
        """The next message, or None when none came in time.

        Raises:
            PeerLost: the server is gone.
        """
        try:
            found = self._messages.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, PeerLost):
            raise found
        return found

    def _work(self) -> None:
        try:
            while True:
                message = self._channel.receive(most_bytes=self._most_bytes)
                self._messages.put(message)
                if message[0] is MessageKind.STOP:
                    return
        except PeerLost as error:
            self._messages.put(error)


class GroupError(BqsgdError, RuntimeError):
    """The ranks could not be brought together."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """This rank's place among the others."""

    rank: int
    size: int
    device: torch.device

    @property
    def serves(self) -> bool:
        """True on the one rank that holds the model."""
        return self.rank == SERVER

    def channel(self, peer: int) -> Channel:
        """Messages to and from one other rank."""
        return Channel(peer, device=self.device)


def world_size() -> int:
    """How many ranks the launcher started.

    Raises:
        InvalidParameter: this process was not started by a launcher.
    """
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise InvalidParameter(
            f"the torch-distributed engine needs the environment variables {', '.join(missing)}; start it with "
            "torchrun --nproc-per-node 4 -m bqsgd train --engine torch-distributed ..."
        )
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise InvalidParameter(f"WORLD_SIZE must be a whole number, got {os.environ['WORLD_SIZE']!r}") from error


@contextmanager
def join(*, backend: str = "gloo", timeout_seconds: float = 300.0) -> Iterator[RankGroup]:
    """Meet the other ranks, and leave them at the end.

    Args:
        backend: gloo (CPU, tested here), or nccl or mpi where torch was built with them.
        timeout_seconds: how long to wait for ranks that have not come yet.
    """
    if backend not in _BACKENDS:
        raise InvalidParameter(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
    world_size()
    if not dist.is_backend_available(backend):
        raise InvalidParameter(f"this build of torch has no {backend}; use gloo")
    try:
        patience = timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, timeout=patience, **_on_loopback(patience))
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"the ranks did not meet within {timeout_seconds:g} s: {str(error)[:300]}") from error
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield RankGroup(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()


def _on_loopback(patience: timedelta) -> dict[str, Any]:
    """Where all ranks are on this machine, a store that listens on loopback only: torch's own listens everywhere.

    Under torchrun its agent has the store, and MASTER_ADDR of several machines is no loopback: nothing to do then.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    rank, size = os.environ.get("RANK", ""), world_size()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent or address not in ("127.0.0.1", "localhost") or not (port.isdigit() and rank.isdigit()):
        return {}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    listening = None
    if rank == "0":
        try:
            listening = socket.create_server(("127.0.0.1", int(port)), backlog=max(128, size)).detach()
        except (OSError, OverflowError) as error:
            raise GroupError(f"port {port} of this machine cannot be used: {error}") from error
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(port), size, rank == "0", patience, wait_for_workers=False, master_listen_fd=listening
    )
    return {"store": store, "rank": int(rank), "world_size": size}


_FORMAT = "bqsgd.distributed.v1"
MOST_BYTES = 1 << 16
_OWN = ("run", "workers", "private_metrics", "sizes", "roster", "identity", "data.data_folder")
"""Settings that may differ between ranks: each has its own disk."""


class SettingsDiffer(InvalidParameter):
    """A rank was started with other settings than the server; it has sent nothing."""


def greeting(config: Config, task: Task, *, resuming: bool) -> bytes:
    """The server's first message: the run's name, whether it is resumed, and the settings all ranks must share."""
    return _bytes({"format": _FORMAT, "run": config.run.name, "resuming": resuming, "settings": _shared(config, task)})


def reply_to_greeting(*, samples: int | None) -> bytes:
    """A client's answer: how many samples it holds; None where the guarantee hides the whole client and says nothing
    of it."""
    return _bytes({"format": _FORMAT} | ({} if samples is None else {"samples": samples}))


def read_greeting(message: memoryview, config: Config, task: Task) -> tuple[str, bool]:
    """(run name, whether it is resumed), once the server's settings are found to be this rank's own."""
    found = _object(message)
    settings, run, resuming = found.get("settings"), found.get("run"), found.get("resuming")
    if not isinstance(settings, dict) or not isinstance(run, str) or not run or not isinstance(resuming, bool):
        raise PeerLost("the server's first message does not name run, settings and whether it is resumed")
    own = _shared(config, task)
    differing = sorted(name for name in own.keys() | settings.keys() if own.get(name) != settings.get(name))
    if differing:
        raise SettingsDiffer(
            f"this rank was started with other settings than the server: {', '.join(differing)}; start all ranks with "
            "the same options"
        )
    if config.run.name is not None and config.run.name != run:
        raise SettingsDiffer(f"this rank's folder holds run {config.run.name!r}, the server's run {run!r}")
    return run, resuming


def read_reply(message: memoryview, *, whole_client: bool) -> int | None:
    """The number of samples a client holds; None where the guarantee hides the whole client, whatever it says."""
    samples = _object(message).get("samples")
    if whole_client:
        return None
    if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= 2**53:
        raise PeerLost(f"a client said it holds {samples!r} samples")
    return samples


def _shared(config: Config, task: Task) -> dict[str, Any]:
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
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise PeerLost(f"the first message is not of format {_FORMAT}")
    return found
