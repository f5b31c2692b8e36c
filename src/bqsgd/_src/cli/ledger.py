"""`bqsgd ledger`: look at what a client has spent, or take it out as JSON or CSV. Never changes a ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bqsgd._src.ledger.register import Ledgers

from bqsgd._src.cli.output import Json, answer, out_option, to_json

ledger = typer.Typer(help="Show or export what one client has spent of its privacy budget.", no_args_is_help=True)

_Where = Annotated[Path, typer.Argument(help="The client's ledger file, or a register of many clients.")]
_Client = Annotated[int | None, typer.Option(help="Whose ledger, in a register; without it the clients are listed.")]
_Delta = Annotated[float | None, typer.Option(help="State epsilon at this delta instead of the budget's.")]

_MOST_SHOWN = 10
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
def show(path: _Where, client: _Client = None, delta: _Delta = None, json: Json = False) -> None:
    """Print the budget, what is spent and what that guarantees."""
    from bqsgd._src.answers import guarantee_lines
    from bqsgd._src.ledger.register import opened_ledgers
    from bqsgd._src.privacy.guarantee import as_given

    with opened_ledgers(path) as ledgers:
        if client is None and len(ledgers.clients) > 1:
            _show_register(path, ledgers, delta=delta, json=json)
            return
        opened = ledgers.ledger(ledgers.clients[0] if client is None else client)
        guarantee, kinds = opened.guarantee(delta=delta), opened.guarantees(delta=delta)
        fields = opened.to_dict(delta=delta)
    entries = fields.pop("entries")
    budget, seeded = fields["budget"], fields["seeded_rounds"]
    lines = {
        "budget": f"epsilon {as_given(budget['epsilon'])} at delta {budget['delta']:g}",
        "spent": f"{fields['spent_rounds']} rounds" + (f", {seeded} of them with seeded noise" if seeded else ""),
    }
    lines |= {"guarantee": "nothing was sent"} if guarantee is None else guarantee_lines(guarantee)
    if len(kinds) > 1:
        lines |= {f"of it, {kind.unit}, {kind.relation}": f"epsilon {kind.epsilon_text}" for kind in kinds}
    lines["entries"] = str(len(entries))
    answer(f"Ledger of client {fields['client']}", lines, fields | {"entry_count": len(entries)}, json=json)


def _show_register(path: Path, ledgers: Ledgers, *, delta: float | None, json: bool) -> None:
    """The clients by what they have spent, the most first, as many as a screen holds; in JSON all of them."""
    from bqsgd._src.ledger.spending import ledger_guarantee

    rows = []
    for client in ledgers.clients:
        opened = ledgers.ledger(client)
        guarantee = ledger_guarantee(opened, delta=delta)
        rows.append((0.0 if guarantee is None else guarantee.epsilon, client, opened.spent_rounds, guarantee))
    rows.sort(key=lambda row: (-row[0], row[1]))
    clients = [
        {"client": client, "spent_rounds": rounds, "guarantee": None if guarantee is None else guarantee.to_dict()}
        for _, client, rounds, guarantee in rows
    ]
    spent = [row for row in rows if row[3] is not None]
    lines = {"clients": f"{len(rows)}, of which {len(spent)} have spent"}
    for _, client, rounds, guarantee in spent[:_MOST_SHOWN]:
        lines[f"client {client}"] = f"{rounds} rounds: {guarantee}"
    if len(spent) > _MOST_SHOWN:
        lines["more"] = f"{len(spent) - _MOST_SHOWN} that have spent no more: --client N or --json"
    answer(f"Register {path}", lines, {"clients": clients}, json=json)


@ledger.command()
def export(
    path: _Where,
    out: Annotated[
        Path,
        out_option("File to write: .json (everything) or .csv (one line per entry)."),
    ],
    client: _Client = None,
    delta: _Delta = None,
) -> None:
    """Write every entry, and in JSON the guarantee, to a file."""
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.ledger.register import opened_ledgers
    from bqsgd._src.storage import write_atomic

    if out.suffix not in (".json", ".csv"):
        raise InvalidParameter(f"--out must end in .json or .csv, got {out.name!r}")
    if os.path.lexists(out):
        raise InvalidParameter(f"{out} exists; give a new file name")
    with opened_ledgers(path) as ledgers:
        if client is None and len(ledgers.clients) > 1:
            raise InvalidParameter(f"{path} is a register of {len(ledgers.clients)} clients; say which with --client")
        fields = ledgers.ledger(ledgers.clients[0] if client is None else client).to_dict(delta=delta)
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
