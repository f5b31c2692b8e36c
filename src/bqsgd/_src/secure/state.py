"""The state of a client of a secure sum: in memory, and in a file if its process ends between messages.

`StateFile` makes a client that is restarted for every message as safe as one that keeps running: the state is written
before an answer leaves, and an older state is not accepted again. So a client never signs a second list of survivors
and never masks a second vector, even if it was restarted or somebody put back an earlier file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from bqsgd._src.errors import InvalidParameter, RoundUsed, SecureSumError, UnsafeFile, WrongRound
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.masks import KEY_BYTES
from bqsgd._src.secure.messages import KeyBatch, Keys, read_keys
from bqsgd._src.storage import one_at_a_time, read_regular, write_atomic

_FILE = struct.Struct("<4sHQ")
_MAGIC = b"BQSS"
_VERSION = 2
_MAX_FILE = 1 << 30
_MOST_RUNS = 8
"""The runs of which a folder keeps a client's state. In others the client sits out the rest of a key batch."""
_Value = TypeVar("_Value")
_unhex = bytes.fromhex


@dataclass
class RoundState:
    """What a client has answered in a round after it masked its vector."""

    survivors: tuple[int, ...] | None = None
    signature: bytes = b""
    unmasking: bytes = b""


@dataclass
class BatchState(KeyBatch):
    """What a client knows about a key batch.

    keys: this client's Keys message. secrets: by round, the seed from which its other secrets follow. peers: the
    holders whose keys came. pairs: for each mask neighbour, the concatenated secrets of the common masks. bundle,
    share_bundle: digests of the server's messages, by which the client notices a second, different one. shares,
    statement: this client's answers. partners: the peers that have shown that they know this client's keys. strangers:
    for each of them, the mask neighbours with which it shares no mask. rounds: those that were masked.
    """

    keys: bytes
    secrets: dict[int, bytes]
    peers: dict[int, Keys] = field(default_factory=dict)
    pairs: dict[int, bytes] = field(default_factory=dict)
    bundle: bytes = b""
    shares: bytes = b""
    share_bundle: bytes = b""
    partners: frozenset[int] = frozenset()
    statement: bytes = b""
    strangers: dict[int, frozenset[int]] | None = None
    rounds: dict[int, RoundState] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """SHA-256 of this client's Keys message."""
        return hashlib.sha256(self.keys).digest()

    def at(self, stream: bytes, round: int) -> bytes:
        """The piece for one round of a stream that has a piece for each round of the batch."""
        start = KEY_BYTES * (round - self.first_round)
        return stream[start : start + KEY_BYTES]

    @property
    def complete(self) -> bool:
        """Whether keys and shares, and on a sparse graph the statements, have come, so that vectors can be masked."""
        return bool(self.share_bundle) and (self.agreement.rule.sparse is None or self.strangers is not None)


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
    fields = {"run": agreement.run_digest, "client": client, **vars(state)}
    return json.dumps(fields, separators=(",", ":"), default=_as_json).encode()


def _as_json(value: Any) -> Any:
    """What JSON has no type for. The fields of a dataclass are written in the order of their declaration."""
    match value:
        case bytes():
            return value.hex()
        case frozenset():
            return sorted(value)
        case Keys():
            return value.message
        case Agreement():
            return [value.cohort, value.width]
        case BatchState():
            return vars(value)
        case RoundState():
            return list(vars(value).values())
    raise TypeError(f"{type(value).__name__} is not part of a client's state")


def read_state(content: bytes, agreement: Agreement, client: int) -> ClientState:
    """Read what `write_state` wrote.

    Raises:
        InvalidParameter: the bytes are not the state of this client in this run.
    """
    try:
        fields = json.loads(content)
        if (fields["run"], fields["client"]) != (agreement.run_digest.hex(), client):
            raise InvalidParameter("the stored state belongs to another run or client")
        batch = None if fields["batch"] is None else _read_batch(fields["batch"], agreement)
        common = _by_number(fields["common"], lambda pair: (_unhex(pair[0]), _unhex(pair[1])))
        return ClientState(int(fields["epoch"]), _unhex(fields["cipher"]), common, batch)
    except InvalidParameter:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, SecureSumError) as error:
        raise InvalidParameter(f"the stored state of client {client} cannot be read: {error}") from error


def _read_batch(fields: dict[str, Any], agreement: Agreement) -> BatchState:
    cohort, width = fields["agreement"]
    agreed = agreement.of(cohort, width=int(width))
    strangers = fields["strangers"]
    return BatchState(
        agreement=agreed,
        epoch=int(fields["epoch"]),
        first_round=int(fields["first_round"]),
        count=int(fields["count"]),
        keys=_unhex(fields["keys"]),
        secrets=_by_number(fields["secrets"], _unhex),
        peers=_by_number(fields["peers"], lambda text: read_keys(_unhex(text), agreed)),
        pairs=_by_number(fields["pairs"], _unhex),
        bundle=_unhex(fields["bundle"]),
        shares=_unhex(fields["shares"]),
        share_bundle=_unhex(fields["share_bundle"]),
        partners=frozenset(fields["partners"]),
        statement=_unhex(fields["statement"]),
        strangers=None if strangers is None else _by_number(strangers, frozenset),
        rounds=_by_number(fields["rounds"], _read_round),
    )


def _read_round(fields: list[Any]) -> RoundState:
    survivors, signature, unmasking = fields
    return RoundState(None if survivors is None else tuple(survivors), _unhex(signature), _unhex(unmasking))


def _by_number(entries: dict[str, Any], read: Callable[[Any], _Value]) -> dict[int, _Value]:
    """JSON has only text as keys: turn them into client or round numbers again, and read the values."""
    return {int(number): read(value) for number, value in entries.items()}


def _lock_of(path: Path) -> Path:
    """The lock that is held from reading the last state to writing the next."""
    return path.with_name(f"{path.name}.lock")


def _numbers(path: Path, count: int) -> list[int] | None:
    """The `count` numbers in a small file; None if there is no such file.

    Raises:
        InvalidParameter: the file cannot be read, or holds something else.
    """
    try:
        content = read_regular(path, limit=64)
    except (OSError, UnsafeFile) as error:
        raise InvalidParameter(f"{path} cannot be read: {error}") from error
    if content is None:
        return None
    words = content.decode("ascii", "replace").split()
    if len(words) != count or not all(word.isdecimal() for word in words):
        # Fail closed: a client that guessed its last epoch could sign a second list of survivors.
        raise InvalidParameter(f"{path} is damaged: it must hold {count} numbers. The client cannot continue this run")
    return [int(word) for word in words]


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
        # The lock covers the comparison and the write: two processes must not both find the epoch unused.
        with one_at_a_time(_lock_of(self.path)):
            last = self._last()
            if epoch <= last:
                raise WrongRound(f"epoch {epoch} is not above {last}, the last one in {self.path.name}")
            write_atomic(self.path, f"{epoch}\n".encode())
        return epoch

    def _last(self) -> int:
        numbers = _numbers(self.path, 1)
        return -1 if numbers is None else numbers[0]


class StateFile:
    """Keeps a client's state between processes: the state in `path`, and in `path`.step how often it was written.

    The count is written first. A state without the last count is stale: somebody put back an earlier one, or the
    process ended between the two writes. The client then knows its last epoch and nothing else, and takes part again
    from the next key batch on.
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

    def forget(self, epoch: int) -> None:
        """Delete the state and keep the epoch: the run is over, and nobody should find the secrets later."""
        self.save(epoch, b"")
        self.path.unlink(missing_ok=True)

    def forget_oldest(self, pattern: str) -> None:
        """If this state is not there yet, delete all but the newest states of other runs that match the pattern.

        Their counts and epochs stay.
        """
        if self.path.exists():
            return
        states = []
        for path in self.path.parent.glob(pattern):
            with suppress(FileNotFoundError):  # another process has deleted its own since
                states.append((path.stat().st_mtime, path))
        for _, path in sorted(states)[: max(0, len(states) - _MOST_RUNS + 1)]:
            with one_at_a_time(_lock_of(path)):
                path.unlink(missing_ok=True)

    def load(self) -> tuple[int, bytes | None]:
        """The last epoch (-1 before the first), and the last state, or None if it is stale.

        Raises:
            InvalidParameter: a file is damaged.
        """
        self._step, epoch = self._last()
        try:
            content = read_regular(self.path, limit=_MAX_FILE)
        except (OSError, UnsafeFile) as error:
            raise InvalidParameter(f"{self.path} cannot be read: {error}") from error
        if content is None:
            return epoch, None
        body, digest = content[:-32], content[-32:]
        if len(body) < _FILE.size or hashlib.sha256(body).digest() != digest or body[:4] != _MAGIC:
            raise InvalidParameter(f"{self.path} is damaged; delete it, and the client sits out the current key batch")
        _, version, step = _FILE.unpack_from(body)
        # Empty if the process ended within `forget`, before it deleted the file.
        return epoch, body[_FILE.size :] or None if (version, step) == (_VERSION, self._step) else None

    def _last(self) -> tuple[int, int]:
        """(count, epoch) of the last save; -1 for both before the first."""
        numbers = _numbers(self._counted, 2)
        if numbers is None:
            # A state without its count may be any earlier one, so it is not accepted.
            if self.path.exists():
                raise InvalidParameter(
                    f"{self._counted} is missing, so it is unknown whether {self.path} is the last state"
                )
            return -1, -1
        return numbers[0], numbers[1]
