"""The state of a client of a secure sum: in memory, and in a file if its process ends between messages.

`StateFile` makes a client that is restarted for every message as safe as one that keeps running: the state is written
before an answer leaves, and an older state is not accepted again. So a client never signs a second list of survivors
and never masks a second vector, even if it was restarted or somebody put back an earlier file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bqsgd._src.errors import InvalidParameter, RoundUsed, SecureSumError, UnsafeFile, WrongRound
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.messages import Keys
from bqsgd._src.storage import one_at_a_time, open_regular, read_regular, write_atomic

_FILE = struct.Struct("<4sHQ")
_MAGIC = b"BQSS"
_VERSION = 1
_MAX_FILE = 1 << 30


@dataclass
class Secrets:
    """The secrets of a client for one round."""

    self_seed: bytes
    mask_seed: bytes
    noise_seeds: list[bytes]


@dataclass
class RoundState:
    """What a client has answered in a round after it masked its vector.

    check: the secret randomness that decides which signatures are verified on a sparse graph. refused: a forged
    signature came, and the client reveals nothing in this round.
    """

    survivors: tuple[int, ...] | None = None
    signature: bytes = b""
    unmasking: bytes = b""
    refused: bool = False
    check: bytes = b""


@dataclass
class BatchState:
    """The state of a key batch: several rounds whose keys and shares are sent together.

    agreement: that of the cohort of the batch. keys: this client's Keys message. secrets: by round. peers: the holders
    whose keys came. pairs: for each mask neighbour, the concatenated keys of the common masks. bundle, share_bundle:
    digests of the server's messages, so that different ones are noticed. shares, statement: this client's answers.
    partners: the clients whose shares came, None before that. held: their shares. strangers: for each client whose
    shares are held, the mask neighbours with which it shares no mask. rounds: those that were masked.
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
        """SHA-256 of this client's Keys message."""
        return hashlib.sha256(self.keys).digest()


@dataclass
class ClientState:
    """Everything that a client must remember.

    epoch: the last one, -1 before the first. cipher: the private X25519 key, drawn once in a run. common: for each
    client, its public key and the secret shared with it.
    """

    epoch: int = -1
    cipher: bytes = b""
    common: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    batch: BatchState | None = None


def write_state(state: ClientState, agreement: Agreement, client: int) -> bytes:
    """The state as JSON bytes that name the run and the client."""
    batch = state.batch
    fields: dict[str, Any] = {
        "run": agreement.run_digest.hex(),
        "client": client,
        "epoch": state.epoch,
        "cipher": state.cipher.hex(),
        "common": {str(other): [key.hex(), secret.hex()] for other, (key, secret) in state.common.items()},
        "batch": None,
    }
    if batch is not None:
        fields["batch"] = {
            "cohort": batch.agreement.cohort,
            "epoch": batch.epoch,
            "first_round": batch.first_round,
            "count": batch.count,
            "keys": batch.keys.hex(),
            "secrets": {
                str(number): [drawn.self_seed.hex(), drawn.mask_seed.hex(), [seed.hex() for seed in drawn.noise_seeds]]
                for number, drawn in batch.secrets.items()
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
                    answered.survivors,
                    answered.signature.hex(),
                    answered.unmasking.hex(),
                    answered.refused,
                    answered.check.hex(),
                ]
                for number, answered in batch.rounds.items()
            },
        }
    return json.dumps(fields, separators=(",", ":")).encode()


def _peer_text(keys: Keys, agreement: Agreement) -> str:
    return messages.write_keys(
        keys.header, agreement, cipher=keys.cipher, nonce=keys.nonce, signature=keys.signature
    ).hex()


def read_state(content: bytes, agreement: Agreement, client: int) -> ClientState:
    """Read what `write_state` wrote.

    Raises:
        InvalidParameter: the bytes are not the state of this client in this run.
    """
    try:
        fields = json.loads(content)
        if (fields["run"], fields["client"]) != (agreement.run_digest.hex(), client):
            raise InvalidParameter("the stored state belongs to another run or client")
        common = {
            int(other): (bytes.fromhex(key), bytes.fromhex(secret)) for other, (key, secret) in fields["common"].items()
        }
        state = ClientState(int(fields["epoch"]), bytes.fromhex(fields["cipher"]), common)
        if fields["batch"] is not None:
            state.batch = _read_batch(fields["batch"], agreement)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, SecureSumError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(f"the stored state of client {client} cannot be read: {error}") from error
    return state


def _read_batch(fields: dict[str, Any], agreement: Agreement) -> BatchState:
    agreed = agreement if fields["cohort"] is None else agreement.of(fields["cohort"])
    return BatchState(
        agreement=agreed,
        epoch=int(fields["epoch"]),
        first_round=int(fields["first_round"]),
        count=int(fields["count"]),
        keys=bytes.fromhex(fields["keys"]),
        secrets={
            int(number): Secrets(bytes.fromhex(self_), bytes.fromhex(mask), [bytes.fromhex(seed) for seed in noise])
            for number, (self_, mask, noise) in fields["secrets"].items()
        },
        peers={int(other): messages.read_keys(bytes.fromhex(text), agreed) for other, text in fields["peers"].items()},
        pairs={int(other): bytes.fromhex(keys) for other, keys in fields["pairs"].items()},
        bundle=bytes.fromhex(fields["bundle"]),
        shares=bytes.fromhex(fields["shares"]),
        share_bundle=bytes.fromhex(fields["share_bundle"]),
        partners=None if fields["partners"] is None else frozenset(fields["partners"]),
        held={int(other): bytes.fromhex(text) for other, text in fields["held"].items()},
        statement=bytes.fromhex(fields["statement"]),
        strangers=None
        if fields["strangers"] is None
        else {int(other): frozenset(without) for other, without in fields["strangers"].items()},
        rounds={
            int(number): RoundState(
                None if survivors is None else tuple(survivors),
                bytes.fromhex(signature),
                bytes.fromhex(unmasking),
                bool(refused),
                bytes.fromhex(check),
            )
            for number, (survivors, signature, unmasking, refused, check) in fields["rounds"].items()
        },
    )


def _lock_of(path: Path) -> Path:
    """The lock that is held from reading the last state to writing the next."""
    return path.with_name(f"{path.name}.lock")


class EpochFile:
    """Remembers the last epoch durably. A client that forgot it after a restart could sign a second list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, epoch: int | None = None) -> int:
        """Return the last epoch, -1 before the first. With an argument, store that epoch first, durably.

        Raises:
            WrongRound: the epoch is not larger than the last. If two processes begin an epoch at once, one gets this.
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
                f"{self.path} does not hold the number of an epoch: the client cannot continue in this run"
            )
        return int(text)


class StateFile:
    """Keeps a client's state between processes: the state in `path`, and in `path`.step how often it was written.

    The count is written first. A state without the last count is stale: somebody put back an earlier one, or the
    process ended between the two writes. The client then knows its last epoch and nothing else, and takes part again
    from the next batch on.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._counted = path, path.with_name(path.name + ".step")
        self._step: int | None = None
        """The count that this object last read or wrote."""

    def save(self, epoch: int, content: bytes) -> None:
        """Store the next state. When this returns, it survives a power cut.

        Raises:
            RoundUsed: another process has written since `load`, and may have used the same masks for another vector.
        """
        with one_at_a_time(_lock_of(self.path)):
            last = self._last()[0]
            if self._step not in (None, last):
                raise RoundUsed(f"another process of this client has written {self.path}; run one process at a time")
            self._step = step = last + 1
            # The count before the state. In the other order a crash in between leaves a state whose number the next
            # save uses again: put back later, it would pass for the last one.
            write_atomic(self._counted, f"{step} {epoch}\n".encode())
            body = _FILE.pack(_MAGIC, _VERSION, step) + content
            write_atomic(self.path, body + hashlib.sha256(body).digest())

    def load(self) -> tuple[int, bytes | None]:
        """The last epoch (-1 before the first), and the last state, or None if it is stale.

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
        _, version, state_step = _FILE.unpack_from(body)
        return epoch, body[_FILE.size :] if (version, state_step) == (_VERSION, step) else None

    def _last(self) -> tuple[int, int]:
        try:
            text = read_regular(self._counted, limit=64)
        except (OSError, UnsafeFile) as error:
            raise InvalidParameter(f"{self._counted} cannot be read: {error}") from error
        if text is None:
            if self.path.exists():
                raise InvalidParameter(
                    f"{self._counted} is missing, so it is unknown whether {self.path} is the last state"
                )
            return -1, -1
        words = text.decode("ascii", "replace").split()
        if len(words) != 2 or not words[0].isdecimal() or not words[1].removeprefix("-").isdecimal():
            raise InvalidParameter(f"{self._counted} is damaged: the client cannot continue in this run")
        return int(words[0]), int(words[1])
