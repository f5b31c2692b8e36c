"""Sharing data: every sample to exactly one client; skew grows as the concentration falls."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd import data
from bqsgd._src.data.dataset import Split
from bqsgd._src.data.shares import dirichlet, iid, rows_by_client
from bqsgd._src.errors import InvalidParameter, NonFiniteInput


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 99))
def test_iid_is_a_partition_with_even_sizes(samples, clients, seed):
    if clients > samples:
        with pytest.raises(InvalidParameter, match="clients"):
            iid(samples, clients, rng=np.random.default_rng(seed))
        return
    shares = iid(samples, clients, rng=np.random.default_rng(seed))
    assert sorted(np.concatenate(shares).tolist()) == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 6), st.floats(0.05, 50), st.integers(0, 99))
def test_dirichlet_is_a_partition_with_the_smallest_share_kept(clients, concentration, seed):
    labels = np.arange(300, dtype=np.int64) % 10
    shares = dirichlet(labels, clients, concentration=concentration, rng=np.random.default_rng(seed), smallest=2)
    assert sorted(np.concatenate(shares).tolist()) == list(range(300))
    assert min(map(len, shares)) >= 2


def test_a_low_concentration_skews_labels():
    labels = np.arange(5000, dtype=np.int64) % 10

    def skew(concentration):
        rng = np.random.default_rng(7)
        shares = dirichlet(labels, 5, concentration=concentration, rng=rng)
        return np.mean([np.bincount(labels[rows], minlength=10).max() / len(rows) for rows in shares])

    assert skew(0.05) > 0.25 > 0.13 > skew(1000.0)


def test_impossible_dirichlet_says_what_to_do():
    labels = np.zeros(40, dtype=np.int64)
    with pytest.raises(InvalidParameter, match="raise concentration"):
        dirichlet(labels, 20, concentration=0.001, rng=np.random.default_rng(0), smallest=2)


def shares_of(split, *, seed):
    return [split.take(rows) for rows in rows_by_client(split.labels, 4, seed=seed)]


def test_partition_by_seed_holds_the_same_samples():
    digits = data.load("digits")
    first, again = (shares_of(digits.train, seed=3) for _ in range(2))
    assert sum(map(len, first)) == len(digits.train) == 1437
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.inputs, b.inputs)
    other = shares_of(digits.train, seed=4)
    assert not np.array_equal(first[0].labels, other[0].labels)


def test_digits_is_always_there():
    digits = data.load("digits")
    assert digits.input_shape == (1, 8, 8)
    assert set(digits.test.labels.tolist()) == set(range(10))
    assert np.abs(digits.train.inputs).max() == 1.0


def test_unknown_names_and_broken_splits_are_refused():
    with pytest.raises(InvalidParameter, match="mnist, fashion-mnist, cifar-10, shakespeare, rand-hie, digits"):
        data.load("imagenet")
    labels = np.zeros(2, np.int64)
    with pytest.raises(InvalidParameter, match="float32"):
        Split(inputs=np.zeros((2, 3)), labels=labels)
    with pytest.raises(InvalidParameter, match="one label for each input"):
        Split(inputs=np.zeros((3, 3), np.float32), labels=labels)
    bad = Split(inputs=np.full((2, 3), np.nan, np.float32), labels=labels)
    with pytest.raises(NonFiniteInput):
        data.Dataset(name="bad", train=bad, test=bad, classes=2, source="test")
    odd = Split(inputs=np.zeros((2, 3), np.float32), labels=labels + 5)
    with pytest.raises(InvalidParameter, match=r"0\.\.1"):
        data.Dataset(name="odd", train=odd, test=odd, classes=2, source="test")
