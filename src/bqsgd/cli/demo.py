"""`bqsgd demo`: a real private training run in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd.cli.output import Json

DEMO: dict[str, dict[str, Any]] = {
    "mnist": {"rounds": 150, "learning_rate": 2.0, "evaluate_every": 15, "reserve_rounds": 150},
    "digits": {"rounds": 60, "epsilon": 8.0, "evaluate_every": 10, "reserve_rounds": 60},
}
"""Settings per data set, beside the defaults. Few rounds leave more of the budget to each; the few samples of `digits`
need a larger one to be learnt from."""


def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: a new one under runs/.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to train.", min=1)] = None,
    dataset: Annotated[str | None, typer.Option(help="mnist or digits. Default: mnist, else digits.")] = None,
    json: Json = False,
) -> None:
    """Train a small model on MNIST over four clients with a proven guarantee, and write the report.

    Noise comes from the operating system. The server sees every client's messages and is not trusted.
    """
    from bqsgd.cli.train import Shown, begin, fit
    from bqsgd.errors import InvalidParameter

    chosen = fit({} if dataset is None else {"dataset": dataset})["dataset"]
    if chosen not in DEMO:
        raise InvalidParameter(f"the demo trains on {' or '.join(DEMO)}, got {chosen!r}; use bqsgd train")
    given = {"dataset": chosen, **DEMO[chosen]} | ({} if rounds is None else {"rounds": rounds})
    begin(given, out=out, shown=Shown(json=json))
