"""A client of a secure sum: bytes in, bytes out, no input or output of its own.

    client = SumClient(agreement, identity=key, number=3)
    send(client.keys(epoch=1, first_round=0, rounds=20))     # once for 20 rounds
    send(client.shares(receive()))                           # key bundle -> encrypted shares
    client.take_shares(receive())                            # share bundle
    send(client.mask(round, codes))                          # each round, after the ledger has recorded it
    send(client.sign(receive()))                             # survivors -> signature
    send(client.unmask(receive()))                           # certificate -> shares

Whatever the server says, a client reveals of each other client either a share of its self-mask or a share of its mask
key, never both for one round; it does so for one list of survivors, which a quorum of clients has signed and which
leaves no more than f of them out; and it masks one vector per round. A refusal is an error of `bqsgd.errors`
(SecureSumError), and nothing has been revealed then.

Secrets live in memory alone. A client that was restarted has none of an earlier batch left: it takes part again from
the next batch on, whose epoch must be above every one it has seen. `last_epoch` is what it must remember.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bqsgd.errors import (
    BadSecureMessage,
    BadShares,
    ConflictingSurvivors,
    ForeignClient,
    InvalidParameter,
    ReplacedKeys,
    RoundUsed,
    TooFewClients,
    WrongRound,
)
from bqsgd.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd.params import Codes, check_int
from bqsgd.secure import messages
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.masks import add_mask, agree, derive, lane_type, mask_key, pair_key, scratch_for, self_key
from bqsgd.secure.messages import Bytes, Keys, Kind, SumHeader, Unmasking
from bqsgd.secure.roster import public_key
from bqsgd.secure.sharing import SECRET_BYTES, SHARE_BYTES, split
from bqsgd.storage import open_regular, write_atomic

_NONCE = bytes(12)
"""A key encrypts one message, so its nonce may be fixed."""
_NO_SEED = bytes(SECRET_BYTES)
_NO_SHARE = bytes(SHARE_BYTES)


@dataclass
class _Secrets:
    """What a client keeps to itself for one round."""

    self_seed: bytes
    mask_seed: bytes
    noise_seeds: list[bytes]


@dataclass
class _Round:
    """What a client has said in a round."""

    masked: bytearray
    survivors: tuple[int, ...] | None = None
    signature: bytes = b""
    unmasking: bytes = b""


@dataclass
class _Batch:
    """The rounds whose keys and shares travelled together."""

    epoch: int
    first_round: int
    count: int
    cipher: X25519PrivateKey
    secrets: dict[int, _Secrets]
    message: bytes
    peers: dict[int, Keys] = field(default_factory=dict)
    bundle: bytes | None = None
    shares_message: bytes = b""
    partners: frozenset[int] | None = None
    held: dict[int, bytes] = field(default_factory=dict)
    rounds: dict[int, _Round] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """Of this client's own Keys message."""
        return hashlib.sha256(self.message).digest()


class EpochFile:
    """Remembers the last epoch across restarts, durably; without it a restarted client could sign a second list."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, epoch: int | None = None) -> int:
        """The last epoch, -1 before the first; with an argument, write that one down first."""
        if epoch is not None:
            write_atomic(self.path, f"{epoch}\n".encode())
            return epoch
        file = open_regular(self.path, limit=64)
        if file is None:
            return -1
        with file:
            text = file.read(64).decode("ascii", "replace").strip()
        if not text.isdecimal():
            raise InvalidParameter(f"{self.path} does not hold the number of an epoch; restore it from a backup")
        return int(text)


class SumClient:
    """One client of a secure sum.

    Args:
        agreement: what all parties agree on.
        identity: the private key whose public half the roster has for `number`.
        last_epoch: remembers the last epoch: called without argument to ask, with one to write it down durably.
            `EpochFile` is one. None forgets on restart, which is right only for a client that is never restarted.
        seed: makes everything reproducible, and voids every claim.
    """

    def __init__(
        self,
        agreement: Agreement,
        *,
        identity: Ed25519PrivateKey,
        number: int,
        last_epoch: Callable[..., int] | None = None,
        seed: int | None = None,
    ) -> None:
        if agreement.roster.keys[agreement.roster.check(number)] != public_key(identity):
            raise InvalidParameter(f"the identity key is not the one that the roster has for client {number}")
        self.agreement, self.number, self._identity = agreement, number, identity
        self._last_epoch = last_epoch
        self._epoch = -1 if last_epoch is None else last_epoch()
        self._seed = None if seed is None else check_int("seed", seed, 0, 2**63 - 1)
        self._private = privacy_rng() if seed is None else None
        self._batch: _Batch | None = None

    @property
    def seeded(self) -> bool:
        """True when whoever knows the seed can remove masks and noise."""
        return self._seed is not None

    def source(self, purpose: str, number: int) -> NoiseSource:
        """Randomness: the operating system's, or that of the seed for one purpose in one round."""
        if self._private is not None:
            return self._private
        assert self._seed is not None
        key = f"bqsgd.secure.{purpose}.v1".encode() + struct.pack("<QQQ", self._seed, self.number, number)
        return seeded_rng(seed=int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)

    def _header(self, kind: Kind, round: int, rounds: int = 1) -> SumHeader:
        batch = self._current()
        return SumHeader(
            kind=kind, epoch=batch.epoch, round=round, rounds=rounds, client=self.number, seeded=self.seeded
        )

    def answer(self, message: Bytes) -> bytes:
        """Answer any message of the server; empty where nothing is due. What engines call.

        Raises:
            SecureSumError: the message is refused.
        """
        match messages.message_kind(message):
            case Kind.BATCH:
                header = messages.read_batch(message, self.agreement)
                if header.client != self.number:
                    raise ForeignClient(f"a message to client {header.client} reached client {self.number}")
                return self.keys(epoch=header.epoch, first_round=header.round, rounds=header.rounds)
            case Kind.KEY_BUNDLE:
                return self.shares(message)
            case Kind.SHARE_BUNDLE:
                self.take_shares(message)
                return b""
            case Kind.SURVIVORS:
                return self.sign(message)
            case Kind.CERTIFICATE:
                return self.unmask(message)
            case kind:
                raise BadSecureMessage(f"a message of kind {int(kind)} is not for clients")

    def ready(self, round: int) -> bool:
        """Whether `mask` can answer this round."""
        batch = self._batch
        return batch is not None and batch.partners is not None and round in batch.secrets and round not in batch.rounds

    # Step 1 and 2: keys and shares, for a batch of rounds.

    def keys(self, *, epoch: int, first_round: int, rounds: int) -> bytes:
        """Begin a batch: fresh secrets for each of its rounds. Those of the batch before are forgotten.

        Asked again for the same batch, the same bytes.

        Raises:
            WrongRound: the epoch is not above all epochs so far.
        """
        check_int("epoch", epoch, 0, 2**63 - 1)
        check_int("first_round", first_round, 0, 2**53 - messages.MAX_BATCH)
        check_int("rounds", rounds, 1, messages.MAX_BATCH)
        batch = self._batch
        if batch is not None and (batch.epoch, batch.first_round, batch.count) == (epoch, first_round, rounds):
            return batch.message
        if epoch <= self._epoch:
            raise WrongRound(f"epoch {epoch} is not above {self._epoch}, the last one that client {self.number} saw")
        if self._last_epoch is not None:
            self._last_epoch(epoch)
        self._epoch = epoch
        common = self.source("batch", first_round)
        cipher = X25519PrivateKey.from_private_bytes(common.words(4).tobytes())
        secrets = {number: self._draw(number) for number in range(first_round, first_round + rounds)}
        self._batch = _Batch(epoch, first_round, rounds, cipher, secrets, b"")
        unsigned = messages.write_keys(
            self._header(Kind.KEYS, first_round, rounds),
            self.agreement,
            cipher=cipher.public_key().public_bytes_raw(),
            masks=[self._mask_key(number).public_key().public_bytes_raw() for number in secrets],
        )
        self._batch.message = unsigned + self._identity.sign(messages.keys_statement(unsigned))
        return self._batch.message

    def _draw(self, number: int) -> _Secrets:
        drawn = self.source("round", number).words(6).tobytes()
        noise, parts = self.agreement.noise, self.agreement.noise.parts
        return _Secrets(
            self_seed=drawn[:16],
            mask_seed=drawn[16:32],
            noise_seeds=noise.seeds(drawn[32:48], self.agreement.session, count=parts),
        )

    def _mask_key(self, number: int) -> X25519PrivateKey:
        seed = self._current().secrets[number].mask_seed
        return mask_key(seed, self.agreement.session, client=self.number, round=number)

    def shares(self, bundle: Bytes) -> bytes:
        """Read the others' keys and encrypt a share of every secret to each of them.

        Raises:
            BadSignature, ForeignClient, WrongRound, TooFewClients: of the bundle or of a Keys message in it.
            ReplacedKeys: other keys than before.
        """
        batch, rule = self._current(), self.agreement.rule
        if batch.bundle is not None:
            if batch.bundle != bytes(bundle):
                raise ReplacedKeys(f"other keys than before for epoch {batch.epoch}; the first ones stand")
            return batch.shares_message
        header, parts = messages.read_key_bundle(bundle, self.agreement)
        self._expect(header, batch.first_round, batch.count)
        peers = {client: self._peer(client, part) for client, part in parts.items()}
        if len(peers) < rule.share_threshold:
            raise TooFewClients(f"{len(peers)} others sent keys, {rule.share_threshold} must take part")
        sealed = self._sealed(peers)
        batch.peers, batch.bundle = peers, bytes(bundle)
        batch.shares_message = messages.write_shares(
            self._header(Kind.SHARES, batch.first_round, batch.count), self.agreement, sealed
        )
        return batch.shares_message

    def _peer(self, client: int, part: memoryview) -> Keys:
        keys = messages.read_keys(part, self.agreement)
        batch = self._current()
        if keys.header.client != client or client == self.number:
            raise ForeignClient(f"keys of client {keys.header.client} in the place of client {client}")
        said = (keys.header.epoch, keys.header.round, keys.header.rounds)
        if said != (batch.epoch, batch.first_round, batch.count):
            raise WrongRound(f"keys of client {client} are for (epoch, round, rounds) = {said}")
        return keys

    def _sealed(self, peers: dict[int, Keys]) -> dict[int, bytes]:
        """The encrypted shares for each of the others."""
        batch, rule, place = self._current(), self.agreement.rule, self.agreement.roster.place
        points = [place[client] + 1 for client in peers]
        shares: dict[int, list[bytes]] = {client: [] for client in peers}
        for number, own in batch.secrets.items():
            rng = self.source("shares", number)
            for secret in (own.self_seed, own.mask_seed, *own.noise_seeds):
                made = split(secret, points, threshold=rule.share_threshold, rng=rng)
                for client, share in zip(shares, made, strict=True):
                    shares[client].append(share)
        sealed = {}
        for client, keys in peers.items():
            try:
                key = self._channel(keys, sender=batch.digest, receiver=keys.digest)
            except ForeignClient:
                continue  # a key of low order: no channel, so no partner
            sealed[client] = AESGCM(key).encrypt(_NONCE, b"".join(shares[client]), None)
        return sealed

    def _channel(self, peer: Keys, *, sender: bytes, receiver: bytes) -> bytes:
        """The key of one direction between this client and a peer, bound to the Keys messages of both."""
        secret = agree(self._current().cipher, peer.cipher)
        return derive(secret, "channel", self.agreement.session, sender, receiver)

    def take_shares(self, bundle: Bytes) -> None:
        """Open what the others sent; those who sent something now are the partners of this batch.

        What opens was made by a client that knew this client's fresh keys: old keys, played again by the server, do
        not pass.

        Raises:
            BadShares: something does not open. TooFewClients: too few are left.
        """
        batch, rule = self._current(), self.agreement.rule
        if batch.bundle is None:
            raise WrongRound("shares before keys")
        header, sealed = messages.read_shares(bundle, self.agreement, Kind.SHARE_BUNDLE)
        self._expect(header, batch.first_round, batch.count)
        opened = {client: self._open(client, part) for client, part in sealed.items()}
        if batch.partners is not None:
            if batch.held != opened:
                raise ReplacedKeys(f"other shares than before for epoch {batch.epoch}; the first ones stand")
            return
        if len(opened) < rule.share_threshold:
            raise TooFewClients(f"{len(opened)} others sent shares, {rule.share_threshold} must take part")
        batch.partners, batch.held = frozenset(opened), opened

    def _open(self, client: int, sealed: bytes) -> bytes:
        batch = self._current()
        if client not in batch.peers:
            raise ForeignClient(f"shares of client {client}, whose keys were not shown")
        peer = batch.peers[client]
        try:
            key = self._channel(peer, sender=peer.digest, receiver=batch.digest)
            text = AESGCM(key).decrypt(_NONCE, sealed, None)
        except InvalidTag as error:
            raise BadShares(f"the shares of client {client} do not open: made for other keys, or changed") from error
        return text

    # Steps 3 to 5: one round.

    def mask(self, round: int, codes: Codes) -> bytearray:
        """The masked message of one round: codes + noise parts + own mask +- pair masks, modulo 2^width.

        The ledger has recorded the round before. `codes` are those of `noise_shares.encode_base`.

        Raises:
            RoundUsed: the round was masked before. WrongRound: it is not in the batch.
        """
        batch, agreement = self._current(), self.agreement
        if batch.partners is None:
            raise WrongRound("a masked vector before the shares")
        if round in batch.rounds:
            raise RoundUsed(f"round {round} was masked before; its masks are not used for a second vector")
        if round not in batch.secrets:
            raise WrongRound(f"round {round} is not among the {batch.count} rounds from {batch.first_round} on")
        if codes.shape != (agreement.dimension,) or codes.dtype.kind != "u":
            raise InvalidParameter(f"codes must be {agreement.dimension} unsigned integers, got {codes.shape}")
        batch.rounds[round] = state = _Round(bytearray())
        own, session = batch.secrets[round], agreement.session
        lanes = codes.astype(lane_type(agreement.width))
        if own.noise_seeds:
            agreement.noise.add_from(0, own.noise_seeds[0], lanes, session)
        scratch = scratch_for(lanes)
        add_mask(lanes, self_key(own.self_seed, session, client=self.number, round=round), scratch=scratch)
        key = self._mask_key(round)
        for client in sorted(batch.partners):
            other = batch.peers[client].masks[round - batch.first_round]
            lower, higher = min(client, self.number), max(client, self.number)
            pair = pair_key(key, other, session, lower=lower, higher=higher, round=round)
            add_mask(lanes, pair, scratch=scratch, subtract=client < self.number)
        state.masked = messages.write_masked(self._header(Kind.MASKED, round), agreement, lanes)
        return state.masked

    def sign(self, survivors: Bytes) -> bytes:
        """Sign the list of survivors, the first one that is shown for a round and no other.

        Raises:
            TooFewClients: too few. ForeignClient: this client is not on it, or one that it shares no mask with is.
            ConflictingSurvivors: not the list that was shown first.
        """
        header, listed = messages.read_survivors(survivors, self.agreement)
        state, rule, batch = self._state(header), self.agreement.rule, self._current()
        assert batch.partners is not None
        if state.survivors is not None:
            if state.survivors != listed:
                raise ConflictingSurvivors(f"a second list of survivors for round {header.round}")
            return state.signature
        if self.number not in listed:
            raise ForeignClient(f"client {self.number} is not among the survivors of round {header.round}")
        if len(listed) < rule.fewest:
            raise TooFewClients(f"{len(listed)} survivors of {rule.clients}, at least {rule.fewest} must be in a sum")
        strangers = set(listed) - batch.partners - {self.number}
        if strangers:  # it may not be in the sum at all, and noise would be taken out that is needed
            raise ForeignClient(f"client {min(strangers)} is listed as a survivor and shares no mask with this client")
        statement = messages.survivors_statement(
            self.agreement, epoch=batch.epoch, round=header.round, survivors=listed
        )
        state.survivors = listed
        state.signature = messages.write_signature(
            self._header(Kind.SIGNATURE, header.round), self.agreement, self._identity.sign(statement)
        )
        return state.signature

    def unmask(self, certificate: Bytes) -> bytes:
        """Reveal what opens the sum over the survivors, once a quorum of them has signed the list this client signed.

        Raises:
            TooFewClients: fewer signatures than the quorum. BadSignature: one does not fit this client's list.
        """
        header, signatures = messages.read_certificate(certificate, self.agreement)
        state, rule, batch = self._state(header), self.agreement.rule, self._current()
        if state.survivors is None:
            raise WrongRound(f"signatures on a list of round {header.round} that was not shown")
        if state.unmasking:
            return state.unmasking
        if len(signatures) < rule.quorum:
            raise TooFewClients(f"{len(signatures)} signatures on the list of survivors, {rule.quorum} are needed")
        statement = messages.survivors_statement(
            self.agreement, epoch=batch.epoch, round=header.round, survivors=state.survivors
        )
        for client, signature in sorted(signatures.items())[: rule.quorum]:
            if client not in state.survivors:
                raise ForeignClient(f"client {client} signed a list that it is not on")
            self.agreement.roster.verify(client, signature, statement)
        state.unmasking = messages.write_unmasking(self._revealed(header.round, state.survivors), self.agreement)
        del batch.secrets[header.round]
        return state.unmasking

    def _revealed(self, round: int, survivors: tuple[int, ...]) -> Unmasking:
        batch, agreement = self._current(), self.agreement
        noise, per_round = agreement.noise, messages.secrets_per_round(agreement) * SHARE_BYTES
        rank = {client: index for index, client in enumerate(survivors)}
        first = (round - batch.first_round) * per_round
        for_survivors, for_missing = {}, {}
        for client, text in batch.held.items():
            shares = text[first : first + per_round]
            if client not in rank:
                for_missing[client] = shares[SHARE_BYTES : 2 * SHARE_BYTES]
                continue
            part = noise.first_unneeded(len(survivors), rank[client])
            start = (2 + part) * SHARE_BYTES
            seed_share = shares[start : start + SHARE_BYTES] if part < noise.parts else _NO_SHARE
            for_survivors[client] = (shares[:SHARE_BYTES], seed_share)
        own = batch.secrets[round]
        unneeded = own.noise_seeds[noise.first_unneeded(len(survivors), rank[self.number]) :]
        return Unmasking(
            header=self._header(Kind.UNMASKING, round),
            self_seed=own.self_seed,
            noise_seed=unneeded[0] if unneeded else _NO_SEED,
            survivors=for_survivors,
            missing=for_missing,
        )

    def _current(self) -> _Batch:
        if self._batch is None:
            raise WrongRound("no batch of rounds has begun")
        return self._batch

    def _expect(self, header: SumHeader, round: int, rounds: int) -> None:
        batch = self._current()
        if header.client != self.number:
            raise ForeignClient(f"a message to client {header.client} reached client {self.number}")
        if (header.epoch, header.round, header.rounds) != (batch.epoch, round, rounds):
            raise WrongRound(
                f"a message of epoch {header.epoch}, round {header.round}, in epoch {batch.epoch}, round {round}"
            )

    def _state(self, header: SumHeader) -> _Round:
        batch = self._current()
        self._expect(header, header.round, 1)
        if header.round not in batch.rounds:
            raise WrongRound(f"round {header.round} of this batch has not been masked by client {self.number}")
        return batch.rounds[header.round]
