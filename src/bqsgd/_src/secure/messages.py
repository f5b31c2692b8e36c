"""The messages of a secure sum as bytes: docs/wire.md. Everything is little-endian.

Readers treat the bytes as hostile. Every length follows from the header and the agreement, and a reader compares it
with the real length before it allocates anything. `client` and `server` check what the contents mean.

A message is a header and a body. Bodies that are a single field are written where they are sent: `header.pack(...)`
followed by the field. Bodies that are a list of parts, one for each client, go through `write_parts` and `read_parts`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import BadSecureMessage, FrameError, WrongRound, WrongSession
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.graph import Thresholds
from bqsgd._src.secure.masks import KEY_BYTES, Lanes, lane_type
from bqsgd._src.secure.sharing import SECRET_BYTES, SHARE_BYTES
from bqsgd._src.wire.fixed import FixedWidth

_MAGIC = b"BQSA"
_VERSION = 2
_HEADER = struct.Struct("<4sHBB16sQQII")
HEADER_BYTES = _HEADER.size
_PUBLIC_KEY_BYTES = 32
_NONCE_BYTES = 16
_SIGNATURE_BYTES = 64
_KEYS_BYTES = HEADER_BYTES + _PUBLIC_KEY_BYTES + _NONCE_BYTES + _SIGNATURE_BYTES
TAG_BYTES = 16
OWN_SEEDS_BYTES = 2 * SECRET_BYTES
MAX_BATCH = 1 << 12
"""The most rounds in a key batch."""
_MOST_HELD = 1 << 24
"""The most bytes of other clients' shares that a client stores for one key batch."""
_SEEDED = 1
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<II")
Bytes = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The messages in the order of the protocol. The server sends those with even numbers, clients the others."""

    BATCH = 0
    KEYS = 1
    KEY_BUNDLE = 2
    SHARES = 3
    SHARE_BUNDLE = 4
    PARTNERS = 5
    PARTNER_BUNDLE = 6
    MASKED = 7
    SURVIVORS = 8
    SIGNATURE = 9
    CERTIFICATE = 10
    UNMASKING = 11


_OWN_AMONG_PARTS = (Kind.SHARES, Kind.PARTNERS)
"""In these messages what the sender says about itself is the part under its own number."""


@dataclass(frozen=True, kw_only=True)
class SumHeader:
    """The header of every message.

    epoch: number of the key batch, which only grows. round, rounds: the first round and how many. client: the client
    that sent the message, or to which the server sends it. seeded: the sender's randomness came from a seed.
    """

    kind: Kind
    epoch: int
    round: int
    client: int
    rounds: int = 1
    seeded: bool = False

    def pack(self, agreement: Agreement) -> bytes:
        """The first bytes of the message."""
        flags = _SEEDED if self.seeded else 0
        session = agreement.session[:16]
        return _HEADER.pack(
            _MAGIC, _VERSION, self.kind, flags, session, self.epoch, self.round, self.rounds, self.client
        )


@dataclass
class KeyBatch:
    """Rounds whose keys and shares are exchanged together. Server and client each add what they know about the batch.

    agreement: that of the cohort of the batch.
    """

    agreement: Agreement
    epoch: int
    first_round: int
    count: int

    def header(self, kind: Kind, client: int, *, round: int | None = None, seeded: bool = False) -> SumHeader:
        """The header of a message about one round, or, without `round`, about the whole batch."""
        first, rounds = (self.first_round, self.count) if round is None else (round, 1)
        return SumHeader(kind=kind, epoch=self.epoch, round=first, rounds=rounds, client=client, seeded=seeded)

    def check(self, header: SumHeader, round: int | None = None) -> None:
        """Raise WrongRound unless a message belongs to this round, or, without `round`, to the whole batch."""
        expected = self.header(header.kind, header.client, round=round, seeded=header.seeded)
        if header != expected:
            raise WrongRound(
                f"a message of epoch {header.epoch} for {header.rounds} rounds from {header.round} on; expected epoch "
                f"{expected.epoch} and {expected.rounds} rounds from {expected.round} on"
            )


def most_bytes(rule: Thresholds, *, rounds: int) -> int:
    """An upper bound on the length of all messages but masked vectors, for key batches of at most `rounds` rounds."""
    # For each number of survivors there are two numbers of trials that a client may keep.
    noise_parts = 2 * (rule.dropouts + 1)
    shares = TAG_BYTES + rounds * (2 + noise_parts) * SHARE_BYTES
    statement = TAG_BYTES + (rule.clients + 7) // 8
    wrapped = KEY_BYTES * rounds * (1 + rule.clients)
    parts = rule.clients * (_ENTRY.size + max(_KEYS_BYTES, shares, statement)) + wrapped
    return HEADER_BYTES + OWN_SEEDS_BYTES + _COUNT.size + parts


def is_sum_message(message: Bytes) -> bool:
    """Whether the bytes claim to be a message of a secure sum, rather than a model or a frame."""
    return bytes(message[: len(_MAGIC)]) == _MAGIC


def _header_fields(message: Bytes) -> tuple[Any, ...]:
    """(version, kind, flags, session, epoch, round, rounds, client) of a message, none of them checked yet."""
    if len(message) < HEADER_BYTES or not is_sum_message(message):
        raise BadSecureMessage(
            f"not a message of a secure sum: it must have at least {HEADER_BYTES} bytes and begin with {_MAGIC!r}"
        )
    return _HEADER.unpack_from(message)[1:]


def message_kind(message: Bytes) -> Kind:
    """The kind that a message claims to be.

    Raises:
        BadSecureMessage: the bytes are not a message of a secure sum.
    """
    kind = _header_fields(message)[1]
    if kind > max(Kind):
        raise BadSecureMessage(f"messages of a secure sum have kinds 0 to {max(Kind)}, got {kind}")
    return Kind(kind)


def sender_of(message: Bytes) -> int:
    """The client that a message claims to come from.

    Raises:
        BadSecureMessage: the bytes are not a message of a secure sum.
    """
    client: int = _header_fields(message)[-1]
    return client


def read_header(message: Bytes, agreement: Agreement, kind: Kind) -> SumHeader:
    """The header of a message, which must be of this kind and of this session.

    Raises:
        BadSecureMessage: another kind, or not a valid header.
        WrongSession: the message belongs to another agreement.
        ForeignClient: the client is not in the roster, or not in the cohort.
    """
    version, stated_kind, flags, session, epoch, round, rounds, client = _header_fields(message)
    if version != _VERSION:
        raise BadSecureMessage(f"this reader knows version {_VERSION}, got {version}")
    if stated_kind != kind:
        raise BadSecureMessage(f"expected a message of kind {kind.name} ({int(kind)}), got kind {stated_kind}")
    if flags & ~_SEEDED:
        raise BadSecureMessage(f"unknown flags {flags:#x}")
    if session != agreement.session[:16]:
        raise WrongSession("the message belongs to another run, roster, cohort, size or set of thresholds")
    too_far = epoch >= 2**63 or round > 2**53 - MAX_BATCH
    if too_far or not 1 <= rounds <= MAX_BATCH or (kind > Kind.PARTNER_BUNDLE and rounds != 1):
        raise BadSecureMessage(f"epoch, round or rounds is out of range: {epoch}, {round}, {rounds}")
    # A request for keys names its cohort only in its body, so its client is looked up in the whole roster.
    (agreement.roster if kind is Kind.BATCH else agreement.members).check(client)
    return SumHeader(kind=kind, epoch=epoch, round=round, rounds=rounds, client=client, seeded=bool(flags & _SEEDED))


def _body(message: Bytes, size: int) -> memoryview:
    body = memoryview(message)[HEADER_BYTES:]
    if len(body) != size:
        raise BadSecureMessage(f"the body must have {size} bytes, got {len(body)}")
    return body


def bits_of(order: Sequence[int], chosen: Collection[int]) -> bytes:
    """A bitmap of the chosen clients: one bit for each client of `order`, the first in the lowest bit."""
    members = frozenset(chosen)
    return np.packbits(np.array([client in members for client in order], np.bool_), bitorder="little").tobytes()


def chosen_of(packed: Bytes, order: Sequence[int]) -> tuple[int, ...]:
    """The clients of `order` whose bits are set."""
    size = len(order)
    if len(packed) != (size + 7) // 8:
        raise BadSecureMessage(f"{size} bits take {(size + 7) // 8} bytes, got {len(packed)}")
    octets: npt.NDArray[np.uint8] = np.frombuffer(packed, np.uint8)
    bits = np.unpackbits(octets, bitorder="little")
    # Without this a list would have several encodings, and a digest of the bytes would not identify it.
    if bits[size:].any():
        raise BadSecureMessage("the bits after the last client must be zero")
    return tuple(compress(order, bits))


def write_batch(header: SumHeader, agreement: Agreement) -> bytes:
    """Exchange 1, from the server: ask for keys for these rounds, and name their width and cohort.

    The session is that without a cohort and with the widest modulus, because the reader does not know them yet.
    """
    cohort = bits_of(agreement.roster.clients, agreement.members.clients)
    return header.pack(agreement.before_batches) + bytes([agreement.width]) + cohort


def read_batch(message: Bytes, agreement: Agreement) -> tuple[SumHeader, Agreement]:
    """The header of a request for keys, and the agreement for the cohort and the width that it names.

    Raises:
        TooFewClients: the cohort does not have the agreed number of clients.
        BadSecureMessage: the width is not from 2 to the widest that was agreed on.
    """
    header = read_header(message, agreement, Kind.BATCH)
    body = memoryview(message)[HEADER_BYTES:]
    if not body or not 2 <= body[0] <= agreement.width:
        stated = body[0] if body else "nothing"
        raise BadSecureMessage(f"the width of a key batch must be from 2 to {agreement.width}, got {stated}")
    return header, agreement.of(chosen_of(body[1:], agreement.roster.clients), width=body[0])


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Exchange 1, from a client: its signed public key, and a fresh nonce for the key batch.

    message: all bytes of the message, nonce included. digest: their SHA-256. All keys of the batch are derived from the
    digest, so the keys of an earlier batch are useless in this one.
    """

    header: SumHeader
    cipher: bytes
    signature: bytes
    message: bytes
    digest: bytes

    def verify(self, agreement: Agreement) -> None:
        """Raise BadSignature if the client of the roster did not sign this key for this run."""
        statement = keys_statement(agreement, self.header.client, self.cipher)
        agreement.members.verify(self.header.client, self.signature, statement)


def keys_statement(agreement: Agreement, client: int, cipher: bytes) -> bytes:
    """The bytes that a client signs to use a key in a run."""
    return b"bqsgd.secure.keys.v2\x00" + agreement.run_digest + _COUNT.pack(client) + cipher


def read_keys(message: Bytes, agreement: Agreement) -> Keys:
    """Read a client's keys. The signature is not verified here."""
    header = read_header(message, agreement, Kind.KEYS)
    body = bytes(_body(message, _KEYS_BYTES - HEADER_BYTES))
    return Keys(
        header=header,
        cipher=body[:_PUBLIC_KEY_BYTES],
        signature=body[-_SIGNATURE_BYTES:],
        message=bytes(message),
        digest=hashlib.sha256(message).digest(),
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A message of parts, one for each client.

    own: what the sender says about itself, apart from the parts. In SHARES, the wrapped keys of its masks: for each
    round a check of the mask seed, then the key of the mask that it shares with each receiver, in ascending order,
    hidden by the mask seed of the round. In PARTNERS, a bitmap of the mask neighbours with which it shares masks. In
    UNMASKING, its self seed, then its first noise seed that is not needed (zeros if all its noise is needed); both are
    zeros on a sparse graph, where they are opened from shares only. Otherwise empty.

    parts: in KEY_BUNDLE, Keys messages. In SHARES and SHARE_BUNDLE, encrypted shares, by receiver and by sender. In
    PARTNERS, a tag on the bitmap for each holder of the sender's shares. In PARTNER_BUNDLE, tag and bitmap by sender.
    In UNMASKING, a share of the same two seeds for each other survivor, and of the mask seed for each missing client.
    The lengths differ, 32 and 16 bytes, so that a server cannot take one for the other.
    """

    header: SumHeader
    own: bytes
    parts: Mapping[int, bytes]

    def masked_with(self, agreement: Agreement) -> tuple[int, ...]:
        """In SHARES: the clients whose masks with the sender are wrapped, ascending."""
        return tuple(client for client in agreement.graph.masks(self.header.client) if client in self.parts)


def write_parts(header: SumHeader, agreement: Agreement, parts: Mapping[int, Bytes], *, own: bytes = b"") -> bytes:
    """A message of parts in the order of client numbers; for `own` see `Parts`."""
    before = own if header.kind is Kind.UNMASKING else b""
    if header.kind in _OWN_AMONG_PARTS:
        parts = {**parts, header.client: own}
    pieces: list[Bytes] = [header.pack(agreement), before, _COUNT.pack(len(parts))]
    for client, part in sorted(parts.items()):
        pieces += [_ENTRY.pack(client, len(part)), part]
    return b"".join(pieces)


def read_parts(message: Bytes, agreement: Agreement, kind: Kind) -> Parts:
    """Read a message of parts. What they mean (keys, bitmaps, tags, the right share for a client) the caller checks."""
    header = read_header(message, agreement, kind)
    start = HEADER_BYTES + (OWN_SEEDS_BYTES if kind is Kind.UNMASKING else 0)
    own, body = bytes(message[HEADER_BYTES:start]), memoryview(message)[start:]
    if len(body) < _COUNT.size:
        raise BadSecureMessage("the message ends before the number of its parts")
    (count,) = _COUNT.unpack_from(body)
    # The count is only a claim of the sender, so it is bounded before the loop.
    if count > agreement.rule.clients:
        raise BadSecureMessage(f"{count} parts for {agreement.rule.clients} clients")
    parts: dict[int, bytes] = {}
    at, last = _COUNT.size, -1
    for _ in range(count):
        if len(body) - at < _ENTRY.size:
            raise BadSecureMessage("the message ends within its parts")
        client, size = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        if client <= last:
            raise BadSecureMessage("parts must be in the order of client numbers, each client once")
        if size > len(body) - at:
            raise BadSecureMessage(f"the message ends within a part of {size} bytes")
        parts[agreement.members.check(client)] = bytes(body[at : at + size])
        at, last = at + size, client
    if at != len(body):
        raise BadSecureMessage(f"{len(body) - at} bytes after the last part")
    if kind in _OWN_AMONG_PARTS:
        own = parts.pop(header.client, b"")
    for client, part in parts.items():
        allowed = _part_sizes(kind, agreement, header.rounds, client)
        if len(part) not in allowed:
            lengths = " or ".join(map(str, allowed))
            raise BadSecureMessage(f"the part of client {client} must have {lengths} bytes, got {len(part)}")
    read = Parts(header=header, own=own, parts=parts)
    wrapped = KEY_BYTES * header.rounds * (1 + len(read.masked_with(agreement)))
    if kind is Kind.SHARES and len(own) != wrapped:
        raise BadSecureMessage(f"the wrapped keys of the sender must have {wrapped} bytes, got {len(own)}")
    return read


def _part_sizes(kind: Kind, agreement: Agreement, rounds: int, client: int) -> tuple[int, ...]:
    """The lengths that the part of a client may have in this kind of message."""
    sealed, bitmap = sealed_size(agreement, rounds), (len(agreement.graph.masks(client)) + 7) // 8
    sizes: dict[Kind, tuple[int, ...]] = {
        Kind.KEY_BUNDLE: (_KEYS_BYTES,),
        Kind.SHARES: (sealed,),
        Kind.SHARE_BUNDLE: (sealed,),
        Kind.PARTNERS: (TAG_BYTES,),
        Kind.PARTNER_BUNDLE: (TAG_BYTES + bitmap,),
        Kind.UNMASKING: (SHARE_BYTES, 2 * SHARE_BYTES),
    }
    return sizes[kind]


def secrets_per_round(agreement: Agreement) -> int:
    """Secrets that a client shares in each round: self seed, mask seed, and a seed for each part of its noise."""
    return 2 + agreement.noise.parts


def sealed_size(agreement: Agreement, rounds: int) -> int:
    """Bytes of the encrypted shares for one receiver."""
    return TAG_BYTES + rounds * secrets_per_round(agreement) * SHARE_BYTES


def most_rounds(agreement: Agreement) -> int:
    """The most rounds of a key batch that a client accepts. It stores the shares of all of them at once."""
    holders = agreement.rule.clients - 1 if agreement.rule.sparse is None else agreement.rule.sparse.holders
    return max(1, min(MAX_BATCH, _MOST_HELD // (holders * secrets_per_round(agreement) * SHARE_BYTES)))


def write_masked(header: SumHeader, agreement: Agreement, lanes: Lanes) -> bytearray:
    """Exchange 3, from a client: masked codes modulo 2^width, packed with that many bits."""
    coder = FixedWidth(1 << agreement.width)
    message = bytearray(HEADER_BYTES + coder.payload_bytes(agreement.dimension))
    message[:HEADER_BYTES] = header.pack(agreement)
    codes = lanes & lanes.dtype.type((1 << agreement.width) - 1)
    coder.pack(codes.astype(coder.dtype, copy=False), np.frombuffer(message, np.uint8)[HEADER_BYTES:])
    return message


def read_masked(message: Bytes, agreement: Agreement) -> tuple[SumHeader, Lanes]:
    """The masked codes as lanes."""
    header = read_header(message, agreement, Kind.MASKED)
    coder = FixedWidth(1 << agreement.width)
    payload = np.frombuffer(_body(message, coder.payload_bytes(agreement.dimension)), np.uint8)
    try:
        codes = coder.unpack(payload, agreement.dimension)
    except FrameError as error:
        raise BadSecureMessage(str(error)) from error
    return header, codes.astype(lane_type(agreement.width), copy=False)


def write_survivors(header: SumHeader, agreement: Agreement, survivors: tuple[int, ...]) -> bytes:
    """Exchange 4, from the server: the survivors, one bit for each client that takes part, as in the roster."""
    return header.pack(agreement) + bits_of(agreement.members.clients, survivors)


def read_survivors(message: Bytes, agreement: Agreement) -> tuple[SumHeader, tuple[int, ...]]:
    """The survivors' numbers, ascending."""
    header = read_header(message, agreement, Kind.SURVIVORS)
    return header, chosen_of(memoryview(message)[HEADER_BYTES:], agreement.members.clients)


def survivors_statement(agreement: Agreement, *, epoch: int, round: int, survivors: tuple[int, ...]) -> bytes:
    """The bytes that a client signs: this list of survivors, in this round of this session."""
    listed = hashlib.sha256(np.array(survivors, dtype="<u4").tobytes()).digest()
    return b"bqsgd.secure.survivors.v2\x00" + agreement.session + struct.pack("<QQ", epoch, round) + listed


def read_signature(message: Bytes, agreement: Agreement) -> tuple[SumHeader, bytes]:
    """Exchange 4, from a client: its signature on the list of survivors, which is not verified here."""
    header = read_header(message, agreement, Kind.SIGNATURE)
    return header, bytes(_body(message, _SIGNATURE_BYTES))


def write_certificate(header: SumHeader, agreement: Agreement, signatures: Mapping[int, bytes]) -> bytes:
    """Exchange 5, from the server: a bit for each member of the committee that signed, then the signatures."""
    committee = agreement.graph.committee
    ordered = [signatures[client] for client in committee if client in signatures]
    return b"".join([header.pack(agreement), bits_of(committee, signatures), *ordered])


def read_certificate(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, bytes]]:
    """Signatures by client, which are not verified here."""
    header = read_header(message, agreement, Kind.CERTIFICATE)
    committee, body = agreement.graph.committee, bytes(memoryview(message)[HEADER_BYTES:])
    size = (len(committee) + 7) // 8
    signers = chosen_of(body[:size], committee)
    if len(body) - size != _SIGNATURE_BYTES * len(signers):
        raise BadSecureMessage(f"{len(signers)} signatures take {_SIGNATURE_BYTES * len(signers)} bytes")
    starts = range(size, len(body), _SIGNATURE_BYTES)
    return header, {client: body[at : at + _SIGNATURE_BYTES] for client, at in zip(signers, starts, strict=True)}
