"""`bqsgd watch`: the report of a run that is going on, in a browser on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN")],
    port: Annotated[int, typer.Option(help="Port on the loopback address; 0 takes any free one.")] = 8765,
) -> None:
    """Show the report of a run while it is going on: accuracy, epsilon, who answers.

    RUN is a run folder, which may still be empty or missing. The page
    refreshes by itself until the run has ended. Only browsers on this machine
    can open it; Ctrl-C ends it, and the run goes on.

    Examples:
      bqsgd watch runs/first
    """
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.reports.live import LOOPBACK, watching

    if run.exists() and not run.is_dir():
        raise InvalidParameter(f"{run} is not a folder; give the folder of a run")
    with suppress(KeyboardInterrupt), watching(run, port=port) as server:
        typer.echo(f"http://{LOOPBACK}:{server.server_port}/ shows {run}; Ctrl-C ends it")
        server.serve_forever(poll_interval=0.2)
