"""Joining the process group that a launcher (torchrun, or environment variables set by hand) describes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from bqsgd.engines.distributed.transport import Channel
from bqsgd.errors import BqsgdError, InvalidParameter

BACKENDS = ("gloo", "nccl", "mpi")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SERVER = 0
"""The rank that serves; it is a client as well."""


class GroupError(BqsgdError, RuntimeError):
    """The ranks could not be brought together."""


@dataclass(frozen=True, kw_only=True)
class Group:
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
            f"the distributed engine needs the environment variables {', '.join(missing)}; start it with "
            "torchrun --nproc-per-node 4 -m bqsgd train --engine distributed ..."
        )
    try:
        return int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise InvalidParameter(f"WORLD_SIZE must be a whole number, got {os.environ['WORLD_SIZE']!r}") from error


@contextmanager
def joined(*, backend: str = "gloo", timeout_seconds: float = 300.0) -> Iterator[Group]:
    """Meet the other ranks, and leave them at the end.

    Args:
        backend: gloo (CPU, tested here), or nccl or mpi where torch was built with them.
        timeout_seconds: how long to wait for ranks that have not come yet.
    """
    if backend not in BACKENDS:
        raise InvalidParameter(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    world_size()
    if not dist.is_backend_available(backend):
        raise InvalidParameter(f"this build of torch has no {backend}; use gloo")
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        raise GroupError(f"the ranks did not meet within {timeout_seconds:g} s: {str(error)[:300]}") from error
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield Group(rank=dist.get_rank(), size=dist.get_world_size(), device=device)
    finally:
        dist.destroy_process_group()
