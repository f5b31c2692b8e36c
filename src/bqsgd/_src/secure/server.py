"""The server of a secure sum: it relays messages, learns no more than the sum, and trusts no bytes of a client.

    server = SumServer(agreement)
    server.begin(epoch=1, first_round=0, rounds=20)
    for answer in send(server.requests()): server.take_keys(answer)
    for answer in send(server.key_bundles()): server.take_shares(answer)
    for answer in send(server.share_bundles()): server.take_partners(answer) # empty if all tags were right
    if server.to_leave_out(): ...                             # begin again without these
    server.open(round)                                        # each round
    for vector in receive(): server.take_masked(vector)
    for answer in send(server.survivor_lists()): server.take_signature(answer)
    for answer in send(server.certificates()): server.take_unmasking(answer)
    for answer in send(server.recoveries()): server.take_recovery(answer)    # nothing to send if all have answered
    total = server.total()

`requests`, `key_bundles` and the others each return the messages of one exchange by receiver, and close the exchange
before it: what comes too late is refused.

A message that is refused raises a `SecureSumError` and changes nothing. Its client then counts as missing from that
exchange on, like a client that did not answer. No guarantee rests on this code: the clients do not trust it.

Clients may lie about shares. Every secret has a check, so a secret is opened from shares that fit. The holders of the
others are named (`blamed`), not the client whose secret it is, unless the sum shows that its corrections are false.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from bqsgd._src.errors import (
    BadSecureMessage,
    BadShares,
    ForeignClient,
    ReplacedKeys,
    RoundUsed,
    TooFewClients,
    WrongRound,
)
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.masks import NO_MODEL, lane_type
from bqsgd._src.secure.messages import Bytes, Kind, Parts, SumHeader
from bqsgd._src.secure.opening import Opening, ServerBatch, ServerRound, Total
from bqsgd._src.secure.sharing import check_of


class SumServer:
    """The server of a secure sum, for one key batch and one round at a time."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.sparse = agreement.rule.sparse is not None
        """Whether clients state their partners, and only a committee signs."""
        self._batch: ServerBatch | None = None
        self._round: ServerRound | None = None
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
        without: Collection[int] = (),
    ) -> None:
        """Begin a key batch. Clients refuse an epoch that is not larger than the last.

        Args:
            cohort: the clients that take part; all of the roster by default.
            width: its sums are taken modulo 2^width; the widest that was agreed on by default.
            without: clients that are not asked for keys, and so are missing from every round of the batch.
        """
        agreed = self.agreement.of(cohort, width=width)
        invited = tuple(client for client in agreed.members.clients if client not in without)
        self._batch, self._round = ServerBatch(agreed, epoch, first_round, rounds, invited), None

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
        """The request for keys to each invited client of the batch: the whole roster, or the cohort."""
        batch = self._current()
        return {
            client: messages.write_batch(batch.header(Kind.BATCH, client), batch.agreement) for client in batch.invited
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
        if client not in batch.invited:
            raise ForeignClient(f"client {client} was not asked for keys")
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
        """Take a client's tags and corrections of its shares."""
        batch = self._current()
        client, shares = self._parts(message, Kind.SHARES)
        if batch.peers is None or batch.partners is not None or client not in batch.peers:
            raise WrongRound(f"shares of client {client} came too early, too late or without its keys")
        if not shares.parts.keys() <= batch.peers[client]:
            raise ForeignClient(f"client {client} sent shares for clients that sent no keys")
        batch.shares[client] = shares

    def _partners(self) -> dict[int, frozenset[int]]:
        batch = self._current()
        if batch.partners is None:
            self._enough(len(batch.shares), "sent shares")
            # Both must have sent shares to each other: a client adds a mask only for a partner, and masks must cancel.
            batch.partners = {
                client: frozenset(
                    other for other in shares.parts if other in batch.shares and client in batch.shares[other].parts
                )
                for client, shares in sorted(batch.shares.items())
            }
        return batch.partners

    def share_bundles(self) -> dict[int, bytes]:
        """For each client that sent shares, the tags that its partners made for it."""
        sent, partners = self._current().shares, self._partners()
        tags = {client: {other: sent[other].parts[client] for other in partners[client]} for client in partners}
        return self._bundles(Kind.SHARE_BUNDLE, tags)

    def take_partners(self, message: Bytes) -> None:
        """Take a client's statement of its partners: of every client on a sparse graph; on a full graph of one that
        found a wrong tag in its bundle."""
        batch = self._current()
        client, statement = self._parts(message, Kind.PARTNERS)
        if batch.partners is None or client not in batch.partners:
            raise WrongRound(f"client {client} states its partners but sent no shares")
        near = batch.agreement.graph.masks(client)
        masked_with = frozenset(messages.chosen_of(statement.own, near))
        stated = frozenset(statement.parts) if self.sparse else masked_with
        if not stated <= batch.partners[client] or masked_with != stated.intersection(near):
            raise BadShares(f"client {client} states other partners than it has")
        batch.refused[client] = batch.partners[client] - stated
        batch.statements[client] = statement

    @property
    def disputes(self) -> dict[int, frozenset[int]]:
        """Client -> the neighbours with which it did not exchange shares although both sent some, or whose tag it
        refused, or that refused its own. One of the two has lied.

        No list with both would be signed, so the caller begins again without the clients of `to_leave_out`.
        """
        refused, partners = self._current().refused, self._partners()
        holders = self._current().agreement.graph.holders
        pairs: dict[int, set[int]] = {}
        for client, exchanged in partners.items():
            for other in partners.keys() & frozenset(holders(client)) - exchanged | refused.get(client, frozenset()):
                pairs.setdefault(client, set()).add(other)
                pairs.setdefault(other, set()).add(client)
        return {client: frozenset(others) for client, others in sorted(pairs.items())}

    def to_leave_out(self) -> frozenset[int]:
        """Clients without which there is no dispute: those with the most first, and of two the one whose tag is
        missing or was refused."""
        open_disputes = {client: set(others) for client, others in self.disputes.items()}
        sent, refused, left_out = self._current().shares, self._current().refused, set()

        def faults(client: int) -> tuple[int, int]:
            others = open_disputes[client]
            bad = sum(o not in sent[client].parts or client in refused.get(o, ()) for o in others)
            return len(others), bad

        while any(open_disputes.values()):
            worst = max(sorted(open_disputes), key=faults)
            left_out.add(worst)
            for other in open_disputes.pop(worst):
                open_disputes[other].discard(worst)
        return frozenset(left_out)

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

    def open(self, round: int, *, model: bytes = NO_MODEL) -> None:
        """Begin a round of the batch. model: digest of the model that the clients are sent."""
        batch = self._current()
        if not batch.first_round <= round < batch.first_round + batch.count:
            raise WrongRound(f"round {round} is not in the batch")
        # Closes the exchange of shares: those that come after a round has begun are too late.
        self._partners()
        agreed = batch.agreement
        self._round = ServerRound(round, np.zeros(agreed.dimension, lane_type(agreed.width)), model)

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
        return {client: messages.write_listed(self._to(Kind.SURVIVORS, client), agreed, listed) for client in listed}

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
        """Keep what a survivor reveals. A seed that is not its own is not kept, and its sender is blamed.

        Raises:
            BadShares: the seed is wrong.
        """
        batch, current, listed = self._current(), self._open(), self.close()
        client, revealed = self._parts(message, Kind.UNMASKING, current.number)
        if client not in listed:
            raise ForeignClient(f"client {client} is not among the survivors")
        if not revealed.parts.keys().isdisjoint(listed):
            raise BadSecureMessage(f"client {client} revealed a share of a mask seed of a survivor")
        # The first answer counts: a later one could change a sum that was computed already.
        if current.unmaskings.setdefault(client, revealed) is not revealed:
            return
        noise, about = batch.agreement.noise, {"client": client, "round": current.number}
        part = noise.first_unneeded(len(listed), listed.index(client))
        chain = noise.chain(part, revealed.own, batch.agreement.run_digest, **about)
        said = batch.shares[client].corrections(batch.agreement, current.number)
        if check_of([chain[-1]], about=batch.about("seed-check", **about)) != said.seed_check:
            current.blame(client, client)
            raise BadShares(f"client {client} revealed a seed that is not the one of its masked vector")
        current.seeds[client] = chain

    def recoveries(self) -> dict[int, bytes]:
        """To each client that unmasked: which survivors have not revealed their seeds. Empty if all have."""
        agreed, current = self._current().agreement, self._open()
        silent = [client for client in self.close() if client not in current.seeds]
        return {
            client: messages.write_listed(self._to(Kind.SILENT, client), agreed, silent)
            for client in (sorted(current.unmaskings) if silent else ())
        }

    def take_recovery(self, message: Bytes) -> None:
        """Keep the shares of self seeds that a survivor reveals."""
        current = self._open()
        client, revealed = self._parts(message, Kind.RECOVERY, current.number)
        if client not in current.unmaskings:
            raise ForeignClient(f"client {client} was not asked for shares")
        current.recoveries.setdefault(client, revealed)

    @property
    def blamed(self) -> dict[int, frozenset[int]]:
        """In this round: client -> the clients with which it shares secrets that it lied about; itself if it lied
        about its own seed."""
        lies = {} if self._round is None else self._round.liars
        return {client: frozenset(about) for client, about in sorted(lies.items())}

    def total(self) -> Total:
        """The sum of the survivors' codes modulo 2^width, without masks and without noise that is not needed.

        Raises:
            TooFewClients: too few shares of a secret came; the round is lost.
            BadShares: no choice among the shares of a secret fits; the round is lost.
        """
        return Opening(self._current(), self._open(), self._partners(), self.close()).total()

    def _parts(self, message: Bytes, kind: Kind, round: int | None = None) -> tuple[int, Parts]:
        """The client that a message of parts names, and the message, which must be of this batch, or of this round."""
        batch = self._current()
        parts = messages.read_parts(message, batch.agreement, kind)
        batch.check(parts.header, round)
        return parts.header.client, parts

    def _enough(self, count: int, what: str) -> None:
        fewest = self.agreement.rule.fewest
        if count < fewest:
            raise TooFewClients(f"{count} clients {what}, a sum needs {fewest}")

    def _current(self) -> ServerBatch:
        if self._batch is None:
            raise WrongRound("no key batch has begun")
        return self._batch

    def _open(self) -> ServerRound:
        if self._round is None:
            raise WrongRound("no round is open")
        return self._round

    def _to(self, kind: Kind, client: int) -> SumHeader:
        return self._current().header(kind, client, round=self._open().number)
