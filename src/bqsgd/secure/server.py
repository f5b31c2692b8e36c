"""The server of a secure sum: it relays, it never learns more than the sum, and it trusts no client's bytes.

    server = SumServer(agreement)
    server.begin(epoch=1, first_round=0, rounds=20)
    for message in ...: server.take_keys(message)
    for client in server.keyed: send(client, server.key_bundle(client))
    for message in ...: server.take_shares(message)
    for client in server.shared: send(client, server.share_bundle(client))
    for message in ...: server.take_masked(message)           # each round
    for client in server.close(round): send(client, server.survivors(client))
    for message in ...: server.take_signature(message)
    for client in server.signed: send(client, server.certificate(client))
    for message in ...: server.take_unmasking(message)
    total = server.total()

A message that is refused raises a `SecureSumError` and leaves everything as it was; the client then counts as missing
from that step on, like one that said nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bqsgd.errors import BadShares, ForeignClient, ReplacedKeys, RoundUsed, TooFewClients, WrongRound
from bqsgd.secure import messages
from bqsgd.secure.agreement import Agreement
from bqsgd.secure.masks import Lanes, add_mask, lane_type, mask_key, pair_key, scratch_for, self_key
from bqsgd.secure.messages import Bytes, Keys, Kind, SumHeader, Unmasking
from bqsgd.secure.sharing import combine


@dataclass
class _Batch:
    epoch: int
    first_round: int
    count: int
    keys: dict[int, Keys] = field(default_factory=dict)
    key_messages: dict[int, bytes] = field(default_factory=dict)
    peers: dict[int, frozenset[int]] | None = None
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    partners: dict[int, frozenset[int]] | None = None


@dataclass
class _Round:
    number: int
    lanes: Lanes
    masked: set[int] = field(default_factory=set)
    survivors: tuple[int, ...] | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    unmaskings: dict[int, Unmasking] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of the survivors' codes modulo 2^width, one number per coordinate.

    trials: binomial trials in it. seeded: some client's randomness came from a seed, so there is no claim.
    """

    lanes: Lanes
    survivors: tuple[int, ...]
    trials: int
    seeded: bool


class SumServer:
    """The server of a secure sum, for one batch and one round at a time."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._batch: _Batch | None = None
        self._round: _Round | None = None

    def begin(self, *, epoch: int, first_round: int, rounds: int) -> None:
        """Begin a batch of rounds; clients refuse an epoch that is not above the last."""
        self._batch, self._round = _Batch(epoch, first_round, rounds), None

    @property
    def last_round(self) -> int:
        """The last round of the batch, -1 before the first."""
        return -1 if self._batch is None else self._batch.first_round + self._batch.count - 1

    def check_sender(self, message: Bytes, client: int) -> None:
        """Raise ForeignClient unless the message is in the name of the client that it came from."""
        claimed = messages.sender_of(message)
        if claimed != client:
            raise ForeignClient(f"client {client} sent a message in the name of client {claimed}")

    # Keys and shares.

    def request(self, client: int) -> bytes:
        """The request for a client's keys."""
        return messages.write_batch(self._header(Kind.BATCH, client, self._current()), self.agreement)

    def take_keys(self, message: Bytes) -> int:
        """Take a client's keys; returns its number."""
        batch = self._current()
        keys = messages.read_keys(message, self.agreement)
        client = self._expect(keys.header, batch.first_round, batch.count)
        if batch.peers is not None:
            raise WrongRound(f"keys of client {client} came after the keys were handed out")
        if client in batch.keys and batch.keys[client].digest != keys.digest:
            raise ReplacedKeys(f"client {client} sent other keys before")
        batch.keys[client], batch.key_messages[client] = keys, bytes(message)
        return client

    @property
    def keyed(self) -> tuple[int, ...]:
        """Clients that sent keys; from here on no more are taken."""
        batch = self._current()
        if batch.peers is None:
            self._enough(len(batch.keys), "sent keys")
            everybody = frozenset(batch.keys)
            batch.peers = {client: everybody - {client} for client in everybody}
        return tuple(sorted(batch.keys))

    def key_bundle(self, client: int) -> bytes:
        """The keys of all others."""
        batch = self._current()
        assert self.keyed
        assert batch.peers is not None
        found = {other: batch.key_messages[other] for other in batch.peers[client]}
        return messages.write_key_bundle(self._header(Kind.KEY_BUNDLE, client, batch), self.agreement, found)

    def take_shares(self, message: Bytes) -> int:
        """Take a client's encrypted shares; returns its number."""
        batch = self._current()
        header, sealed = messages.read_shares(message, self.agreement, Kind.SHARES)
        client = self._expect(header, batch.first_round, batch.count)
        if batch.peers is None or batch.partners is not None or client not in batch.peers:
            raise WrongRound(f"shares of client {client} came too early, too late or without keys")
        if not set(sealed) <= batch.peers[client]:
            raise ForeignClient(f"client {client} sent shares to clients that sent no keys")
        batch.sealed[client] = sealed
        return client

    @property
    def shared(self) -> tuple[int, ...]:
        """Clients that sent shares: those who can take part in the rounds of this batch."""
        batch = self._current()
        if batch.partners is None:
            self._enough(len(batch.sealed), "sent shares")
            batch.partners = {
                client: frozenset(other for other in sealed if client in batch.sealed.get(other, ()))
                for client, sealed in batch.sealed.items()
            }
        return tuple(sorted(batch.sealed))

    def share_bundle(self, client: int) -> bytes:
        """What the others sealed for the client."""
        batch = self._current()
        assert self.shared
        assert batch.partners is not None
        found = {other: batch.sealed[other][client] for other in batch.partners[client]}
        return messages.write_shares(self._header(Kind.SHARE_BUNDLE, client, batch), self.agreement, found)

    # One round.

    def open(self, round: int) -> None:
        """Begin a round of the batch."""
        batch = self._current()
        if not batch.first_round <= round < batch.first_round + batch.count:
            raise WrongRound(f"round {round} is not in the batch")
        assert self.shared
        lanes = np.zeros(self.agreement.dimension, lane_type(self.agreement.width))
        self._round = _Round(round, lanes)

    def take_masked(self, message: Bytes) -> int:
        """Add a client's masked vector to the sum; returns its number."""
        batch, current = self._current(), self._open()
        header, lanes = messages.read_masked(message, self.agreement)
        client = self._expect(header, current.number, 1)
        assert batch.partners is not None
        if current.survivors is not None:
            raise WrongRound(f"the masked vector of client {client} came after the survivors were announced")
        if client not in batch.partners:
            raise ForeignClient(f"client {client} sent no shares in this batch")
        if client in current.masked:
            raise RoundUsed(f"a second masked vector of client {client} in round {current.number}")
        np.add(current.lanes, lanes, out=current.lanes)
        current.masked.add(client)
        current.seeded |= header.seeded
        return client

    def close(self) -> tuple[int, ...]:
        """The survivors of the round: those whose masked vectors came. From here on no more are taken.

        Raises:
            TooFewClients: fewer than any client would agree to unmask.
        """
        current = self._open()
        if current.survivors is None:
            self._enough(len(current.masked), "sent masked vectors")
            current.survivors = tuple(sorted(current.masked))
        return current.survivors

    def survivors(self, client: int) -> bytes:
        """The list of survivors, for one of them."""
        return messages.write_survivors(self._to(Kind.SURVIVORS, client), self.agreement, self.close())

    def take_signature(self, message: Bytes) -> int:
        """Take a client's signature on the list; returns its number."""
        current, listed = self._open(), self.close()
        header, signature = messages.read_signature(message, self.agreement)
        client = self._expect(header, current.number, 1)
        if client not in listed:
            raise ForeignClient(f"client {client} is not among the survivors")
        statement = messages.survivors_statement(
            self.agreement, epoch=header.epoch, round=header.round, survivors=listed
        )
        self.agreement.roster.verify(client, signature, statement)
        current.signatures[client] = signature
        return client

    @property
    def signed(self) -> tuple[int, ...]:
        """Clients that signed, once they are a quorum.

        Raises:
            TooFewClients: they are not.
        """
        current, quorum = self._open(), self.agreement.rule.quorum
        if len(current.signatures) < quorum:
            raise TooFewClients(f"{len(current.signatures)} survivors signed their list, {quorum} must")
        return tuple(sorted(current.signatures))

    def certificate(self, client: int) -> bytes:
        """As many signatures as make a quorum, for one of those who signed."""
        chosen = {other: self._open().signatures[other] for other in self.signed[: self.agreement.rule.quorum]}
        return messages.write_certificate(self._to(Kind.CERTIFICATE, client), self.agreement, chosen)

    def take_unmasking(self, message: Bytes) -> int:
        """Take what a survivor reveals; returns its number."""
        current, listed = self._open(), self.close()
        said = messages.read_unmasking(message, self.agreement)
        client = self._expect(said.header, current.number, 1)
        if client not in listed:
            raise ForeignClient(f"client {client} is not among the survivors")
        if not set(said.survivors) <= set(listed) or set(said.missing) & set(listed):
            raise BadShares(f"client {client} revealed the wrong kind of share")
        current.unmaskings.setdefault(client, said)
        return client

    def total(self) -> Total:
        """The sum of the survivors' codes modulo 2^width, with the noise that is needed and no other.

        Raises:
            TooFewClients: too few shares came for a client's secret: the round is lost.
            BadShares: shares that came do not fit together.
        """
        batch, current, agreement = self._current(), self._open(), self.agreement
        listed, session, number = self.close(), agreement.session, current.number
        assert batch.partners is not None
        lanes = current.lanes.copy()
        scratch = scratch_for(lanes)
        for rank, client in enumerate(listed):
            seed = self._secret(client, "self_seed")
            key = self_key(seed, session, client=client, round=number)
            add_mask(lanes, key, scratch=scratch, subtract=True)
            part = agreement.noise.first_unneeded(len(listed), rank)
            if part < agreement.noise.parts:
                agreement.noise.add_from(part, self._secret(client, "noise_seed"), lanes, session, subtract=True)
        for client in sorted(set(batch.partners) - set(listed)):
            affected = batch.partners[client] & set(listed)
            if affected:
                self._remove_pairs(client, affected, lanes, scratch)
        lanes &= lanes.dtype.type((1 << agreement.width) - 1)
        return Total(lanes=lanes, survivors=listed, trials=agreement.noise.in_sum(len(listed)), seeded=current.seeded)

    def _remove_pairs(self, client: int, affected: frozenset[int] | set[int], lanes: Lanes, scratch: Lanes) -> None:
        """Take out the masks that survivors share with a client that is missing."""
        batch, current, session = self._current(), self._open(), self.agreement.session
        offset = current.number - batch.first_round
        key = mask_key(self._secret(client, "mask_seed"), session, client=client, round=current.number)
        if key.public_key().public_bytes_raw() != batch.keys[client].masks[offset]:
            raise BadShares(f"the shares of the mask key of client {client} give another key than the one it sent")
        for other in sorted(affected):
            lower, higher = min(client, other), max(client, other)
            pair = pair_key(
                key, batch.keys[other].masks[offset], session, lower=lower, higher=higher, round=current.number
            )
            add_mask(lanes, pair, scratch=scratch, subtract=other == lower)

    def _secret(self, client: int, which: str) -> bytes:
        """A client's secret from itself, or from the shares that others hold."""
        current, rule, place = self._open(), self.agreement.rule, self.agreement.roster.place
        own = current.unmaskings.get(client)
        if own is not None and which != "mask_seed":
            return own.self_seed if which == "self_seed" else own.noise_seed
        shares = {}
        for holder, said in current.unmaskings.items():
            if which == "mask_seed" and client in said.missing:
                shares[place[holder] + 1] = said.missing[client]
            elif which != "mask_seed" and client in said.survivors:
                shares[place[holder] + 1] = said.survivors[client][which == "noise_seed"]
        if len(shares) < rule.share_threshold:
            raise TooFewClients(
                f"{len(shares)} shares of a secret of client {client} came, {rule.share_threshold} are needed: "
                f"round {current.number} is lost"
            )
        return combine(shares, threshold=rule.share_threshold)

    def _enough(self, count: int, what: str) -> None:
        fewest = self.agreement.rule.fewest
        if count < fewest:
            raise TooFewClients(f"{count} clients {what}, a sum needs {fewest}")

    def _current(self) -> _Batch:
        if self._batch is None:
            raise WrongRound("no batch of rounds has begun")
        return self._batch

    def _open(self) -> _Round:
        if self._round is None:
            raise WrongRound("no round is open")
        return self._round

    def _expect(self, header: SumHeader, round: int, rounds: int) -> int:
        batch = self._current()
        if (header.epoch, header.round, header.rounds) != (batch.epoch, round, rounds):
            raise WrongRound(
                f"client {header.client} sent a message of epoch {header.epoch}, round {header.round}, in epoch "
                f"{batch.epoch}, round {round}"
            )
        return header.client

    def _header(self, kind: Kind, client: int, batch: _Batch) -> SumHeader:
        return SumHeader(kind=kind, epoch=batch.epoch, round=batch.first_round, rounds=batch.count, client=client)

    def _to(self, kind: Kind, client: int) -> SumHeader:
        return SumHeader(kind=kind, epoch=self._current().epoch, round=self._open().number, client=client)
