"""What a client of a secure sum keeps to itself, in memory and, where its process ends between messages, in a file.

`StateFile` makes a client that is started anew for every message as careful as one that lives on: the state is written
before an answer leaves, and an older state is not taken back. So a second list of survivors is never signed, nor a
second vector masked, by a client that was restarted, or whose state somebody replaced by an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bqsgd.errors import InvalidParameter, RoundUsed, SecureSumError, UnsafeFile, WrongRound
from bqsgd.secure import messages
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.messages import Keys
from bqsgd.storage import one_at_a_time, open_regular, read_regular, write_atomic

_FILE = struct.Struct("<4sHQ")
_MAGIC = b"BQSS"
_VERSION = 1
_MAX_FILE = 1 << 30


@dataclass
class Secrets:
    """What a client keeps to itself for one round."""

    self_seed: bytes
    mask_seed: bytes
    noise_seeds: list[bytes]


@dataclass
class RoundState:
    """What a client has said in a round, since it masked its vector.

    check: decides which signatures are verified on a sparse graph. refused: a certificate was forged.
    """

    survivors: tuple[int, ...] | None = None
    signature: bytes = b""
    unmasking: bytes = b""
    refused: bool = False
    check: bytes = b""


@dataclass
class BatchState:
    """The rounds whose keys and shares travelled together.

    agreement: for the cohort of the batch. keys: this client's own. secrets: by round. peers: holders whose keys were
    shown. pairs: by mask neighbour, the keys of the common masks, one after the other. bundle, share_bundle: digests of
    what the server said. partners: whose shares came. held: their shares. strangers: by holder's client, the mask
    neighbours that it shares no mask with.
    """

    agreement: Agreement
    epoch: int
    first_round: int
    count: int
    keys: bytes
    secrets: dict[int, Secrets]
    peers: dict[int, Keys] = field(default_factory=dict)
    pairs: dict[int, bytes] = field(default_factory=dict)
    bundle: bytes = b""
    shares: bytes = b""
    share_bundle: bytes = b""
    partners: frozenset[int] | None = None
    held: dict[int, bytes] = field(default_factory=dict)
    statement: bytes = b""
    strangers: dict[int, frozenset[int]] | None = None
    rounds: dict[int, RoundState] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Of this client's own Keys message."""
        return hashlib.sha256(self.keys).digest()


@dataclass
class ClientState:
    """cipher: the private X25519 key, drawn once. common: by client, its public key and the secret common with it."""

    epoch: int = -1
    cipher: bytes = b""
    common: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    batch: BatchState | None = None


def write_state(state: ClientState, agreement: Agreement, client: int) -> bytes:
    """The state as bytes, bound to a run and a client."""
    batch = state.batch
    said: dict[str, Any] = {
        "run": agreement.run_digest.hex(),
        "client": client,
        "epoch": state.epoch,
        "cipher": state.cipher.hex(),
        "common": {str(other): [key.hex(), secret.hex()] for other, (key, secret) in state.common.items()},
        "batch": None,
    }
    if batch is not None:
        said["batch"] = {
            "cohort": batch.agreement.cohort,
            "epoch": batch.epoch,
            "first_round": batch.first_round,
            "count": batch.count,
            "keys": batch.keys.hex(),
            "secrets": {
                str(number): [own.self_seed.hex(), own.mask_seed.hex(), [seed.hex() for seed in own.noise_seeds]]
                for number, own in batch.secrets.items()
            },
            "peers": {str(other): _peer_text(keys, batch.agreement) for other, keys in batch.peers.items()},
            "pairs": {str(other): keys.hex() for other, keys in batch.pairs.items()},
            "bundle": batch.bundle.hex(),
            "shares": batch.shares.hex(),
            "share_bundle": batch.share_bundle.hex(),
            "partners": None if batch.partners is None else sorted(batch.partners),
            "held": {str(other): text.hex() for other, text in batch.held.items()},
            "statement": batch.statement.hex(),
            "strangers": None
            if batch.strangers is None
            else {str(other): sorted(without) for other, without in batch.strangers.items()},
            "rounds": {
                str(number): [
                    each.survivors,
                    each.signature.hex(),
                    each.unmasking.hex(),
                    each.refused,
                    each.check.hex(),
                ]
                for number, each in batch.rounds.items()
            },
        }
    return json.dumps(said, separators=(",", ":")).encode()


def _peer_text(keys: Keys, agreement: Agreement) -> str:
    return messages.write_keys(
        keys.header, agreement, cipher=keys.cipher, nonce=keys.nonce, signature=keys.signature
    ).hex()


def read_state(content: bytes, agreement: Agreement, client: int) -> ClientState:
    """The state of this client in this run.

    Raises:
        InvalidParameter: the bytes are no such state.
    """
    try:
        said = json.loads(content)
        if (said["run"], said["client"]) != (agreement.run_digest.hex(), client):
            raise InvalidParameter("the kept state belongs to another run or client")
        common = {int(other): (bytes.fromhex(key), bytes.fromhex(own)) for other, (key, own) in said["common"].items()}
        state = ClientState(int(said["epoch"]), bytes.fromhex(said["cipher"]), common)
        if said["batch"] is not None:
            state.batch = _read_batch(said["batch"], agreement)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, SecureSumError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(f"the kept state of client {client} cannot be read: {error}") from error
    return state


def _read_batch(said: dict[str, Any], agreement: Agreement) -> BatchState:
    agreed = agreement if said["cohort"] is None else agreement.of(said["cohort"])
    return BatchState(
        agreement=agreed,
        epoch=int(said["epoch"]),
        first_round=int(said["first_round"]),
        count=int(said["count"]),
        keys=bytes.fromhex(said["keys"]),
        secrets={
            int(number): Secrets(bytes.fromhex(own), bytes.fromhex(mask), [bytes.fromhex(seed) for seed in noise])
            for number, (own, mask, noise) in said["secrets"].items()
        },
        peers={int(other): messages.read_keys(bytes.fromhex(text), agreed) for other, text in said["peers"].items()},
        pairs={int(other): bytes.fromhex(keys) for other, keys in said["pairs"].items()},
        bundle=bytes.fromhex(said["bundle"]),
        shares=bytes.fromhex(said["shares"]),
        share_bundle=bytes.fromhex(said["share_bundle"]),
        partners=None if said["partners"] is None else frozenset(said["partners"]),
        held={int(other): bytes.fromhex(text) for other, text in said["held"].items()},
        statement=bytes.fromhex(said["statement"]),
        strangers=None
        if said["strangers"] is None
        else {int(other): frozenset(without) for other, without in said["strangers"].items()},
        rounds={
            int(number): RoundState(
                None if survivors is None else tuple(survivors),
                bytes.fromhex(signature),
                bytes.fromhex(unmasking),
                bool(refused),
                bytes.fromhex(check),
            )
            for number, (survivors, signature, unmasking, refused, check) in said["rounds"].items()
        },
    )


def _lock_of(path: Path) -> Path:
    """Held from reading what is there to writing what is next."""
    return path.with_name(f"{path.name}.lock")


class EpochFile:
    """Remembers the last epoch across restarts, durably; without it a restarted client could sign a second list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, epoch: int | None = None) -> int:
        """The last epoch, -1 before the first; with an argument, write that one down first.

        Raises:
            WrongRound: the epoch is not above the last one. Of two processes that begin it at once, one does.
        """
        if epoch is None:
            return self._last()
        with one_at_a_time(_lock_of(self.path)):
            last = self._last()
            if epoch <= last:
                raise WrongRound(f"epoch {epoch} is not above {last}, the last one in {self.path.name}")
            write_atomic(self.path, f"{epoch}\n".encode())
        return epoch

    def _last(self) -> int:
        file = open_regular(self.path, limit=64)
        if file is None:
            return -1
        with file:
            text = file.read(64).decode("ascii", "replace").strip()
        if not text.isdecimal():
            raise InvalidParameter(
                f"{self.path} does not hold the number of an epoch: the client cannot go on in this run"
            )
        return int(text)


class StateFile:
    """Keeps a client's state between processes: in `path`, and beside it, in `path`.step, how often it was written.

    The count is written first. A state that has not the last count is stale: an earlier one was put back, or the
    process ended between the two writes. Then the client remembers its last epoch and nothing else, and takes part
    again from the next batch on.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._counted = path, path.with_name(path.name + ".step")
        self._step: int | None = None
        """The count as this object knows it."""

    def save(self, epoch: int, content: bytes) -> None:
        """Write the next state; when this returns, it survives a power cut.

        Raises:
            RoundUsed: another process has written since `load`: it may have used the same masks for another vector.
        """
        with one_at_a_time(_lock_of(self.path)):
            last = self._last()[0]
            if self._step not in (None, last):
                raise RoundUsed(f"another process of this client has written {self.path}; one at a time may take part")
            self._step = step = last + 1
            write_atomic(self._counted, f"{step} {epoch}\n".encode())
            body = _FILE.pack(_MAGIC, _VERSION, step) + content
            write_atomic(self.path, body + hashlib.sha256(body).digest())

    def load(self) -> tuple[int, bytes | None]:
        """The last epoch (-1 before the first), and the last state unless it is stale.

        Raises:
            InvalidParameter: a file is damaged.
        """
        step, epoch = self._last()
        self._step = step
        try:
            content = read_regular(self.path, limit=_MAX_FILE)
        except (OSError, UnsafeFile) as error:
            raise InvalidParameter(f"{self.path} cannot be read: {error}") from error
        if content is None:
            return epoch, None
        body, digest = content[:-32], content[-32:]
        if len(body) < _FILE.size or hashlib.sha256(body).digest() != digest or body[:4] != _MAGIC:
            raise InvalidParameter(f"{self.path} is damaged; delete it, and the client sits out the current batch")
        _, version, found = _FILE.unpack_from(body)
        return epoch, body[_FILE.size :] if (version, found) == (_VERSION, step) else None

    def _last(self) -> tuple[int, int]:
        try:
            text = read_regular(self._counted, limit=64)
        except (OSError, UnsafeFile) as error:
            raise InvalidParameter(f"{self._counted} cannot be read: {error}") from error
        if text is None:
            if self.path.exists():
                raise InvalidParameter(
                    f"{self._counted} is missing: whether {self.path} is the last state is not known"
                )
            return -1, -1
        words = text.decode("ascii", "replace").split()
        if len(words) != 2 or not words[0].isdecimal() or not words[1].removeprefix("-").isdecimal():
            raise InvalidParameter(f"{self._counted} is damaged: the client cannot go on in this run")
        return int(words[0]), int(words[1])
