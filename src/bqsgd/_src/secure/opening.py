"""Opening a secure sum: what the survivors have revealed takes masks, and noise that is not needed, out of it.

A mask that a survivor and a missing client state differently is contested: the sum itself tells who lied (`blame`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bqsgd._src.errors import BadShares, TooFewClients
from bqsgd._src.secure import blame, messages
from bqsgd._src.secure.masks import KEY_BYTES, Lanes, add_mask, keystream, pair_keys, scratch_for, self_key, xor
from bqsgd._src.secure.messages import KeyBatch, Keys, Parts
from bqsgd._src.secure.sharing import SHARE_BYTES, base_points, extend, good_shares

_NOTHING = bytes(SHARE_BYTES)


@dataclass
class ServerBatch(KeyBatch):
    """What the server knows about a key batch.

    invited: the clients that are asked for keys. keys, shares, statements: what came, by client. peers: for each client
    that sent keys, its holders that did so too; None as long as keys may come. partners: for each client that sent
    shares, the clients with which it exchanged them; None as long as shares may come. refused: client -> those of its
    partners whose tags it says are wrong.
    """

    invited: tuple[int, ...]
    keys: dict[int, Keys] = field(default_factory=dict)
    peers: dict[int, frozenset[int]] | None = None
    shares: dict[int, Parts] = field(default_factory=dict)
    partners: dict[int, frozenset[int]] | None = None
    refused: dict[int, frozenset[int]] = field(default_factory=dict)
    statements: dict[int, Parts] = field(default_factory=dict)


@dataclass
class ServerRound:
    """What came in a round.

    model: digest of the round's model. vectors: on a sparse graph, the masked vectors until `close`, which may have to
    leave a client out. seeds: of the survivors that revealed theirs, from the first noise part that is not needed on.
    liars: client -> the clients with which it shares secrets that it lied about; itself for its own seed.
    """

    number: int
    lanes: Lanes
    model: bytes
    masked: set[int] = field(default_factory=set)
    vectors: dict[int, Lanes] = field(default_factory=dict)
    survivors: tuple[int, ...] | None = None
    signatures: dict[int, bytes] = field(default_factory=dict)
    unmaskings: dict[int, Parts] = field(default_factory=dict)
    seeds: dict[int, list[bytes]] = field(default_factory=dict)
    recoveries: dict[int, Parts] = field(default_factory=dict)
    liars: dict[int, set[int]] = field(default_factory=dict)

    def blame(self, client: int, about: int) -> None:
        self.liars.setdefault(client, set()).add(about)


@dataclass(frozen=True, kw_only=True)
class Total:
    """The sum of the survivors' codes, one number per coordinate.

    width: the numbers are taken modulo 2^width. trials: binomial trials in the sum. If survivors left before they
    revealed their seeds, all of their noise is in it, and the expectation of what is not needed has been subtracted,
    rounded down. seeded: the clients' randomness came from seeds, so there is no claim.
    """

    lanes: Lanes
    width: int
    survivors: tuple[int, ...]
    trials: int
    seeded: bool


class Opening:
    """The opening of one round's sum.

    Args:
        batch: what the server knows about the key batch.
        current: what came in the round; who lied is noted there.
        partners: for each client that sent shares, the clients with which it exchanged them.
        listed: the survivors.
    """

    def __init__(
        self,
        batch: ServerBatch,
        current: ServerRound,
        partners: Mapping[int, frozenset[int]],
        listed: tuple[int, ...],
    ) -> None:
        self._batch, self._round, self._partners, self._listed = batch, current, partners, listed
        self._agreed = batch.agreement
        self._lanes = current.lanes.copy()  # so that the sum can be tried again after more shares have come
        self._scratch = scratch_for(self._lanes)

    def total(self) -> Total:
        """The sum of the survivors' codes; see `SumServer.total`."""
        agreed, lanes, listed, extra = self._agreed, self._lanes, self._listed, 0
        for rank, client in enumerate(listed):
            extra += self._remove_own(client, rank)
        contested: dict[int, list[blame.Contested]] = {}
        unconfirmed = []
        for client in sorted(self._partners.keys() - set(listed)):
            # A survivor that exchanged shares with a missing client has masked its vector with their common mask.
            affected = sorted(self._partners[client].intersection(listed, agreed.graph.masks(client)))
            if affected and (pairs := self._remove_pairs(client, affected)):
                contested[client] = pairs
            if not all(self._confirmed(client, other) for other in affected):
                unconfirmed.append(client)
        if contested:
            self._settle(contested)
        if unconfirmed and not blame.is_sum(lanes, agreed.width):
            raise BadShares(
                f"what is left is no sum: what client {', '.join(map(str, unconfirmed))} said about its masks is "
                f"false, or so is a vector; round {self._round.number} is lost"
            )
        lanes -= lanes.dtype.type(extra // 2 % (1 << agreed.width))
        lanes &= lanes.dtype.type((1 << agreed.width) - 1)
        return Total(
            lanes=lanes,
            width=agreed.width,
            survivors=listed,
            trials=agreed.noise.in_sum(len(listed)) + extra,
            seeded=agreed.seeded,
        )

    def _remove_own(self, client: int, rank: int) -> int:
        """Remove a survivor's self mask and unneeded noise; returns how many unneeded trials stay in the sum."""
        agreed, extra = self._agreed, 0
        part = agreed.noise.first_unneeded(len(self._listed), rank)
        if (chain := self._round.seeds.get(client)) is not None:
            agreed.noise.add_parts(part, chain, self._lanes, agreed.run_digest, subtract=True)
            self_seed = chain[-1]
        else:
            # Only the self seed opens, so the client's noise stays. The caller takes out its expectation.
            extra = agreed.noise.drawn - agreed.noise.cuts[part]
            opened, wrong = self._opened(client, self._round.recoveries, masks=False)
            self._blame_holders(client, wrong)
            self_seed = extend(opened, [0])[0]
        key = self_key(self_seed, agreed.session, client=client, round=self._round.number)
        add_mask(self._lanes, key, scratch=self._scratch, subtract=True)
        return extra

    def _remove_pairs(self, client: int, affected: list[int]) -> list[blame.Contested]:
        """Remove the masks that survivors share with a client that is missing; return those that it and a survivor
        state differently."""
        agreed, current, shares = self._agreed, self._round, self._batch.shares[client]
        said = shares.corrections(agreed, current.number)
        try:
            opened, wrong = self._opened(client, current.unmaskings, masks=True)
        except BadShares:
            told = {other: said.parts[client] for other, said in current.unmaskings.items() if client in said.parts}
            if agreed.rule.sparse is not None or not told.keys() >= set(affected):
                raise
            # Nothing follows from what it said. Each survivor's share is the secret of their mask.
            pairs = []
            for other, key in zip(affected, self._pair_keys([told[other] for other in affected]), strict=True):
                self._remove_mask(key, client, other)
                pairs.append(blame.Contested(other, told=key, derived=None))
            return pairs
        if agreed.rule.sparse is None:
            points = agreed.graph.points(client)
            true = extend(opened, [points[other] for other in affected])
            secrets = [xor(v, said.mask_shares.get(o, _NOTHING)) for v, o in zip(true, affected, strict=True)]
        else:
            self._blame_holders(client, wrong)  # their shares say nothing about a mask
            others, wrong = shares.masked_with(agreed), []
            stream = xor(said.wrapped, keystream(extend(opened, [0])[0], len(said.wrapped)))
            secret_of = {other: stream[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, other in enumerate(others)}
            secrets = [secret_of[other] for other in affected]
        keys = dict(zip(affected, self._pair_keys(secrets), strict=True))
        for other, key in keys.items():
            self._remove_mask(key, client, other)
        wrong = [other for other in wrong if other in keys]
        stated = self._pair_keys([current.unmaskings[other].parts[client] for other in wrong])
        return [blame.Contested(other, told=key, derived=keys[other]) for other, key in zip(wrong, stated, strict=True)]

    def _remove_mask(self, key: bytes, missing: int, survivor: int) -> None:
        # The lower client of a pair added their mask, the higher one subtracted it.
        add_mask(self._lanes, key, scratch=self._scratch, subtract=survivor < missing)

    def _confirmed(self, client: int, other: int) -> bool:
        """Whether the mask of a missing client and a survivor follows from more than what the missing client said."""
        if self._agreed.rule.sparse is not None:
            return False
        said = self._batch.shares[client].corrections(self._agreed, self._round.number)
        revealed = self._round.unmaskings.get(other)
        return other not in said.mask_shares or (revealed is not None and client in revealed.parts)

    def _settle(self, contested: Mapping[int, list[blame.Contested]]) -> None:
        """Find out who lied about masks that are stated differently, and remove the true ones from the sum.

        Raises:
            BadShares: whoever lied, what is left is no sum. The holders are blamed.
        """
        current, rule = self._round, self._agreed.rule
        known = {client for client, about in current.liars.items() if client in about}
        lied: frozenset[int] = frozenset()
        try:
            lied = blame.settle(contested, self._lanes, width=self._agreed.width, most=rule.liars, known=known)
        finally:
            for client, pairs in contested.items():
                for pair in pairs:
                    current.blame(*((client, pair.holder) if client in lied else (pair.holder, client)))

    def _blame_holders(self, client: int, holders: list[int]) -> None:
        """Blame holders whose shares do not fit; or, if more of them would lie than a sum can do without, the client
        whose corrections may be false."""
        rule, current = self._agreed.rule, self._round
        for holder in holders:
            if len(holders) > max(rule.liars, rule.dropouts):
                current.blame(client, holder)
            else:
                current.blame(holder, client)

    def _pair_keys(self, secrets: list[bytes]) -> list[bytes]:
        return pair_keys(secrets, self._agreed.session, round=self._round.number, model=self._round.model)

    def _opened(self, client: int, revealed: Mapping[int, Parts], *, masks: bool) -> tuple[dict[int, bytes], list[int]]:
        """Enough good shares, by point, of a client's mask seed or else its self seed, and the holders whose shares do
        not fit."""
        agreed, current, shares = self._agreed, self._round, self._batch.shares[client]
        said = shares.corrections(agreed, current.number)
        differ, check = (said.mask_shares, said.mask_check) if masks else (said.self_shares, said.self_check)
        threshold = messages.threshold_of(agreed, len(shares.parts))
        points = {holder: point for holder, point in agreed.graph.points(client).items() if holder in shares.parts}
        holders = {
            at: holder for holder, at in points.items() if holder in revealed and client in revealed[holder].parts
        }
        if len(holders) < threshold:
            raise TooFewClients(
                f"{len(holders)} shares of a secret of client {client} came, {threshold} are needed; "
                f"round {current.number} is lost"
            )
        came = {
            point: xor(revealed[holder].parts[client], differ.get(holder, _NOTHING))
            for point, holder in holders.items()
        }
        base = base_points(points.values(), threshold, with_secret=not masks)
        about = self._batch.about("mask-check" if masks else "self-check", client=client, round=current.number)
        try:
            good = good_shares(came, threshold=threshold, points=base, check=check, about=about)
        except BadShares:
            # As many holders as may lie would have been found, so the client's own corrections or checks are false.
            if len(came) - threshold >= 2 * agreed.rule.liars:
                current.blame(client, client)
            raise
        true = extend(good, list(came))
        wrong = [holders[point] for (point, share), value in zip(came.items(), true, strict=True) if share != value]
        return good, wrong
