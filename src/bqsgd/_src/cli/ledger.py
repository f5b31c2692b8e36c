"""`bqsgd ledger`: show what a client has spent, or export it as JSON or CSV. Never changes a ledger."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bqsgd._src.cli.output import Json, answer, out_option, to_json

if TYPE_CHECKING:
    from bqsgd._src.ledger.register import Ledgers

ledger = typer.Typer(help="Show or export what clients have spent of their privacy budgets.", no_args_is_help=True)

_Where = Annotated[Path, typer.Argument(metavar="LEDGER")]
_Client = Annotated[int | None, typer.Option(help="The client's number, if LEDGER is a register of many clients.")]
_Delta = Annotated[float | None, typer.Option(help="State epsilon at this delta instead of the budget's.")]

_MAX_SHOWN = 10


@ledger.command()
def show(path: _Where, client: _Client = None, delta: _Delta = None, json: Json = False) -> None:
    """Print the budget, what is spent and what that guarantees.

    LEDGER is a client's ledger file, or a register of many clients. For a
    register without --client, the clients that have spent most are listed.

    Example:
      bqsgd ledger show runs/first/ledgers/client-0000.ledger
    """
    from bqsgd._src.ledger.register import Ledgers
    from bqsgd._src.planner.statements import guarantee_lines
    from bqsgd._src.privacy.guarantee import Guarantee, as_given

    with Ledgers(path) as ledgers:
        if client is None and len(ledgers.clients) > 1:
            _show_register(path, ledgers, delta=delta, json=json)
            return
        fields = ledgers.ledger(ledgers.clients[0] if client is None else client).to_dict(delta=delta)
    kinds = [Guarantee.from_dict(kind) for kind in fields["guarantees_by_kind"]]
    entries = fields.pop("entries")
    budget, seeded = fields["budget"], fields["seeded_rounds"]
    lines = {
        "budget": f"epsilon {as_given(budget['epsilon'])} at delta {budget['delta']:g}",
        "spent": f"{fields['spent_rounds']} rounds" + (f", {seeded} of them with seeded noise" if seeded else ""),
    }
    if fields["guarantee"] is None:
        lines["guarantee"] = "nothing was sent"
    else:
        lines |= guarantee_lines(Guarantee.from_dict(fields["guarantee"]))
    # Messages of one kind: the line above is already about them.
    if len(kinds) > 1:
        lines |= {f"of it, {kind.unit}, {kind.relation}": f"epsilon {kind.epsilon_text}" for kind in kinds}
    lines["entries"] = str(len(entries))
    answer(f"Ledger of client {fields['client']}", lines, fields | {"entry_count": len(entries)}, json=json)


def _show_register(path: Path, ledgers: Ledgers, *, delta: float | None, json: bool) -> None:
    """List the clients by epsilon, largest first: as many as fit on a screen, or all of them in JSON."""
    rows = []
    for client in ledgers.clients:
        opened = ledgers.ledger(client)
        guarantee = opened.guarantee(delta=delta)
        rows.append((0.0 if guarantee is None else guarantee.epsilon, client, opened.spent_rounds, guarantee))
    rows.sort(key=lambda row: (-row[0], row[1]))
    clients = [
        {"client": client, "spent_rounds": rounds, "guarantee": None if guarantee is None else guarantee.to_dict()}
        for _, client, rounds, guarantee in rows
    ]
    spent = [row for row in rows if row[3] is not None]
    lines = {"clients": f"{len(rows)}; {len(spent)} of them have spent"}
    # Most clients of a run have spent the same: one line for all of them.
    alike: dict[str, list[int]] = {}
    for _, client, rounds, guarantee in spent:
        alike.setdefault(f"{rounds} rounds: {guarantee}", []).append(client)
    for text, sharing in islice(alike.items(), _MAX_SHOWN):
        lines[f"client {sharing[0]}" + (f" and {len(sharing) - 1} more" if len(sharing) > 1 else "")] = text
    hidden = sum(map(len, islice(alike.values(), _MAX_SHOWN, None)))
    if hidden:
        lines["others"] = f"{hidden} with the same or a smaller epsilon: --client N or --json shows them"
    answer(f"Register {path}", lines, {"clients": clients}, json=json)


@ledger.command()
def export(
    path: _Where,
    out: Annotated[Path, out_option("New file: .json (everything) or .csv (one line per entry).")],
    client: _Client = None,
    delta: _Delta = None,
) -> None:
    """Write all entries of one client to a file; JSON holds the guarantee too.

    LEDGER is a client's ledger file, or a register of many clients, which
    needs --client.

    Example:
      bqsgd ledger export client.ledger --out spent.csv
    """
    from bqsgd._src.errors import InvalidParameter
    from bqsgd._src.ledger.register import Ledgers
    from bqsgd._src.storage import write_atomic

    if out.suffix not in (".json", ".csv"):
        raise InvalidParameter(f"--out must end in .json or .csv, got {out.name!r}")
    # `lexists`, because a dangling link would make us write to a file that the user did not name.
    if os.path.lexists(out):
        raise InvalidParameter(f"{out} exists; give a new file name")
    with Ledgers(path) as ledgers:
        if client is None and len(ledgers.clients) > 1:
            raise InvalidParameter(f"{path} is a register of {len(ledgers.clients)} clients; choose one with --client")
        fields = ledgers.ledger(ledgers.clients[0] if client is None else client).to_dict(delta=delta)
    text = to_json(fields) + "\n" if out.suffix == ".json" else _csv(fields["entries"])
    write_atomic(out, text.encode())
    typer.echo(f"{len(fields['entries'])} entries of client {fields['client']} written to {out}")


def _csv(entries: list[dict[str, Any]]) -> str:
    import csv
    import io
    import json

    rows = []
    for number, entry in enumerate(entries, start=1):
        row = {"number": number, **entry}
        row |= {f"budget_{name}": value for name, value in row.pop("budget", {}).items()}
        if release := row.pop("release", {}):
            # Nested tables become columns; `sampling` is the name of the scheme.
            row |= release | release["mechanism"] | release["sensitivity"] | release["sampling"]
            row["sampling"] = row.pop("scheme")
            # What a release made elsewhere was, and noise that is not binomial, stay one column each.
            row |= {name: json.dumps(row[name]) for name in ("event", "noise") if name in row}
        rows.append({name: value for name, value in row.items() if not isinstance(value, dict)})
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
