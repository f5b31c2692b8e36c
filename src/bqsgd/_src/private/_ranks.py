"""The ranks of a private loop: what they tell each other, and how their frames travel."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from bqsgd._src.engines.torch_distributed.ranks import Channel, PeerLost, meet
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.release import Trust

_NOTE_BYTES = 1 << 12
_WAIT = timedelta(minutes=30)
"""How long a rank waits for another in a step: one of them may be evaluating meanwhile."""


class Peers:
    """The ranks that torchrun started, this process among them; or this process alone."""

    def __init__(self, *, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    @classmethod
    def met(cls) -> Self:
        """Join the other ranks if there are any."""
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
                return cls()
            meet(timeout_seconds=_WAIT.total_seconds())
            # Only a group that we made: the user ends their own.
            atexit.register(dist.destroy_process_group)
        # Frames are bytes on the CPU, which other backends, such as nccl, do not carry.
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        return cls(rank=dist.get_rank(), size=dist.get_world_size(), group=group)

    @property
    def trust(self) -> Trust:
        """Alone, the process is trusted; among ranks, each sees the others' messages."""
        return Trust.TRAINER if self.size == 1 else Trust.EACH_CLIENT

    def gather(self, content: bytes | bytearray, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Every rank's bytes, this rank's included; rank r sends sizes[r] of them.

        Raises:
            PeerLost: a rank is gone.
        """
        if self.size == 1:
            return [np.frombuffer(content, np.uint8)]
        # All ranks must send equally many bytes, so shorter contents are padded.
        sent = torch.zeros(max(sizes), dtype=torch.uint8)
        sent[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        # Zeros, not `empty`: a rank may send fewer bytes, and the others would be old memory of this process.
        gathered = [torch.zeros_like(sent) for _ in range(self.size)]
        try:
            dist.all_gather(gathered, sent, group=self._group)
        except RuntimeError as error:
            raise PeerLost(f"a rank is gone, or sent too few bytes: {str(error).splitlines()[0][:200]}") from error
        return [received.numpy()[:size] for received, size in zip(gathered, sizes, strict=True)]

    def channel(self, rank: int) -> Channel:
        """Messages to and from one other rank."""
        return Channel(rank, group=self._group, wait=_WAIT)

    def tell(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's note, in the order of ranks. A rank may be hostile: the caller checks the values."""
        written = json.dumps(note, allow_nan=False).encode().ljust(_NOTE_BYTES)
        contents = self.gather(written, [_NOTE_BYTES] * self.size)
        try:
            notes = [json.loads(content.tobytes()) for content in contents]
        except (ValueError, RecursionError) as error:
            raise InvalidParameter("a rank sent bytes that make_private did not write") from error
        if any(not isinstance(other, dict) or other.keys() != note.keys() for other in notes):
            raise InvalidParameter("the ranks run different versions of bqsgd; install the same one on all of them")
        return notes

    def share(self, model: nn.Module) -> bytes:
        """Copy the model of rank 0 to every rank; returns a digest of what came."""
        digest = hashlib.sha256()
        if self.size > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    own = tensor.detach().cpu().contiguous()
                    dist.broadcast(own, 0, group=self._group)
                    tensor.data.copy_(own)
                    digest.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.digest()
