"""`bqsgd report`: the page of one run, or the comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bqsgd._src.cli.output import Json, out_option, to_json

_COMPARISON = "comparison.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; several are compared.")],
    out: Annotated[
        Path | None,
        out_option(
            f"Where to write. Default: RUN/report.html; {_COMPARISON} for several runs.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a self-contained HTML page about one run, or comparing several."""
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.reports.page import write_comparison, write_report

    try:
        path = write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path(_COMPARISON))
    except OSError as error:
        raise InvalidParameter(f"the report cannot be written: {error}") from error
    typer.echo(to_json({"report": str(path), "runs": len(runs), "bytes": path.stat().st_size}) if json else path)
