"""The messages of a secure sum as bytes: docs/wire.md. Everything is little-endian.

Readers treat the bytes as hostile: every length follows from the header and the agreement, and is compared with the
real length before anything is allocated. What the contents mean is checked in `client` and `server`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import BadSecureMessage, FrameError, WrongSession
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
TAG_BYTES = 16
MAX_BATCH = 1 << 12
"""Most rounds in a batch, whose keys and shares are sent together."""
_MOST_HELD = 1 << 24
"""Most bytes of other clients' shares that a client stores for one batch."""
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


@dataclass(frozen=True, kw_only=True)
class SumHeader:
    """The header of every message.

    epoch: number of the batch, which only grows. round, rounds: the first round and how many. client: the client that
    sent the message, or to which the server sends it. seeded: the sender's randomness came from a seed.
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


def most_bytes(rule: Thresholds, *, rounds: int) -> int:
    """An upper bound on the length of all messages but masked vectors, for batches of at most `rounds` rounds."""
    noise_parts = 2 * (rule.dropouts + 1)  # for each number of survivors, two numbers of trials that a client may keep
    keys = HEADER_BYTES + _PUBLIC_KEY_BYTES + _NONCE_BYTES + _SIGNATURE_BYTES
    shares = TAG_BYTES + rounds * (2 + noise_parts) * SHARE_BYTES
    statement = TAG_BYTES + (rule.clients + 7) // 8
    wrapped = KEY_BYTES * rounds * (1 + rule.clients)
    parts = rule.clients * (_ENTRY.size + max(keys, shares, statement)) + wrapped
    return HEADER_BYTES + 2 * SECRET_BYTES + _COUNT.size + parts


def message_kind(message: Bytes) -> Kind:
    """The kind that a message claims to be.

    Raises:
        BadSecureMessage: the bytes are not a message of a secure sum.
    """
    if len(message) < HEADER_BYTES or bytes(message[:4]) != _MAGIC or message[6] > max(Kind):
        raise BadSecureMessage("not a message of a secure sum")
    return Kind(message[6])


def sender_of(message: Bytes) -> int:
    """The client that a message claims to come from.

    Raises:
        BadSecureMessage: the bytes are not a message of a secure sum.
    """
    message_kind(message)
    client: int = _HEADER.unpack_from(message)[-1]
    return client


def is_sum_message(message: Bytes) -> bool:
    """Whether the bytes claim to be a message of a secure sum, rather than a model or a frame."""
    return bytes(message[: len(_MAGIC)]) == _MAGIC


def read_header(message: Bytes, agreement: Agreement, kind: Kind) -> SumHeader:
    """The header of a message, which must be of this kind and of this session.

    Raises:
        BadSecureMessage: another kind, or not a valid header.
        WrongSession: the message belongs to another agreement.
        ForeignClient: the client is not in the roster, or not in the cohort.
    """
    if len(message) < HEADER_BYTES:
        raise BadSecureMessage(f"a message has at least {HEADER_BYTES} bytes, got {len(message)}")
    magic, version, stated_kind, flags, session, epoch, round, rounds, client = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise BadSecureMessage("not a message of a secure sum: wrong magic")
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


def _bitmap(places: list[int], size: int) -> bytes:
    """A bitmap with the bits of these places set; place 0 is the lowest bit of the first byte."""
    bits = np.zeros(size, dtype=np.uint8)
    bits[places] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _places(packed: Bytes, size: int) -> list[int]:
    """The places whose bits are set in a bitmap of `size` places."""
    if len(packed) != (size + 7) // 8:
        raise BadSecureMessage(f"{size} bits take {(size + 7) // 8} bytes, got {len(packed)}")
    octets: npt.NDArray[np.uint8] = np.frombuffer(packed, np.uint8)
    bits = np.unpackbits(octets, bitorder="little")
    if bits[size:].any():
        raise BadSecureMessage("the bits after the last place must be zero")
    places: list[int] = np.flatnonzero(bits[:size]).tolist()
    return places


def write_batch(header: SumHeader, agreement: Agreement) -> bytes:
    """Exchange 1, from the server: ask for keys for these rounds and name the cohort, one bit per client of the roster.

    The session is that without a cohort, because the reader does not know the cohort yet.
    """
    place = agreement.roster.place
    whole = replace(agreement, cohort=None)
    named = _bitmap([place[client] for client in agreement.members.clients], len(place))
    return header.pack(whole) + named


def read_batch(message: Bytes, agreement: Agreement) -> tuple[SumHeader, Agreement]:
    """The header of a request for keys, and the agreement for the cohort that it names.

    Raises:
        TooFewClients: the cohort does not have the agreed number of clients.
    """
    header = read_header(message, agreement, Kind.BATCH)
    clients = agreement.roster.clients
    body = memoryview(message)[HEADER_BYTES:]
    return header, agreement.of(clients[place] for place in _places(body, len(clients)))


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Exchange 1, from a client: its signed public key, and a fresh nonce for the batch.

    digest: SHA-256 of the whole message. All keys of the batch are derived from it, so old keys are of no use.
    """

    header: SumHeader
    cipher: bytes
    nonce: bytes
    signature: bytes
    digest: bytes

    def verify(self, agreement: Agreement) -> None:
        """Raise BadSignature if the client of the roster did not sign this key for this run."""
        statement = keys_statement(agreement, self.header.client, self.cipher)
        agreement.members.verify(self.header.client, self.signature, statement)


def keys_statement(agreement: Agreement, client: int, cipher: bytes) -> bytes:
    """The bytes that a client signs to use a key in a run."""
    return b"bqsgd.secure.keys.v2\x00" + agreement.run_digest + _COUNT.pack(client) + cipher


def write_keys(header: SumHeader, agreement: Agreement, *, cipher: bytes, nonce: bytes, signature: bytes) -> bytes:
    """The bytes of a client's keys."""
    return header.pack(agreement) + cipher + nonce + signature


def read_keys(message: Bytes, agreement: Agreement) -> Keys:
    """Read a client's keys. The signature is not verified here."""
    header = read_header(message, agreement, Kind.KEYS)
    body = bytes(_body(message, _PUBLIC_KEY_BYTES + _NONCE_BYTES + _SIGNATURE_BYTES))
    return Keys(
        header=header,
        cipher=body[:_PUBLIC_KEY_BYTES],
        nonce=body[_PUBLIC_KEY_BYTES:-_SIGNATURE_BYTES],
        signature=body[-_SIGNATURE_BYTES:],
        digest=hashlib.sha256(message).digest(),
    )


def _write_parts(header: SumHeader, agreement: Agreement, parts: Mapping[int, Bytes]) -> bytes:
    """A message of parts, one for each client, in the order of client numbers."""
    pieces: list[Bytes] = [header.pack(agreement), _COUNT.pack(len(parts))]
    for client, part in sorted(parts.items()):
        pieces += [_ENTRY.pack(client, len(part)), part]
    return b"".join(pieces)


def _read_parts(
    message: Bytes, agreement: Agreement, kind: Kind, *, sizes: frozenset[int] | None
) -> tuple[SumHeader, dict[int, memoryview]]:
    """Read a message of parts: views of the message by client number. Each has one of the `sizes` (None: any)."""
    header = read_header(message, agreement, kind)
    body = memoryview(message)[HEADER_BYTES:]
    if len(body) < _COUNT.size:
        raise BadSecureMessage("the message ends before the number of its parts")
    (count,) = _COUNT.unpack_from(body)
    if count > agreement.rule.clients:
        raise BadSecureMessage(f"{count} parts for {agreement.rule.clients} clients")
    return header, dict(_parts(body, count, agreement, sizes))


def _parts(
    body: memoryview, count: int, agreement: Agreement, sizes: frozenset[int] | None
) -> Iterator[tuple[int, memoryview]]:
    at, last = _COUNT.size, -1
    for _ in range(count):
        if len(body) - at < _ENTRY.size:
            raise BadSecureMessage("the message ends within its parts")
        client, size = _ENTRY.unpack_from(body, at)
        at += _ENTRY.size
        if client <= last:
            raise BadSecureMessage("parts must be in the order of client numbers, each client once")
        if size > len(body) - at or (sizes is not None and size not in sizes):
            raise BadSecureMessage(f"a part of {size} bytes has a wrong length, or the message ends within it")
        agreement.members.check(client)
        yield client, body[at : at + size]
        at, last = at + size, client
    if at != len(body):
        raise BadSecureMessage(f"{len(body) - at} bytes after the last part")


def write_key_bundle(header: SumHeader, agreement: Agreement, keys: Mapping[int, Bytes]) -> bytes:
    """Exchange 1, from the server: the Keys messages of the neighbours, as they sent them."""
    return _write_parts(header, agreement, keys)


def read_key_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, memoryview]]:
    """Keys messages by sender; the messages themselves are not read here."""
    return _read_parts(message, agreement, Kind.KEY_BUNDLE, sizes=None)


def secrets_per_round(agreement: Agreement) -> int:
    """Secrets that a client shares in each round: self seed, mask seed, and a seed for each part of its noise."""
    return 2 + agreement.noise.parts


def sealed_size(agreement: Agreement, rounds: int) -> int:
    """Bytes of the encrypted shares for one receiver."""
    return TAG_BYTES + rounds * secrets_per_round(agreement) * SHARE_BYTES


def most_rounds(agreement: Agreement) -> int:
    """Most rounds of a batch that a client accepts. It stores the shares of all of them at once."""
    holders = agreement.rule.clients - 1 if agreement.rule.sparse is None else agreement.rule.sparse.holders
    return max(1, min(MAX_BATCH, _MOST_HELD // (holders * secrets_per_round(agreement) * SHARE_BYTES)))


@dataclass(frozen=True, kw_only=True)
class SealedShares:
    """Exchange 2, from a client: encrypted shares by receiver, and the wrapped keys of the sender's masks.

    wrapped: for each round a check of the mask seed, then the key of the mask that the sender shares with each
    receiver, in ascending order. The keys are hidden by the mask seed of the round.
    """

    header: SumHeader
    sealed: Mapping[int, bytes]
    wrapped: bytes

    def masked_with(self, agreement: Agreement) -> tuple[int, ...]:
        """The clients whose masks with the sender are wrapped, ascending."""
        return tuple(client for client in agreement.graph.masks(self.header.client) if client in self.sealed)


def write_shares(said: SealedShares, agreement: Agreement) -> bytes:
    """The bytes of a client's shares. The part in the sender's own name holds the wrapped keys."""
    return _write_parts(said.header, agreement, {**said.sealed, said.header.client: said.wrapped})


def read_shares(message: Bytes, agreement: Agreement) -> SealedShares:
    """Encrypted shares and wrapped keys."""
    header, parts = _read_parts(message, agreement, Kind.SHARES, sizes=None)
    wrapped = parts.pop(header.client, None)
    if wrapped is None:
        raise BadSecureMessage("the wrapped keys of the sender's masks are missing")
    sealed = {client: bytes(part) for client, part in parts.items()}
    said = SealedShares(header=header, sealed=sealed, wrapped=bytes(wrapped))
    if any(len(part) != sealed_size(agreement, header.rounds) for part in parts.values()):
        raise BadSecureMessage("encrypted shares have a wrong length")
    if len(said.wrapped) != KEY_BYTES * header.rounds * (1 + len(said.masked_with(agreement))):
        raise BadSecureMessage("wrapped keys have a wrong length")
    return said


def write_share_bundle(header: SumHeader, agreement: Agreement, sealed: Mapping[int, bytes]) -> bytes:
    """Exchange 2, from the server: the shares that others encrypted for a client, by sender."""
    return _write_parts(header, agreement, sealed)


def read_share_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, bytes]]:
    """Encrypted shares by sender."""
    rounds = read_header(message, agreement, Kind.SHARE_BUNDLE).rounds
    sizes = frozenset({sealed_size(agreement, rounds)})
    header, parts = _read_parts(message, agreement, Kind.SHARE_BUNDLE, sizes=sizes)
    return header, {client: bytes(part) for client, part in parts.items()}


def partner_bits(agreement: Agreement, client: int, partners: Collection[int]) -> bytes:
    """With which of its mask neighbours a client shares masks: one bit for each neighbour, ascending."""
    near = agreement.graph.masks(client)
    return _bitmap([place for place, other in enumerate(near) if other in partners], len(near))


def read_partner_bits(agreement: Agreement, client: int, packed: Bytes) -> frozenset[int]:
    """The partners that a client states."""
    near = agreement.graph.masks(client)
    return frozenset(near[place] for place in _places(packed, len(near)))


def write_partners(header: SumHeader, agreement: Agreement, bits: bytes, tags: Mapping[int, bytes]) -> bytes:
    """Exchange 2, from a client, on a sparse graph: its statement, and a tag on it for each holder of its shares."""
    return _write_parts(header, agreement, {**tags, header.client: bits})


def read_partners(message: Bytes, agreement: Agreement) -> tuple[SumHeader, bytes, dict[int, bytes]]:
    """A client's statement, and the tags for the holders of its shares."""
    header, parts = _read_parts(message, agreement, Kind.PARTNERS, sizes=None)
    bits = bytes(parts.pop(header.client, b""))
    read_partner_bits(agreement, header.client, bits)
    if any(len(tag) != TAG_BYTES for tag in parts.values()):
        raise BadSecureMessage(f"a tag must have {TAG_BYTES} bytes")
    return header, bits, {client: bytes(tag) for client, tag in parts.items()}


def write_partner_bundle(header: SumHeader, agreement: Agreement, stated: Mapping[int, bytes]) -> bytes:
    """Exchange 2, from the server, on a sparse graph: tag and statement by sender."""
    return _write_parts(header, agreement, stated)


def read_partner_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, tuple[bytes, bytes]]]:
    """Statement and tag by sender. The tags are not verified here."""
    header, parts = _read_parts(message, agreement, Kind.PARTNER_BUNDLE, sizes=None)
    stated = {}
    for client, part in parts.items():
        if len(part) < TAG_BYTES:
            raise BadSecureMessage("a statement has no tag")
        stated[client] = (bytes(part[TAG_BYTES:]), bytes(part[:TAG_BYTES]))
    return header, stated


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
    place = agreement.members.place
    return header.pack(agreement) + _bitmap([place[client] for client in survivors], len(place))


def read_survivors(message: Bytes, agreement: Agreement) -> tuple[SumHeader, tuple[int, ...]]:
    """The survivors' numbers, ascending."""
    header = read_header(message, agreement, Kind.SURVIVORS)
    clients = agreement.members.clients
    places = _places(memoryview(message)[HEADER_BYTES:], len(clients))
    return header, tuple(map(clients.__getitem__, places))


def survivors_statement(agreement: Agreement, *, epoch: int, round: int, survivors: tuple[int, ...]) -> bytes:
    """The bytes that a client signs: this list of survivors, in this round of this session."""
    listed = hashlib.sha256(np.array(survivors, dtype="<u4").tobytes()).digest()
    return b"bqsgd.secure.survivors.v2\x00" + agreement.session + struct.pack("<QQ", epoch, round) + listed


def write_signature(header: SumHeader, agreement: Agreement, signature: bytes) -> bytes:
    """Exchange 4, from a client: its signature on the list of survivors."""
    return header.pack(agreement) + signature


def read_signature(message: Bytes, agreement: Agreement) -> tuple[SumHeader, bytes]:
    """The signature, which is not verified here."""
    header = read_header(message, agreement, Kind.SIGNATURE)
    return header, bytes(_body(message, _SIGNATURE_BYTES))


def write_certificate(header: SumHeader, agreement: Agreement, signatures: Mapping[int, bytes]) -> bytes:
    """Exchange 5, from the server: a bit for each member of the committee that signed, then the signatures."""
    committee = agreement.graph.committee
    places = [place for place, client in enumerate(committee) if client in signatures]
    signed = [signatures[committee[place]] for place in places]
    return b"".join([header.pack(agreement), _bitmap(places, len(committee)), *signed])


def read_certificate(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, bytes]]:
    """Signatures by client, which are not verified here."""
    header = read_header(message, agreement, Kind.CERTIFICATE)
    committee, body = agreement.graph.committee, bytes(memoryview(message)[HEADER_BYTES:])
    size = (len(committee) + 7) // 8
    places = _places(body[:size], len(committee))
    if len(body) - size != _SIGNATURE_BYTES * len(places):
        raise BadSecureMessage(f"{len(places)} signatures take {_SIGNATURE_BYTES * len(places)} bytes")
    starts = range(size, len(body), _SIGNATURE_BYTES)
    return header, {
        committee[place]: body[at : at + _SIGNATURE_BYTES] for place, at in zip(places, starts, strict=True)
    }


@dataclass(frozen=True, kw_only=True)
class Unmasking:
    """Exchange 5, from a client: what a survivor reveals.

    self_seed, noise_seed: its own seeds. The noise seed is 16 zero bytes if all its noise is needed; both are on a
    sparse graph, where they are opened from shares only. survivors: for each client, the shares of its self seed and of
    its first noise seed that is not needed. missing: for each client, the share of its mask seed.
    """

    header: SumHeader
    self_seed: bytes
    noise_seed: bytes
    survivors: Mapping[int, tuple[bytes, bytes]]
    missing: Mapping[int, bytes]


def write_unmasking(said: Unmasking, agreement: Agreement) -> bytes:
    """The bytes of an unmasking."""
    parts = {client: b"".join(pair) for client, pair in said.survivors.items()} | dict(said.missing)
    bundle = _write_parts(said.header, agreement, parts)
    return bundle[:HEADER_BYTES] + said.self_seed + said.noise_seed + bundle[HEADER_BYTES:]


def read_unmasking(message: Bytes, agreement: Agreement) -> Unmasking:
    """Read an unmasking. The length of a part tells which kind of share it is."""
    own_end = HEADER_BYTES + 2 * SECRET_BYTES
    read_header(message, agreement, Kind.UNMASKING)
    if len(message) < own_end:
        raise BadSecureMessage("the message ends before the sender's own seeds")
    whole = bytes(message)
    sizes = frozenset({SHARE_BYTES, 2 * SHARE_BYTES})
    header, parts = _read_parts(whole[:HEADER_BYTES] + whole[own_end:], agreement, Kind.UNMASKING, sizes=sizes)
    return Unmasking(
        header=header,
        self_seed=whole[HEADER_BYTES : HEADER_BYTES + SECRET_BYTES],
        noise_seed=whole[HEADER_BYTES + SECRET_BYTES : own_end],
        survivors={
            client: (bytes(part[:SHARE_BYTES]), bytes(part[SHARE_BYTES:]))
            for client, part in parts.items()
            if len(part) == 2 * SHARE_BYTES
        },
        missing={client: bytes(part) for client, part in parts.items() if len(part) == SHARE_BYTES},
    )
