"""How commands print: a few aligned lines for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bqsgd.params import Mechanism
    from bqsgd.privacy.guarantee import Guarantee

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with every figure in full.")]


def show(title: str, lines: Mapping[str, str]) -> None:
    """Print a title and, below it, one aligned line per label; long lines wrap within the terminal."""
    typer.echo(title)
    indent = 4 + max(map(len, lines), default=0)
    width = max(40, shutil.get_terminal_size().columns)
    for label, text in lines.items():
        first = f"  {label}".ljust(indent)
        typer.echo(textwrap.fill(text, width, initial_indent=first, subsequent_indent=" " * indent,
                                 break_on_hyphens=False, break_long_words=False))  # fmt: skip


def guarantee_lines(guarantee: Guarantee) -> dict[str, str]:
    """Everything that must be read beside an epsilon, in words."""
    void = " [seeded noise: no privacy claim]" if guarantee.seeded else ""
    return {
        "guarantee": f"epsilon {guarantee.epsilon_text} at delta {guarantee.delta:g}, total over all rounds{void}",
        "neighbours": guarantee.neighbours,
        "trust": str(guarantee.trust),
        "sampling": guarantee.sampling,
        "method": guarantee.method,
    }


def message_lines(mechanism: Mechanism, *, variance: float) -> dict[str, str]:
    """What one message costs in bits and in error; `variance` is V of Eq. 14, in squared ranges of the encoder."""
    return {
        "message": f"{mechanism.bits_per_coordinate:.3g} bits per coordinate ({mechanism.code_count} codes)",
        "error": f"{math.sqrt(variance):.3g} times the range (standard deviation per coordinate)",
    }


def emit(fields: Mapping[str, Any], *, as_json: bool, title: str, notes: tuple[str, ...] = ()) -> None:
    """Print `fields` as JSON, or as a two-column table with `notes` under it."""
    if as_json:
        typer.echo(to_json(fields))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        if isinstance(value, Mapping):
            for inner, detail in value.items():
                table.add_row(f"{name}.{inner}", display(detail, f"{name}.{inner}"))
        else:
            table.add_row(name, display(value, name))
    console = Console()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, markup=False)


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


def display(value: Any, name: str) -> str:
    """The table cell of a field: floats to six digits, None as a dash, one line per item of a list.

    An upper bound is rounded up and a lower one down; a budget is shown as it was given.
    """
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "\n".join(display(inner, name) for inner in value)
    if isinstance(value, float):
        from bqsgd.privacy.guarantee import as_given, rounded_down, rounded_up

        if name.startswith("budget."):
            return as_given(value)
        if name.endswith("_lower"):
            return rounded_down(value, 6)
        return rounded_up(value, 6) if name.endswith(("epsilon", "claimed_delta")) else f"{value:.6g}"
    return str(value)
