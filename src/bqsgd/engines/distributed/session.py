"""A run as the serving rank leads it: the same server, loop and checkpoint as in one process, over ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bqsgd.engines.distributed.engine import Distributed
from bqsgd.engines.distributed.group import SERVER, Group
from bqsgd.engines.distributed.hello import MOST_BYTES, hello_of, read_welcome
from bqsgd.engines.distributed.taking_part import share_of
from bqsgd.engines.distributed.transport import Channel, Kind
from bqsgd.engines.session import Result, Session
from bqsgd.engines.task import PrivateLogs, Task, make_client
from bqsgd.errors import InvalidParameter
from bqsgd.paper.nominal import nominal_epsilon_after
from bqsgd.training.aggregation import smallest_quorum
from bqsgd.training.config import Config
from bqsgd.training.receipts import OK
from bqsgd.training.server import Server
from bqsgd.training.vector import to_vector

log = logging.getLogger("bqsgd.distributed")


class DistributedSession(Session):
    """`Session` on rank 0 of a group; every other rank calls `take_part`. Use `start` or `resume`, with `group`.

    Every frame refused and every client missing is a line in the log. A run that lost so many ranks that no round can
    meet the quorum stops, with a checkpoint.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        *,
        folder: Path | None,
        resuming: bool,
        group: Group,
        private_log: PrivateLogs | None = None,
    ) -> None:
        if not group.serves:
            raise InvalidParameter(f"rank {group.rank} does not serve; it calls take_part")
        self.config, self.folder, self.task = config, folder, task
        self.started = time.monotonic()
        share = share_of(task, config, group)
        torch.set_num_threads(1)  # sums must not depend on how many cores this machine has
        model = task.make_model()
        self._evaluate = task.evaluator(model)
        client = make_client(
            task,
            config,
            number=SERVER,
            model=model,
            share=share,
            folder=folder,
            run=config.run or "run",
            resuming=resuming,
            private_logs=private_log,
        )
        channels = [group.channel(rank) for rank in range(1, group.size)]
        weights = {SERVER: len(client.inputs)} | _greet(channels, config, resuming=resuming)
        self.server = Server(model=to_vector(model), weights=weights, config=config)
        self.ranks = Distributed(
            client,
            channels,
            most_bytes=most_frame_bytes(client.situation.dimension),
            deadline_seconds=config.deadline_seconds,
        )
        self.engine = self.ranks  # type: ignore[assignment]
        self._nominal = nominal_epsilon_after(config, client.situation)
        self._result: Result | None = None

    def rounds(self) -> Iterator[dict[str, Any]]:
        """As in one process; what did not come as it should is logged."""
        config = self.config
        needed = max(config.quorum, smallest_quorum(config.aggregation, byzantine=config.byzantine))
        for record in super().rounds():
            for receipt in record["clients"]:
                if receipt["status"] != OK:
                    line = "round %d, client %d: %s (%s)"
                    log.warning(line, record["round"], receipt["client"], receipt["status"], receipt["reason"])
            yield record
            left = len(self.ranks.numbers) - len(self.ranks.lost)
            if left < needed:
                log.warning("%d of %d clients are left and a round needs %d: stopping", left, config.clients, needed)
                return

    def result(self) -> Result:
        """The model and what it cost, from the clients' own books; asked of them while they are still there."""
        return super().result() if self._result is None else self._result

    def close(self) -> None:
        """End the run on every rank and close the own ledger."""
        try:
            self._result = self.result()
        finally:
            self.ranks.close()


def _greet(channels: list[Channel], config: Config, *, resuming: bool) -> dict[int, int]:
    """Tell every rank run and settings; rank -> its number of samples."""
    hello = hello_of(config, resuming=resuming)
    for channel in channels:
        channel.send(Kind.HELLO, hello)
    samples, refusals = {}, []
    for channel in channels:
        kind, body = channel.receive(most_bytes=MOST_BYTES)
        if kind is Kind.WELCOME:
            samples[channel.peer] = read_welcome(body)
        else:
            refusals.append(f"rank {channel.peer} does not take part: {bytes(body[:500]).decode(errors='replace')}")
    if refusals:
        raise InvalidParameter("; ".join(refusals))
    return samples


def most_frame_bytes(dimension: int) -> int:
    """More than any frame of this dimension takes: a rank that announces more is cut off before it is read."""
    return 4096 + 8 * dimension
