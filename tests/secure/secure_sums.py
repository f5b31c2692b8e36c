"""A secure sum from end to end in one process, with clients that leave where a test says so."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.errors import BadShares
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds, thresholds
from bqsgd._src.secure.masks import NO_MODEL
from bqsgd._src.secure.messages import Kind, SumHeader, read_parts, write_batch, write_listed
from bqsgd._src.secure.opening import Total
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.secure.server import SumServer
from bqsgd._src.secure.sparse import Sparse


def identity(client: int, generation: int = 0) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(client.to_bytes(4, "little") + bytes([generation]) + bytes(27))


def roster(clients: int) -> Roster:
    return Roster({client: public_key(identity(client)) for client in range(clients)}, bytes(range(32)))


SMALL_SPARSE = Sparse(masks=4, away=2, holders=8, threshold=3, committee=6, quorum=4, failure=1.0)
"""A sparse graph for tests: every step of one, and no safety."""


def agreement(
    clients: int = 4,
    *,
    dropouts: int = 1,
    colluders: int = 0,
    dimension: int = 5,
    width: int = 8,
    trials: int = 0,
    sparse: Sparse | None = None,
    seeded: bool = True,
) -> Agreement:
    rule = (
        thresholds(clients=clients, dropouts=dropouts, colluders=colluders)
        if sparse is None
        else Thresholds(clients=clients, dropouts=dropouts, colluders=colluders, sparse=sparse)
    )
    return Agreement(
        roster=roster(clients),
        run="test",
        rule=rule,
        dimension=dimension,
        width=width,
        trials=trials,
        seeded=seeded,
    )


@dataclass
class Federation:
    """A server and its clients; each step takes the clients that still answer."""

    agreement: Agreement
    seed: int | None = 7
    clients: dict[int, SumClient] = field(default_factory=dict)
    revealed: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    """(round, client) -> kinds of shares that anybody revealed of it."""
    masked: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agreement = replace(self.agreement, seeded=self.seed is not None)
        self.server = SumServer(self.agreement)
        for number in self.agreement.roster.clients:
            self.clients[number] = SumClient(self.agreement, identity=identity(number), number=number, seed=self.seed)

    def begin(
        self,
        *,
        epoch: int = 1,
        first_round: int = 0,
        rounds: int = 1,
        keys: Collection[int] | None = None,
        shares: Collection[int] | None = None,
        stated: Collection[int] | None = None,
        cohort: Collection[int] | None = None,
        width: int | None = None,
        without: Collection[int] = (),
    ) -> None:
        self.server.begin(
            epoch=epoch, first_round=first_round, rounds=rounds, cohort=cohort, width=width, without=without
        )
        for number, request in self.server.requests().items():
            if keys is None or number in keys:
                self.server.take_keys(self.clients[number].answer(request))
        for number, bundle in self.server.key_bundles().items():
            if shares is None or number in shares:
                self.server.take_shares(self.clients[number].shares(bundle))
        for number, bundle in self.server.share_bundles().items():
            statement = self.clients[number].take_shares(bundle)
            if statement and (stated is None or number in stated):
                self.server.take_partners(statement)
        for number, bundle in self.server.partner_bundles().items() if self.server.sparse else ():
            self.clients[number].take_partners(bundle)

    def sum(
        self,
        codes: Mapping[int, np.ndarray],
        *,
        round: int = 0,
        masked: Collection[int] | None = None,
        signed: Collection[int] | None = None,
        unmasked: Collection[int] | None = None,
        models: Mapping[int, bytes] | None = None,
    ) -> Total:
        server = self.server
        server.open(round)
        for number in server.partner_bundles() if server.sparse else server.share_bundles():
            if masked is None or number in masked:
                model = NO_MODEL if models is None else models[number]
                self.masked[round, number] = bytes(self.clients[number].mask(round, codes[number], model=model))
                server.take_masked(self.masked[round, number])
        for number, listed in server.survivor_lists().items():
            if signed is None or number in signed:
                signature = self.clients[number].sign(listed)
                if signature:
                    server.take_signature(signature)
        for number, certificate in server.certificates().items():
            if unmasked is None or number in unmasked:
                message = self.clients[number].unmask(certificate)
                self._note(round, message)
                with contextlib.suppress(BadShares):  # the server keeps the shares of others that came with it
                    server.take_unmasking(message)
        for number, request in server.recoveries().items():
            message = self.clients[number].recover(request)
            self._note(round, message, Kind.RECOVERY)
            server.take_recovery(message)
        return server.total()

    def _note(self, round: int, message: bytes, kind: Kind = Kind.UNMASKING) -> None:
        said = read_parts(message, self.server._current().agreement, kind)
        if kind is Kind.UNMASKING:
            self.revealed.setdefault((round, said.header.client), set()).add("self")
        for client in said.parts:
            self.revealed.setdefault((round, client), set()).add("mask" if kind is Kind.UNMASKING else "self")


def request_shares(client: SumClient, silent: Collection[int], *, round: int = 0, epoch: int = 1) -> set[int]:
    """The clients of whose self seeds a client reveals a share if it is asked about `silent`."""
    header = SumHeader(kind=Kind.SILENT, epoch=epoch, round=round, client=client.number)
    message = client.recover(write_listed(header, client.agreement, silent))
    return set(read_parts(message, client.agreement, Kind.RECOVERY).parts)


def request_keys(
    client: SumClient, *, epoch: int = 1, first_round: int = 0, rounds: int = 1, width: int | None = None
) -> bytes:
    """The keys with which a client answers a request to the whole roster."""
    header = SumHeader(kind=Kind.BATCH, epoch=epoch, round=first_round, rounds=rounds, client=client.number)
    return client.keys(write_batch(header, client.agreement.of(width=width)))


def some_codes(agreed: Agreement, *, most: int = 5, seed: int = 0) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {client: rng.integers(0, most + 1, agreed.dimension).astype(np.uint8) for client in agreed.roster.clients}


def plain_sum(codes: Mapping[int, np.ndarray], clients: Collection[int], width: int) -> np.ndarray:
    return sum(codes[client].astype(np.int64) for client in clients) % (1 << width)
