"""The readers of secure sums, for `assurance.fuzz`: every message on both graphs, and a client's kept state."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.graph import Thresholds, thresholds
from bqsgd._src.secure.messages import Kind
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.secure.server import SumServer
from bqsgd._src.secure.sparse import Sparse
from bqsgd._src.secure.state import read_state, write_state

_SPARSE = Sparse(masks=4, away=2, holders=8, threshold=3, committee=6, quorum=4, failure=1.0)
_READ: dict[Kind, Callable[[bytes, Agreement], object]] = {
    Kind.BATCH: messages.read_batch,
    Kind.KEYS: messages.read_keys,
    Kind.KEY_BUNDLE: partial(messages.read_parts, kind=Kind.KEY_BUNDLE),
    Kind.SHARES: partial(messages.read_parts, kind=Kind.SHARES),
    Kind.SHARE_BUNDLE: partial(messages.read_parts, kind=Kind.SHARE_BUNDLE),
    Kind.PARTNERS: partial(messages.read_parts, kind=Kind.PARTNERS),
    Kind.PARTNER_BUNDLE: partial(messages.read_parts, kind=Kind.PARTNER_BUNDLE),
    Kind.MASKED: messages.read_masked,
    Kind.SURVIVORS: partial(messages.read_listed, kind=Kind.SURVIVORS),
    Kind.SIGNATURE: messages.read_signature,
    Kind.CERTIFICATE: messages.read_certificate,
    Kind.UNMASKING: partial(messages.read_parts, kind=Kind.UNMASKING),
    Kind.SILENT: partial(messages.read_listed, kind=Kind.SILENT),
    Kind.RECOVERY: partial(messages.read_parts, kind=Kind.RECOVERY),
}


class Sums:
    """A seeded sum of 12 clients on one graph: what everybody said, and what the clients keep."""

    def __init__(self, *, sparse: bool) -> None:
        identities = {number: Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(12)}
        roster = Roster({number: public_key(key) for number, key in identities.items()}, bytes(32))
        rule = (
            Thresholds(clients=12, dropouts=2, colluders=0, sparse=_SPARSE)
            if sparse
            else thresholds(clients=12, dropouts=2, colluders=1)
        )
        self.agreement = Agreement(
            roster=roster, run="fuzz", rule=rule, dimension=5, width=9, trials=30, seeded=True
        )  # fmt: skip
        self.clients = {n: SumClient(self.agreement, identity=key, number=n, seed=7) for n, key in identities.items()}
        self.said: dict[Kind, list[bytes]] = {kind: [] for kind in Kind}
        self._run()

    def _run(self) -> None:
        server = SumServer(self.agreement)
        server.begin(epoch=3, first_round=6, rounds=2)
        for number, request in server.requests().items():
            server.take_keys(self._ask(number, request))
        for number, bundle in server.key_bundles().items():
            server.take_shares(self._ask(number, bundle))
        for number, bundle in server.share_bundles().items():
            statement = self._ask(number, bundle)
            if statement:
                server.take_partners(statement)
        for number, bundle in server.partner_bundles().items() if server.sparse else ():
            self._ask(number, bundle)
        server.open(6)
        for number in range(11):
            masked = bytes(self.clients[number].mask(6, np.zeros(5, dtype=np.uint8)))
            self.said[Kind.MASKED].append(masked)
            server.take_masked(masked)
        for number, listed in server.survivor_lists().items():
            signature = self._ask(number, listed)
            if signature:
                server.take_signature(signature)
        for number, certificate in server.certificates().items():
            if number != 10:
                server.take_unmasking(self._ask(number, certificate))
        for number, silent in server.recoveries().items():
            server.take_recovery(self._ask(number, silent))
        server.total()

    def _ask(self, number: int, message: bytes) -> bytes:
        self.said[messages.message_kind(message)].append(message)
        answer = self.clients[number].answer(message)
        if answer:
            self.said[messages.message_kind(answer)].append(answer)
        return answer


def message_case(content: bytes, rng: random.Random, mutate: Callable[[bytes, random.Random], bytes]) -> bytes:
    """Counts, lengths and client numbers set to something else, bytes changed, or both."""
    data = bytearray(content)
    if rng.random() < 0.6 and len(data) > 52:
        at = rng.choice([24, 32, 40, 44, 48, 52, 56, rng.randrange(48, len(data) - 3)])
        if at + 4 <= len(data):
            struct.pack_into("<I", data, at, rng.choice([0, 1, 3, 11, 12, 4096, 2**16, 2**31, 2**32 - 1]))
    return mutate(bytes(data), rng) if rng.random() < 0.7 else bytes(data)


def sum_corpus(kind: Kind) -> tuple[list[tuple[bool, bytes]], Callable[[bool, bytes], object]]:
    """The messages of a kind on both graphs, and how they are read."""
    sums = {sparse: Sums(sparse=sparse) for sparse in (False, True)}
    corpus = [(sparse, message) for sparse, each in sums.items() for message in each.said[kind]]
    return corpus, lambda sparse, content: _READ[kind](content, sums[sparse].agreement)


def kept_states() -> tuple[list[dict[str, Any]], Callable[[bytes], object]]:
    """The states of clients as JSON trees, and how they are read."""
    sums = Sums(sparse=True)
    trees = [json.loads(write_state(client._state, sums.agreement, 3)) for client in list(sums.clients.values())[:4]]
    return trees, lambda content: read_state(content, sums.agreement, 3)
