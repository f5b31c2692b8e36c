"""A client of secure sums written from docs/wire.md alone. It shares no code with the library.

`python -m experiments.assurance.foreign_client -- python tests/secure/page_client.py` sums with it on a sparse graph.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

HEADER = struct.Struct("<4sHBB16sQQII")
BATCH, KEYS, KEY_BUNDLE, SHARES, SHARE_BUNDLE, PARTNERS, PARTNER_BUNDLE = range(7)
MASKED, SURVIVORS, SIGNATURE, CERTIFICATE, UNMASKING, SILENT, RECOVERY = range(7, 14)


class Refused(Exception):
    """The client does not answer."""


def need(holds, why):
    if not holds:
        raise Refused(why)


def sha(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def u8(*numbers):
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def derive(secret, purpose, salt, context):
    info = f"bqsgd.secure.{purpose}.v3".encode() + b"\x00" + context
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=salt, info=info).derive(secret)


def stream(key, size):
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def xor(one, other):
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def to_bits(listed, chosen):
    raw = bytearray((len(listed) + 7) // 8)
    for at, entry in enumerate(listed):
        raw[at // 8] |= (entry in chosen) << at % 8
    return bytes(raw)


def from_bits(raw, listed):
    need(len(raw) == (len(listed) + 7) // 8, "bits of the wrong length")
    chosen = [entry for at, entry in enumerate(listed) if raw[at // 8] >> at % 8 & 1]
    need(to_bits(listed, chosen) == raw, "spare bits")
    return chosen


def times(a, b):
    product = 0
    while b:
        product ^= a * (b & 1)
        a, b = (a << 1) ^ (0x11B if a & 128 else 0), b >> 1
    return product


INVERSE = {a: b for a in range(1, 256) for b in range(1, 256) if times(a, b) == 1}


def values_at(known, point):
    """The value at a point of the polynomial through known (point -> bytes)."""
    total = bytes(16)
    for x, value in known.items():
        weight = 1
        for other in known:
            if other != x:
                weight = times(weight, times(point ^ other, INVERSE[x ^ other]))
        total = xor(total, bytes(times(byte, weight) for byte in value))
    return total


@dataclass
class Round:
    listed: list | None = None
    list_raw: bytes = b""
    signature: bytes = b""
    unmasking: bytes = b""


@dataclass
class KeyBatch:
    raw: bytes
    epoch: int
    first: int
    count: int
    width: int
    clients: list
    session: bytes
    seeds: dict
    keys: bytes = b""
    remain: dict = field(default_factory=dict)  # client -> its keys message
    partners: set | None = None
    statements: dict | None = None  # partner -> its mask neighbours that are not its partners
    first_of: dict = field(default_factory=dict)  # kind -> (what came, what was answered)
    rounds: dict = field(default_factory=dict)


class PageClient:
    """agreed: run, clients, dropouts, colluders, dimension, widest, trials, seeded, roster, number, identity, as in
    `experiments.assurance.foreign_client`. numbers: d, a, h, k, m, Q of a sparse graph, None for a full one."""

    def __init__(self, agreed, numbers=None):
        self.n, self.f, self.t = agreed["clients"], agreed["dropouts"], agreed["colluders"]
        self.d, self.widest, self.trials = agreed["dimension"], agreed["widest"], agreed["trials"]
        self.number, self.numbers = agreed["number"], numbers
        self.identity = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(agreed["identity"]))
        self.public = {number: bytes.fromhex(key) for number, key in agreed["roster"]["keys"]}
        self.seed = bytes.fromhex(agreed["roster"]["seed"])
        self.roster = sha(
            b"bqsgd.roster.v1", *(struct.pack("<I", c) + self.public[c] for c in sorted(self.public)), self.seed
        )
        name = agreed["run"].encode()
        self.run = sha(
            b"bqsgd.secure.run.v3", self.roster, bytes([len(name)]), name, struct.pack("<III", self.n, self.f, self.t),
            struct.pack("<QBIB", self.d, self.widest, self.trials, agreed["seeded"]),
        )  # fmt: skip
        self.cipher, self.epoch, self.batch = X25519PrivateKey.generate(), -1, None
        quorum = (self.n + self.t) // 2 + 1
        self.quorum, self.threshold, self.partners = quorum, max(quorum - 1, self.t + self.f + 1), quorum - 1
        if numbers is not None:
            self.quorum, self.threshold, self.partners = numbers[5], numbers[3], numbers[3]
            self.orders = [self._order(a) for a in range(numbers[2] // 2 + 1)]
        # How much noise a client adds, and where its parts begin.
        kept = {(u, r): self.kept(u, r) for u in range(self.n - self.f, self.n + 1) for r in (0, u - 1)}
        self.cuts = sorted(set(kept.values()))

    def session_of(self, width, clients):
        some = [] if clients == sorted(self.public) else clients
        return sha(b"bqsgd.secure.session.v3", self.run, bytes([width]), *(struct.pack("<I", c) for c in some))

    def kept(self, u, r):
        b, e = divmod(self.trials, u - self.t)
        return b + 1 if e > 0 and r < self.t + e else b

    # The graph.

    def _order(self, a):
        clients = sorted(self.public)
        key = derive(self.seed, "graph", self.roster, u8(a))[:16]
        words = struct.unpack(f"<{len(clients)}Q", stream(key, 8 * len(clients)))
        return [clients[place] for place in sorted(range(len(clients)), key=lambda place: (words[place], place))]

    def slots(self, client, count):
        """The neighbours of a client in count/2 orders, one that is in several of them several times."""
        near = []
        for order in self.orders[: count // 2]:
            at = order.index(client)
            near += [order[at - 1], order[(at + 1) % len(order)]]
        return near

    def masks(self, client):
        if self.numbers is None:
            return self.holders(client)
        return sorted(set(self.slots(client, self.numbers[0])) - {client})

    def holders(self, client):
        if self.numbers is None:
            return [c for c in self.batch.clients if c != client]
        return sorted(set(self.slots(client, self.numbers[2])) - {client})

    def committee(self):
        return self.batch.clients if self.numbers is None else sorted(self.orders[-1][: self.numbers[4]])

    def point(self, owner, holder):
        return 1 + (self.batch.clients if self.numbers is None else self.holders(owner)).index(holder)

    # Messages.

    def header(self, kind, round=None):
        batch = self.batch
        first, count = (batch.first, batch.count) if round is None else (round, 1)
        return HEADER.pack(b"BQSA", 3, kind, 0, batch.session[:16], batch.epoch, first, count, self.number)

    def parts(self, kind, parts, own=b""):
        mine = self.holders(self.number)
        return self.header(kind) + to_bits(mine, parts) + b"".join(parts[c] for c in mine if c in parts) + own

    def read_parts(self, body, size_of):
        mine = self.holders(self.number)
        at, parts = (len(mine) + 7) // 8, {}
        for client in from_bits(body[:at], mine):
            parts[client] = body[at : at + size_of(client)]
            at += size_of(client)
        need(at == len(body), "wrong length")
        return parts

    def answer(self, message):
        message = bytes(message)
        need(len(message) >= HEADER.size, "shorter than a header")
        magic, version, kind, flags, session, epoch, round, count, client = HEADER.unpack_from(message)
        need((magic, version, flags) == (b"BQSA", 3, 0), "no message of this version")
        need(client == self.number and epoch < 2**63 and round <= 2**53 - 4096, "not for this client, or out of range")
        handlers = {
            KEY_BUNDLE: self.on_keys, SHARE_BUNDLE: self.on_tags, PARTNER_BUNDLE: self.on_statements,
            SURVIVORS: self.on_list, CERTIFICATE: self.on_certificate, SILENT: self.on_silent,
        }  # fmt: skip
        body, batch = message[HEADER.size :], self.batch
        if kind == BATCH:
            return self.begin(message, body, session, epoch, round, count)
        need(kind in handlers and batch is not None, "of a kind that no client gets, or too early")
        need((session, epoch) == (batch.session[:16], batch.epoch), "of another session or key batch")
        if kind > PARTNER_BUNDLE:
            need(count == 1 and round in batch.rounds, "a round that was not masked")
            return handlers[kind](body, round)
        need((round, count) == (batch.first, batch.count), "of another key batch")
        if kind in batch.first_of:
            came, answered = batch.first_of[kind]
            need(came == body, "another message than the first")
            return answered
        answered = handlers[kind](body)
        batch.first_of[kind] = body, answered
        return answered

    def begin(self, message, body, session, epoch, first, count):
        clients = sorted(self.public)
        need(session == self.session_of(self.widest, clients)[:16], "of another session")
        if self.batch is not None and self.batch.raw == message:
            return self.batch.keys
        need(len(body) > 1 and 2 <= body[0] <= self.widest, "a width out of range")
        cohort = from_bits(body[1:], clients)
        need(len(cohort) == self.n and self.number in cohort, "another cohort than was agreed on")
        need(self.numbers is None or cohort == clients, "a cohort on a sparse graph")
        holders = self.n - 1 if self.numbers is None else self.numbers[2]
        need(1 <= count <= 4096 and 48 * (holders + 1) * count <= 2**24, "too many rounds")
        need(epoch > self.epoch, "an epoch that was used")
        self.epoch = epoch
        seeds = {round: os.urandom(16) for round in range(first, first + count)}
        session = self.session_of(body[0], cohort)
        self.batch = batch = KeyBatch(message, epoch, first, count, body[0], cohort, session, seeds)
        public = self.cipher.public_key().public_bytes_raw()
        statement = b"bqsgd.secure.keys.v3\x00" + self.run + struct.pack("<I", self.number) + public
        batch.keys = self.header(KEYS) + public + os.urandom(16) + self.identity.sign(statement)
        return batch.keys

    def verify(self, client, signature, statement):
        try:
            Ed25519PublicKey.from_public_bytes(self.public[client]).verify(signature, statement)
        except InvalidSignature:
            raise Refused(f"a bad signature of client {client}") from None

    # Keys that two clients derive.

    def channel(self, purpose, client, first, second, more=b""):
        secret = self.cipher.exchange(X25519PublicKey.from_public_bytes(self.keys_of(client)[48:80]))
        ends = b"".join(sha(self.keys_of(one)) for one in (first, second))
        return derive(secret, purpose, self.batch.session, ends + more)

    def keys_of(self, client):
        return self.batch.keys if client == self.number else self.batch.remain[client]

    def shared(self, purpose, owner, holder, round):
        """The derived share of `owner`'s seed that `holder` has; one of the two is this client."""
        if purpose == "mask-shares" and self.numbers is None:
            return self.pair(owner if holder == self.number else holder, round)
        other = owner if holder == self.number else holder
        return self._piece(self.channel(purpose, other, owner, holder), round)

    def pair(self, other, round):
        return self._piece(self.channel("pair-secrets", other, *sorted((self.number, other))), round)

    def _piece(self, key, round):
        at = 16 * (round - self.batch.first)
        return stream(key[:16], 16 * self.batch.count)[at : at + 16]

    def chain(self, round):
        seeds = [self.batch.seeds[round]]
        for _ in self.cuts[1:]:
            seeds.append(derive(seeds[-1], "noise-chain", self.run, u8(self.number, round))[:16])
        return seeds

    def on_keys(self, body):
        batch, offered = self.batch, self.read_parts(body, lambda client: 160)
        for client, keys in offered.items():
            header = HEADER.pack(b"BQSA", 3, KEYS, 0, batch.session[:16], batch.epoch, batch.first, batch.count, client)
            need(keys[:48] == header, f"no keys of client {client}")
            statement = b"bqsgd.secure.keys.v3\x00" + self.run + struct.pack("<I", client) + keys[48:80]
            self.verify(client, keys[96:], statement)
        remain = {}
        for client, keys in offered.items():
            try:
                self.cipher.exchange(X25519PublicKey.from_public_bytes(keys[48:80]))
                remain[client] = keys
            except ValueError:  # zeros
                continue
        need(len(remain) >= self.partners, "too few keys")
        batch.remain = remain
        tags = {c: self.channel("confirm", c, self.number, c)[:16] for c in remain}
        return self.parts(SHARES, tags, b"".join(self.corrections(round) for round in batch.seeds))

    def corrections(self, round):
        me, holders = self.number, sorted(self.batch.remain)
        k = min(self.threshold, len(holders))
        own = {self.point(me, c): self.shared("self-shares", me, c, round) for c in holders}
        mask = {self.point(me, c): self.shared("mask-shares", me, c, round) for c in holders}
        points = list(own)
        self_seed = self.chain(round)[-1]
        own_line = {0: self_seed, **{x: own[x] for x in points[: k - 1]}}
        mask_line = {x: mask[x] for x in points[:k]}

        def check(name, values):
            about = f"bqsgd.secure.{name}.v3".encode() + b"\x00" + self.batch.session
            return sha(about, u8(self.batch.epoch, me, round), *values)[:16]

        pieces = [check("seed-check", [self_seed]), check("self-check", own_line.values())]
        pieces += [check("mask-check", mask_line.values())]
        pieces += [xor(values_at(own_line, x), own[x]) for x in points[k - 1 :]]
        pieces += [xor(values_at(mask_line, x), mask[x]) for x in points[k:]]
        if self.numbers is not None:
            pairs = b"".join(self.pair(c, round) for c in holders if c in self.masks(me))
            pieces.append(xor(pairs, stream(values_at(mask_line, 0), len(pairs))))
        return b"".join(pieces)

    def on_tags(self, body):
        batch, me = self.batch, self.number
        need(KEY_BUNDLE in batch.first_of, "shares before keys")
        tags = self.read_parts(body, lambda client: 16)
        need(tags.keys() <= batch.remain.keys(), "a tag of a client without keys")
        partners = {c for c, tag in tags.items() if tag == self.channel("confirm", c, c, me)[:16]}
        need(len(partners) >= self.partners, "too few good tags")
        batch.partners = partners
        stated = to_bits(self.masks(me), partners)
        if self.numbers is not None:
            return self.parts(PARTNERS, {c: self.channel("partners", c, me, c, stated)[:16] for c in partners}, stated)
        return b"" if partners == tags.keys() else self.parts(PARTNERS, {}, stated)

    def on_statements(self, body):
        batch = self.batch
        need(self.numbers is not None and batch.partners is not None, "statements too early, or on a full graph")
        said = self.read_parts(body, lambda client: 16 + (len(self.masks(client)) + 7) // 8)
        need(said.keys() <= batch.partners, "a statement of a client that is no partner")
        strangers = {}
        for client, part in said.items():
            if part[:16] == self.channel("partners", client, client, self.number, part[16:])[:16]:
                near = self.masks(client)
                strangers[client] = set(near) - set(from_bits(part[16:], near))
        batch.statements = strangers
        return b""

    # One round.

    def mask(self, round, codes, model=bytes(32)):
        batch = self.batch
        ready = batch is not None and (batch.partners is not None if self.numbers is None else batch.statements)
        need(ready and round in batch.seeds and round not in batch.rounds, "not to be masked now")
        batch.rounds[round] = Round()
        total, seeds = [int(code) for code in codes], self.chain(round)
        for j, (low, high) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            total = [a + b for a, b in zip(total, self.noise(seeds[j], j, high - low), strict=True)]
        keys = [(derive(seeds[-1], "self-mask", batch.session, u8(self.number, round))[:16], 1)]
        for other in self.masks(self.number):
            if other in batch.partners:
                about = b"bqsgd.secure.masks.v3\x00" + batch.session + u8(round) + bytes(model)
                keys.append((sha(about, self.pair(other, round))[:16], 1 if self.number < other else -1))
        word = "B" if batch.width <= 8 else "H" if batch.width <= 16 else "I"
        for key, sign in keys:
            mask = struct.unpack(f"<{self.d}{word}", stream(key, struct.calcsize(word) * self.d))
            total = [a + sign * b for a, b in zip(total, mask, strict=True)]
        packed = 0
        for at, code in enumerate(total):
            packed |= code % (1 << batch.width) << batch.width * at
        return self.header(MASKED, round) + packed.to_bytes((batch.width * self.d + 7) // 8, "little")

    def noise(self, seed, j, trials):
        key, drawn, at = derive(seed, "noise", self.run, u8(j)), [0] * self.d, 0
        raw = stream(key, (trials // 64 + 1) * (8 * self.d + 16))
        while trials:
            m = min(64, trials)
            size = next(size for size in (1, 2, 4, 8) if m <= 8 * size)
            for i in range(self.d):
                word = int.from_bytes(raw[at + i * size : at + (i + 1) * size], "little")
                drawn[i] += (word & ((1 << m) - 1)).bit_count()
            at, trials = at + -(-size * self.d // 16) * 16, trials - m
        return drawn

    def statement(self, round, listed):
        survivors = sha(*(struct.pack("<I", client) for client in listed))
        return b"bqsgd.secure.survivors.v3\x00" + self.batch.session + u8(self.batch.epoch, round) + survivors

    def on_list(self, body, round):
        batch, state = self.batch, self.batch.rounds[round]
        listed = from_bits(body, batch.clients)
        if state.listed is not None:
            need(state.listed == listed, "a second list")
            return state.signature
        need(self.number in listed and len(listed) >= self.n - self.f, "not on the list, or it is too short")
        need(set(listed) & set(self.masks(self.number)) <= batch.partners, "a listed neighbour is no partner")
        if self.number in self.committee():
            for client in listed if self.numbers is not None else ():
                away = sum(other not in listed for other in self.slots(client, self.numbers[0]))
                need(away <= self.numbers[1], f"too many neighbours of client {client} are missing")
            signature = self.identity.sign(self.statement(round, listed))
            state.signature = self.header(SIGNATURE, round) + signature
        state.listed = listed
        return state.signature

    def on_certificate(self, body, round):
        batch, state, committee = self.batch, self.batch.rounds[round], self.committee()
        size = (len(committee) + 7) // 8
        signers = from_bits(body[:size], committee)
        need(len(body) == size + 64 * len(signers), "wrong length")
        need(state.listed is not None, "no list was kept")
        if state.unmasking:
            return state.unmasking
        need(len(signers) >= self.quorum and set(signers) <= set(state.listed), "too few signers, or one not listed")
        for index, client in enumerate(signers[: self.quorum]):
            signature = body[size + 64 * index : size + 64 * (index + 1)]
            self.verify(client, signature, self.statement(round, state.listed))
        for client, strangers in (batch.statements or {}).items():
            need(client not in state.listed or not strangers & set(state.listed), "two on the list share no mask")
        missing = batch.partners - set(state.listed)
        shares = {c: self.shared("mask-shares", c, self.number, round) for c in missing}
        u, r = len(state.listed), state.listed.index(self.number)
        seed = self.chain(round)[self.cuts.index(self.kept(u, r))]
        mine = self.holders(self.number)
        body = to_bits(mine, shares) + b"".join(shares[c] for c in mine if c in shares) + seed
        state.unmasking = self.header(UNMASKING, round) + body
        del batch.seeds[round]
        return state.unmasking

    def on_silent(self, body, round):
        batch, state = self.batch, self.batch.rounds[round]
        asked = from_bits(body, batch.clients)
        need(state.unmasking, "not unmasked yet")
        need(set(asked) <= set(state.listed), "a client that is not on the list")
        known = batch.partners & set(asked)
        if self.numbers is not None:
            known &= set(batch.statements)
        shares = {c: self.shared("self-shares", c, self.number, round) for c in known}
        mine = self.holders(self.number)
        return self.header(RECOVERY, round) + to_bits(mine, shares) + b"".join(shares[c] for c in mine if c in shares)


def main():
    """Speak with `experiments.assurance.foreign_client`."""
    client = None
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "agreed":
                agreed = json.loads(rest)
                sparse = agreed["clients"] > 200
                if sparse:
                    from test_secure_pages import _numbers_of_the_page  # they are computed from the page there

                numbers = (
                    _numbers_of_the_page(agreed["clients"], agreed["dropouts"], max(1, agreed["colluders"]))
                    if sparse
                    else None
                )
                client, said = PageClient(agreed, numbers), b""
            elif command == "message":
                said = client.answer(bytes.fromhex(rest))
            else:
                round, model, *codes = rest.split()
                said = client.mask(int(round), codes, bytes.fromhex(model))
            print(said.hex(), flush=True)
        except Refused as error:
            print(f"refused {error}", flush=True)


if __name__ == "__main__":
    main()
