"""The messages of a secure sum as bytes: docs/secure_wire.md. Everything little-endian.

Readers treat the bytes as hostile: every length is known from the header and the agreement, and is checked against the
real length before anything is made from it. Contents are checked by whoever knows what they must be (`client`,
`server`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from bqsgd.errors import BadSecureMessage, FrameError, WrongSession
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.graph import Thresholds
from bqsgd.secure.masks import KEY_BYTES, Lanes, lane_type
from bqsgd.secure.sharing import SECRET_BYTES, SHARE_BYTES
from bqsgd.wire.fixed import FixedWidth

_MAGIC = b"BQSA"
_VERSION = 2
_HEADER = struct.Struct("<4sHBB16sQQII")
HEADER_BYTES = _HEADER.size
_PUBLIC_KEY_BYTES = 32
_NONCE_BYTES = 16
_SIGNATURE_BYTES = 64
TAG_BYTES = 16
MAX_BATCH = 1 << 12
"""Most rounds whose keys and shares travel together."""
_MOST_HELD = 1 << 24
"""Most bytes of other clients' shares that a client takes for one batch."""
_SEEDED = 1
_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<II")
Bytes = bytes | bytearray | memoryview


class Kind(IntEnum):
    """The messages, in the order of the protocol; even ones come from the server, odd ones from a client."""

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
    """What every message begins with.

    epoch: number of the batch of rounds, which only grows. round, rounds: the first round and how many. client: who
    sent it, or to whom the server sends it. seeded: the sender's randomness came from a seed.
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
    """No message is longer, masked vectors left out, where keys travel for at most so many rounds together."""
    noise_parts = 2 * (rule.dropouts + 1)  # by the number of survivors, two numbers of trials to keep
    keys = HEADER_BYTES + _PUBLIC_KEY_BYTES + _NONCE_BYTES + _SIGNATURE_BYTES
    shares = TAG_BYTES + rounds * (2 + noise_parts) * SHARE_BYTES
    statement = TAG_BYTES + (rule.clients + 7) // 8
    wrapped = KEY_BYTES * rounds * (1 + rule.clients)
    parts = rule.clients * (_ENTRY.size + max(keys, shares, statement)) + wrapped
    return HEADER_BYTES + 2 * SECRET_BYTES + _COUNT.size + parts


def message_kind(message: Bytes) -> Kind:
    """Which kind a message claims to be.

    Raises:
        BadSecureMessage: it is none.
    """
    if len(message) < HEADER_BYTES or bytes(message[:4]) != _MAGIC or message[6] > max(Kind):
        raise BadSecureMessage("not a message of a secure sum")
    return Kind(message[6])


def sender_of(message: Bytes) -> int:
    """Which client a message claims to come from.

    Raises:
        BadSecureMessage: it is no message of a sum.
    """
    message_kind(message)
    client: int = _HEADER.unpack_from(message)[-1]
    return client


def is_sum_message(message: Bytes) -> bool:
    """Whether the bytes are for the reader of sums, and not a model or a frame."""
    return bytes(message[: len(_MAGIC)]) == _MAGIC


def read_header(message: Bytes, agreement: Agreement, kind: Kind) -> SumHeader:
    """The header of a message that must be of this kind and of this session."""
    if len(message) < HEADER_BYTES:
        raise BadSecureMessage(f"{len(message)} bytes are less than the {HEADER_BYTES} of a header")
    magic, version, found, flags, session, epoch, round, rounds, client = _HEADER.unpack_from(message)
    if magic != _MAGIC:
        raise BadSecureMessage("not a message of a secure sum: wrong magic")
    if version != _VERSION:
        raise BadSecureMessage(f"version {version} is unknown here; this reader knows {_VERSION}")
    if found != kind:
        raise BadSecureMessage(f"a message of kind {found} where {kind.name} ({int(kind)}) is due")
    if flags & ~_SEEDED:
        raise BadSecureMessage(f"unknown flags {flags:#x}")
    if session != agreement.session[:16]:
        raise WrongSession("the message belongs to another run, roster, cohort, size or threshold than agreed")
    too_far = epoch >= 2**63 or round > 2**53 - MAX_BATCH
    if too_far or not 1 <= rounds <= MAX_BATCH or (kind > Kind.PARTNER_BUNDLE and rounds != 1):
        raise BadSecureMessage(f"{rounds} rounds from {round} on in epoch {epoch} cannot be")
    (agreement.roster if kind is Kind.BATCH else agreement.members).check(client)
    return SumHeader(kind=kind, epoch=epoch, round=round, rounds=rounds, client=client, seeded=bool(flags & _SEEDED))


def _body(message: Bytes, size: int) -> memoryview:
    body = memoryview(message)[HEADER_BYTES:]
    if len(body) != size:
        raise BadSecureMessage(f"the body must have {size} bytes, got {len(body)}")
    return body


def _bitmap(places: list[int], size: int) -> bytes:
    """One bit for each place, the first in the lowest bit."""
    bits = np.zeros(size, dtype=np.uint8)
    bits[places] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _places(packed: Bytes, size: int) -> list[int]:
    """The places whose bits are set."""
    if len(packed) != (size + 7) // 8:
        raise BadSecureMessage(f"{size} bits take {(size + 7) // 8} bytes, got {len(packed)}")
    found: npt.NDArray[np.uint8] = np.frombuffer(packed, np.uint8)
    bits = np.unpackbits(found, bitorder="little")
    if bits[size:].any():
        raise BadSecureMessage("bits after the last one must be zero")
    places: list[int] = np.flatnonzero(bits[:size]).tolist()
    return places


def write_batch(header: SumHeader, agreement: Agreement) -> bytes:
    """Step 1, down: the server asks for keys for these rounds, and names who takes part: one bit per client of the
    roster. The session is that without a cohort."""
    place = agreement.roster.place
    whole = replace(agreement, cohort=None)
    named = _bitmap([place[client] for client in agreement.members.clients], len(place))
    return header.pack(whole) + named


def read_batch(message: Bytes, agreement: Agreement) -> tuple[SumHeader, Agreement]:
    """The header of a request for keys, and the agreement for the cohort that it names.

    Raises:
        TooFewClients: not as many clients as were agreed on.
    """
    header = read_header(message, agreement, Kind.BATCH)
    clients = agreement.roster.clients
    body = memoryview(message)[HEADER_BYTES:]
    return header, agreement.of(clients[place] for place in _places(body, len(clients)))


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Step 1, up: a client's public key, signed, and a nonce that makes the batch its own.

    digest: of the whole message, which all secrets of the batch are bound to.
    """

    header: SumHeader
    cipher: bytes
    nonce: bytes
    signature: bytes
    digest: bytes

    def verify(self, agreement: Agreement) -> None:
        """Raise BadSignature unless the client of the roster signed this key for this run."""
        statement = keys_statement(agreement, self.header.client, self.cipher)
        agreement.members.verify(self.header.client, self.signature, statement)


def keys_statement(agreement: Agreement, client: int, cipher: bytes) -> bytes:
    """What a client signs to use a key in a run."""
    return b"bqsgd.secure.keys.v2\x00" + agreement.run_digest + _COUNT.pack(client) + cipher


def write_keys(header: SumHeader, agreement: Agreement, *, cipher: bytes, nonce: bytes, signature: bytes) -> bytes:
    """The bytes of a client's keys."""
    return header.pack(agreement) + cipher + nonce + signature


def read_keys(message: Bytes, agreement: Agreement) -> Keys:
    """A client's keys; their signature is not yet verified."""
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
    """Parts by client number, ascending."""
    pieces: list[Bytes] = [header.pack(agreement), _COUNT.pack(len(parts))]
    for client, part in sorted(parts.items()):
        pieces += [_ENTRY.pack(client, len(part)), part]
    return b"".join(pieces)


def _read_parts(
    message: Bytes, agreement: Agreement, kind: Kind, *, sizes: frozenset[int] | None
) -> tuple[SumHeader, dict[int, memoryview]]:
    """Parts by client number: views of the message, each of one of the `sizes` (any, if None)."""
    header = read_header(message, agreement, kind)
    body = memoryview(message)[HEADER_BYTES:]
    if len(body) < _COUNT.size:
        raise BadSecureMessage("the message ends before its number of parts")
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
            raise BadSecureMessage(f"a part of {size} bytes does not fit")
        agreement.members.check(client)
        yield client, body[at : at + size]
        at, last = at + size, client
    if at != len(body):
        raise BadSecureMessage(f"{len(body) - at} bytes after the last part")


def write_key_bundle(header: SumHeader, agreement: Agreement, keys: Mapping[int, Bytes]) -> bytes:
    """Step 1, down: the others' Keys messages as they sent them."""
    return _write_parts(header, agreement, keys)


def read_key_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, memoryview]]:
    """Keys messages by sender, not yet read."""
    return _read_parts(message, agreement, Kind.KEY_BUNDLE, sizes=None)


def secrets_per_round(agreement: Agreement) -> int:
    """Secrets that a client shares for a round: self-mask, mask seed, and a seed for each part of its noise."""
    return 2 + agreement.noise.parts


def sealed_size(agreement: Agreement, rounds: int) -> int:
    """Bytes of one receiver's encrypted shares."""
    return TAG_BYTES + rounds * secrets_per_round(agreement) * SHARE_BYTES


def most_rounds(agreement: Agreement) -> int:
    """Most rounds of a batch that a client takes part in: it holds shares of all of them at once."""
    holders = agreement.rule.clients - 1 if agreement.rule.sparse is None else agreement.rule.sparse.holders
    return max(1, min(MAX_BATCH, _MOST_HELD // (holders * secrets_per_round(agreement) * SHARE_BYTES)))


@dataclass(frozen=True, kw_only=True)
class SealedShares:
    """Step 2, up: encrypted shares by receiver, and the wrapped keys of the sender's masks.

    wrapped: round by round, a check of the mask seed and then, for each receiver that the sender shares masks with, in
    ascending order, the key of their mask; all hidden by the mask seed of the round.
    """

    header: SumHeader
    sealed: Mapping[int, bytes]
    wrapped: bytes

    def masked_with(self, agreement: Agreement) -> tuple[int, ...]:
        """Whose masks are wrapped, ascending."""
        return tuple(client for client in agreement.graph.masks(self.header.client) if client in self.sealed)


def write_shares(said: SealedShares, agreement: Agreement) -> bytes:
    """The bytes of a client's shares: what is wrapped is the part of the sender itself."""
    return _write_parts(said.header, agreement, {**said.sealed, said.header.client: said.wrapped})


def read_shares(message: Bytes, agreement: Agreement) -> SealedShares:
    """Encrypted shares and wrapped keys."""
    header, parts = _read_parts(message, agreement, Kind.SHARES, sizes=None)
    wrapped = parts.pop(header.client, None)
    if wrapped is None:
        raise BadSecureMessage("shares without the wrapped keys of the sender's masks")
    sealed = {client: bytes(part) for client, part in parts.items()}
    said = SealedShares(header=header, sealed=sealed, wrapped=bytes(wrapped))
    if any(len(part) != sealed_size(agreement, header.rounds) for part in parts.values()):
        raise BadSecureMessage("encrypted shares of a wrong length")
    if len(said.wrapped) != KEY_BYTES * header.rounds * (1 + len(said.masked_with(agreement))):
        raise BadSecureMessage("wrapped keys of a wrong length")
    return said


def write_share_bundle(header: SumHeader, agreement: Agreement, sealed: Mapping[int, bytes]) -> bytes:
    """Step 2, down: what the others sealed for a client, by sender."""
    return _write_parts(header, agreement, sealed)


def read_share_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, bytes]]:
    """Encrypted shares by sender."""
    rounds = read_header(message, agreement, Kind.SHARE_BUNDLE).rounds
    sizes = frozenset({sealed_size(agreement, rounds)})
    header, parts = _read_parts(message, agreement, Kind.SHARE_BUNDLE, sizes=sizes)
    return header, {client: bytes(part) for client, part in parts.items()}


def partner_bits(agreement: Agreement, client: int, partners: Collection[int]) -> bytes:
    """Whom of its mask neighbours a client shares masks with: one bit for each, ascending."""
    near = agreement.graph.masks(client)
    return _bitmap([place for place, other in enumerate(near) if other in partners], len(near))


def read_partner_bits(agreement: Agreement, client: int, packed: Bytes) -> frozenset[int]:
    """The partners that a client states."""
    near = agreement.graph.masks(client)
    return frozenset(near[place] for place in _places(packed, len(near)))


def write_partners(header: SumHeader, agreement: Agreement, bits: bytes, tags: Mapping[int, bytes]) -> bytes:
    """Step 2, up, on a sparse graph: a client's statement, and for each holder of its shares a tag on it."""
    return _write_parts(header, agreement, {**tags, header.client: bits})


def read_partners(message: Bytes, agreement: Agreement) -> tuple[SumHeader, bytes, dict[int, bytes]]:
    """A client's statement, and the tags for the holders of its shares."""
    header, parts = _read_parts(message, agreement, Kind.PARTNERS, sizes=None)
    bits = bytes(parts.pop(header.client, b""))
    read_partner_bits(agreement, header.client, bits)
    if any(len(tag) != TAG_BYTES for tag in parts.values()):
        raise BadSecureMessage(f"tags have {TAG_BYTES} bytes")
    return header, bits, {client: bytes(tag) for client, tag in parts.items()}


def write_partner_bundle(header: SumHeader, agreement: Agreement, stated: Mapping[int, bytes]) -> bytes:
    """Step 2, down, on a sparse graph: by sender, the tag and the statement."""
    return _write_parts(header, agreement, stated)


def read_partner_bundle(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, tuple[bytes, bytes]]]:
    """By sender, its statement and the tag on it, which is not yet verified."""
    header, parts = _read_parts(message, agreement, Kind.PARTNER_BUNDLE, sizes=None)
    stated = {}
    for client, part in parts.items():
        if len(part) < TAG_BYTES:
            raise BadSecureMessage("a statement without its tag")
        stated[client] = (bytes(part[TAG_BYTES:]), bytes(part[:TAG_BYTES]))
    return header, stated


def write_masked(header: SumHeader, agreement: Agreement, lanes: Lanes) -> bytearray:
    """Step 3, up: masked codes modulo 2^width, packed at that width."""
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
    """Step 4, down: one bit per client that takes part, in the roster's order."""
    place = agreement.members.place
    return header.pack(agreement) + _bitmap([place[client] for client in survivors], len(place))


def read_survivors(message: Bytes, agreement: Agreement) -> tuple[SumHeader, tuple[int, ...]]:
    """The survivors' numbers, ascending."""
    header = read_header(message, agreement, Kind.SURVIVORS)
    clients = agreement.members.clients
    places = _places(memoryview(message)[HEADER_BYTES:], len(clients))
    return header, tuple(map(clients.__getitem__, places))


def survivors_statement(agreement: Agreement, *, epoch: int, round: int, survivors: tuple[int, ...]) -> bytes:
    """What a client signs: this list, and no other, in this round."""
    listed = hashlib.sha256(np.array(survivors, dtype="<u4").tobytes()).digest()
    return b"bqsgd.secure.survivors.v2\x00" + agreement.session + struct.pack("<QQ", epoch, round) + listed


def write_signature(header: SumHeader, agreement: Agreement, signature: bytes) -> bytes:
    """Step 4, up: a client's signature on the list of survivors."""
    return header.pack(agreement) + signature


def read_signature(message: Bytes, agreement: Agreement) -> tuple[SumHeader, bytes]:
    """The signature, not yet verified."""
    header = read_header(message, agreement, Kind.SIGNATURE)
    return header, bytes(_body(message, _SIGNATURE_BYTES))


def write_certificate(header: SumHeader, agreement: Agreement, signatures: Mapping[int, bytes]) -> bytes:
    """Step 5, down: who of the committee signed the list, one bit each, ascending; then their signatures."""
    committee = agreement.graph.committee
    places = [place for place, client in enumerate(committee) if client in signatures]
    signed = [signatures[committee[place]] for place in places]
    return b"".join([header.pack(agreement), _bitmap(places, len(committee)), *signed])


def read_certificate(message: Bytes, agreement: Agreement) -> tuple[SumHeader, dict[int, bytes]]:
    """Signatures by client, not yet verified."""
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
    """Step 5, up: what a survivor reveals.

    self_seed and noise_seed are its own (16 zero bytes for a noise seed where all its noise is needed, and for both on
    a sparse graph, where they are opened from shares alone). survivors: by client, the shares of its self-mask and of
    its first unneeded noise seed. missing: the share of its mask seed.
    """

    header: SumHeader
    self_seed: bytes
    noise_seed: bytes
    survivors: Mapping[int, tuple[bytes, bytes]]
    missing: Mapping[int, bytes]


def write_unmasking(said: Unmasking, agreement: Agreement) -> bytes:
    """The bytes of an unmasking."""
    parts = {client: b"".join(pair) for client, pair in said.survivors.items()} | dict(said.missing)
    own = said.self_seed + said.noise_seed
    bundle = _write_parts(said.header, agreement, parts)
    return bundle[:HEADER_BYTES] + own + bundle[HEADER_BYTES:]


def read_unmasking(message: Bytes, agreement: Agreement) -> Unmasking:
    """Read an unmasking; a part's size says which kind of share it is."""
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
