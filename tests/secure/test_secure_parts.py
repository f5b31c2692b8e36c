"""Thresholds, graph, shares, noise parts and roster, each on its own."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from secure_sums import identity, roster

from bqsgd.errors import BadShares, Infeasible, InvalidParameter
from bqsgd.noise import binomial_pmf, seeded_rng
from bqsgd.secure import graph
from bqsgd.secure.graph import Thresholds, draw_neighbours, thresholds
from bqsgd.secure.noise_shares import PIECE, NoiseParts, add_binomial
from bqsgd.secure.roster import Roster, public_key, read_identity, read_roster, write_identity
from bqsgd.secure.sharing import PRIME, combine, split


def test_no_split_of_the_honest_clients_in_the_full_graph():
    """Whatever the server tells whom: two groups that see none of each other cannot both have enough neighbours."""
    for n in range(2, 40):
        for t in range(n):
            for f in range(n):
                try:
                    rule = thresholds(clients=n, dropouts=f, colluders=t)
                except Infeasible:
                    assert n - f < (n + t) // 2 + 1 or n - f - t < 2
                    continue
                if not rule.full:
                    continue
                assert rule.colluders < rule.share_threshold <= rule.fewest - 1
                assert 2 * rule.quorum - n > t
                for a in range(1, n - t):
                    b = n - t - a
                    assert min(a, b) - 1 + t < rule.share_threshold


def test_infeasible_thresholds_name_feasible_ones():
    with pytest.raises(Infeasible, match=r"at most 2 dropouts.*at most 3 colluders"):
        thresholds(clients=10, dropouts=3, colluders=4)
    thresholds(clients=10, dropouts=2, colluders=4)
    thresholds(clients=10, dropouts=3, colluders=3)


@pytest.mark.parametrize(("n", "f", "t"), [(100, 10, 10), (1000, 50, 100)])
def test_sparse_graphs_have_the_failure_probability_asked_for(n, f, t):
    rule = thresholds(clients=n, dropouts=f, colluders=t)
    assert not rule.full
    assert 0 < rule.failure <= 2.0**-graph.FAILURE_BITS
    # The first term, from integers: colluders hold enough shares of one of the honest clients.
    most = min(t, rule.degree)
    ways = sum(math.comb(t, c) * math.comb(n - 1 - t, rule.degree - c) for c in range(rule.share_threshold, most + 1))
    first = (n - t) * ways / math.comb(n - 1, rule.degree)
    assert first <= rule.failure * (1 + 1e-9)
    for threshold in range(rule.degree // 2, rule.degree):  # a smaller degree would not do
        lost = graph._loss_log2(n, f, rule.degree - 1, threshold) > -graph.LOSS_BITS
        assert lost or graph._failure_log2(n, t, rule.degree - 1, threshold) > -graph.FAILURE_BITS


def test_the_failure_bound_holds_for_graphs_drawn():
    """Small and badly chosen on purpose: 9 clients, 3 colluders, degree 3, 3 shares. Every set A is looked at."""
    n, t, degree, threshold, draws = 9, 3, 3, 3, 1500
    rule = Thresholds(clients=n, dropouts=2, colluders=t, degree=degree, share_threshold=threshold)
    rng, failed = seeded_rng(seed=5), 0
    honest = range(t, n)
    for _ in range(draws):
        chosen = {client: set(draw_neighbours(client, rule, rng)) for client in honest}
        failed += any(
            all(len(chosen[client] & (set(a) | set(range(t)))) >= threshold for client in a)
            for size in range(1, len(honest) // 2 + 1)
            for a in itertools.combinations(honest, size)
        )
    assert rule.failure / 4 < failed / draws <= rule.failure + 4 * math.sqrt(rule.failure / draws)


def test_neighbours_are_drawn_uniformly():
    rule = Thresholds(clients=6, dropouts=1, colluders=0, degree=2, share_threshold=1)
    rng = seeded_rng(seed=1)
    drawn = [draw_neighbours(2, rule, rng) for _ in range(2000)]
    pairs = list(itertools.combinations([0, 1, 3, 4, 5], 2))
    assert stats.chisquare([drawn.count(pair) for pair in pairs]).pvalue > 1e-4


def test_any_threshold_of_the_shares_opens_the_secret_and_fewer_fit_every_secret():
    secret, points = bytes(range(16)), [1, 2, 4, 7, 9]
    shares = dict(zip(points, split(secret, points, threshold=3, rng=seeded_rng(seed=1)), strict=True))
    for chosen in itertools.combinations(points, 3):
        assert combine({point: shares[point] for point in chosen}, threshold=3) == secret
    with pytest.raises(BadShares):
        combine({1: shares[1], 2: shares[2]}, threshold=3)
    # Two shares and any other secret lie on a polynomial of degree two: at a third point it takes one value for each.
    values = {point: int.from_bytes(shares[point], "little") for point in (1, 2)}
    thirds = set()
    for guess in range(50):
        known = {0: guess, **values}
        thirds.add(sum(value * _basis(list(known), at, 4) for at, value in known.items()) % PRIME)
    assert len(thirds) == 50


def _basis(points, at, x):
    value = 1
    for other in points:
        if other != at:
            value = value * (x - other) * pow(at - other, -1, PRIME) % PRIME
    return value


def test_one_share_alone_is_uniform():
    first = [split(bytes(16), [1, 2], threshold=2, rng=seeded_rng(seed=seed))[0][0] for seed in range(1500)]
    assert stats.chisquare(np.bincount(first, minlength=256)).pvalue > 1e-4


def test_shares_that_were_changed_are_found_out_mostly():
    shares = split(bytes(16), [1, 2, 3], threshold=2, rng=seeded_rng(seed=2))
    found = 0
    for bit in range(130):
        changed = (int.from_bytes(shares[0], "little") ^ (1 << bit)).to_bytes(17, "little")
        try:
            found += combine({1: changed, 2: shares[1]}, threshold=2) != bytes(16)
        except BadShares:
            found += 1
    assert found == 130


@pytest.mark.parametrize(("n", "f", "t"), [(4, 1, 0), (5, 1, 1), (10, 2, 2), (12, 0, 3)])
def test_noise_parts_add_up_for_every_number_of_survivors(n, f, t):
    rule = thresholds(clients=n, dropouts=f, colluders=t)
    for total in (1, 7, 64, 100, 101, 1000):
        parts = NoiseParts(total=total, rule=rule)
        for survivors in range(n - f, n + 1):
            kept = [parts.kept(survivors, rank) for rank in range(survivors)]
            assert min(sum(chosen) for chosen in itertools.combinations(kept, survivors - t)) == total
            assert max(kept) - min(kept) <= 1
            assert set(kept) <= set(parts.cuts)
            assert parts.in_sum(survivors) == sum(kept)
            if t == 0:
                assert sum(kept) == total
        assert parts.drawn == -(-total // rule.honest)


def test_pieces_of_noise_have_the_exact_binomial_law():
    for trials in range(1, PIECE + 1):
        law = binomial_pmf(trials)
        assert law.first == 0
        assert [p.as_integer_ratio() for p in law.pmf[:3]] == [
            (math.comb(trials, k) / 2**trials).as_integer_ratio() for k in range(min(3, trials + 1))
        ]
        assert float(law.pmf.sum()) == 1.0


def test_noise_that_is_added_and_subtracted_again_leaves_nothing():
    lanes = np.arange(100, dtype="<u2")
    add_binomial(lanes, 150, seeded_rng(seed=1))
    assert lanes.max() > 150
    add_binomial(lanes, 150, seeded_rng(seed=1), subtract=True)
    assert np.array_equal(lanes, np.arange(100))


def test_a_roster_is_read_back_and_its_digest_knows_every_key(tmp_path):
    path = tmp_path / "roster.toml"
    path.write_text(roster(3).to_toml())
    assert read_roster(path) == roster(3)
    assert read_roster(path).digest == roster(3).digest
    other = Roster({**roster(3).keys, 2: public_key(identity(2, generation=1))})
    assert other.digest != roster(3).digest
    assert Roster({0: b"a" * 32, 2: b"b" * 32}).digest != Roster({0: b"a" * 32, 1: b"b" * 32}).digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[clients]",
        "[clients]\n0 = 'zz'",
        "[clients]\n-1 = '" + "0" * 64 + "'",
        "[clients]\n0 = '" + "0" * 64 + "'\n1 = '" + "0" * 64 + "'",
        "[clients]\n0 = '" + "0" * 64 + "'\n01 = '" + "1" * 64 + "'",
        "[clients]\n0 = 5",
        "[other]\n0 = 5",
        "what",
    ],
)
def test_what_is_not_a_roster_is_refused(tmp_path, text):
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(InvalidParameter):
        read_roster(path)
    with pytest.raises(InvalidParameter):
        read_roster(tmp_path / "none")


def test_an_identity_is_kept_from_others(tmp_path):
    path = tmp_path / "client.key"
    write_identity(path, identity(1))
    assert path.stat().st_mode & 0o077 == 0
    assert public_key(read_identity(path)) == public_key(identity(1))
    with pytest.raises(InvalidParameter):
        write_identity(path, identity(2))
    path.chmod(0o644)
    with pytest.raises(InvalidParameter, match="others"):
        read_identity(path)
    for text in (b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        (tmp_path / "bad").write_bytes(text)
        (tmp_path / "bad").chmod(0o600)
        with pytest.raises(InvalidParameter):
            read_identity(tmp_path / "bad")
