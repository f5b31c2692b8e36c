"""The sparse graph: its bounds against enumeration, sums on it, and a server that tries everything against it."""

import contextlib
import itertools
import random

import numpy as np
import pytest
from scipy import stats
from secure_sums import SMALL_SPARSE, Federation, agreement, identity, plain_sum, request_shares, roster, some_codes

from bqsgd._src.errors import (
    BadSignature,
    ConflictingSurvivors,
    ForeignClient,
    Infeasible,
    InvalidParameter,
    TooFewClients,
    WrongRound,
)
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.graph import Graph, Thresholds, thresholds
from bqsgd._src.secure.masks import NO_MODEL, add_mask, pair_keys, scratch_for, self_key
from bqsgd._src.secure.messages import Kind, SumHeader, is_sum_message, message_kind, read_masked
from bqsgd._src.secure.roster import Roster
from bqsgd._src.secure.sparse import _TILTS, Sparse, _committee, _crossings, _cut, _opened
from bqsgd._src.server.sums import SumRounds
from bqsgd._src.wire.reply import Reply

N = 12


@pytest.mark.parametrize(("n", "t"), [(6, 1), (7, 1), (8, 2)])
def test_the_bound_on_crossings_holds_over_all_cyclic_orders(n, t):
    """E[tilt^X] by enumeration; the bound is never below it, and close to it where colluders hardly count."""
    table = _crossings(n, t)
    for s in range(1, (n - t) // 2 + 1):
        found = np.zeros(len(_TILTS))
        count = 0
        for rest in itertools.permutations(range(1, n)):
            order = (0, *rest)
            kinds = ["S" if x < s else "C" if x < s + t else "U" for x in order]
            crossings = sum({kinds[i], kinds[i - 1]} == {"S", "U"} for i in range(n))
            found += np.array(_TILTS) ** crossings
            count += 1
        exact = np.log(found / count)
        assert (table[:, s - 1] >= exact - 1e-9).all()
        assert table[-1, s - 1] <= exact[-1] + 0.3


def small_graph(seed, n, masks, away):
    numbers = Sparse(
        masks=masks, away=away, holders=masks, threshold=1, committee=2, quorum=1, failure=1.0
    )  # fmt: skip
    rule = Thresholds(clients=n, dropouts=n - 2, colluders=0, sparse=numbers)
    return Graph(Roster(roster(n).keys, seed.to_bytes(32, "little")), rule)


def parts_of(graph, there):
    """The connected parts of the mask graph among `there`."""
    left, parts = set(there), []
    while left:
        part, edge = set(), [left.pop()]
        while edge:
            client = edge.pop()
            part.add(client)
            near = left & set(graph.masks(client))
            left -= near
            edge += near
        parts.append(part)
    return parts


@pytest.mark.parametrize(("masks", "away"), [(4, 0), (6, 1), (8, 1)])
def test_graphs_are_cut_no_more_often_than_the_bound_says(masks, away):
    """A server that tries every list of survivors (up to two missing) against 100 graphs."""
    n, t, graphs = 12, 1, 100
    cut = 0
    for seed in range(graphs):
        graph = small_graph(seed, n, masks, away)
        honest = tuple(range(t, n))
        lists = (
            tuple(c for c in range(n) if c not in missing)
            for size in range(3)
            for missing in itertools.combinations(honest, size)
        )
        for listed in lists:
            if not graph.too_far_away(listed) and len(parts_of(graph, [c for c in listed if c >= t])) > 1:
                cut += 1
                break
    bound = _cut(_crossings(n, t), n, t, masks=masks, away=away)
    assert stats.binom.sf(cut - 1, graphs, bound) > 1e-3
    assert bound < 1


@pytest.mark.parametrize(("n", "f", "t"), [(250, 12, 12), (1000, 50, 100), (10_000, 500, 500)])
def test_bounds_of_the_committee_and_the_holders(n, f, t):
    size, quorum = _committee(n, f, t)
    for colluding in range(2 * quorum - size, size + 1):  # two lists could both have a quorum
        assert stats.hypergeom.sf(colluding - 1, n, t, size) <= 2.0**-42
    assert stats.hypergeom.sf(size - quorum, n, f, size) <= 1e-9
    rng, holders = np.random.default_rng(1), 20
    bad = rng.hypergeometric(t, n - 1 - t, 2, size=(200_000, holders // 2)).sum(axis=1)
    for threshold in range(5, 12):
        assert min(1.0, (bad >= threshold).mean() * n) <= _opened(n, t, holders, threshold)
    assert _opened(n, t, holders, 16) < 1e-2


def test_numbers_that_fail_are_not_given():
    with pytest.raises(Infeasible):
        thresholds(clients=300, dropouts=100, colluders=100)
    with pytest.raises(Infeasible):
        thresholds(clients=20_000, dropouts=100, colluders=100)
    assert thresholds(clients=300, dropouts=10, colluders=10).failure < 2**-40


def test_a_sparse_graph_needs_the_seed_and_the_whole_roster():
    rule = Thresholds(clients=N, dropouts=2, colluders=0, sparse=SMALL_SPARSE)
    agreed = Agreement(roster=Roster(roster(N).keys), run="a", rule=rule, dimension=3, width=8)
    with pytest.raises(InvalidParameter, match="seed"):
        agreed.graph  # noqa: B018
    with pytest.raises(InvalidParameter, match="cohort"):
        Agreement(roster=roster(N + 1), run="a", rule=rule, dimension=3, width=8)


def test_neighbours_are_mutual_and_other_seeds_give_others():
    graph = small_graph(1, 30, 6, 2)
    other = small_graph(2, 30, 6, 2)
    for client in range(30):
        assert all(client in graph.masks(near) for near in graph.masks(client))
        assert len(graph.masks(client)) <= 6
    assert any(graph.masks(client) != other.masks(client) for client in range(30))


# Sums.


def sparse_agreement(**changes):
    return agreement(N, sparse=SMALL_SPARSE, **{"dropouts": 3, "dimension": 4, "width": 9, **changes})


def try_pattern(federation, codes, round, later):
    """The sum over those that were there, or a refusal."""
    try:
        total = federation.sum(codes, round=round, **later)
    except TooFewClients:
        return False
    assert set(total.survivors) <= set(later["masked"])
    assert np.array_equal(total.lanes, plain_sum(codes, total.survivors, federation.agreement.width))
    return True


def dropouts(seeds):
    codes, sums = some_codes(sparse_agreement()), 0
    for seed in seeds:
        rng = random.Random(seed)
        leaves = {client: 6 if rng.random() < 0.85 else rng.randrange(6) for client in range(N)}
        stay = [[client for client in range(N) if leaves[client] > step] for step in range(6)]
        federation = Federation(sparse_agreement(trials=rng.choice([0, 20])), seed=seed)
        try:
            federation.begin(keys=stay[0], shares=stay[1], stated=stay[2])
        except TooFewClients:
            continue
        zero = federation.agreement.trials == 0
        later = {"masked": stay[3], "signed": stay[4], "unmasked": stay[5]}
        if zero:
            sums += try_pattern(federation, codes, 0, later)
        else:
            with contextlib.suppress(TooFewClients):
                federation.sum(codes, **later)
        assert all(len(kinds) == 1 for kinds in federation.revealed.values())
    return sums


def test_whoever_leaves_a_sparse_sum_at_whichever_step():
    assert dropouts(range(8)) > 1


@pytest.mark.slow
def test_whoever_leaves_a_sparse_sum_at_whichever_step_many_times():
    assert dropouts(range(40, 2000)) > 200


def test_the_noise_that_is_not_needed_is_taken_out_on_a_sparse_graph():
    agreed = agreement(N, dropouts=3, dimension=3000, width=12, trials=100, sparse=SMALL_SPARSE)
    federation = Federation(agreed)
    federation.begin(rounds=2)
    zeros = {client: np.zeros(3000, dtype=np.uint8) for client in range(N)}
    for round, there in enumerate([range(N), range(2, N)]):
        total = federation.sum(zeros, round=round, masked=there)
        extra = total.trials - len(total.survivors) * agreed.noise.cuts[0]
        assert abs(total.lanes.mean() - extra / 2) < 0.5


@pytest.mark.slow
def test_a_sum_over_more_clients_than_a_full_graph_has():
    agreed = agreement(210, dropouts=10, colluders=10, dimension=5, width=12)
    assert agreed.rule.sparse is not None
    federation = Federation(agreed)
    federation.begin()
    codes = some_codes(agreed)
    total = federation.sum(codes, masked=range(4, 210))
    assert np.array_equal(total.lanes, plain_sum(codes, total.survivors, 12))
    assert len(total.survivors) >= 200


# The server's lies.


@pytest.fixture
def federation():
    return Federation(sparse_agreement())


def masked(federation):
    codes = some_codes(federation.agreement)
    for number in federation.server.partner_bundles():
        federation.clients[number].mask(0, codes[number])


def survivors(federation, client, listed):
    header = SumHeader(kind=Kind.SURVIVORS, epoch=1, round=0, client=client)
    return messages.write_listed(header, federation.agreement, tuple(listed))


def certificate(federation, client, listed, signers=None, **forged):
    agreed = federation.agreement
    statement = messages.survivors_statement(agreed, epoch=1, round=0, survivors=tuple(listed))
    chosen = [c for c in agreed.graph.committee if c in listed] if signers is None else signers
    signatures = {c: identity(c).sign(statement) for c in chosen} | forged.get("forged", {})
    header = SumHeader(kind=Kind.CERTIFICATE, epoch=1, round=0, client=client)
    return messages.write_certificate(header, agreed, signatures)


def test_a_second_list_and_a_forged_certificate(federation):
    federation.begin()
    masked(federation)
    everybody = tuple(range(N))
    client = federation.agreement.graph.committee[0]
    state_machine = federation.clients[client]
    state_machine.sign(survivors(federation, client, everybody))
    with pytest.raises(ConflictingSurvivors):
        state_machine.sign(survivors(federation, client, everybody[:-1]))
    with pytest.raises(TooFewClients):
        state_machine.unmask(
            certificate(federation, client, everybody, signers=federation.agreement.graph.committee[:3])
        )
    forged = dict.fromkeys(federation.agreement.graph.committee, bytes(64))
    for signer in federation.agreement.graph.committee[:4]:  # all of a quorum are verified
        with pytest.raises(BadSignature):
            state_machine.unmask(
                certificate(federation, client, everybody, forged={signer: forged[signer]})
            )  # fmt: skip
    assert state_machine._state.batch.rounds[0].unmasking == b""
    state_machine.unmask(certificate(federation, client, everybody))


def test_a_list_that_leaves_a_survivor_without_its_neighbours(federation):
    """The server says that a client's neighbours are missing, so that it would stand alone: the committee refuses."""
    federation.begin()
    masked(federation)
    graph = federation.agreement.graph
    lonely = next(c for c in range(N) if len(graph.masks(c)) == 4)
    listed = [c for c in range(N) if c not in graph.masks(lonely)[:3]]
    signer = next(c for c in graph.committee if c in listed)
    with pytest.raises(TooFewClients, match="neighbours"):
        federation.clients[signer].sign(survivors(federation, signer, listed))


def test_too_few_survivors_and_a_client_that_is_not_listed(federation):
    federation.begin()
    masked(federation)
    with pytest.raises(TooFewClients):
        federation.clients[0].sign(survivors(federation, 0, range(8)))
    with pytest.raises(ForeignClient):
        federation.clients[0].sign(survivors(federation, 0, range(1, N)))
    listed = tuple(range(N - 1))
    outside = N - 1
    if outside in federation.agreement.graph.committee:
        inside = next(c for c in federation.agreement.graph.committee if c != outside)
        federation.clients[inside].sign(survivors(federation, inside, listed))
        signers = federation.agreement.graph.committee
        with pytest.raises(ForeignClient):
            federation.clients[inside].unmask(certificate(federation, inside, listed, signers=signers))


def cut_off(federation, one, other):
    """The server holds the shares of two mask neighbours back from each other."""
    server, agreed = federation.server, federation.agreement
    server.begin(epoch=1, first_round=0, rounds=1)
    for number, request in server.requests().items():
        server.take_keys(federation.clients[number].answer(request))
    for number, keys in server.key_bundles().items():
        server.take_shares(federation.clients[number].shares(keys))
    partners = server._partners()
    partners[one] -= {other}
    partners[other] -= {one}
    for number, sealed in server.share_bundles().items():
        server.take_partners(federation.clients[number].take_shares(sealed))
    for number, statements in server.partner_bundles().items():
        federation.clients[number].take_partners(statements)
    masked(federation)
    return agreed


def test_two_neighbours_that_were_cut_off_from_each_other_are_not_listed_together(federation):
    one = 0
    other = federation.agreement.graph.masks(one)[0]
    agreed = cut_off(federation, one, other)
    everybody = tuple(range(N))
    for client in (one, other):
        with pytest.raises(ForeignClient, match="no mask"):
            federation.clients[client].sign(survivors(federation, client, everybody))
    holders = [c for c in agreed.graph.holders(one) if c != other]
    for holder in holders:  # the two say nothing, and their holders refuse all the same
        federation.clients[holder].sign(survivors(federation, holder, everybody))
        with pytest.raises(ForeignClient, match="no mask"):
            federation.clients[holder].unmask(certificate(federation, holder, everybody))
        assert federation.clients[holder]._state.batch.rounds[0].unmasking == b""


@pytest.mark.parametrize("many", [True, False])
def test_a_client_that_sends_wrong_tags_is_left_out_of_a_sparse_sum(federation, many):
    """To all of its holders, or to one that shares no mask with it: nobody masks a vector before it is left out."""
    agreed, clients = federation.agreement, federation.clients
    near = agreed.graph.holders(0)
    to = near if many else tuple(set(near).difference(agreed.graph.masks(0)))[:1]
    codes, asked = some_codes(agreed), []

    def carry(sent):
        for number, message in sent.items():
            asked.append((message_kind(message) if is_sum_message(message) else None, number))
            answer = (
                clients[number].answer(message) if is_sum_message(message) else clients[number].mask(0, codes[number])
            )
            if number == 0 and asked[-1][0] is Kind.KEY_BUNDLE:
                shares = messages.read_parts(answer, agreed, Kind.SHARES)
                answer = messages.write_parts(
                    shares.header, agreed, {**shares.parts, **dict.fromkeys(to, bytes(16))}, own=shares.own
                )
            yield Reply(client=number, frame=answer)

    rounds = SumRounds(agreed, rounds=1, key_rounds=1)
    outcome = rounds.round(dict.fromkeys(clients, b"values"), round=0, carry=carry)
    assert outcome.total is not None, outcome.lost
    assert 0 not in outcome.total.survivors
    np.testing.assert_array_equal(outcome.total.lanes, plain_sum(codes, outcome.total.survivors, agreed.width))
    assert [number for kind, number in asked if kind is Kind.BATCH].count(0) == 1
    assert (None, 0) not in asked
    assert "could not agree on keys" in outcome.trouble[0].reason


def test_statements_that_were_changed_exchanged_or_held_back(federation):
    server, agreed = federation.server, federation.agreement
    server.begin(epoch=1, first_round=0, rounds=1)
    for number, request in server.requests().items():
        server.take_keys(federation.clients[number].answer(request))
    for number, keys in server.key_bundles().items():
        server.take_shares(federation.clients[number].shares(keys))
    for number, sealed in server.share_bundles().items():
        server.take_partners(federation.clients[number].take_shares(sealed))
    client = federation.clients[0]
    bundle = messages.read_parts(server.partner_bundles()[0], agreed, Kind.PARTNER_BUNDLE)
    true = {number: (part[:16], part[16:]) for number, part in bundle.parts.items()}
    header = SumHeader(kind=Kind.PARTNER_BUNDLE, epoch=1, round=0, client=0)
    first, second = sorted(true)[:2]
    with pytest.raises(WrongRound):
        client.mask(0, np.zeros(4, dtype=np.uint8))
    for wrong in (
        (true[first][0], bytes(len(true[first][1]))),
        true[second],
        (bytes(16), true[first][1]),
    ):
        # A wrong statement counts like one that was held back, which comes last.
        stated = {c: tag + bits for c, (tag, bits) in (true | {first: wrong}).items()}
        client.take_partners(messages.write_parts(header, agreed, stated))
        assert client._state.batch.strangers.keys() == true.keys() - {first}
    held_back = {c: tag + bits for c, (tag, bits) in true.items() if c != first}
    client.take_partners(messages.write_parts(header, agreed, held_back))
    client.mask(0, np.zeros(4, dtype=np.uint8))
    everybody = tuple(range(N))
    client.sign(survivors(federation, 0, everybody))
    client.unmask(certificate(federation, 0, everybody))
    assert request_shares(client, everybody) == set(true) - {first}


def test_every_strategy_against_a_small_graph():
    """What the argument of claim 12 says, by trying: a server cuts any directed set of mask pairs off, names any list
    that the committee signs, and asks whom it likes. Whatever it then opens is all honest survivors, or nobody."""
    n, colluder, rng = 7, 0, random.Random(3)
    opened_whole = opened_none = 0
    for seed in range(12):
        graph = small_graph(seed, n, 4, 2)
        pairs = [(i, j) for i in range(n) for j in graph.masks(i)]
        for trial in range(60):
            chance = 0.0 if trial == 0 else rng.choice([0.02, 0.1, 0.3])
            partners = {i: set(graph.masks(i)) for i in range(n)}
            for i, j in pairs:
                if rng.random() < chance:
                    partners[i].discard(j)
            for missing in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(3)):
                listed = [c for c in range(n) if c not in missing]
                honest = [c for c in listed if c != colluder]
                if graph.too_far_away(tuple(listed)) or len(parts_of(graph, honest)) > 1:
                    continue  # not signed, or the event that the bound is about
                # A holder opens a client's self-mask only if its statement fits the list.
                opened = {i for i in honest if set(graph.masks(i)) & set(listed) <= partners[i]}
                # Masks go away in pairs that are both summed; one-sided masks of survivors stay for good.
                grown = True
                while grown:
                    stuck = {
                        i for i in opened for j in partners[i] & set(honest) if j not in opened or i not in partners[j]
                    }
                    grown = bool(stuck)
                    opened -= stuck
                assert opened in (set(), set(honest))
                opened_whole += opened == set(honest)
                opened_none += not opened
    assert opened_whole > 100
    assert opened_none > 100


def test_server_and_colluders_are_left_with_uniform_vectors_on_a_sparse_graph():
    agreed = agreement(N, dropouts=3, dimension=8, width=3, sparse=SMALL_SPARSE)
    federation = Federation(agreed)
    rounds, gone = 60, 11
    federation.begin(rounds=rounds)
    codes = {client: np.full(8, client % 8, dtype=np.uint8) for client in range(N)}
    honest = 5
    colluders = agreed.graph.masks(honest)[:2]
    seen = []
    for round in range(rounds):
        federation.sum(codes, round=round, masked=[c for c in range(N) if c != gone])
        lanes = read_masked(federation.masked[round, honest], agreed)[1].copy()
        scratch, seed = scratch_for(lanes), federation.server._round.seeds[honest][-1]
        add_mask(lanes, self_key(seed, agreed.session, client=honest, round=round), scratch=scratch, subtract=True)
        batch = federation.clients[honest]._state.batch
        for other in {gone, *colluders} & batch.pairs.keys():
            secret = batch.at(batch.pairs[other], round)
            (key,) = pair_keys([secret], agreed.session, round=round, model=NO_MODEL)
            add_mask(lanes, key, scratch=scratch, subtract=other > honest)
        seen.append(lanes % 8)
    seen = np.array(seen)
    assert min(stats.chisquare(np.bincount(seen[:, j], minlength=8)).pvalue for j in range(8)) > 1e-4
