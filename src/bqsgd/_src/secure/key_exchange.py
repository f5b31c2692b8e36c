"""Exchanges 1 and 2 of a client of a secure sum: keys and shares for a key batch, and what follows from them.

`client` has the rules that a client keeps to, and the exchanges of a round.
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
    ForeignClient,
    InvalidParameter,
    ReplacedKeys,
    TooFewClients,
    WrongRound,
)
from bqsgd._src.noise import NoiseSource, privacy_rng, seeded_rng
from bqsgd._src.params import check_int
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.messages import Bytes, Corrections, Keys, Kind, SumHeader
from bqsgd._src.secure.roster import public_key
from bqsgd._src.secure.sharing import check_of, row_through
from bqsgd._src.secure.state import BatchState, ClientState, StateFile, read_state, write_state


class KeyExchange:
    """A client up to the masked vectors: its keys, and what it shares with each of its neighbours in a key batch."""

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


def _is_tag(tag: bytes, expected: bytes) -> bool:
    # In constant time: a forger must not learn how many bytes of a tag were right.
    return hmac.compare_digest(expected[: messages.TAG_BYTES], tag)
