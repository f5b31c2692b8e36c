"""Thresholds, graph, shares, noise parts and roster, each on its own."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from secure_sums import identity, roster

from bqsgd.errors import BadShares, Infeasible, InvalidParameter
from bqsgd.noise import binomial_pmf, seeded_rng
from bqsgd.secure.graph import thresholds
from bqsgd.secure.noise_shares import PIECE, NoiseParts, add_binomial
from bqsgd.secure.roster import Roster, public_key, read_identity, read_roster, write_identity
from bqsgd.secure.sharing import PRIME, combine, split


def test_what_is_opened_is_the_sum_over_all_honest_survivors():
    """The counting behind `graph`, for every n, f and t: one list, and no sum without a client that signed it."""
    for n in range(2, 40):
        for t, f in itertools.product(range(n), range(n)):
            try:
                rule = thresholds(clients=n, dropouts=f, colluders=t)
            except Infeasible:
                assert n - f < (n + t) // 2 + 1 or n - f - t < 2
                continue
            assert t < rule.share_threshold <= rule.fewest - 1
            assert 2 * rule.quorum - n > t
            honest_signers = rule.quorum - t
            assert honest_signers >= 2
            for missing in range(f + 1):  # honest clients that are not on the list
                others = n - t - honest_signers - missing  # honest survivors that did not sign
                assert others - 1 + t + missing < rule.share_threshold


def test_infeasible_thresholds_name_feasible_ones():
    with pytest.raises(Infeasible, match=r"at most 2 dropouts.*at most 3 colluders"):
        thresholds(clients=10, dropouts=3, colluders=4)
    thresholds(clients=10, dropouts=2, colluders=4)
    thresholds(clients=10, dropouts=3, colluders=3)


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
