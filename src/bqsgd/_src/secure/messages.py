"""The messages of a secure sum as bytes: docs/wire.md. Everything is little-endian.

Readers treat the bytes as hostile. Every length follows from the header and the agreement, and a reader compares it
with the real length before it allocates anything. `client` and `server` check what the contents mean.

A message is a header and a body. Bodies that are a single field are written where they are sent: `header.pack(...)`
followed by the field. Bodies with a part for each of several neighbours go through `write_parts` and `read_parts`.
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
from bqsgd._src.secure.masks import Lanes, lane_type
from bqsgd._src.secure.sharing import SECRET_BYTES, SHARE_BYTES
from bqsgd._src.wire.fixed import FixedWidth

_MAGIC = b"BQSA"
_VERSION = 3
_HEADER = struct.Struct("<4sHBB16sQQII")
HEADER_BYTES = _HEADER.size
_PUBLIC_KEY_BYTES = 32
_NONCE_BYTES = 16
_SIGNATURE_BYTES = 64
_KEYS_BYTES = HEADER_BYTES + _PUBLIC_KEY_BYTES + _NONCE_BYTES + _SIGNATURE_BYTES
TAG_BYTES = 16
MAX_BATCH = 1 << 12
"""The most rounds in a key batch."""
_MOST_HELD = 1 << 24
"""The most bytes of secrets and corrections that a client stores for one key batch."""
_COUNT = struct.Struct("<I")
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
    SILENT = 12
    RECOVERY = 13


@dataclass(frozen=True, kw_only=True)
class SumHeader:
    """The header of every message.

    epoch: number of the key batch, which only grows. round, rounds: the first round and how many. client: the client
    that sent the message, or to which the server sends it.
    """

    kind: Kind
    epoch: int
    round: int
    client: int
    rounds: int = 1

    def pack(self, agreement: Agreement) -> bytes:
        """The first bytes of the message."""
        session = agreement.session[:16]
        return _HEADER.pack(_MAGIC, _VERSION, self.kind, 0, session, self.epoch, self.round, self.rounds, self.client)


@dataclass
class KeyBatch:
    """Rounds whose keys and shares are exchanged together. Server and client each add what they know about the batch.

    agreement: that of the cohort of the batch.
    """

    agreement: Agreement
    epoch: int
    first_round: int
    count: int

    def header(self, kind: Kind, client: int, *, round: int | None = None) -> SumHeader:
        """The header of a message about one round, or, without `round`, about the whole batch."""
        first, rounds = (self.first_round, self.count) if round is None else (round, 1)
        return SumHeader(kind=kind, epoch=self.epoch, round=first, rounds=rounds, client=client)

    def about(self, purpose: str, *, client: int, round: int) -> bytes:
        """Names one secret of one client in one round: the first bytes of what its check is a digest of."""
        named = struct.pack("<QQQ", self.epoch, client, round)
        return f"bqsgd.secure.{purpose}.v3".encode() + b"\x00" + self.agreement.session + named

    def check(self, header: SumHeader, round: int | None = None) -> None:
        """Raise WrongRound unless a message belongs to this round, or, without `round`, to the whole batch."""
        expected = self.header(header.kind, header.client, round=round)
        if header != expected:
            raise WrongRound(
                f"a message of epoch {header.epoch} for {header.rounds} rounds from {header.round} on; expected epoch "
                f"{expected.epoch} and {expected.rounds} rounds from {expected.round} on"
            )


def most_bytes(rule: Thresholds, *, rounds: int) -> int:
    """An upper bound on the length of all messages but masked vectors, for key batches of at most `rounds` rounds."""
    bits = (rule.clients + 7) // 8
    parts = rule.clients * max(_KEYS_BYTES, TAG_BYTES + bits)
    return HEADER_BYTES + 2 * bits + parts + rounds * SHARE_BYTES * _most_shares(rule.clients)


def _most_shares(holders: int) -> int:
    """The most pieces of 16 bytes that a client sends about one round: three checks, and for each holder a correction
    of two shares and a wrapped secret."""
    return 3 * (1 + holders)


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
    if flags:
        raise BadSecureMessage(f"unknown flags {flags:#x}")
    if session != agreement.session[:16]:
        raise WrongSession("the message belongs to another run, roster, cohort, size or set of thresholds")
    too_far = epoch >= 2**63 or round > 2**53 - MAX_BATCH
    if too_far or not 1 <= rounds <= MAX_BATCH or (kind > Kind.PARTNER_BUNDLE and rounds != 1):
        raise BadSecureMessage(f"epoch, round or rounds is out of range: {epoch}, {round}, {rounds}")
    # A request for keys names its cohort only in its body, so its client is looked up in the whole roster.
    (agreement.roster if kind is Kind.BATCH else agreement.members).check(client)
    return SumHeader(kind=kind, epoch=epoch, round=round, rounds=rounds, client=client)


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
    return b"bqsgd.secure.keys.v3\x00" + agreement.run_digest + _COUNT.pack(client) + cipher


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
class Corrections:
    """What a client tells the server about its secrets of one round.

    Both ends of a pair derive the shares that they hold of each other's secrets. The polynomial of a secret goes
    through the derived shares of the first holders; the others' differ from it by a correction (`sharing`).

    seed_check: identifies the self seed. self_check, mask_check: identify the polynomials of the self seed and of the
    mask seed. self_shares, mask_shares: holder -> correction, for the holders that need one. wrapped: on a sparse
    graph, the secrets of the pairs that share masks, hidden by the mask seed.
    """

    seed_check: bytes
    self_check: bytes
    mask_check: bytes
    self_shares: Mapping[int, bytes]
    mask_shares: Mapping[int, bytes]
    wrapped: bytes = b""

    def pack(self) -> bytes:
        """The bytes about one round."""
        shares = [*self.self_shares.values(), *self.mask_shares.values()]
        return b"".join([self.seed_check, self.self_check, self.mask_check, *shares, self.wrapped])


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A message with a part for each of several neighbours of `header.client`.

    own: what the sender says about itself, after the parts. In SHARES, its `Corrections` of each round. In PARTNERS, a
    bitmap of the mask neighbours with which it shares masks. In UNMASKING, a seed: with its first noise part that is
    not needed begins a chain that ends with its self seed (`noise_shares`). Otherwise empty.

    parts: in KEY_BUNDLE, Keys messages. In SHARES and SHARE_BUNDLE, a tag by which the receiver knows that the sender
    has its fresh keys. In PARTNERS, on a sparse graph, a tag on the bitmap for each partner. In PARTNER_BUNDLE, tag
    and bitmap by sender. In UNMASKING, a share of the mask seed of each missing client. In RECOVERY, a share of the
    self seed of each survivor that the server asked about.
    """

    header: SumHeader
    own: bytes
    parts: Mapping[int, bytes]

    def masked_with(self, agreement: Agreement) -> tuple[int, ...]:
        """In SHARES: the clients with which the sender shares masks, ascending."""
        return tuple(client for client in agreement.graph.masks(self.header.client) if client in self.parts)

    def corrections(self, agreement: Agreement, round: int) -> Corrections:
        """In SHARES: what the sender says about the secrets of a round."""
        holders, size = sorted(self.parts), len(self.own) // self.header.rounds
        first = size * (round - self.header.round)
        pieces = iter([self.own[at : at + SHARE_BYTES] for at in range(first, first + size, SHARE_BYTES)])
        threshold = threshold_of(agreement, len(holders))
        return Corrections(
            seed_check=next(pieces),
            self_check=next(pieces),
            mask_check=next(pieces),
            self_shares={holder: next(pieces) for holder in holders[threshold - 1 :]},
            mask_shares={holder: next(pieces) for holder in holders[threshold:]},
            wrapped=b"".join(pieces),
        )


def threshold_of(agreement: Agreement, holders: int) -> int:
    """Shares that open a secret with this many holders."""
    return min(agreement.rule.share_threshold, holders)


def write_parts(header: SumHeader, agreement: Agreement, parts: Mapping[int, Bytes], *, own: bytes = b"") -> bytes:
    """A bit for each neighbour that has a part, the parts in the order of client numbers, then `own` (`Parts`)."""
    near = agreement.graph.holders(header.client)
    ordered = [parts[client] for client in near if client in parts]
    return b"".join([header.pack(agreement), bits_of(near, parts), *ordered, own])


def read_parts(message: Bytes, agreement: Agreement, kind: Kind) -> Parts:
    """Read a message of parts. What they mean (keys, bitmaps, tags, the right share for a client) the caller checks."""
    header = read_header(message, agreement, kind)
    near, body = agreement.graph.holders(header.client), memoryview(message)[HEADER_BYTES:]
    at = (len(near) + 7) // 8
    named = chosen_of(body[:at], near)
    sizes = [_part_size(kind, agreement, client) for client in named]
    own = _own_size(header, agreement, named)
    if len(body) != at + sum(sizes) + own:
        raise BadSecureMessage(f"the body must have {at + sum(sizes) + own} bytes, got {len(body)}")
    parts = {}
    for client, size in zip(named, sizes, strict=True):
        parts[client] = bytes(body[at : at + size])
        at += size
    return Parts(header=header, own=bytes(body[at:]), parts=parts)


def _part_size(kind: Kind, agreement: Agreement, client: int) -> int:
    """Bytes of the part of a client in this kind of message."""
    if kind is Kind.PARTNER_BUNDLE:
        return TAG_BYTES + (len(agreement.graph.masks(client)) + 7) // 8
    sizes = {Kind.KEY_BUNDLE: _KEYS_BYTES, Kind.UNMASKING: SHARE_BYTES, Kind.RECOVERY: SHARE_BYTES}
    return sizes.get(kind, TAG_BYTES)


def _own_size(header: SumHeader, agreement: Agreement, named: Collection[int]) -> int:
    """Bytes of what the sender says about itself, if these neighbours have a part."""
    match header.kind:
        case Kind.SHARES:
            return header.rounds * round_size(agreement, header.client, named)
        case Kind.PARTNERS:
            return (len(agreement.graph.masks(header.client)) + 7) // 8
        case Kind.UNMASKING:
            return SECRET_BYTES
    return 0


def round_size(agreement: Agreement, client: int, holders: Collection[int]) -> int:
    """Bytes of a client's `Corrections` of one round, if it shares its secrets among these holders.

    Raises:
        BadSecureMessage: too few holders.
    """
    count = len(holders)
    if count < agreement.rule.partners:
        raise BadSecureMessage(f"client {client} shares its secrets among {count} clients, too few to keep them")
    shares = 2 * (count - threshold_of(agreement, count)) + 1
    wrapped = 0 if agreement.rule.sparse is None else len(set(agreement.graph.masks(client)).intersection(holders))
    return SHARE_BYTES * (3 + shares + wrapped)


def most_rounds(agreement: Agreement) -> int:
    """The most rounds of a key batch that a client accepts. It stores the secrets of all of them at once."""
    holders = agreement.rule.clients - 1 if agreement.rule.sparse is None else agreement.rule.sparse.holders
    return max(1, min(MAX_BATCH, _MOST_HELD // (SHARE_BYTES * _most_shares(holders))))


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


def write_listed(header: SumHeader, agreement: Agreement, clients: Collection[int]) -> bytes:
    """A list from the server, one bit for each client that takes part: exchange 4, the survivors; exchange 6, those of
    them whose seeds did not come."""
    return header.pack(agreement) + bits_of(agreement.members.clients, clients)


def read_listed(message: Bytes, agreement: Agreement, kind: Kind) -> tuple[SumHeader, tuple[int, ...]]:
    """The numbers of the listed clients, ascending."""
    header = read_header(message, agreement, kind)
    return header, chosen_of(memoryview(message)[HEADER_BYTES:], agreement.members.clients)


def survivors_statement(agreement: Agreement, *, epoch: int, round: int, survivors: tuple[int, ...]) -> bytes:
    """The bytes that a client signs: this list of survivors, in this round of this session."""
    listed = hashlib.sha256(np.array(survivors, dtype="<u4").tobytes()).digest()
    return b"bqsgd.secure.survivors.v3\x00" + agreement.session + struct.pack("<QQ", epoch, round) + listed


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
