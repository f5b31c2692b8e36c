"""`bqsgd demo`: a real private training run in under two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd.cli.output import Json

DEMO: dict[str, dict[str, Any]] = {
    "mnist": {"rounds": 100, "levels": 16, "trials": 203, "evaluate_every": 10, "reserve_rounds": 100},
    "digits": {"rounds": 60, "levels": 17, "trials": 220, "epsilon": 20.0, "evaluate_every": 10, "reserve_rounds": 60},
}
"""Settings per data set. The mechanism is fixed here to save the planner's time; its epsilon is proven like any other,
and the ledgers hold the clients to their budget."""


def demo(
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: a new one under runs/.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds to train.", min=1)] = None,
    dataset: Annotated[str | None, typer.Option(help="mnist or digits. Default: mnist, else digits.")] = None,
    json: Json = False,
) -> None:
    """Train a small model on MNIST over four clients with a proven guarantee, and write the report.

    Noise comes from the operating system. The server sees every client's messages and is not trusted.
    """
    from bqsgd.cli.train import finish, fitted
    from bqsgd.errors import InvalidParameter

    chosen = fitted({} if dataset is None else {"dataset": dataset})["dataset"]
    if chosen not in DEMO:
        raise InvalidParameter(f"the demo trains on {' or '.join(DEMO)}, got {chosen!r}; use bqsgd train")
    given = {"dataset": chosen, **DEMO[chosen]} | ({} if rounds is None else {"rounds": rounds})
    finish(given, config=None, out=out, resume=False, tensorboard=False, json=json)
