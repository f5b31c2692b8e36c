"""How commands print: a table for people, one JSON object for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


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
                table.add_row(f"{name}.{inner}", display(detail))
        else:
            table.add_row(name, display(value))
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


def display(value: Any) -> str:
    """A table cell: floats to six digits, None as a dash, a list by the line."""
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "\n".join(display(inner) for inner in value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)
