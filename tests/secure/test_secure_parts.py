"""Thresholds, graph, shares, noise parts and roster, each on its own."""

import itertools
import math

import numpy as np
import pytest
from secure_sums import identity, roster

from bqsgd._src.errors import BadShares, Infeasible, InvalidParameter
from bqsgd._src.noise import binomial_pmf, seeded_rng
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.secure.noise_shares import PIECE, NoiseParts, add_binomial
from bqsgd._src.secure.roster import Roster, public_key, read_identity, read_roster, write_identity
from bqsgd._src.secure.sharing import _times, combine, split


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


def test_any_threshold_of_the_shares_opens_the_secret():
    secret, points = bytes(range(48)), [1, 2, 4, 7, 255]
    shares = dict(zip(points, split(secret, points, threshold=3, rng=seeded_rng(seed=1)), strict=True))
    for chosen in itertools.combinations(points, 3):
        assert combine({point: shares[point] for point in chosen}, threshold=3) == secret
    with pytest.raises(BadShares):
        combine({1: shares[1], 2: shares[2]}, threshold=3)
    changed = {**shares, 2: bytes([shares[2][0] ^ 1]) + shares[2][1:]}
    assert combine({point: changed[point] for point in (1, 2, 4)}, threshold=3) != secret


class _Every:
    """In the place of random words: every byte of word i has one value."""

    def __init__(self, *values: int) -> None:
        self.values = values

    def words(self, count):
        assert count == len(self.values)
        return np.array([value * 0x0101010101010101 for value in self.values], dtype=np.uint64)


@pytest.mark.parametrize("secret", [0, 1, 77, 255])
def test_fewer_shares_than_the_threshold_say_nothing(secret):
    """Over all coefficients, one share of two takes every value once; two of three take every pair once."""
    text = bytes([secret]) * 8
    assert {split(text, [3, 9], threshold=2, rng=_Every(a))[1][0] for a in range(256)} == set(range(256))
    pairs = {
        (shares[0][0], shares[2][0])
        for a in range(0, 256, 15)
        for b in range(256)
        for shares in [split(text, [5, 6, 200], threshold=3, rng=_Every(a, b))]
    }
    assert len(pairs) == 18 * 256


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
    ("points", "threshold"), [([], 1), ([0, 1], 2), ([1, 256], 2), ([1, 1], 1), ([1, 2], 3), ([1, 2], 0)]
)
def test_shares_that_cannot_be_made(points, threshold):
    with pytest.raises(InvalidParameter):
        split(bytes(16), points, threshold=threshold, rng=seeded_rng(seed=1))


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
    for text in (b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        (tmp_path / "bad").write_bytes(text)
        (tmp_path / "bad").chmod(0o600)
        with pytest.raises(InvalidParameter):
            read_identity(tmp_path / "bad")
