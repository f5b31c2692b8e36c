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
    """Make a client's identity key and print its public half.

    The private half stays on the client's machine. The public half goes into
    the roster. Keys are Ed25519.

    Example:
      bqsgd secure keygen --out client-0.key
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from bqsgd._src.secure.roster import public_key, write_identity

    identity = Ed25519PrivateKey.generate()
    write_identity(out, identity)
    public = public_key(identity).hex()
    lines = {"private": f"{out} (keep it on this machine)", "public": public}
    answer("Identity key", lines, {"private_key": str(out), "public_key": public}, json=json)


@secure.command()
def roster(
    entries: Annotated[list[str] | None, typer.Argument(metavar="CLIENT=KEY...")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the roster to this new file.")] = None,
    show: Annotated[Path | None, typer.Option(help="Show this roster instead of writing one.")] = None,
    json: Json = False,
) -> None:
    """Write the roster of a federation, or show one.

    CLIENT=KEY gives a client's number and its public key, as
    `bqsgd secure keygen` prints it. All clients must hold the same roster:
    compare the digest that this command prints.

    Examples:
      bqsgd secure roster --out roster.toml 0=f1d2... 1=88ac...
      bqsgd secure roster --show roster.toml
    """
    from bqsgd._src.secure.roster import Roster, read_roster
    from bqsgd._src.storage import write_atomic

    entries = entries or []
    if show is not None and out is None and not entries:
        path, content = show, read_roster(show)
    elif out is not None and show is None:
        if out.exists():
            raise InvalidParameter(f"{out} exists, and a roster is never overwritten; name another file")
        path, content = out, Roster(dict(_entry(text) for text in entries), os.urandom(32))
        # Before anything is written: a roster with the wrong key of a client would lock it out.
        if len(content.keys) != len(entries):
            raise InvalidParameter("a client's number is given twice")
        write_atomic(out, content.to_toml().encode(), mode=0o644)
    else:
        raise InvalidParameter("give --out and the clients' keys to write a roster, or --show to look at one")
    digest = content.digest.hex()
    clients = {str(client): key.hex() for client, key in content.keys.items()}
    lines = {"clients": str(len(clients)), "digest": digest}
    answer(f"Roster {path}", lines, {"roster": str(path), "digest": digest, "clients": clients}, json=json)


def _entry(text: str) -> tuple[int, bytes]:
    number, _, key = text.partition("=")
    try:
        return int(number), bytes.fromhex(key)
    except ValueError as error:
        raise InvalidParameter(
            f"{text!r} must be CLIENT=KEY: a number and a public key as `bqsgd secure keygen` prints it"
        ) from error
