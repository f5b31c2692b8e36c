"""A server that tries everything at once: what it can open is the sum over all honest clients of one list, or nothing.

It holds keys and shares back from whom it likes, cuts a group off from the others, lists whom it likes, shows every
client another list and then all of them, and has the secrets of t clients that sign whatever it wants. What it can
compute from all of that is worked out here, and compared with what `bqsgd._src.secure.graph` says of it.
"""

from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest
from secure_sums import Federation, agreement, identity, request_keys, request_shares, some_codes

from bqsgd._src.errors import ForeignClient, SecureSumError
from bqsgd._src.secure import messages
from bqsgd._src.secure.messages import Kind, SumHeader

SIZES = [(4, 1, 0), (5, 1, 1), (5, 2, 0), (6, 2, 1), (7, 2, 2)]


class Server:
    """One attack: a batch of one round with the last t clients on the server's side."""

    def __init__(self, agreed, rng, *, held_back, group=0):
        self.agreed, self.rng, self.held_back = agreed, rng, held_back
        self.everybody = agreed.members.clients
        self.honest = self.everybody[: agreed.rule.clients - agreed.rule.colluders]
        self.clients = dict(Federation(agreed, seed=int(rng.integers(2**31))).clients)
        self.group = set(rng.permutation(self.honest)[:group].tolist())
        self.partners = {}
        self.self_shares, self.mask_shares = defaultdict(set), defaultdict(set)
        self.certified = set()
        self.known, self.rows = set(), {}
        """Pairs whose secret the server was told, and for each client the peers whose secrets are on its polynomial."""

    def batch(self):
        keys = {number: request_keys(client) for number, client in self.clients.items()}
        sealed = {}
        for number, client in self.clients.items():
            shown = self._some(other for other in keys if other != number)
            bundle = messages.write_parts(self._to(Kind.KEY_BUNDLE, number), self.agreed, {o: keys[o] for o in shown})
            try:
                sealed[number] = messages.read_parts(client.shares(bundle), self.agreed, Kind.SHARES).parts
            except SecureSumError:
                continue
            self.rows[number] = sorted(sealed[number])
        for number in sealed:
            mine = self._some(o for o in sealed if number in sealed[o] and o in sealed[number])
            if number in self.group:  # it hears of nobody else that is honest, while the others hear of it
                mine = [o for o in mine if o in self.group or o not in self.honest]
            parts = {other: sealed[other][number] for other in mine}
            bundle = messages.write_parts(self._to(Kind.SHARE_BUNDLE, number), self.agreed, parts)
            try:
                self.clients[number].take_shares(bundle)
            except SecureSumError:
                continue
            self.partners[number] = frozenset(mine)
        codes = some_codes(self.agreed)
        for number in self.partners:
            self.clients[number].mask(0, codes[number])
        for number in set(self.everybody) - set(self.honest):  # what its friends hold is its own
            for client in self.partners.get(number, ()):
                self.self_shares[client].add(number)
                self.mask_shares[client].add(number)

    def lists(self):
        """Every list to somebody first, and then each to everybody."""
        fewest, n = self.agreed.rule.fewest, len(self.everybody)
        size = int(self.rng.integers(fewest, n + 1))
        lists = [tuple(sorted(self.rng.permutation(n)[:size].tolist())) for _ in range(2)]
        signatures = {listed: {} for listed in lists}
        for number in self.rng.permutation(self.honest).tolist():
            for index in self.rng.permutation(2):
                self._sign(number, lists[index], signatures)
        for listed, signed in signatures.items():
            statement = messages.survivors_statement(self.agreed, epoch=1, round=0, survivors=listed)
            signed |= {n: identity(n).sign(statement) for n in listed if n not in self.honest}
        for number in self.honest:
            for listed in lists:
                self._unmask(number, signatures[listed])

    def _sign(self, number, listed, signatures):
        message = messages.write_listed(self._to(Kind.SURVIVORS, number), self.agreed, listed)
        try:
            answer = self.clients[number].sign(message)
        except SecureSumError:
            return
        signatures[listed][number] = messages.read_signature(answer, self.agreed)[1]

    def _unmask(self, number, signatures):
        quorum = min(self.agreed.rule.quorum, len(signatures))
        shown = {n: signatures[n] for n in self.rng.permutation(sorted(signatures))[:quorum].tolist()}
        message = messages.write_certificate(self._to(Kind.CERTIFICATE, number), self.agreed, shown)
        try:
            said = messages.read_parts(self.clients[number].unmask(message), self.agreed, Kind.UNMASKING)
        except SecureSumError:
            return
        listed = self.clients[number]._state.batch.rounds[0].survivors
        self.certified.add(listed)  # asked again it says the same again
        self.self_shares[number] |= set(self.everybody)  # its own seed
        for client in said.parts:
            self.mask_shares[client].add(number)
            self.known.add(frozenset((client, number)))
        if len(listed) < len(self.everybody):
            with pytest.raises(ForeignClient):
                request_shares(self.clients[number], self.everybody)
        for client in request_shares(self.clients[number], listed):  # it says that all others are silent
            self.self_shares[client].add(number)

    def opened(self, shares):
        enough = {c: min(self.agreed.rule.share_threshold, len(row)) for c, row in self.rows.items()}
        return {c for c in self.honest if c in enough and len(shares[c]) >= enough[c]}

    def secrets(self):
        """The pairs whose secrets follow from what the server knows: the more often a row opens, the more there are."""
        known = self.known | {
            frozenset((one, other)) for one in self.everybody for other in self.everybody if other not in self.honest
        }
        grown = True
        while grown:
            before = len(known)
            for one, row in self.rows.items():
                enough = min(self.agreed.rule.share_threshold, len(row))
                if sum(frozenset((one, other)) in known for other in row) >= enough:
                    known |= {frozenset((one, other)) for other in row}
            grown = len(known) > before
        return known

    def readable(self):
        """Every set of honest clients whose vectors, added up, are without a mask that the server does not know."""
        own, known = self.opened(self.self_shares), self.secrets()

        def hidden(one, other):  # the mask that they share
            return frozenset((one, other)) not in known

        able = [c for c in self.honest if c in self.partners and c in own]
        return [
            chosen
            for size in range(1, len(able) + 1)
            for chosen in combinations(able, size)
            if not any(
                hidden(c, other) and not (other in chosen and c in self.partners[other])
                for c in chosen
                for other in self.partners[c]
            )
        ]

    def _some(self, clients):
        return [client for client in clients if self.rng.random() >= self.held_back]

    def _to(self, kind, client):
        return SumHeader(kind=kind, epoch=1, round=0, client=client)


def attacked(sizes, seed):
    n, f, t = sizes
    rng = np.random.default_rng(seed)
    agreed = agreement(n, dropouts=f, colluders=t, dimension=2, trials=60)
    held_back, group = rng.choice([0.0, 0.05, 0.2]), int(rng.choice([0, 0, *range(1, n - t)]))
    server = Server(agreed, rng, held_back=held_back, group=group)
    server.batch()
    server.lists()
    return server


def check(server):
    assert len(server.certified) <= 1
    assert not server.opened(server.self_shares) & server.opened(server.mask_shares)
    found = server.readable()
    if not found:
        return False
    (listed,) = server.certified
    assert found == [tuple(client for client in server.honest if client in listed)]
    noise = server.agreed.noise
    assert sum(noise.kept(len(listed), listed.index(client)) for client in found[0]) >= noise.total
    return True


@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_opens_but_the_sum_of_one_list(sizes):
    opened = sum(check(attacked(sizes, seed)) for seed in range(25))
    assert opened > 0, "no attack got as far as a sum"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_nothing_opens_but_the_sum_of_one_list_in_many_attacks(sizes):
    assert sum(check(attacked(sizes, seed)) for seed in range(1000)) > 10
