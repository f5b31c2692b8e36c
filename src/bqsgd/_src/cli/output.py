"""How commands print: a few aligned lines for people, one JSON object for programs, and the progress of a run.

Progress is a bar on a terminal and plain lines elsewhere. Every figure it shows is public.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd._src.text import aligned, one_line, volume

if TYPE_CHECKING:
    from rich.console import Console

    from bqsgd._src.records.record import RoundRecord, Summary
    from bqsgd._src.settings.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with every figure in full.")]
_NARROW, _WIDE = 60, 120
"""Columns of a terminal from which on the progress line has a clock, and a bar."""
_SECONDS_BETWEEN_LINES = 5.0
"""Where there is no terminal, planning prints at most one line in this time."""


def out_option(help: str, *, panel: str | None = None) -> Any:
    """The option --out. It refuses an empty value, which would mean the current folder without naming it."""
    return typer.Option(parser=_named_path, metavar="PATH", help=help, rich_help_panel=panel)


def _named_path(text: str) -> Path:
    if not text.strip():
        raise typer.BadParameter("the path is empty; name a file or folder")
    return Path(text)


def answer(title: str, lines: Mapping[str, str], fields: Mapping[str, Any], *, json: bool) -> None:
    """Print a title with an aligned line per label, wrapped within the terminal; with `json` print the fields."""
    lines = {one_line(label): one_line(text, limit=None) for label, text in lines.items()}
    title = one_line(title, limit=None)
    width = max(40, shutil.get_terminal_size().columns)
    typer.echo(to_json(fields) if json else aligned(title, lines, width=width))


def to_json(fields: Mapping[str, Any]) -> str:
    """Strict JSON, in which infinities and NaN are the strings "inf", "-inf" and "nan"."""
    from bqsgd._src.records.record import plain

    return json.dumps(plain(fields), indent=2, allow_nan=False)


def summary_lines(summary: Summary) -> dict[str, str]:
    """A run's result in words: the model on the test data, the guarantee, and the bytes that were sent."""
    from bqsgd._src.planner.statements import guarantee_lines

    after = f"on the test data, after {summary.rounds} rounds"
    if summary.metric is not None and summary.metric_name is not None:
        lines = {summary.metric_name: f"{summary.metric:.4g} {after}"}
    elif summary.accuracy is not None:
        lines = {"accuracy": f"{summary.accuracy:.2%} {after}"}
    elif summary.loss is not None:
        lines = {"loss": f"{summary.loss:.4g} {after}"}
    else:
        lines = {"loss": f"no test data, {summary.rounds} rounds"}
    if summary.best_text is not None:
        lines["best model"] = summary.best_text
    if summary.stopped is not None:
        lines["stopped early"] = summary.stopped
    if summary.guarantee is None:
        lines["guarantee"] = "nothing private was sent"
    else:
        lines |= guarantee_lines(summary.guarantee)
    bits = "" if summary.bits_per_coordinate is None else f", {summary.bits_per_coordinate:.2f} bits per coordinate"
    return lines | {
        "sent up": f"{volume(summary.bytes_up)}{_beside_float32(summary.saving)}{bits}",
        "sent down": f"{volume(summary.bytes_down)}{_beside_float32(summary.saving_down)}",
    }


def _beside_float32(saving: float | None) -> str:
    """How many times fewer bytes than as float32, or how many times more; nothing if it makes no difference."""
    if saving is None or 0.99 <= saving <= 1.01:
        return ""
    if saving > 1:
        return f", {saving:.2f} times less than float32"
    return f", {1 / saving:.2f} times as much as float32: headers and keys outweigh so small a model"


def _console() -> Console:
    """The terminal on stderr. If stderr is not a terminal it prints nothing, and the caller prints plain lines."""
    from rich.console import Console

    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


@contextmanager
def planning() -> Iterator[Callable[[int, int], None]]:
    """Show on stderr how many clients' plans are made. Yields a function to call with (done, in all)."""
    console, last_line = _console(), time.monotonic()
    with console.status("planning") as status:

        def show(done: int, total: int) -> None:
            nonlocal last_line
            line = f"planning: {done} of {total} clients"
            status.update(line)
            if console.quiet and time.monotonic() - last_line > _SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                print(line, file=sys.stderr, flush=True)

        yield show


def shown(records: Iterable[RoundRecord], *, config: Config, first_round: int) -> Iterator[RoundRecord]:
    """Pass the records on; on stderr show round, test accuracy and loss, epsilon, bytes and the time left."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    console, rounds, sent, figures = _console(), config.run.rounds, 0, ""
    # The figures get what room the others leave, and are cut to it: a narrow terminal has no bar and no clock.
    figures_column = TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns: list[str | ProgressColumn] = ["round {task.completed}/{task.total}", figures_column]
    if console.width >= _WIDE:
        columns = [columns[0], BarColumn(bar_width=24), figures_column, TimeElapsedColumn()]
    if console.width >= _NARROW:
        columns += ["left", TimeRemainingColumn()]
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("planning and compiling", total=rounds, completed=first_round)
        for record in records:
            done, sent = record.round + 1, sent + record.bytes_up
            if record.test_loss is not None:
                figures = _figures(record, config)
            line = f"{figures}{volume(sent)} up"
            bar.update(task, completed=done, description=line)
            # A line per evaluation, not per round, so that logs stay short.
            if console.quiet and record.test_loss is not None:
                left = record.time / done * (rounds - done)
                print(f"round {done}/{rounds}  {line}  {left:.0f} s left", file=sys.stderr, flush=True)
            # Yield inside `with`: the bar stays until the last round is done.
            yield record


def _figures(record: RoundRecord, config: Config) -> str:
    """What was measured after a round, and the epsilon spent until then."""
    from bqsgd._src.privacy.guarantee import rounded_up

    epsilon = record.epsilon_max
    privacy = "no privacy" if epsilon is None else f"epsilon {rounded_up(epsilon)} at delta {config.privacy.delta:g}"
    if config.privacy.seed is not None:
        privacy += " (seeded: no claim)"
    accuracy = "" if record.test_accuracy is None else f"test accuracy {record.test_accuracy:.2%}  "
    metric = "" if record.test_metric is None else f"test metric {record.test_metric:.4g}  "
    return f"{accuracy}{metric}loss {record.test_loss:.3f}  {privacy}  "
