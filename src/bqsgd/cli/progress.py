"""Live progress of a run: a bar on a terminal, plain lines elsewhere. Every figure shown is public."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bqsgd.records.round import RoundRecord
    from bqsgd.training.settings import Config


def shown(records: Iterable[RoundRecord], *, config: Config, first_round: int) -> Iterator[RoundRecord]:
    """Pass the records on; on stderr show round, test accuracy and loss, epsilon, bytes and the time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield from _plain(records, config)
        return
    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("planning and compiling", total=config.run.rounds, completed=first_round)
        last: RoundRecord | None = None
        sent = 0
        for record in records:
            sent += record.bytes_up
            if record.test_accuracy is not None:
                last = record
            bar.update(task, completed=record.round + 1, description=_line(last, sent, config))
            yield record


def _plain(records: Iterable[RoundRecord], config: Config) -> Iterator[RoundRecord]:
    sent = 0
    for record in records:
        sent += record.bytes_up
        if record.test_accuracy is not None:
            done = record.round + 1
            left = record.time / done * (config.run.rounds - done)
            line = f"round {done}/{config.run.rounds}  {_line(record, sent, config)}  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
        yield record


def _line(record: RoundRecord | None, sent: int, config: Config) -> str:
    if record is None:
        return f"{sent / 1e6:.1f} MB up"
    from bqsgd.privacy.guarantee import rounded_up

    epsilon = record.epsilon_max
    privacy = "no privacy" if epsilon is None else f"epsilon {rounded_up(epsilon)} at delta {config.privacy.delta:g}"
    if config.privacy.seed is not None:
        privacy += " (seeded: no claim)"
    test = f"test accuracy {record.test_accuracy:.2%}  loss {record.test_loss:.3f}"
    return f"{test}  {privacy}  {sent / 1e6:.1f} MB up"
