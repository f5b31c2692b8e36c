"""`bqsgd ledger`: look at what a client has spent, or take it out as JSON or CSV. Never changes a ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from bqsgd.cli.output import Json, out_option, print_lines, to_json

ledger = typer.Typer(help="Show or export what one client has spent of its privacy budget.", no_args_is_help=True)

_Where = Annotated[Path, typer.Argument(help="The client's ledger file.")]
_Delta = Annotated[float | None, typer.Option(help="State epsilon at this delta instead of the budget's.")]

_COLUMNS = [
    "number",
    "kind",
    "time",
    "run",
    "first_round",
    "rounds",
    "seeded",
    "again",
    "levels",
    "trials",
    "dimension",
    "linf",
    "l2",
    "relation",
    "sampling",
    "rate",
    "unit",
    "trust",
    "budget_epsilon",
    "budget_delta",
    "reason",
]


@ledger.command()
def show(path: _Where, delta: _Delta = None, json: Json = False) -> None:
    """Print the budget, what is spent and what that guarantees."""
    from bqsgd.answers import guarantee_lines
    from bqsgd.ledger import Ledger
    from bqsgd.privacy.guarantee import as_given

    with Ledger(path) as opened:
        guarantee, kinds = opened.guarantee(delta=delta), opened.guarantees(delta=delta)
        fields = opened.to_dict(delta=delta)
    entries = fields.pop("entries")
    if json:
        typer.echo(to_json(fields | {"entry_count": len(entries)}))
        return
    budget, seeded = fields["budget"], fields["seeded_rounds"]
    lines = {
        "budget": f"epsilon {as_given(budget['epsilon'])} at delta {budget['delta']:g}",
        "spent": f"{fields['spent_rounds']} rounds" + (f", {seeded} of them with seeded noise" if seeded else ""),
    }
    lines |= {"guarantee": "nothing was sent"} if guarantee is None else guarantee_lines(guarantee)
    if len(kinds) > 1:
        lines |= {f"of it, {kind.unit}, {kind.relation}": f"epsilon {kind.epsilon_text}" for kind in kinds}
    print_lines(f"Ledger of client {fields['client']}", lines | {"entries": str(len(entries))})


@ledger.command()
def export(
    path: _Where,
    out: Annotated[
        Path,
        out_option("File to write: .json (everything) or .csv (one line per entry)."),
    ],
    delta: _Delta = None,
) -> None:
    """Write every entry, and in JSON the guarantee, to a file."""
    from bqsgd.errors import InvalidParameter
    from bqsgd.ledger import Ledger
    from bqsgd.storage import write_atomic

    if out.suffix not in (".json", ".csv"):
        raise InvalidParameter(f"--out must end in .json or .csv, got {out.name!r}")
    if os.path.lexists(out):
        raise InvalidParameter(f"{out} exists; give a new file name")
    with Ledger(path) as opened:
        fields = opened.to_dict(delta=delta)
    text = to_json(fields) + "\n" if out.suffix == ".json" else _csv(fields["entries"])
    write_atomic(out, text.encode())
    typer.echo(f"{len(fields['entries'])} entries of client {fields['client']} written to {out}")


def _csv(entries: list[dict[str, Any]]) -> str:
    import csv
    import io

    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, _COLUMNS, restval="", extrasaction="ignore")
    writer.writeheader()
    for number, entry in enumerate(entries, start=1):
        release, budget = entry.get("release", {}), entry.get("budget", {})
        row = {"number": number, **entry, **release, **release.get("mechanism", {})}
        row |= release.get("sensitivity", {})
        if release:
            row |= {"sampling": release["sampling"]["scheme"], "rate": release["sampling"]["rate"]}
        writer.writerow(row | {f"budget_{name}": value for name, value in budget.items()})
    return stream.getvalue()
