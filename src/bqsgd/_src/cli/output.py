"""How commands print: a few aligned lines for people, one JSON object for programs, and the progress of a run.

Progress is a bar on a terminal and plain lines elsewhere; every figure it shows is public.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bqsgd._src.records.record import RoundRecord
    from bqsgd._src.settings.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with every figure in full.")]


_SAY_EVERY = 5.0
"""Seconds between lines where there is no terminal to redraw."""


def out_option(help: str) -> Any:
    """The option --out. An empty value would be the current folder, which nobody has named: it is refused."""
    return typer.Option(parser=_named_path, metavar="PATH", help=help)


def _named_path(text: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("name a file or folder; it is empty")
    return Path(text)


def answer(title: str, lines: Mapping[str, str], fields: Mapping[str, Any], *, json: bool) -> None:
    """Print a title with an aligned line per label, wrapped within the terminal; with `json` print the fields."""
    from bqsgd._src.answers import aligned

    width = max(40, shutil.get_terminal_size().columns)
    typer.echo(to_json(fields) if json else aligned(title, lines, width=width))


def to_json(fields: Mapping[str, Any]) -> str:
    """Strict JSON: infinity becomes the string "inf" and NaN is refused."""
    return json.dumps(_finite(fields), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


@contextmanager
def planning() -> Iterator[Callable[[int, int], None]]:
    """What to call with (done, in all) while the clients' plans are made; shown on stderr."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        began = [time.monotonic()]

        def say(done: int, total: int) -> None:
            if time.monotonic() - began[0] > _SAY_EVERY:
                began[0] = time.monotonic()
                print(f"planning: {done} of {total} clients", file=sys.stderr, flush=True)

        yield say
        return
    with console.status("planning") as status:
        yield lambda done, total: status.update(f"planning: {done} of {total} clients")


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
            if record.test_loss is not None:
                last = record
            bar.update(task, completed=record.round + 1, description=_line(last, sent, config))
            yield record


def _plain(records: Iterable[RoundRecord], config: Config) -> Iterator[RoundRecord]:
    sent = 0
    for record in records:
        sent += record.bytes_up
        if record.test_loss is not None:
            done = record.round + 1
            left = record.time / done * (config.run.rounds - done)
            line = f"round {done}/{config.run.rounds}  {_line(record, sent, config)}  {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)
        yield record


def _line(record: RoundRecord | None, sent: int, config: Config) -> str:
    if record is None:
        return f"{sent / 1e6:.1f} MB up"
    from bqsgd._src.privacy.guarantee import rounded_up

    epsilon = record.epsilon_max
    privacy = "no privacy" if epsilon is None else f"epsilon {rounded_up(epsilon)} at delta {config.privacy.delta:g}"
    if config.privacy.seed is not None:
        privacy += " (seeded: no claim)"
    figures = []
    if record.test_accuracy is not None:
        figures.append(f"test accuracy {record.test_accuracy:.2%}")
    if record.test_metric is not None:
        figures.append(f"test metric {record.test_metric:.4g}")
    return f"{'  '.join([*figures, f'loss {record.test_loss:.3f}'])}  {privacy}  {sent / 1e6:.1f} MB up"
