"""A client of a secure sum: it turns messages into answers, and leaves sending to the caller.

    client = SumClient(agreement, identity=key, number=3)
    send(client.keys(receive()))                             # request -> keys, once for the rounds of a key batch
    send(client.shares(receive()))                           # key bundle -> tags, and corrections of its shares
    send(client.take_shares(receive()))                      # share bundle -> its partners, if sparse or a tag is wrong
    client.take_partners(receive())                          # on a sparse graph: its neighbours' partners
    send(client.mask(round, codes))                          # each round, after the ledger has recorded it
    send(client.sign(receive()))                             # survivors -> signature
    send(client.unmask(receive()))                           # certificate -> its seed, shares of the missing clients
    send(client.recover(receive()))                          # if a survivor has left: shares of its self seed

Whatever the server says, a client keeps to these rules, on which the proof rests (docs/secure.md, Claim 12):

- It masks one vector per round.
- It signs one list of survivors per round, and only if at most f clients are missing from it.
- It reveals seeds and shares only for a list that a quorum has signed. For each other client it then reveals a share of
  the self seed or a share of the mask seed, never both for one round: the two together would unmask a single vector.

Shares are not sent. Two clients that know each other's keys derive the shares that they hold of each other's secrets,
and a client tells the server only what corrects those that are not on its polynomial. On a full graph the share of a
client's mask seed that a neighbour holds is the secret of their common mask itself. So the secrets of one client's
masks lie on a polynomial, but for public corrections: if the client drops out, some of them give all the others. On a
sparse graph the secrets of masks are wrapped with the mask seed instead.

A client that refuses a message raises a SecureSumError, and has revealed nothing.

Secrets live in memory, or in a file of the client that is written before an answer leaves (`state.StateFile`). A client
that has lost them takes part again from the next key batch on, whose epoch must be larger than all that it has seen.
"""

from __future__ import annotations

from bqsgd._src.errors import (
    BadSecureMessage,
    ConflictingSurvivors,
    ForeignClient,
    InvalidParameter,
    RoundUsed,
    TooFewClients,
    WrongRound,
)
from bqsgd._src.params import Codes
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.key_exchange import KeyExchange
from bqsgd._src.secure.messages import Bytes, Kind, SumHeader
from bqsgd._src.secure.state import RoundState


class SumClient(KeyExchange):
    """One client of a secure sum.

    Args:
        agreement: what all parties agree on.
        identity: the private key whose public half the roster has for `number`.
        last_epoch: remembers the last epoch, as `EpochFile` does: a call without argument returns it, a call with one
            stores it durably.
        keep: stores the whole state, and returns that of an earlier process, from which this client continues. A
            client without `keep` and `last_epoch` must never be restarted: it would forget which epochs it has seen.
        seed: makes everything reproducible, and voids every claim. The agreement says whether there is one.
        rounds: how many rounds the run has. After the last one a client with `keep` deletes its state.
    """

    def answer(self, message: Bytes) -> bytes:
        """Answer any message of the server; engines call this. The answer is empty if none is due.

        Raises:
            SecureSumError: the message is refused.
        """
        answers = {
            Kind.BATCH: self.keys,
            Kind.KEY_BUNDLE: self.shares,
            Kind.SHARE_BUNDLE: self.take_shares,
            Kind.PARTNER_BUNDLE: self.take_partners,
            Kind.SURVIVORS: self.sign,
            Kind.CERTIFICATE: self.unmask,
            Kind.SILENT: self.recover,
        }
        kind = messages.message_kind(message)
        if kind not in answers:
            raise BadSecureMessage(f"a message of kind {kind.name} ({int(kind)}) goes to the server, not to a client")
        return answers[kind](message)

    def ready(self, round: int) -> bool:
        """Whether `mask` can be called for this round."""
        batch = self._state.batch
        return batch is not None and batch.complete and round in batch.secrets and round not in batch.rounds

    def mask(self, round: int, codes: Codes, *, model: bytes = masks.NO_MODEL) -> bytearray:
        """The masked message of one round: codes + noise parts + self mask +- pair masks, modulo 2^width.

        Call it after the ledger has recorded the round. `codes` come from `noise_shares.encode_base`. model: digest of
        the model that the server sent (`masks.model_digest`). Masks cancel only between clients with the same model.

        Raises:
            RoundUsed: a vector of this round was masked before.
            WrongRound: the round is not in the batch, or keys and shares are not complete.
        """
        batch = self._current()
        agreed = batch.agreement
        if not batch.complete:
            raise WrongRound("a masked vector was asked for before the shares are complete")
        if round in batch.rounds:
            raise RoundUsed(f"round {round} was masked before; its masks must not be used for a second vector")
        if round not in batch.secrets:
            raise WrongRound(f"round {round} is not among the {batch.count} rounds from {batch.first_round} on")
        if codes.shape != (agreed.dimension,) or codes.dtype.kind != "u":
            raise InvalidParameter(f"codes must be {agreed.dimension} unsigned integers, got {codes.shape}")
        # Stored before the vector exists: if the process ends now, the round is lost, and its masks are never reused.
        batch.rounds[round] = RoundState()
        self._remember()
        lanes = codes.astype(masks.lane_type(agreed.width))
        chain = self._chain(round)
        agreed.noise.add_parts(0, chain, lanes, agreed.run_digest)
        scratch = masks.scratch_for(lanes)
        key = masks.self_key(chain[-1], agreed.session, client=self.number, round=round)
        masks.add_mask(lanes, key, scratch=scratch)
        # A neighbour whose shares did not come does not add the common mask either.
        secrets = {client: batch.at(own, round) for client, own in batch.pairs.items() if client in batch.partners}
        keys = masks.pair_keys(list(secrets.values()), agreed.session, round=round, model=model)
        for client, pair_key in zip(secrets, keys, strict=True):
            masks.add_mask(lanes, pair_key, scratch=scratch, subtract=client < self.number)
        return messages.write_masked(self._header(Kind.MASKED, round), agreed, lanes)

    def sign(self, survivors: Bytes) -> bytes:
        """Sign the first list of survivors that comes for a round, and no other.

        On a sparse graph only the committee signs. The other clients keep the list, and their answer is empty.

        Raises:
            TooFewClients: the list is too short, or has too few neighbours of a survivor.
            ForeignClient: this client is not on the list, or a neighbour on it shares no mask with this client.
            ConflictingSurvivors: another list came first.
        """
        batch = self._current()
        agreed = batch.agreement
        header, listed = messages.read_listed(survivors, agreed, Kind.SURVIVORS)
        state, rule, graph = self._round(header), agreed.rule, agreed.graph
        if state.survivors is not None:
            if state.survivors != listed:
                raise ConflictingSurvivors(f"a second list of survivors for round {header.round}")
            return state.signature
        if self.number not in listed:
            raise ForeignClient(f"client {self.number} is not among the survivors of round {header.round}")
        if len(listed) < rule.fewest:
            raise TooFewClients(f"{len(listed)} survivors of {rule.clients}, at least {rule.fewest} must be in a sum")
        if strangers := set(listed) & set(graph.masks(self.number)) - batch.partners:
            # Such a client may not be in the sum at all. If the list counted its noise, the server could take out noise
            # that the sum needs.
            raise ForeignClient(f"client {min(strangers)} is listed as a survivor and shares no mask with this client")
        if self.number in graph.committee:
            if alone := graph.too_far_away(listed):
                raise TooFewClients(f"too many neighbours of client {alone[0]} are missing from the list of survivors")
            statement = messages.survivors_statement(agreed, epoch=batch.epoch, round=header.round, survivors=listed)
            signature = self._identity.sign(statement)
            state.signature = self._header(Kind.SIGNATURE, header.round).pack(agreed) + signature
        state.survivors = listed
        # Before the signature leaves: after a restart this client must not sign another list.
        self._remember()
        return state.signature

    def unmask(self, certificate: Bytes) -> bytes:
        """Reveal what opens the sum over the survivors, if a quorum has signed the list that this client has.

        Raises:
            TooFewClients: fewer signatures than the quorum.
            BadSignature: a signature is not on this client's list.
            ForeignClient: on a sparse graph, two clients on the list share no mask although they are neighbours.
        """
        batch = self._current()
        agreed = batch.agreement
        header, signatures = messages.read_certificate(certificate, agreed)
        state, rule = self._round(header), agreed.rule
        if state.survivors is None:
            raise WrongRound(f"signatures came before the list of survivors of round {header.round}")
        # Asked again, the client says the same again, whatever certificate comes with the question.
        if state.unmasking:
            return state.unmasking
        if len(signatures) < rule.quorum:
            raise TooFewClients(f"{len(signatures)} signatures on the list of survivors, {rule.quorum} are needed")
        if foreign := signatures.keys() - frozenset(state.survivors):
            raise ForeignClient(f"client {min(foreign)} signed a list that it is not on")
        statement = messages.survivors_statement(
            agreed, epoch=batch.epoch, round=header.round, survivors=state.survivors
        )
        for client in sorted(signatures)[: rule.quorum]:
            agreed.members.verify(client, signatures[client], statement)
        state.unmasking = self._revealed(header.round, state.survivors)
        # No longer needed. Somebody who steals the state later does not find it.
        del batch.secrets[header.round]
        answer = state.unmasking
        if self._keep is not None and header.round + 1 == self._rounds:
            self._state.batch = None
            self._keep.forget(self._state.epoch)
        else:
            self._remember()
        return answer

    def _revealed(self, round: int, survivors: tuple[int, ...]) -> bytes:
        """The seed of this client's own mask and unneeded noise, and for each missing client a share of its mask seed.

        The self mask of a missing client stays closed, so its vector stays hidden even if the server has received it.
        """
        batch, listed = self._current(), frozenset(survivors)
        for client in listed & (batch.strangers or {}).keys():
            assert batch.strangers is not None
            if cut := batch.strangers[client] & listed:
                raise ForeignClient(f"client {client} is on the list with client {min(cut)} but shares no mask with it")
        missing = {
            client: batch.at(self._mask_shares(client, sender=False), round) for client in batch.partners - listed
        }
        part = batch.agreement.noise.first_unneeded(len(survivors), survivors.index(self.number))
        own = self._chain(round, part)[0]
        return messages.write_parts(self._header(Kind.UNMASKING, round), batch.agreement, missing, own=own)

    def recover(self, request: Bytes) -> bytes:
        """Shares of the self seeds of survivors that have revealed nothing themselves, after this client unmasked.

        Raises:
            WrongRound: this client has not unmasked the round.
            ForeignClient: one of the clients is not on the list of survivors.
        """
        batch = self._current()
        header, silent = messages.read_listed(request, batch.agreement, Kind.SILENT)
        state = self._round(header)
        if not state.unmasking or state.survivors is None:
            raise WrongRound(f"client {self.number} has not unmasked round {header.round}")
        if foreign := set(silent).difference(state.survivors):
            # Its mask seed may have been opened; its self seed must stay closed.
            raise ForeignClient(f"client {min(foreign)} is not among the survivors of round {header.round}")
        # On a sparse graph a client that has not stated its partners may be cut off: reveal nothing about it.
        known = batch.partners if batch.strangers is None else batch.partners & batch.strangers.keys()
        shares = {
            client: batch.at(self._stream("self-shares", client, sender=False), header.round)
            for client in known.intersection(silent)
        }
        return messages.write_parts(self._header(Kind.RECOVERY, header.round), batch.agreement, shares)

    def _round(self, header: SumHeader) -> RoundState:
        """The state of the round that a message is for; WrongRound if this client has not masked a vector in it."""
        batch = self._current()
        self._check(header, header.round)
        if header.round not in batch.rounds:
            raise WrongRound(f"round {header.round} of this batch has not been masked by client {self.number}")
        return batch.rounds[header.round]
