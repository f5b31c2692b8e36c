"""`bqsgd report`: the page of one run, or the comparison of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bqsgd._src.cli.output import Json, out_option, to_json

_COMPARISON = "comparison.html"


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    out: Annotated[
        Path | None, out_option(f"File to write. Default: RUN/report.html; {_COMPARISON} for several runs.")
    ] = None,
    json: Json = False,
) -> None:
    """Write an HTML page about one run, or one that compares several runs.

    RUN is a run folder, as `bqsgd train` writes it. The page needs no other
    file and no network.

    Examples:
      bqsgd report runs/first
      bqsgd report runs/first runs/second --out both.html
    """
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.reports.page import write_comparison, write_report

    try:
        path = write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path(_COMPARISON))
    except OSError as error:
        raise InvalidParameter(f"the report cannot be written: {error}") from error
    typer.echo(to_json({"report": str(path), "runs": len(runs), "bytes": path.stat().st_size}) if json else path)
