"""The server of a secure sum: it relays messages, learns no more than the sum, and trusts no bytes of a client.

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

A message that is refused raises a `SecureSumError` and changes nothing. Its client then counts as missing from that
step on, like a client that did not answer. No guarantee rests on this code: the clients do not trust it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from bqsgd._src.errors import BadShares, ForeignClient, ReplacedKeys, RoundUsed, TooFewClients, WrongRound
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.masks import KEY_BYTES, Lanes, add_mask, lane_type, scratch_for, self_key, wrap_stream, xor
from bqsgd._src.secure.messages import Bytes, Keys, Kind, SealedShares, SumHeader, Unmasking
from bqsgd._src.secure.sharing import combine


@dataclass
class _Batch:
    epoch: int
    first_round: int
    count: int
    agreement: Agreement
    keys: dict[int, Keys] = field(default_factory=dict)
    key_messages: dict[int, bytes] = field(default_factory=dict)
    peers: dict[int, frozenset[int]] | None = None
    said: dict[int, SealedShares] = field(default_factory=dict)
    partners: dict[int, frozenset[int]] | None = None
    stated: dict[int, tuple[bytes, dict[int, bytes]]] = field(default_factory=dict)


@dataclass
class _Round:
    number: int
    lanes: Lanes
    masked: set[int] = field(default_factory=set)
    vectors: dict[int, Lanes] = field(default_factory=dict)
    survivors: tuple[int, ...] | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    unmaskings: dict[int, Unmasking] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of the survivors' codes modulo 2^width, one number per coordinate.

    trials: binomial trials in the sum. seeded: the randomness of some client came from a seed, so there is no claim.
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
        self._verified: dict[int, bytes] = {}

    def begin(self, *, epoch: int, first_round: int, rounds: int, cohort: Iterable[int] | None = None) -> None:
        """Begin a key batch. Clients refuse an epoch that is not larger than the last.

        Args:
            cohort: the clients that take part; all of the roster by default.
        """
        agreed = self.agreement if cohort is None else self.agreement.of(cohort)
        assert agreed.members
        self._batch, self._round = _Batch(epoch, first_round, rounds, agreed), None

    @property
    def asked(self) -> tuple[int, ...]:
        """The clients of the batch: the whole roster, or the cohort."""
        return self._current().agreement.members.clients

    @property
    def last_round(self) -> int:
        """The last round of the batch, -1 before the first."""
        return -1 if self._batch is None else self._batch.first_round + self._batch.count - 1

    def check_sender(self, message: Bytes, client: int) -> None:
        """Raise ForeignClient if the message names another client than the one that it came from."""
        claimed = messages.sender_of(message)
        if claimed != client:
            raise ForeignClient(f"client {client} sent a message in the name of client {claimed}")

    # Keys and shares.

    def request(self, client: int) -> bytes:
        """The request for a client's keys."""
        batch = self._current()
        return messages.write_batch(self._header(Kind.BATCH, client, batch), batch.agreement)

    def take_keys(self, message: Bytes) -> int:
        """Take a client's keys; returns its number."""
        batch = self._current()
        keys = messages.read_keys(message, batch.agreement)
        client = self._expect(keys.header, batch.first_round, batch.count)
        if self._verified.get(client) != keys.cipher:
            keys.verify(batch.agreement)
            self._verified[client] = keys.cipher
        if batch.peers is not None:
            raise WrongRound(f"keys of client {client} came after the keys were distributed")
        if client in batch.keys and batch.keys[client].digest != keys.digest:
            raise ReplacedKeys(f"client {client} has sent other keys before")
        batch.keys[client], batch.key_messages[client] = keys, bytes(message)
        return client

    @property
    def keyed(self) -> tuple[int, ...]:
        """Clients that sent keys. Reading this closes the step: keys that come later are refused."""
        batch = self._current()
        if batch.peers is None:
            self._enough(len(batch.keys), "sent keys")
            batch.peers = {
                client: frozenset(batch.agreement.graph.holders(client)) & batch.keys.keys() for client in batch.keys
            }
        return tuple(sorted(batch.keys))

    def key_bundle(self, client: int) -> bytes:
        """The keys of the client's neighbours."""
        batch = self._current()
        assert self.keyed
        assert batch.peers is not None
        keys = {other: batch.key_messages[other] for other in batch.peers[client]}
        return messages.write_key_bundle(self._header(Kind.KEY_BUNDLE, client, batch), batch.agreement, keys)

    def take_shares(self, message: Bytes) -> int:
        """Take a client's encrypted shares; returns its number."""
        batch = self._current()
        said = messages.read_shares(message, batch.agreement)
        client = self._expect(said.header, batch.first_round, batch.count)
        if batch.peers is None or batch.partners is not None or client not in batch.peers:
            raise WrongRound(f"shares of client {client} came too early, too late or without its keys")
        if not said.sealed.keys() <= batch.peers[client]:
            raise ForeignClient(f"client {client} sent shares for clients that sent no keys")
        batch.said[client] = said
        return client

    @property
    def shared(self) -> tuple[int, ...]:
        """Clients that sent shares, and so can take part in the rounds of this batch. Reading this closes the step."""
        batch = self._current()
        if batch.partners is None:
            self._enough(len(batch.said), "sent shares")
            batch.partners = {
                client: frozenset(
                    other for other in said.sealed if other in batch.said and client in batch.said[other].sealed
                )
                for client, said in batch.said.items()
            }
        return tuple(sorted(batch.said))

    def share_bundle(self, client: int) -> bytes:
        """The shares that the client's neighbours encrypted for it."""
        batch = self._current()
        assert self.shared
        assert batch.partners is not None
        sealed = {other: batch.said[other].sealed[client] for other in batch.partners[client]}
        return messages.write_share_bundle(self._header(Kind.SHARE_BUNDLE, client, batch), batch.agreement, sealed)

    @property
    def sparse(self) -> bool:
        """Whether clients state their partners, and only a committee signs."""
        return self.agreement.rule.sparse is not None

    def take_partners(self, message: Bytes) -> int:
        """On a sparse graph: take a client's statement of its partners; returns its number."""
        batch = self._current()
        header, bits, tags = messages.read_partners(message, batch.agreement)
        client = self._expect(header, batch.first_round, batch.count)
        if batch.partners is None or client not in batch.partners:
            raise WrongRound(f"client {client} states its partners but sent no shares")
        near = frozenset(batch.agreement.graph.masks(client))
        if messages.read_partner_bits(batch.agreement, client, bits) != near & batch.partners[client]:
            raise BadShares(f"client {client} states other partners than it has")
        batch.stated[client] = (bits, tags)
        return client

    @property
    def stated(self) -> tuple[int, ...]:
        """Clients that stated their partners, and so can take part in the rounds of a batch on a sparse graph."""
        self._enough(len(self._current().stated), "stated their partners")
        return tuple(sorted(self._current().stated))

    def partner_bundle(self, client: int) -> bytes:
        """On a sparse graph: the statements of the clients whose shares the client holds."""
        batch = self._current()
        assert batch.partners is not None
        statements = {
            other: batch.stated[other][1][client] + batch.stated[other][0]
            for other in batch.partners[client]
            if other in batch.stated and client in batch.stated[other][1]
        }
        header = self._header(Kind.PARTNER_BUNDLE, client, batch)
        return messages.write_partner_bundle(header, batch.agreement, statements)

    # One round.

    def open(self, round: int) -> None:
        """Begin a round of the batch."""
        batch = self._current()
        if not batch.first_round <= round < batch.first_round + batch.count:
            raise WrongRound(f"round {round} is not in the batch")
        assert self.shared
        agreed = batch.agreement
        lanes = np.zeros(agreed.dimension, lane_type(agreed.width))
        self._round = _Round(round, lanes)

    def take_masked(self, message: Bytes) -> int:
        """Add a client's masked vector to the sum; returns its number."""
        batch, current = self._current(), self._open()
        header, lanes = messages.read_masked(message, batch.agreement)
        client = self._expect(header, current.number, 1)
        assert batch.partners is not None
        if current.survivors is not None:
            raise WrongRound(f"the masked vector of client {client} came after the list of survivors was made")
        if client not in (batch.stated if self.sparse else batch.partners):
            raise ForeignClient(f"client {client} sent no shares or no statement in this batch")
        if client in current.masked:
            raise RoundUsed(f"a second masked vector of client {client} in round {current.number}")
        if self.sparse:
            current.vectors[client] = lanes  # kept apart, because `close` may have to leave the client out
        else:
            np.add(current.lanes, lanes, out=current.lanes)
        current.masked.add(client)
        current.seeded |= header.seeded
        return client

    def close(self) -> tuple[int, ...]:
        """End the step and return the survivors of the round: the clients whose masked vectors came.

        On a sparse graph, clients of whose neighbours too many are missing are left out.

        Raises:
            TooFewClients: fewer survivors than any client would agree to unmask.
        """
        current = self._open()
        if current.survivors is None:
            listed = tuple(sorted(current.masked))
            # Leaving a client out may leave its neighbours with too few in turn, so repeat until the list is stable.
            while alone := frozenset(self._current().agreement.graph.too_far_away(listed)):
                listed = tuple(client for client in listed if client not in alone)
            self._enough(len(listed), "sent masked vectors")
            for client in listed if self.sparse else ():
                np.add(current.lanes, current.vectors[client], out=current.lanes)
            current.vectors.clear()
            current.survivors = listed
        return current.survivors

    def survivors(self, client: int) -> bytes:
        """The message with the list of survivors, for one of them."""
        return messages.write_survivors(self._to(Kind.SURVIVORS, client), self._current().agreement, self.close())

    def take_signature(self, message: Bytes) -> int:
        """Verify and keep a client's signature on the list; returns its number."""
        current, listed = self._open(), self.close()
        agreed = self._current().agreement
        header, signature = messages.read_signature(message, agreed)
        client = self._expect(header, current.number, 1)
        if client not in listed or client not in agreed.graph.committee:
            raise ForeignClient(f"client {client} is not a survivor that signs")
        statement = messages.survivors_statement(agreed, epoch=header.epoch, round=header.round, survivors=listed)
        agreed.members.verify(client, signature, statement)
        current.signatures[client] = signature
        return client

    @property
    def signed(self) -> tuple[int, ...]:
        """The clients to ask for an unmasking: those that signed; on a sparse graph all survivors.

        Raises:
            TooFewClients: fewer than a quorum have signed.
        """
        current, quorum = self._open(), self.agreement.rule.quorum
        if len(current.signatures) < quorum:
            raise TooFewClients(f"{len(current.signatures)} survivors signed their list, {quorum} are needed")
        return self.close() if self.sparse else tuple(sorted(current.signatures))

    def certificate(self, client: int) -> bytes:
        """The message with a quorum of signatures, for one of the clients to ask."""
        assert self.signed
        current = self._open()
        chosen = {
            other: current.signatures[other] for other in sorted(current.signatures)[: self.agreement.rule.quorum]
        }
        return messages.write_certificate(self._to(Kind.CERTIFICATE, client), self._current().agreement, chosen)

    def take_unmasking(self, message: Bytes) -> int:
        """Keep the shares that a survivor reveals; returns its number."""
        current, listed = self._open(), self.close()
        said = messages.read_unmasking(message, self._current().agreement)
        client = self._expect(said.header, current.number, 1)
        if client not in listed:
            raise ForeignClient(f"client {client} is not among the survivors")
        if not set(said.survivors) <= set(listed) or set(said.missing) & set(listed):
            raise BadShares(f"client {client} revealed the wrong kind of share")
        current.unmaskings.setdefault(client, said)
        return client

    def total(self) -> Total:
        """The sum of the survivors' codes modulo 2^width, without masks and without noise that is not needed.

        Raises:
            TooFewClients: too few shares of a secret came; the round is lost.
            BadShares: the shares that came contradict each other.
        """
        batch, current = self._current(), self._open()
        agreed, listed, number = batch.agreement, self.close(), current.number
        assert batch.partners is not None
        lanes = current.lanes.copy()  # the sum can then be tried again after more shares have come
        scratch = scratch_for(lanes)
        for rank, client in enumerate(listed):
            key = self_key(self._secret(client, "self_seed"), agreed.session, client=client, round=number)
            add_mask(lanes, key, scratch=scratch, subtract=True)
            part = agreed.noise.first_unneeded(len(listed), rank)
            if part < agreed.noise.parts:
                seed = self._secret(client, "noise_seed")
                agreed.noise.add_from(part, seed, lanes, agreed.run_digest, subtract=True)
        for client in sorted(batch.partners.keys() - set(listed)):
            affected = batch.partners[client] & set(listed) & set(agreed.graph.masks(client))
            if affected:
                self._remove_pairs(client, affected, lanes, scratch)
        lanes &= lanes.dtype.type((1 << agreed.width) - 1)
        return Total(lanes=lanes, survivors=listed, trials=agreed.noise.in_sum(len(listed)), seeded=current.seeded)

    def _remove_pairs(self, client: int, affected: frozenset[int] | set[int], lanes: Lanes, scratch: Lanes) -> None:
        """Remove the masks that survivors share with a client that is missing."""
        batch, said = self._current(), self._current().said[client]
        others = said.masked_with(batch.agreement)
        size = KEY_BYTES * (1 + len(others))
        first = size * (self._open().number - batch.first_round)
        wrapped = said.wrapped[first : first + size]
        check, pads = wrap_stream(self._secret(client, "mask_seed"), len(others))
        if check != wrapped[:KEY_BYTES]:
            raise BadShares(f"the shares of client {client}'s mask seed give a wrong seed")
        keys = xor(wrapped[KEY_BYTES:], pads)
        for index, other in enumerate(others):
            if other in affected:
                key = keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]
                add_mask(lanes, key, scratch=scratch, subtract=other < client)

    def _secret(self, client: int, which: str) -> bytes:
        """A secret of a client: as the client itself revealed it, or from the shares that others revealed."""
        current, agreed = self._open(), self._current().agreement
        revealed = current.unmaskings.get(client)
        if revealed is not None and which != "mask_seed" and not self.sparse:
            return revealed.self_seed if which == "self_seed" else revealed.noise_seed
        shares, threshold = {}, agreed.rule.share_threshold
        for index, holder in enumerate(agreed.graph.holders(client)):
            said = current.unmaskings.get(holder)
            if said is None:
                continue
            if which == "mask_seed" and client in said.missing:
                shares[index + 1] = said.missing[client]
            elif which != "mask_seed" and client in said.survivors:
                shares[index + 1] = said.survivors[client][which == "noise_seed"]
        if len(shares) < threshold:
            raise TooFewClients(
                f"{len(shares)} shares of a secret of client {client} came, {threshold} are needed; "
                f"round {current.number} is lost"
            )
        return combine(shares, threshold=threshold)

    def _enough(self, count: int, what: str) -> None:
        fewest = self.agreement.rule.fewest
        if count < fewest:
            raise TooFewClients(f"{count} clients {what}, a sum needs {fewest}")

    def _current(self) -> _Batch:
        if self._batch is None:
            raise WrongRound("no key batch has begun")
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
