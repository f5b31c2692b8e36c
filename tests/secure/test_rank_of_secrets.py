"""What a server and its friends know of the secrets of pairs, by linear algebra that shares no code with the package.

A key bundle may name other peers to every client, and nonces in it may be changed, so that two clients derive different
secrets. Every sum of at most seven clients is tried with every set of clients whose secrets are known.
"""

import random
from itertools import combinations, product

import pytest
from secure_sums import roster

from bqsgd._src.errors import Infeasible
from bqsgd._src.secure.graph import Graph, thresholds

LOG, POWER = {}, []
for _ in range(255):  # powers of 3 modulo x^8 + x^4 + x^3 + x + 1
    last = POWER[-1] if POWER else 246  # 1 / 3
    twice = last << 1
    POWER.append(last ^ (twice ^ 0x11B if twice & 256 else twice))
    LOG[POWER[-1]] = len(POWER) - 1


def times(one, other):
    return POWER[(LOG[one] + LOG[other]) % 255] if one and other else 0


def over(one, other):
    return POWER[(LOG[one] - LOG[other]) % 255] if one else 0


def weights(base, at):
    """Of the values at the points of `base`, in the value at another point."""
    found = []
    for point in base:
        weight = 1
        for other in base:
            if other != point:
                weight = times(weight, over(at ^ other, point ^ other))
        found.append(weight)
    return found


def reduced(equations):
    """The equations in reduced form: an unknown follows from them exactly if one of these is about it alone."""
    done = []
    for equation in equations:
        left = dict(equation)
        for pivot, row in done:
            add(left, row, left.get(pivot, 0))
        if left:
            pivot = min(left)
            left = {name: over(value, left[pivot]) for name, value in left.items()}
            for _, row in done:
                add(row, left, row.get(pivot, 0))
            done.append((pivot, left))
    return [row for _, row in done]


def add(row, other, factor):
    for name, value in other.items() if factor else ():
        row[name] = row.get(name, 0) ^ times(factor, value)
        if not row[name]:
            del row[name]


def known_secrets(rule, known, peers, changed):
    """The secrets between other clients that follow from all corrections and the secrets of clients in `known`."""
    graph, equations = Graph(roster(rule.clients), rule), []
    for client in set(peers) - set(known):
        points, holders = graph.points(client), sorted(peers[client])
        size = min(rule.share_threshold, len(holders))
        for other in holders[size:]:
            parts = weights([points[holder] for holder in holders[:size]], points[other])
            of = zip([*holders[:size], other], [*parts, 1], strict=True)
            pairs = {(client, holder): weight for holder, weight in of if holder not in known}
            equations.append({p if frozenset(p) in changed else tuple(sorted(p)): w for p, w in pairs.items()})
    return [row for row in reduced(equations) if len(row) == 1]


def rules(clients):
    for dropouts, colluders in product(range(clients), repeat=2):
        try:
            yield thresholds(clients=clients, dropouts=dropouts, colluders=colluders)
        except Infeasible:
            continue


@pytest.mark.parametrize("clients", range(2, 8))
def test_no_secret_of_an_honest_pair_follows_whatever_keys_the_server_shows(clients):
    rng = random.Random(clients)
    others = {client: [other for other in range(clients) if other != client] for client in range(clients)}
    for rule in rules(clients):
        for known in combinations(range(clients), rule.dropouts + rule.colluders):
            assert known_secrets(rule, known, others, ()) == []
            for _ in range(3):
                peers = {c: rng.sample(o, rng.randint(rule.partners, clients - 1)) for c, o in others.items()}
                changed = {frozenset(pair) for pair in combinations(range(clients), 2) if rng.random() < 0.2}
                assert known_secrets(rule, known, peers, ()) == []
                assert known_secrets(rule, known, peers, changed) == []
        if rule.share_threshold < clients - 2:  # as many as open a secret would be too many
            assert known_secrets(rule, range(rule.share_threshold), others, ()) != []


def test_no_secret_of_an_honest_pair_follows_among_more_clients():
    rng = random.Random(1)
    for clients in (12, 20, 30):
        others = {client: [other for other in range(clients) if other != client] for client in range(clients)}
        tight = [rule for rule in rules(clients) if rule.share_threshold == rule.dropouts + rule.colluders + 1]
        for rule in rng.sample(tight, 2):
            known = rng.sample(range(clients), rule.dropouts + rule.colluders)
            peers = {c: rng.sample(o, rng.randint(rule.partners, clients - 1)) for c, o in others.items()}
            for rows in (others, peers):
                assert known_secrets(rule, known, rows, ()) == []
