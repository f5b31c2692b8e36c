"""The ranks of torch.distributed: how they meet, and the one protocol in which one rank sends bytes to another.

The engine, and `make_private` with secure sums, use it. A message is a head of 16 bytes (magic, kind, length), then the
body, both as plain uint8 tensors. Nothing is ever unpickled, because no object collective is used, and a length is
checked before memory is allocated for it.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.wire.frame import Buffer

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"BQSD"
_BACKENDS = ("gloo", "nccl", "mpi")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVER = 0
"""The rank that is the server; it is a client as well."""
_FOREVER = timedelta(days=3650)
"""Effectively no timeout. A gloo timeout would close the connections to all ranks, so waits with a deadline run in a
separate thread."""


class MessageKind(IntEnum):
    """What a message is. The server sends the first six kinds, a client the others.

    MODEL: a model, or a message of a secure sum. SUM, NO_SUM: the result of a private loop's step, for every rank.
    """

    GREETING, MODEL, REPORT, STOP, SUM, NO_SUM = 1, 2, 3, 4, 5, 6
    ACCEPTED, FRAME, DECLINED, GUARANTEE, REFUSAL = 17, 18, 19, 20, 21


class PeerLost(BqsgdError, ConnectionError):
    """A rank is gone, or sent something that is not one of our messages. The connection cannot be used again."""


class Channel:
    """Messages to and from one rank. Only one thread may send, and one receive, at a time.

    Args:
        peer: the other rank.
        device: where the tensors must be: the CPU, or this rank's GPU for nccl.
        group: the process group; None for the default group.
        wait: how long `receive` waits for a message.
    """

    def __init__(
        self,
        peer: int,
        *,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        wait: timedelta = _FOREVER,
    ) -> None:
        self.peer, self.device = peer, device or torch.device("cpu")
        self._group, self._wait = group, wait

    def send(self, kind: MessageKind, body: Buffer | Tensor = b"") -> None:
        """Send one message; returns when it is sent."""
        content = as_tensor(body)
        head = as_tensor(_HEAD.pack(_MAGIC, kind, content.numel()))
        try:
            dist.send(head.to(self.device), self.peer, group=self._group)
            if content.numel():
                dist.send(content.to(self.device), self.peer, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error

    def receive(self, *, most_bytes: int) -> tuple[MessageKind, memoryview]:
        """Wait for one message. A body of more than `most_bytes` is refused before it is read.

        Raises:
            PeerLost: the connection is closed, or the bytes are not one of our messages.
        """
        # Head and body separately: the length is checked before memory is allocated for the body.
        magic, number, length = _HEAD.unpack(self._bytes(_HEAD.size))
        if magic != _MAGIC or number not in set(MessageKind):
            raise PeerLost(f"rank {self.peer} sent something that is not a message of bqsgd")
        if length > most_bytes:
            raise PeerLost(f"rank {self.peer} announced {length} bytes; at most {most_bytes} are allowed")
        return MessageKind(number), self._bytes(length) if length else memoryview(b"")

    def _bytes(self, count: int) -> memoryview:
        # Not `empty`: gloo accepts fewer bytes than announced, and the others would be old memory of this process, and
        # can end up in a log or a record.
        buffer = torch.zeros(count, dtype=torch.uint8, device=self.device)
        try:
            work = dist.irecv(buffer, self.peer, group=self._group)
            assert work is not None
            work.wait(self._wait)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error
        return memoryview(buffer.cpu().numpy())  # type: ignore[arg-type]

    def _lost(self, error: Exception) -> PeerLost:
        closed = "closed by peer" in str(error).lower() or "reset by peer" in str(error).lower()
        reason = "the connection was closed by the other side" if closed else str(error).splitlines()[0][:200]
        return PeerLost(f"rank {self.peer} is gone: {reason}")


def as_tensor(body: Buffer | Tensor) -> Tensor:
    """The bytes as a uint8 tensor. A bytearray is not copied."""
    if isinstance(body, Tensor):
        return body
    if len(body) == 0:
        return torch.empty(0, dtype=torch.uint8)  # torch.frombuffer refuses an empty buffer
    return torch.frombuffer(body if isinstance(body, bytearray) else bytearray(body), dtype=torch.uint8)


class GroupError(BqsgdError, RuntimeError):
    """The ranks could not be brought together."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """This rank and the number of ranks."""

    rank: int
    size: int
    device: torch.device

    @property
    def serves(self) -> bool:
        """True on the rank that is the server."""
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
            f"the torch-distributed engine needs the environment variables {', '.join(missing)}: start it with "
            "torchrun --nproc-per-node 4 -m bqsgd train --engine torch-distributed ..."
        )
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise InvalidParameter(f"WORLD_SIZE must be a whole number, got {os.environ['WORLD_SIZE']!r}") from error


def meet(*, backend: str = "gloo", timeout_seconds: float = 300.0) -> None:
    """Form the process group of the ranks that the launcher started. On one machine, listen on loopback only.

    Raises:
        GroupError: the ranks did not meet in time.
    """
    if backend not in _BACKENDS or not dist.is_backend_available(backend):
        raise InvalidParameter(
            f"backend must be one of {', '.join(_BACKENDS)} that this build of torch has, got {backend!r}: use gloo"
        )
    world_size()
    try:
        patience = timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, timeout=patience, **_on_loopback(patience))
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"the ranks did not meet within {timeout_seconds:g} s: {str(error)[:300]}") from error


@contextmanager
def join(*, backend: str = "gloo", timeout_seconds: float = 300.0) -> Iterator[RankGroup]:
    """Meet the other ranks, and leave the process group at the end of the block.

    Args:
        backend: gloo (CPU, tested here), or nccl or mpi if torch was built with them.
        timeout_seconds: how long to wait for the other ranks to start.
    """
    meet(backend=backend, timeout_seconds=timeout_seconds)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    # Also after an error: other ranks see the connection close, instead of waiting for this one.
    try:
        yield RankGroup(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()


def _on_loopback(patience: timedelta) -> dict[str, Any]:
    """Arguments for a store that listens on loopback only, if all ranks are on this machine.

    Torch's own store listens on all addresses. Empty under torchrun, whose agent has made the store already, and with
    several machines, where MASTER_ADDR is not a loopback address.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    rank, size = os.environ.get("RANK", ""), world_size()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agent or address not in ("127.0.0.1", "localhost") or not (port.isdigit() and rank.isdigit()):
        return {}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        # Otherwise gloo listens on the address of the host name, which other machines may reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    listening = None
    if rank == "0":
        try:
            # Handed to the store, which would open its own socket on all addresses.
            listening = socket.create_server(("127.0.0.1", int(port)), backlog=max(128, size)).detach()
        except (OSError, OverflowError) as error:
            raise GroupError(f"port {port} of this machine is not available: {error}") from error
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", int(port), size, rank == "0", patience, wait_for_workers=False, master_listen_fd=listening
    )
    return {"store": store, "rank": int(rank), "world_size": size}
