"""`bqsgd train --engine distributed`: this process as one rank among those that torchrun started."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bqsgd.errors import InvalidParameter

if TYPE_CHECKING:
    from bqsgd.training.config import Config


def as_rank(given: dict[str, Any], *, out: Path | None) -> dict[str, Any]:
    """The settings with as many clients as there are ranks, unless that was said."""
    from bqsgd.engines.distributed.group import world_size

    size = world_size()
    if out is None:
        raise InvalidParameter("--engine distributed needs --out: all ranks must name the same run folder")
    return {"clients": size} | given


def run_rank(
    config: Config, *, folder: Path, found: bool, resume: bool, tensorboard: bool, backend: str
) -> dict[str, Any] | None:
    """Lead the run on rank 0 and return the fields to print; take part in it on any other rank and return None.

    found: this rank's folder holds the settings of the run. resume: whether --resume was given; a client on a machine
    of its own has no settings file, only its ledger.
    """
    from bqsgd.cli.training_run import private_log_in, run, task_of
    from bqsgd.engines.distributed import DistributedSession, joined, take_part

    with joined(backend=backend) as group:
        if group.serves:
            begin = DistributedSession.resume if found else DistributedSession.start
            begin = partial(begin, group=group)
            return run(config, folder=folder, resuming=found, tensorboard=tensorboard, begin=begin, client=group.rank)
        log = private_log_in(folder) if config.private_metrics else None
        take_part(
            task_of(config, client=group.rank), config, group=group, folder=folder, resuming=resume, private_log=log
        )
        return None
