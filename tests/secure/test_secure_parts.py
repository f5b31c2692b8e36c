"""Thresholds, graph, shares, noise parts and roster, each on its own."""

import itertools
import math

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x448 import X448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from secure_sums import identity, roster

from bqsgd._src.errors import BadShares, Infeasible, InvalidParameter
from bqsgd._src.laws import Binomial
from bqsgd._src.noise import seeded_rng
from bqsgd._src.secure import sharing
from bqsgd._src.secure.graph import Graph, thresholds
from bqsgd._src.secure.masks import xor
from bqsgd._src.secure.noise_shares import PIECE, NoiseParts, add_binomial
from bqsgd._src.secure.roster import Roster, public_key, read_identity, read_roster, write_identity
from bqsgd._src.secure.sharing import _products, _solution, _times, check_of, extend, good_shares, row_through


def test_what_is_opened_is_the_sum_over_all_honest_survivors():
    """The counting behind `graph`, for every n, f and t: one list, and no sum without a client that signed it."""
    for n in range(2, 40):
        for t, f in itertools.product(range(n), range(n)):
            try:
                rule = thresholds(clients=n, dropouts=f, colluders=t)
            except Infeasible:
                assert n - f < (n + t) // 2 + 1 or n - f - t < 2
                continue
            assert t < rule.partners <= rule.fewest - 1
            assert t + f < rule.share_threshold <= min(rule.quorum, n - 1)
            assert 2 * rule.quorum - n > t
            honest_signers = rule.quorum - t
            assert honest_signers >= 2
            for missing in range(f + 1):  # honest clients that are not on the list
                others = n - t - honest_signers - missing  # honest survivors that did not sign
                assert others - 1 + t + missing < rule.partners


def known_pairs(rule, known, rows):
    """The honest pairs whose secrets follow from the corrections of these rows and the secrets of clients in `known`.

    Each row has as many linear equations as corrections. A pair is known if its unknown alone is a combination of them.
    """
    graph = Graph(roster(rule.clients), rule)
    pairs = [pair for pair in itertools.combinations(range(rule.clients), 2) if not set(pair) & set(known)]
    column = {pair: at for at, pair in enumerate(pairs)}
    equations = []
    for client in set(rows) - set(known):
        points = graph.points(client)
        holders = sorted(rows[client])
        threshold = min(rule.share_threshold, len(holders))
        base = holders[:threshold]
        for other in holders[threshold:]:
            # Value at this holder's point, as a combination of those in the base: columns of the identity.
            weights = extend(
                {
                    points[b]: bytes(8 * at) + bytes([1] * 8) + bytes(8 * (threshold - at - 1))
                    for at, b in enumerate(base)
                },
                [points[other]],
            )[0][::8]
            equation = np.zeros(len(pairs), np.uint8)
            for holder, weight in zip([*base, other], [*weights, 1], strict=True):
                if holder not in known:
                    equation[column[tuple(sorted((client, holder)))]] ^= weight
            equations.append(equation)
    rank = _rank(equations)
    return [pair for pair, at in column.items() if _rank([*equations, np.eye(1, len(pairs), at, np.uint8)[0]]) == rank]


def _rank(equations):
    if not equations:
        return 0
    table = np.array(equations, np.uint8)
    independent = 0
    for at in range(len(table)):
        # An equation that follows from those before adds nothing: its combination solves a linear system.
        before = table[:at].T
        solution = _solution(np.hstack([before, table[at][:, None]])) if at else np.zeros(0, np.uint8)
        made = np.bitwise_xor.reduce(_products()[before, solution[None, :]], axis=1) if at else np.zeros_like(table[at])
        independent += not np.array_equal(made, table[at])
    return independent


@pytest.mark.parametrize(("n", "f", "t"), [(3, 1, 0), (4, 1, 0), (4, 1, 1), (5, 2, 0), (5, 1, 1), (6, 2, 1), (7, 2, 2)])
def test_what_is_opened_for_others_says_nothing_about_the_secret_of_a_pair(n, f, t):
    """Whichever t clients collude and f are missing, all corrections are public: no other pair's secret follows.

    Nor if a client was shown the keys of some others only. With one more client known, some would follow."""
    rule, rng = thresholds(clients=n, dropouts=f, colluders=t), np.random.default_rng(n)
    everybody = {client: [other for other in range(n) if other != client] for client in range(n)}
    some = {
        client: sorted(rng.choice(others, rng.integers(rule.partners, n), replace=False).tolist())
        for client, others in everybody.items()
    }
    for known in itertools.combinations(range(n), f + t):
        for rows in (everybody, some):
            assert known_pairs(rule, known, rows) == []
    if rule.share_threshold < n - 2:
        assert known_pairs(rule, range(rule.share_threshold), everybody) != []


def test_infeasible_thresholds_name_feasible_ones():
    with pytest.raises(Infeasible, match=r"at most 2 dropouts.*at most 3 colluders"):
        thresholds(clients=10, dropouts=3, colluders=4)
    thresholds(clients=10, dropouts=2, colluders=4)
    thresholds(clients=10, dropouts=3, colluders=3)


def shared(secret, points, threshold, rng):
    """Shares of which the first are given, as two clients derive them, and the others corrected."""
    derived = {point: rng.bytes(len(secret)) for point in points}
    row = row_through(derived, threshold=threshold, secret=secret)
    assert row.secret == secret == row.base[0]
    assert sorted(row.differ) == points[threshold - 1 :]
    return {point: xor(share, row.differ.get(point, bytes(len(secret)))) for point, share in derived.items()}


def test_any_threshold_of_the_shares_opens_the_secret():
    secret, points = bytes(range(48)), [1, 2, 4, 7, 255]
    shares = shared(secret, points, 3, np.random.default_rng(1))
    for chosen in itertools.combinations(points, 3):
        assert extend({point: shares[point] for point in chosen}, [0]) == [secret]
    changed = {**shares, 2: bytes([shares[2][0] ^ 1]) + shares[2][1:]}
    assert extend({point: changed[point] for point in (1, 2, 4)}, [0]) != [secret]


@pytest.mark.parametrize("secret", [0, 1, 77, 255])
def test_fewer_shares_than_the_threshold_and_all_corrections_say_nothing(secret):
    """Over all derived shares: whatever the corrections and one share of two are, they are as frequent."""
    text, seen = bytes([secret]) * 8, {}
    for first, second in itertools.product(range(0, 256, 5), range(256)):
        derived = {3: bytes([first]) * 8, 9: bytes([second]) * 8}
        view = first, row_through(derived, threshold=2, secret=text).differ[9][0]
        seen[view] = seen.get(view, 0) + 1
    assert len(seen) == 52 * 256
    assert set(seen.values()) == {1}


@pytest.mark.parametrize(("shares", "threshold", "liars"), [(5, 3, 1), (5, 3, 2), (5, 4, 1), (40, 24, 8), (8, 6, 2)])
def test_a_secret_opens_although_holders_lie(shares, threshold, liars):
    """Up to half of the spare shares by Berlekamp and Welch; in a small sum all of them, by trying."""
    rng = np.random.default_rng(shares + liars)
    secret, points = rng.bytes(16), list(range(1, shares + 1))
    good = shared(secret, points, threshold, rng)
    base = list(range(threshold))
    check = check_of(extend({p: good[p] for p in points[:threshold]}, base), about=b"this secret")
    agreed = {"points": base, "check": check, "about": b"this secret"}
    for trial in range(5):
        wrong = rng.choice(points, liars, replace=False).tolist()
        # Whole shares, or a single byte of them.
        lies = {p: rng.bytes(16) if trial else good[p][:-1] + bytes([good[p][-1] ^ 1]) for p in wrong}
        found = good_shares(good | lies, threshold=threshold, **agreed)
        assert extend(found, points) == [good[point] for point in points]
    with pytest.raises(BadShares):
        good_shares({p: rng.bytes(16) for p in points}, threshold=threshold, **agreed)
    with pytest.raises(BadShares):
        good_shares(good, threshold=threshold, **agreed | {"about": b"another one"})


def test_the_tries_of_a_secret_that_does_not_open_are_bounded(monkeypatch):
    rng, tried = np.random.default_rng(1), []
    monkeypatch.setattr(sharing, "check_of", lambda values, about: tried.append(values))
    with pytest.raises(BadShares):
        good_shares({p: rng.bytes(16) for p in range(1, 41)}, threshold=20, points=[0], check=bytes(16), about=b"")
    assert 1000 < len(tried) <= 5002


def test_products_are_those_of_the_field():
    """Against the definition: multiply as polynomials over GF(2), modulo x^8 + x^4 + x^3 + x + 1."""

    def slow(a, b):
        value = 0
        for bit in range(8):
            value ^= (a << bit) * (b >> bit & 1)
        for bit in range(15, 7, -1):
            value ^= (0x11B << bit - 8) * (value >> bit & 1)
        return value

    words = np.arange(256, dtype=np.uint8).view(np.uint64)
    for factor in range(1, 256):
        result = np.array([_times(word, np.uint64(factor)) for word in words], dtype=np.uint64)
        assert result.tobytes() == bytes(slow(value, factor) for value in range(256))


@pytest.mark.parametrize(
    ("shares", "points"),
    [
        ({}, [1]),
        ({1: bytes(8)}, []),
        ({1: bytes(8)}, [256]),
        ({-1: bytes(8)}, [1]),
        ({1: bytes(8)}, [2, 2]),
        ({1: b""}, [2]),
        ({1: bytes(7)}, [2]),
        ({1: bytes(8), 2: bytes(16)}, [3]),
    ],
)
def test_shares_that_cannot_be_extended(shares, points):
    with pytest.raises(InvalidParameter):
        extend(shares, points)


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
            for rank in range(survivors):
                assert parts.cuts[parts.first_unneeded(survivors, rank)] == kept[rank]
            if t == 0:
                assert sum(kept) == total
        assert parts.drawn == -(-total // rule.honest)


def test_pieces_of_noise_have_the_exact_binomial_law():
    for trials in range(1, PIECE + 1):
        law = Binomial(trials)
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
    assert Roster(roster(3).keys, bytes(32)).digest != roster(3).digest
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
        "seed = 5\n[clients]\n0 = '" + "0" * 64 + "'\n1 = '" + "1" * 64 + "'",
        "seed = '00'\n[clients]\n0 = '" + "0" * 64 + "'\n1 = '" + "1" * 64 + "'",
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
    with pytest.raises(InvalidParameter, match="other users"):
        read_identity(path)
    other = X448PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for text in (other, b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        (tmp_path / "bad").write_bytes(text)
        (tmp_path / "bad").chmod(0o600)
        with pytest.raises(InvalidParameter):
            read_identity(tmp_path / "bad")
