"""The server of a secure sum: it relays messages, learns no more than the sum, and trusts no bytes of a client.

    server = SumServer(agreement)
    server.begin(epoch=1, first_round=0, rounds=20)
    for answer in send(server.requests()): server.take_keys(answer)
    for answer in send(server.key_bundles()): server.take_shares(answer)
    send(server.share_bundles())
    server.open(round)                                        # each round
    for vector in receive(): server.take_masked(vector)
    for answer in send(server.survivor_lists()): server.take_signature(answer)
    for answer in send(server.certificates()): server.take_unmasking(answer)
    total = server.total()

`requests`, `key_bundles` and the others each return the messages of one exchange by receiver, and close the exchange
before it: what comes too late is refused.

A message that is refused raises a `SecureSumError` and changes nothing. Its client then counts as missing from that
exchange on, like a client that did not answer. No guarantee rests on this code: the clients do not trust it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from bqsgd._src.errors import BadShares, ForeignClient, ReplacedKeys, RoundUsed, TooFewClients, WrongRound
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.masks import KEY_BYTES, Lanes, add_mask, lane_type, scratch_for, self_key, wrap_stream, xor
from bqsgd._src.secure.messages import Bytes, KeyBatch, Keys, Kind, Parts, SumHeader
from bqsgd._src.secure.sharing import SECRET_BYTES, SHARE_BYTES, combine


@dataclass
class _Batch(KeyBatch):
    """What the server knows about a key batch.

    keys, sealed, statements: what came, by client. peers: for each client that sent keys, its holders that did so too;
    None as long as keys may come. partners: for each client that sent shares, the clients with which it exchanged them;
    None as long as shares may come.
    """

    keys: dict[int, Keys] = field(default_factory=dict)
    peers: dict[int, frozenset[int]] | None = None
    sealed: dict[int, Parts] = field(default_factory=dict)
    partners: dict[int, frozenset[int]] | None = None
    statements: dict[int, Parts] = field(default_factory=dict)


@dataclass
class _Round:
    """vectors: on a sparse graph, the masked vectors until `close`, which may have to leave a client out."""

    number: int
    lanes: Lanes
    masked: set[int] = field(default_factory=set)
    vectors: dict[int, Lanes] = field(default_factory=dict)
    survivors: tuple[int, ...] | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    unmaskings: dict[int, Parts] = field(default_factory=dict)
    seeded: bool = False


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of the survivors' codes, one number per coordinate.

    width: the numbers are taken modulo 2^width. trials: binomial trials in the sum. seeded: the randomness of some
    client came from a seed, so there is no claim.
    """

    lanes: Lanes
    width: int
    survivors: tuple[int, ...]
    trials: int
    seeded: bool


class SumServer:
    """The server of a secure sum, for one key batch and one round at a time."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.sparse = agreement.rule.sparse is not None
        """Whether clients state their partners, and only a committee signs."""
        self._batch: _Batch | None = None
        self._round: _Round | None = None
        # Client -> its public key whose signature was verified. A client signs its key once for the whole run.
        self._verified: dict[int, bytes] = {}

    def begin(
        self,
        *,
        epoch: int,
        first_round: int,
        rounds: int,
        cohort: Iterable[int] | None = None,
        width: int | None = None,
    ) -> None:
        """Begin a key batch. Clients refuse an epoch that is not larger than the last.

        Args:
            cohort: the clients that take part; all of the roster by default.
            width: its sums are taken modulo 2^width; the widest that was agreed on by default.
        """
        agreed = self.agreement.of(cohort, width=width)
        self._batch, self._round = _Batch(agreed, epoch, first_round, rounds), None

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

    def requests(self) -> dict[int, bytes]:
        """The request for keys to each client of the batch: the whole roster, or the cohort."""
        batch = self._current()
        return {
            client: messages.write_batch(batch.header(Kind.BATCH, client), batch.agreement)
            for client in batch.agreement.members.clients
        }

    def take_keys(self, message: Bytes) -> None:
        """Take a client's keys."""
        batch = self._current()
        keys = messages.read_keys(message, batch.agreement)
        batch.check(keys.header)
        client = keys.header.client
        if self._verified.get(client) != keys.cipher:
            keys.verify(batch.agreement)
            self._verified[client] = keys.cipher
        if batch.peers is not None:
            raise WrongRound(f"keys of client {client} came after the keys were distributed")
        if batch.keys.setdefault(client, keys).digest != keys.digest:
            raise ReplacedKeys(f"client {client} has sent other keys before")

    def key_bundles(self) -> dict[int, bytes]:
        """For each client that sent keys, the keys of its neighbours."""
        batch = self._current()
        if batch.peers is None:
            self._enough(len(batch.keys), "sent keys")
            holders = batch.agreement.graph.holders
            batch.peers = {client: frozenset(holders(client)) & batch.keys.keys() for client in sorted(batch.keys)}
        keys = {client: {other: batch.keys[other].message for other in near} for client, near in batch.peers.items()}
        return self._bundles(Kind.KEY_BUNDLE, keys)

    def _bundles(self, kind: Kind, parts: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        batch = self._current()
        return {
            client: messages.write_parts(batch.header(kind, client), batch.agreement, held)
            for client, held in parts.items()
        }

    def take_shares(self, message: Bytes) -> None:
        """Take a client's encrypted shares."""
        batch = self._current()
        shares = messages.read_parts(message, batch.agreement, Kind.SHARES)
        batch.check(shares.header)
        client = shares.header.client
        if batch.peers is None or batch.partners is not None or client not in batch.peers:
            raise WrongRound(f"shares of client {client} came too early, too late or without its keys")
        if not shares.parts.keys() <= batch.peers[client]:
            raise ForeignClient(f"client {client} sent shares for clients that sent no keys")
        batch.sealed[client] = shares

    def _partners(self) -> dict[int, frozenset[int]]:
        batch = self._current()
        if batch.partners is None:
            self._enough(len(batch.sealed), "sent shares")
            # Both must have sent shares to each other: a client adds a mask only for a partner, and masks must cancel.
            batch.partners = {
                client: frozenset(
                    other for other in shares.parts if other in batch.sealed and client in batch.sealed[other].parts
                )
                for client, shares in sorted(batch.sealed.items())
            }
        return batch.partners

    def share_bundles(self) -> dict[int, bytes]:
        """For each client that sent shares, the shares that its partners encrypted for it."""
        sent, partners = self._current().sealed, self._partners()
        sealed = {client: {other: sent[other].parts[client] for other in partners[client]} for client in partners}
        return self._bundles(Kind.SHARE_BUNDLE, sealed)

    def take_partners(self, message: Bytes) -> None:
        """On a sparse graph: take a client's statement of its partners."""
        batch = self._current()
        statement = messages.read_parts(message, batch.agreement, Kind.PARTNERS)
        batch.check(statement.header)
        client = statement.header.client
        if batch.partners is None or client not in batch.partners:
            raise WrongRound(f"client {client} states its partners but sent no shares")
        near = batch.agreement.graph.masks(client)
        if set(messages.chosen_of(statement.own, near)) != batch.partners[client].intersection(near):
            raise BadShares(f"client {client} states other partners than it has")
        batch.statements[client] = statement

    def partner_bundles(self) -> dict[int, bytes]:
        """On a sparse graph: to each client that stated its partners, the statements of those whose shares it holds."""
        statements, bundles = self._current().statements, {}
        self._enough(len(statements), "stated their partners")
        for client in sorted(statements):
            bundles[client] = {
                other: statements[other].parts[client] + statements[other].own
                for other in self._partners()[client]
                if other in statements and client in statements[other].parts
            }
        return self._bundles(Kind.PARTNER_BUNDLE, bundles)

    # One round.

    def open(self, round: int) -> None:
        """Begin a round of the batch."""
        batch = self._current()
        if not batch.first_round <= round < batch.first_round + batch.count:
            raise WrongRound(f"round {round} is not in the batch")
        # Closes the exchange of shares: those that come after a round has begun are too late.
        self._partners()
        agreed = batch.agreement
        self._round = _Round(round, np.zeros(agreed.dimension, lane_type(agreed.width)))

    def take_masked(self, message: Bytes) -> int:
        """Add a client's masked vector to the sum; returns its number."""
        batch, current = self._current(), self._open()
        header, lanes = messages.read_masked(message, batch.agreement)
        batch.check(header, current.number)
        client = header.client
        if current.survivors is not None:
            raise WrongRound(f"the masked vector of client {client} came after the list of survivors was made")
        if client not in (batch.statements if self.sparse else self._partners()):
            raise ForeignClient(f"client {client} sent no shares or no statement in this batch")
        if client in current.masked:
            raise RoundUsed(f"a second masked vector of client {client} in round {current.number}")
        if self.sparse:
            current.vectors[client] = lanes
        else:
            np.add(current.lanes, lanes, out=current.lanes)
        current.masked.add(client)
        current.seeded |= header.seeded
        return client

    def close(self) -> tuple[int, ...]:
        """End the exchange and return the survivors of the round: the clients whose masked vectors came.

        A sparse graph also leaves out every client with too many missing neighbours.

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

    def survivor_lists(self) -> dict[int, bytes]:
        """The list of survivors, to each of them."""
        agreed, listed = self._current().agreement, self.close()
        return {client: messages.write_survivors(self._to(Kind.SURVIVORS, client), agreed, listed) for client in listed}

    def take_signature(self, message: Bytes) -> None:
        """Verify and keep a client's signature on the list."""
        batch, current, listed = self._current(), self._open(), self.close()
        agreed = batch.agreement
        header, signature = messages.read_signature(message, agreed)
        batch.check(header, current.number)
        client = header.client
        if client not in listed or client not in agreed.graph.committee:
            raise ForeignClient(f"client {client} is not a survivor that signs")
        statement = messages.survivors_statement(agreed, epoch=header.epoch, round=header.round, survivors=listed)
        agreed.members.verify(client, signature, statement)
        current.signatures[client] = signature

    def certificates(self) -> dict[int, bytes]:
        """A quorum of signatures, to each client that signed; on a sparse graph to all survivors.

        Raises:
            TooFewClients: fewer than a quorum have signed.
        """
        agreed, signatures, quorum = self._current().agreement, self._open().signatures, self.agreement.rule.quorum
        if len(signatures) < quorum:
            raise TooFewClients(f"{len(signatures)} survivors signed their list, {quorum} are needed")
        signers = sorted(signatures)
        chosen = {client: signatures[client] for client in signers[:quorum]}
        return {
            client: messages.write_certificate(self._to(Kind.CERTIFICATE, client), agreed, chosen)
            for client in (self.close() if self.sparse else signers)
        }

    def take_unmasking(self, message: Bytes) -> None:
        """Keep the shares that a survivor reveals."""
        batch, current, listed = self._current(), self._open(), frozenset(self.close())
        revealed = messages.read_parts(message, batch.agreement, Kind.UNMASKING)
        batch.check(revealed.header, current.number)
        client = revealed.header.client
        if client not in listed:
            raise ForeignClient(f"client {client} is not among the survivors")
        # Two seeds for a survivor, one for a missing client: a share of the other kind would give a wrong seed later.
        if any((len(share) == 2 * SHARE_BYTES) != (other in listed) for other, share in revealed.parts.items()):
            raise BadShares(f"client {client} revealed the wrong kind of share")
        # The first answer counts: a later one could change a sum that was computed already.
        current.unmaskings.setdefault(client, revealed)

    def total(self) -> Total:
        """The sum of the survivors' codes modulo 2^width, without masks and without noise that is not needed.

        Raises:
            TooFewClients: too few shares of a secret came; the round is lost.
            BadShares: the shares that came contradict each other.
        """
        current, agreed, listed = self._open(), self._current().agreement, self.close()
        # A copy, so that the sum can be tried again after more shares have come.
        lanes = current.lanes.copy()
        scratch = scratch_for(lanes)
        for rank, client in enumerate(listed):
            seeds = self._secret(client)
            key = self_key(seeds[:SECRET_BYTES], agreed.session, client=client, round=current.number)
            add_mask(lanes, key, scratch=scratch, subtract=True)
            part = agreed.noise.first_unneeded(len(listed), rank)
            agreed.noise.add_from(part, seeds[SECRET_BYTES:], lanes, agreed.run_digest, subtract=True)
        for client in sorted(self._partners().keys() - set(listed)):
            # A survivor that exchanged shares with a missing client has masked its vector with their common mask.
            affected = self._partners()[client].intersection(listed, agreed.graph.masks(client))
            if affected:
                self._remove_pairs(client, affected, lanes, scratch)
        lanes &= lanes.dtype.type((1 << agreed.width) - 1)
        trials = agreed.noise.in_sum(len(listed))
        return Total(lanes=lanes, width=agreed.width, survivors=listed, trials=trials, seeded=current.seeded)

    def _remove_pairs(self, client: int, affected: frozenset[int], lanes: Lanes, scratch: Lanes) -> None:
        """Remove the masks that survivors share with a client that is missing."""
        batch, shares = self._current(), self._current().sealed[client]
        others = shares.masked_with(batch.agreement)
        size = KEY_BYTES * (1 + len(others))
        first = size * (self._open().number - batch.first_round)
        wrapped = shares.own[first : first + size]
        check, pads = wrap_stream(self._secret(client), len(others))
        if check != wrapped[:KEY_BYTES]:
            raise BadShares(f"the shares of client {client}'s mask seed give a wrong seed")
        keys = xor(wrapped[KEY_BYTES:], pads)
        for index, other in enumerate(others):
            if other in affected:
                key = keys[KEY_BYTES * index : KEY_BYTES * (index + 1)]
                # The lower client of a pair added their mask, the higher one subtracted it.
                add_mask(lanes, key, scratch=scratch, subtract=other < client)

    def _secret(self, client: int) -> bytes:
        """What was revealed about a client: self seed and noise seed of a survivor, mask seed of a missing client."""
        current, rule = self._open(), self.agreement.rule
        if client in current.unmaskings and not self.sparse:
            return current.unmaskings[client].own
        shares = {
            point: current.unmaskings[holder].parts[client]
            for point, holder in enumerate(self._current().agreement.graph.holders(client), start=1)
            if holder in current.unmaskings and client in current.unmaskings[holder].parts
        }
        if len(shares) < rule.share_threshold:
            raise TooFewClients(
                f"{len(shares)} shares of a secret of client {client} came, {rule.share_threshold} are needed; "
                f"round {current.number} is lost"
            )
        return combine(shares, threshold=rule.share_threshold)

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

    def _to(self, kind: Kind, client: int) -> SumHeader:
        return self._current().header(kind, client, round=self._open().number)
