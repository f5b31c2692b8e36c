"""Identity keys and the roster: the clients that take part, and the Ed25519 key of each.

The server must not decide which key belongs to which client, because it could then impersonate any of them. So the
roster is a file that reaches the clients in another way, and its digest is part of every message (docs/secure.md).
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from bqsgd._src.errors import BadSignature, ForeignClient, InvalidParameter, UnsafeFile
from bqsgd._src.params import check_int
from bqsgd._src.storage import open_regular, parse_toml, toml_bytes, write_atomic

MAX_CLIENTS = 100_000
_KEY_BYTES = 32
_SEED_BYTES = 32
_MAX_KEY_FILE = 1 << 12
_MAX_ROSTER_FILE = 1 << 24


@dataclass(frozen=True)
class Roster:
    """Client number -> public identity key (32 bytes). No two clients have the same key.

    The digest covers numbers, keys and seed, not the layout of the file.

    seed: 32 random bytes that determine the neighbours on a sparse graph; empty if the roster has no seed. Sums over
    more than `graph.FULL_GRAPH` clients need it. Draw it after all keys are known: somebody who knew the seed before
    could place colluders around one client.
    """

    keys: Mapping[int, bytes]
    seed: bytes = b""

    def __post_init__(self) -> None:
        if not 2 <= len(self.keys) <= MAX_CLIENTS:
            raise InvalidParameter(f"a roster has 2 to {MAX_CLIENTS} clients, got {len(self.keys)}")
        for client, key in self.keys.items():
            check_int("client", client, 0, 2**32 - 1)
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                raise InvalidParameter(f"the identity key of client {client} must be {_KEY_BYTES} bytes")
        if len(set(self.keys.values())) < len(self.keys):
            raise InvalidParameter("two clients of the roster have the same identity key; give each its own")
        if len(self.seed) not in (0, _SEED_BYTES):
            raise InvalidParameter(f"the seed of a roster has {_SEED_BYTES} bytes, got {len(self.seed)}")
        # Sorted once: places, digest and bitmaps all follow this order.
        object.__setattr__(self, "keys", dict(sorted(self.keys.items())))

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """The clients' numbers, ascending."""
        return tuple(self.keys)

    @cached_property
    def place(self) -> dict[int, int]:
        """Client number -> its place in the roster, from 0."""
        return {client: index for index, client in enumerate(self.keys)}

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over the numbers, keys and seed."""
        state = hashlib.sha256(b"bqsgd.roster.v1")
        for client, key in self.keys.items():
            state.update(struct.pack("<I", client) + key)
        state.update(self.seed)
        return state.digest()

    def only(self, clients: Iterable[int]) -> Roster:
        """The roster of these clients only, without a seed.

        Raises:
            ForeignClient: one of them is not in this roster.
        """
        return Roster({client: self.keys[self.check(client)] for client in clients})

    def group(self, number: int, *, groups: int) -> Roster:
        """The roster of one of so many groups. The client in place i is in group i modulo `groups`.

        Its seed, and with it its digest, follows from this whole roster, the number of groups and that of the group. So
        clients that were told other groups refuse each other's messages.
        """
        if groups == 1:
            return self
        about = struct.pack("<II", groups, number)
        seed = hashlib.sha256(b"bqsgd.roster.group.v1" + self.digest + about).digest()
        return Roster({client: self.keys[client] for client in self.clients[number::groups]}, seed)

    def check(self, client: int) -> int:
        """Return `client`; raise ForeignClient if it is not in the roster."""
        if client not in self.keys:
            raise ForeignClient(f"client {client} is not in the roster")
        return client

    def verify(self, client: int, signature: bytes, statement: bytes) -> None:
        """Raise BadSignature unless `client` signed `statement`."""
        if not _signed(self.keys[self.check(client)], bytes(signature), bytes(statement)):
            raise BadSignature(f"the signature of client {client} does not verify under its identity key")

    def to_toml(self) -> str:
        """The text of a roster file."""
        lines = [f'{client} = "{key.hex()}"' for client, key in self.keys.items()]
        seed = [
            "# Drawn at random after all keys were known; it determines the neighbours of every client.",
            f'seed = "{self.seed.hex()}"',
            "",
        ]
        keys = ["# Ed25519 identity keys of the clients, by number.", "[clients]", *lines, ""]
        return "\n".join((seed if self.seed else []) + keys)


@lru_cache(maxsize=4096)
def _signed(key: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether the signature verifies. All arguments are public, so clients in one process may share the cache."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def read_roster(path: str | Path) -> Roster:
    """Read a roster file: TOML with a table [clients] of number = "key in hexadecimal", and optionally a seed.

    Raises:
        InvalidParameter: the file is not a roster.
    """
    return _roster(toml_bytes(path, limit=_MAX_ROSTER_FILE, kind="roster"), path)


@lru_cache(maxsize=2)
def _roster(content: bytes, path: str | Path) -> Roster:
    """The roster in these bytes. Cached, because simulated clients read it for every message and it may be long."""
    tables = parse_toml(content, path=path, kind="roster")
    entries = tables.get("clients")
    if not set(tables) <= {"clients", "seed"} or not isinstance(entries, dict):
        raise InvalidParameter(f"{path} is not a roster: it may hold the table [clients] and a seed, nothing else")
    keys = {}
    for number, key in entries.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", number) or not re.fullmatch(r"[0-9a-f]{64}", str(key)):
            raise InvalidParameter(
                f"{path} is not a roster: the entry {number!r} must be a client number with 64 hexadecimal digits"
            )
        keys[int(number)] = bytes.fromhex(key)
    seed = tables.get("seed", "")
    if not re.fullmatch(r"([0-9a-f]{64})?", str(seed)):
        raise InvalidParameter(f"{path} is not a roster: its seed must have 64 hexadecimal digits")
    return Roster(keys, bytes.fromhex(seed))


def public_key(identity: Ed25519PrivateKey) -> bytes:
    """The 32 bytes of this identity in the roster."""
    return identity.public_key().public_bytes_raw()


def write_identity(path: Path, identity: Ed25519PrivateKey) -> None:
    """Write the private key as PEM (PKCS 8), readable by its owner only. An existing file is never replaced."""
    if path.exists():
        raise InvalidParameter(f"{path} exists, and identity keys are never overwritten; name another file")
    pem = identity.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_atomic(path, pem)


def read_identity(path: str | Path) -> Ed25519PrivateKey:
    """The private identity key in a PEM file.

    Raises:
        InvalidParameter: the file does not hold an Ed25519 key, or users other than its owner can read it.
    """
    try:
        file = open_regular(Path(path), limit=_MAX_KEY_FILE)
        if file is None:
            raise InvalidParameter(f"{path} is not an identity key: there is no such file")
        with file:
            # Of the open file, not of its name, which somebody could give to another file meanwhile.
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise InvalidParameter(f"{path} can be read by other users: chmod 600 it, or make a new key")
            key = serialization.load_pem_private_key(file.read(_MAX_KEY_FILE), password=None)
    except (OSError, UnsafeFile, ValueError, TypeError, UnsupportedAlgorithm) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(f"{path} is not an identity key: {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InvalidParameter(f"{path} is not an identity key: it must be Ed25519")
    return key
