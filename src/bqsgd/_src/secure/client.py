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

import hashlib
import hmac
import struct
from collections.abc import Callable
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from bqsgd._src.errors import (
    BadSecureMessage,
    ConflictingSurvivors,
    ForeignClient,
    InvalidParameter,
    ReplacedKeys,
    RoundUsed,
    TooFewClients,
    WrongRound,
)
from bqsgd._src.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd._src.params import Codes, check_int
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.messages import Bytes, Corrections, Keys, Kind, SumHeader
from bqsgd._src.secure.roster import public_key
from bqsgd._src.secure.sharing import check_of, row_through
from bqsgd._src.secure.state import BatchState, ClientState, RoundState, StateFile, read_state, write_state


class SumClient:
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

    def __init__(
        self,
        agreement: Agreement,
        *,
        identity: Ed25519PrivateKey,
        number: int,
        last_epoch: Callable[..., int] | None = None,
        keep: StateFile | None = None,
        seed: int | None = None,
        rounds: int | None = None,
    ) -> None:
        if agreement.roster.keys[agreement.roster.check(number)] != public_key(identity):
            raise InvalidParameter(f"the identity key is not the one that the roster has for client {number}")
        if agreement.seeded != (seed is not None):
            raise InvalidParameter(
                "the clients agree whether their secrets follow from seeds: give a seed to all of them or to none"
            )
        self.agreement, self.number, self._identity = agreement, number, identity
        self._last_epoch, self._keep, self._rounds = last_epoch, keep, rounds
        self._state = ClientState()
        if keep is not None:
            epoch, kept = keep.load()
            self._state = ClientState(epoch) if kept is None else read_state(kept, agreement, number)
        if last_epoch is not None:
            self._state.epoch = max(self._state.epoch, last_epoch())
        self._seed = None if seed is None else check_int("seed", seed, 0, 2**63 - 1)

    @property
    def seeded(self) -> bool:
        """Whether the randomness comes from a seed. Whoever knows it can remove masks and noise."""
        return self._seed is not None

    def source(self, purpose: str, number: int) -> NoiseSource:
        """The source of randomness: the operating system, or a stream of the seed for one purpose in one round."""
        if self._seed is None:
            return privacy_rng()
        key = f"bqsgd.secure.{purpose}.v1".encode() + struct.pack("<QQQ", self._seed, self.number, number)
        return seeded_rng(seed=int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1)

    def _header(self, kind: Kind, round: int | None = None) -> SumHeader:
        return self._current().header(kind, self.number, round=round)

    def _remember(self) -> None:
        """Store the state. Every method that answers calls this before it returns."""
        if self._keep is None:
            return
        try:
            self._keep.save(self._state.epoch, write_state(self._state, self.agreement, self.number))
        except BaseException:
            # Drop the batch: an answer whose state was not saved must never be sent, not even later.
            self._state.batch = None
            raise

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

    # Exchanges 1 and 2: keys and shares, for a key batch (several rounds whose keys are exchanged together).

    def keys(self, request: Bytes) -> bytes:
        """Begin a key batch: draw a fresh seed for each of its rounds and forget those of the previous batch.

        A repeated request for the same batch gets the same bytes.

        Raises:
            WrongRound: the epoch is not larger than all epochs so far.
            TooFewClients, ForeignClient: the cohort has the wrong size, or this client is not in it.
            BadSecureMessage: too many rounds, so that the client would have to store too much; or a width out of range.
        """
        header, agreed = messages.read_batch(request, self.agreement)
        self._check_receiver(header)
        if self.number not in agreed.members.keys:
            raise ForeignClient(f"client {self.number} is not in the cohort that it was asked to join")
        if header.rounds > (most := messages.most_rounds(agreed)):
            raise BadSecureMessage(f"keys for {header.rounds} rounds at once; at most {most} are allowed")
        state, batch, epoch = self._state, self._state.batch, header.epoch
        asked = (epoch, header.round, header.rounds)
        # A request that is repeated, after a lost answer, gets the same answer: fresh secrets need a fresh epoch.
        if batch is not None and (batch.epoch, batch.first_round, batch.count) == asked:
            if batch.agreement.session != agreed.session:
                raise ReplacedKeys(f"another cohort or width for epoch {epoch}; the client keeps to the first")
            return batch.keys
        if self._last_epoch is not None:
            # Another process of this client may have begun a batch since this one read the file.
            state.epoch = max(state.epoch, self._last_epoch())
        if epoch <= state.epoch:
            raise WrongRound(
                f"epoch {epoch} is not above {state.epoch}, the last one that client {self.number} saw; "
                "if this is not that run continued, give it a name of its own"
            )
        if self._last_epoch is not None:
            # Stored before any secret of the epoch exists: after a crash the epoch counts as used.
            self._last_epoch(epoch)
        state.epoch = epoch
        if not state.cipher:
            state.cipher = self.source("cipher", 0).words(4).tobytes()
        nonce = self.source("batch", header.round).words(2).tobytes()
        rounds = range(header.round, header.round + header.rounds)
        secrets = {number: self.source("round", number).words(2).tobytes() for number in rounds}
        state.batch = batch = BatchState(agreed, *asked, b"", secrets)
        cipher = X25519PrivateKey.from_private_bytes(state.cipher).public_key().public_bytes_raw()
        signature = self._identity.sign(messages.keys_statement(agreed, self.number, cipher))
        batch.keys = self._header(Kind.KEYS).pack(agreed) + cipher + nonce + signature
        self._remember()
        return batch.keys

    def shares(self, bundle: Bytes) -> bytes:
        """Read the neighbours' keys, and make a tag for each neighbour and the corrections of its shares.

        Raises:
            BadSignature, ForeignClient, WrongRound, TooFewClients: the bundle, or a Keys message in it, is refused.
            ReplacedKeys: the bundle is not the one that came first.
        """
        batch = self._current()
        agreed, digest = batch.agreement, hashlib.sha256(bundle).digest()
        if batch.bundle:
            if batch.bundle != digest:
                raise ReplacedKeys(f"other keys for epoch {batch.epoch}; the client keeps to the first")
            return batch.shares
        offered_keys = messages.read_parts(bundle, agreed, Kind.KEY_BUNDLE)
        self._check(offered_keys.header)
        offered = {client: self._peer(client, part) for client, part in offered_keys.parts.items()}
        peers = {client: keys for client, keys in offered.items() if keys is not None}
        if len(peers) < agreed.rule.partners:
            raise TooFewClients(f"{len(peers)} other clients sent keys, {agreed.rule.partners} are needed")
        # From here on other keys for this batch are refused. Otherwise a server could collect shares of the same
        # secrets under several sets of keys.
        batch.peers, batch.bundle = peers, digest
        # The client of the lower number counts as the sender on both sides, so that both derive the same secrets.
        batch.pairs = {
            client: self._stream("pair-secrets", client, sender=self.number < client)
            for client in agreed.graph.masks(self.number)
            if client in peers
        }
        tags = {client: self._channel("confirm", client, sender=True)[: messages.TAG_BYTES] for client in peers}
        batch.shares = messages.write_parts(self._header(Kind.SHARES), agreed, tags, own=self._corrections())
        self._remember()
        return batch.shares

    def _peer(self, client: int, part: bytes) -> Keys | None:
        """The keys of a neighbour; None if no secret can be agreed on with them."""
        batch, common = self._current(), self._state.common
        keys = messages.read_keys(part, batch.agreement)
        if keys.header.client != client or client not in batch.agreement.graph.holders(self.number):
            raise ForeignClient(
                f"the part of client {client} holds keys of client {keys.header.client}, or it is not a neighbour"
            )
        batch.check(keys.header)
        # A client signs its public key for the whole run, so a key that was verified in an earlier batch is not
        # verified again. The secret agreed on with it is kept as well.
        if client not in common or common[client][0] != keys.cipher:
            keys.verify(batch.agreement)
            try:
                secret = masks.agree(X25519PrivateKey.from_private_bytes(self._state.cipher), keys.cipher)
            except ForeignClient:
                return None  # a key of low order: no channel to this client, so it cannot be a partner
            common[client] = (keys.cipher, secret)
        return keys

    def _corrections(self) -> bytes:
        """What the server needs to open this client's secrets from the shares that others derive, round by round."""
        batch = self._current()
        graph, holders = batch.agreement.graph, sorted(batch.peers)
        threshold = messages.threshold_of(batch.agreement, len(holders))
        points = graph.points(self.number)
        # All rounds at once: a stream has 16 bytes for each.
        self_seeds = b"".join(self._chain(number)[-1] for number in batch.secrets)
        self_shares = {points[client]: self._stream("self-shares", client, sender=True) for client in holders}
        mask_shares = {points[client]: self._mask_shares(client, sender=True) for client in holders}
        own = row_through(self_shares, threshold=threshold, secret=self_seeds)
        # There is nothing that the mask seed must equal, so it is whatever the polynomial says.
        mask = row_through(mask_shares, threshold=threshold)
        made = []
        for number in batch.secrets:
            cut, wrapped = partial(batch.at, round=number), b""
            about = partial(batch.about, client=self.number, round=number)
            if batch.agreement.rule.sparse is not None:
                pairs = b"".join(map(cut, batch.pairs.values()))
                wrapped = masks.xor(pairs, masks.keystream(cut(mask.secret), len(pairs)))
            corrections = Corrections(
                seed_check=check_of([cut(self_seeds)], about=about("seed-check")),
                self_check=check_of(map(cut, own.base), about=about("self-check")),
                mask_check=check_of(map(cut, mask.base), about=about("mask-check")),
                self_shares={point: cut(stream) for point, stream in own.differ.items()},
                mask_shares={point: cut(stream) for point, stream in mask.differ.items()},
                wrapped=wrapped,
            )
            made.append(corrections.pack())
        return b"".join(made)

    def _chain(self, round: int, part: int = 0) -> list[bytes]:
        """The seeds of this client's noise from a part on; the last one is its self seed."""
        batch = self._current()
        noise, run = batch.agreement.noise, batch.agreement.run_digest
        return noise.chain(0, batch.secrets[round], run, client=self.number, round=round)[part:]

    def _mask_shares(self, client: int, *, sender: bool) -> bytes:
        """The derived shares, one for each round, that a client holds of this one's mask seeds; or, unless `sender`,
        those that this client holds of its mask seeds."""
        if self._current().agreement.rule.sparse is None:
            return self._current().pairs[client]
        return self._stream("mask-shares", client, sender=sender)

    def _stream(self, purpose: str, client: int, *, sender: bool) -> bytes:
        """16 bytes for each round of the batch, which only this client and a peer can derive."""
        key = self._channel(purpose, client, sender=sender)[: masks.KEY_BYTES]
        return masks.keystream(key, masks.KEY_BYTES * self._current().count)

    def _channel(self, purpose: str, client: int, *context: bytes, sender: bool) -> bytes:
        """A key of one direction between this client and a peer.

        It is derived from the Keys messages of both, which hold fresh nonces, so that every batch has its own keys.
        """
        batch = self._current()
        ends = (batch.digest, batch.peers[client].digest)
        first, second = ends if sender else ends[::-1]
        return masks.derive(self._state.common[client][1], purpose, batch.agreement.session, first, second, *context)

    def take_shares(self, bundle: Bytes) -> bytes:
        """Learn which peers have sent their shares. Those that show a good tag are the partners of this batch.

        A good tag was made by a client that knew this client's fresh nonce, so the server cannot replay keys of an
        earlier batch. A peer whose tag is wrong or missing does not become a partner. On a sparse
        graph the answer tells the partners with which clients this client shares masks. On a full graph it is empty if
        all tags were right; otherwise it tells the server which ones were.

        Raises:
            TooFewClients: too few clients sent good tags.
        """
        batch, digest = self._current(), hashlib.sha256(bundle).digest()
        rule = batch.agreement.rule
        if not batch.bundle:
            raise WrongRound("shares came before keys")
        if batch.share_bundle:
            if batch.share_bundle != digest:
                raise ReplacedKeys(f"other shares for epoch {batch.epoch}; the client keeps to the first")
            return batch.statement
        tags = messages.read_parts(bundle, batch.agreement, Kind.SHARE_BUNDLE)
        self._check(tags.header)
        if foreign := tags.parts.keys() - batch.peers.keys():
            raise ForeignClient(f"a tag of client {min(foreign)}, whose keys were not in the key bundle")
        # Skipped, not refused with the whole bundle: otherwise one client could stop the key batch of all.
        good = {c for c, tag in tags.parts.items() if _is_tag(tag, self._channel("confirm", c, sender=False))}
        if len(good) < rule.partners:
            raise TooFewClients(f"{len(good)} other clients sent shares with a good tag, {rule.partners} are needed")
        batch.partners, batch.share_bundle = frozenset(good), digest
        if rule.sparse is not None or good != tags.parts.keys():
            bits = messages.bits_of(batch.agreement.graph.masks(self.number), batch.partners)
            stated = {
                client: self._channel("partners", client, bits, sender=True)[: messages.TAG_BYTES]
                for client in (batch.partners if rule.sparse is not None else ())
            }
            batch.statement = messages.write_parts(self._header(Kind.PARTNERS), batch.agreement, stated, own=bits)
        self._remember()
        return batch.statement

    def take_partners(self, bundle: Bytes) -> bytes:
        """On a sparse graph: learn the mask partners of each client whose shares are held here. The answer is empty.

        A statement with a wrong tag counts like one that did not come: this client reveals no share of the self seed of
        the client that it names.
        """
        batch = self._current()
        if not batch.share_bundle or batch.agreement.rule.sparse is None:
            raise WrongRound("statements of partners came before the shares, or on a full graph")
        statements = messages.read_parts(bundle, batch.agreement, Kind.PARTNER_BUNDLE)
        self._check(statements.header)
        strangers = {}
        for client, part in statements.parts.items():
            tag, bits = part[: messages.TAG_BYTES], part[messages.TAG_BYTES :]
            if client not in batch.partners:
                raise ForeignClient(f"a statement of client {client}, whose shares this client does not hold")
            if not _is_tag(tag, self._channel("partners", client, bits, sender=False)):
                continue
            near = batch.agreement.graph.masks(client)
            strangers[client] = frozenset(near).difference(messages.chosen_of(bits, near))
        if batch.strangers is not None and batch.strangers != strangers:
            raise ReplacedKeys(f"other statements for epoch {batch.epoch}; the client keeps to the first")
        batch.strangers = strangers
        self._remember()
        return b""

    # Exchanges 3 to 6: one round.

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

    def _current(self) -> BatchState:
        if self._state.batch is None:
            raise WrongRound("no key batch has begun")
        return self._state.batch

    def _check_receiver(self, header: SumHeader) -> None:
        if header.client != self.number:
            raise ForeignClient(f"a message to client {header.client} reached client {self.number}")

    def _check(self, header: SumHeader, round: int | None = None) -> None:
        """Check that a message is for this client and for this batch, or for this round of it."""
        self._check_receiver(header)
        self._current().check(header, round)

    def _round(self, header: SumHeader) -> RoundState:
        """The state of the round that a message is for; WrongRound if this client has not masked a vector in it."""
        batch = self._current()
        self._check(header, header.round)
        if header.round not in batch.rounds:
            raise WrongRound(f"round {header.round} of this batch has not been masked by client {self.number}")
        return batch.rounds[header.round]


def _is_tag(tag: bytes, expected: bytes) -> bool:
    # In constant time: a forger must not learn how many bytes of a tag were right.
    return hmac.compare_digest(expected[: messages.TAG_BYTES], tag)
