"""`bqsgd secure`: identity keys of clients, and the roster that all of them hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bqsgd._src.cli.output import Json, answer
from bqsgd._src.errors import InvalidParameter

secure = typer.Typer(help="Make the keys and the roster that secure sums need.", no_args_is_help=True)


@secure.command()
def keygen(
    out: Annotated[Path, typer.Option(help="New file for the private key; only its owner can read it.")],
    json: Json = False,
) -> None:
    """Make a client's identity key (Ed25519) and print its public half, which goes into the roster."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from bqsgd._src.secure.roster import public_key, write_identity

    identity = Ed25519PrivateKey.generate()
    write_identity(out, identity)
    public = public_key(identity).hex()
    lines = {"private": f"{out} (keep it on this machine)", "public": public}
    answer("Identity key", lines, {"private_key": str(out), "public_key": public}, json=json)


@secure.command()
def roster(
    entries: Annotated[list[str] | None, typer.Argument(help="number=public key, for every client.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the roster to this new file.")] = None,
    shown: Annotated[Path | None, typer.Option("--show", help="Show an existing roster instead.")] = None,
    json: Json = False,
) -> None:
    """Write the roster of a federation, or show one: its clients, and the digest by which to compare copies.

    Examples: bqsgd secure roster --out roster.toml 0=f1d2... 1=88ac...
              bqsgd secure roster --show roster.toml
    """
    from bqsgd._src.secure.roster import Roster, read_roster
    from bqsgd._src.storage import write_atomic

    if (out is None) == (shown is None) or (shown is not None and entries):
        raise InvalidParameter("give --out and the clients' keys to write a roster, or --show to look at one")
    if shown is not None:
        made, path = read_roster(shown), shown
    else:
        assert out is not None
        if out.exists():
            raise InvalidParameter(f"{out} exists; a roster is not overwritten: name another file")
        made, path = Roster(dict(_entry(text) for text in entries or ()), os.urandom(32)), out
        if len(made.keys) != len(entries or ()):
            raise InvalidParameter("a client's number is given twice")
        write_atomic(out, made.to_toml().encode(), mode=0o644)
    digest = made.digest.hex()
    clients = {str(client): key.hex() for client, key in made.keys.items()}
    lines = {"clients": str(len(clients)), "digest": digest}
    answer(f"Roster {path}", lines, {"roster": str(path), "digest": digest, "clients": clients}, json=json)


def _entry(text: str) -> tuple[int, bytes]:
    number, _, key = text.partition("=")
    try:
        return int(number), bytes.fromhex(key)
    except ValueError as error:
        raise InvalidParameter(f"{text!r} is not number=public key, as `bqsgd secure keygen` prints it") from error
