"""Byte messages between two ranks: a head of 16 bytes (magic, kind, length), then the body, as plain uint8 tensors.

No object collective is used, so nothing is ever unpickled. A length is checked before anything is allocated for it.
"""

from __future__ import annotations

import struct
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from bqsgd.errors import BqsgdError

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"BQSD"
FOREVER = timedelta(days=3650)
"""A wait that a timeout of gloo must not end: its timeouts close the connections to *all* ranks. Waits with an end are
made in Python instead, beside a thread that waits here."""


class Kind(IntEnum):
    """What a message is. The server asks with the first four, a client answers with the others."""

    HELLO, MODEL, REPORT, STOP = 1, 2, 3, 4
    WELCOME, FRAME, DECLINED, GUARANTEE, REFUSAL = 17, 18, 19, 20, 21


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

    def send(self, kind: Kind, body: bytes | bytearray | Tensor = b"") -> None:
        """Send one message; returns when it is on its way."""
        content = as_tensor(body)
        head = as_tensor(_HEAD.pack(_MAGIC, kind, content.numel()))
        try:
            dist.send(head.to(self.device), self.peer)
            if content.numel():
                dist.send(content.to(self.device), self.peer)
        except (RuntimeError, ValueError) as error:
            raise self._lost(error) from error

    def receive(self, *, most_bytes: int) -> tuple[Kind, memoryview]:
        """Wait for one message; a body of more than `most_bytes` is refused unread.

        Raises:
            PeerLost: the connection is closed, or the bytes are not a message of ours.
        """
        magic, number, length = _HEAD.unpack(self._bytes(_HEAD.size))
        if magic != _MAGIC or number not in set(Kind):
            raise PeerLost(f"rank {self.peer} sent something that is not a message of this engine")
        if length > most_bytes:
            raise PeerLost(f"rank {self.peer} announced {length} bytes where at most {most_bytes} can be meant")
        return Kind(number), self._bytes(length) if length else memoryview(b"")

    def _bytes(self, count: int) -> memoryview:
        buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
        try:
            work = dist.irecv(buffer, self.peer)
            assert work is not None
            work.wait(FOREVER)
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
