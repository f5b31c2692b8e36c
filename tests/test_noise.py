"""The binomial law against exact integers, the alias table against the law, and the keystream's single use."""

import copy
import ctypes
import math
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.laws import TAIL_BITS, Binomial
from bqsgd._src.mechanism.encoder import Encoding
from bqsgd._src.noise import (
    CUT_LAW,
    NOISE_BITS,
    REFINE_BITS,
    AliasTable,
    NoiseSource,
    alias_table,
    privacy_rng,
    seeded_rng,
)
from bqsgd._src.params import MAX_TRIALS, Mechanism

GOLDEN = ["0x65c004b237171286", "0x2271267fdc36b62f"]
PAPER_TRIALS = [0, 1, 2, 7, 64, 80, 81, 82, 251, 1003, 4079]


def law_of(table: AliasTable) -> dict[int, Fraction]:
    """The exact law that the table samples, from its integers."""
    unit = 1 << (NOISE_BITS - table.index_bits + REFINE_BITS)
    total = len(table.alias) * unit
    law: dict[int, Fraction] = {}
    for i, (threshold, refine, alias) in enumerate(zip(table.threshold, table.refine, table.alias, strict=True)):
        keep = (int(threshold) << REFINE_BITS) + int(refine)
        assert 0 <= keep <= unit
        for outcome, mass in ((table.first + i, keep), (table.first + int(alias), unit - keep)):
            if mass:
                law[outcome] = law.get(outcome, Fraction(0)) + Fraction(mass, total)
    return law


@pytest.mark.parametrize("trials", range(65))
def test_pmf_is_the_correctly_rounded_binomial_for_every_small_m(trials: int) -> None:
    law = Binomial(trials)
    assert law.first == 0
    assert law.pmf.tolist() == [math.comb(trials, k) / 2**trials for k in range(trials + 1)]


@pytest.mark.parametrize("trials", [81, 251, 1003, 4079, 16279, MAX_TRIALS - 1, MAX_TRIALS])
def test_pmf_of_large_m_is_symmetric_complete_and_close_to_an_independent_one(trials: int) -> None:
    law = Binomial(trials)
    assert np.array_equal(law.pmf, law.pmf[::-1])
    assert law.first + len(law.pmf) - 1 == trials - law.first
    assert math.fsum(law.pmf) == pytest.approx(1, abs=1e-15)
    outcomes = law.first + np.arange(len(law.pmf))
    np.testing.assert_allclose(law.pmf, stats.binom(trials, 0.5).pmf(outcomes), rtol=1e-8, atol=2.0**-103)


@pytest.mark.parametrize("trials", [81, 100, 251, 1003, 4079])
def test_the_mass_cut_off_is_below_its_stated_bound(trials: int) -> None:
    law = Binomial(trials)
    outside = 2 * sum(math.comb(trials, k) for k in range(law.first))
    assert Fraction(outside, 2**trials) <= Fraction(2.0**-TAIL_BITS)


@pytest.mark.parametrize("trials", PAPER_TRIALS)
def test_the_table_samples_the_binomial_within_its_stated_distance(trials: int) -> None:
    sampled = law_of(alias_table(Binomial(trials)))
    exact = {k: Fraction(math.comb(trials, k), 2**trials) for k in range(trials + 1)}
    assert set(sampled) <= set(exact)
    assert sum(sampled.values()) == 1
    law = Binomial(trials)
    assert {law.first + k: p for k, p in enumerate(law.pmf)} == {k: float(p) for k, p in sampled.items()}
    distance = sum(abs(exact[k] - sampled.get(k, 0)) for k in exact) / 2
    assert distance <= (Fraction(CUT_LAW) if trials > TAIL_BITS else 0)


@given(st.integers(0, MAX_TRIALS))
@settings(max_examples=15)
def test_every_m_has_a_tight_table(trials: int) -> None:
    table = alias_table(Binomial(trials))
    # Floors lose less than one unit of 2^-104 per outcome; one unit more covers the error of the weights themselves.
    assert 2.0**-TAIL_BITS + (len(Binomial(trials).pmf) + 1) * 2.0**-104 <= CUT_LAW < 2.0**-63
    assert table.index_bits <= 14
    assert len(table.alias) == 1 << table.index_bits
    law = law_of(table)
    assert min(law) >= 0
    assert max(law) <= trials
    peak = trials // 2
    assert float(law[peak]) == pytest.approx(Binomial(trials).pmf[peak - table.first], rel=1e-12)


def test_cached_tables_cannot_be_changed() -> None:
    table = alias_table(Binomial(7))
    for column in (table.threshold, table.refine, table.alias, Binomial(7).pmf):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


@pytest.mark.parametrize("trials", [-1, MAX_TRIALS + 1, 2.0, True])
def test_trials_outside_the_range_are_refused(trials: int) -> None:
    with pytest.raises(InvalidParameter, match="trials"):
        Binomial(trials)
    with pytest.raises(InvalidParameter, match="trials"):
        alias_table(Binomial(trials))


def test_the_keystream_is_aes_256_in_counter_mode() -> None:
    source = NoiseSource(bytes(range(32)), seeded=True)
    words = np.empty(6, np.uint64)
    source.fill(words, block=5)
    block_cipher = Cipher(algorithms.AES256(bytes(range(32))), modes.ECB()).encryptor()
    counters = b"".join(n.to_bytes(16, "big") for n in (5, 6, 7))
    assert words.tobytes() == block_cipher.update(counters)


def test_a_keystream_read_in_parts_is_the_keystream_read_at_once() -> None:
    source = seeded_rng(seed=3)
    whole, parts = np.empty(100_001, np.uint64), np.empty(100_001, np.uint64)
    source.fill(whole, block=9)
    stream = source.keystream(9)
    for start, stop in ((0, 2), (2, 40_000), (40_000, 100_001)):
        stream.fill(parts[start:stop])
    assert np.array_equal(whole, parts)


def test_words_are_never_handed_out_twice() -> None:
    source = seeded_rng(seed=1)
    drawn = np.concatenate([source.words(n) for n in (1, 2, 3, 1000, 0, 5)])
    assert len(np.unique(drawn)) == 1011


def test_threads_reserve_disjoint_blocks() -> None:
    source = privacy_rng()
    with ThreadPoolExecutor(8) as pool:
        starts = list(pool.map(source.reserve, [3] * 4000))
    assert sorted(starts) == list(range(0, 12_000, 3))


def test_seeds_reproduce_and_separate() -> None:
    assert np.array_equal(seeded_rng(seed=7).words(50), seeded_rng(seed=7).words(50))
    assert not np.any(seeded_rng(seed=7).words(50) == seeded_rng(seed=8).words(50))
    assert seeded_rng(seed=7).seeded
    with pytest.raises(InvalidParameter, match="seed"):
        seeded_rng(seed=-1)


def test_the_seeded_keystream_does_not_change_between_versions() -> None:
    assert [hex(word) for word in seeded_rng(seed=0).words(2)] == GOLDEN


def test_privacy_sources_are_keyed_apart_and_unmarked() -> None:
    first, second = privacy_rng(), privacy_rng()
    assert not first.seeded
    assert not np.any(first.words(50) == second.words(50))


def test_a_source_cannot_be_copied_or_pickled() -> None:
    source = privacy_rng()
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="must not be used twice"):
            attempt(source)


def fork_in_c() -> int:
    """A fork that Python does not hear of: none of its hooks run."""
    return ctypes.PyDLL(None).fork()


FORKS = (
    pytest.mark.parametrize("fork", [os.fork, fork_in_c], ids=["os.fork", "C"])
    if hasattr(os, "fork")
    else pytest.mark.skip(reason="no fork on this system")
)


def in_child(fork, report) -> bytes:  # type: ignore[no-untyped-def]
    """What `report()` returns in a forked process, or the error it raises."""
    reader, writer = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            os.write(writer, report())
        except InvalidParameter as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


@FORKS
def test_a_fork_never_shares_the_keystream(fork) -> None:  # type: ignore[no-untyped-def]
    source = privacy_rng()
    source.words(10)

    def grandchild() -> bytes:
        return in_child(fork, lambda: source.words(64).tobytes())  # of a child that has drawn nothing itself

    drawn = [in_child(fork, lambda: source.words(64).tobytes()) for _ in range(2)]
    drawn += [in_child(fork, grandchild), source.words(64).tobytes()]
    words = np.frombuffer(b"".join(drawn), np.uint64)
    assert len(words) == len(np.unique(words)) == 4 * 64


@FORKS
def test_a_fork_while_a_thread_reserves_leaves_the_child_able_to(fork) -> None:  # type: ignore[no-untyped-def]
    source = privacy_rng()
    own = source._blocks()
    with own.lock:  # as if another thread were in the middle of it
        child = in_child(fork, lambda: source.words(64).tobytes())
    assert len(child) == 8 * 64


@FORKS
def test_blocks_reserved_before_a_fork_are_refused_in_the_child(fork) -> None:  # type: ignore[no-untyped-def]
    source, mechanism = privacy_rng(), Mechanism(levels=4, trials=64)
    values = np.zeros(1000, np.float32)
    encoding = Encoding(values, mechanism, range=1.0, rng=source)
    assert b"reserved before a fork" in in_child(fork, lambda: encoding.codes().tobytes())

    def after_the_next() -> bytes:
        Encoding(values, mechanism, range=1.0, rng=source).codes()
        return encoding.codes().tobytes()

    assert b"reserved before a fork" in in_child(fork, after_the_next)
    stream = source.keystream(source.reserve(4))
    assert b"reserved before a fork" in in_child(fork, lambda: stream.fill(np.empty(8, np.uint64)) or b"drew words")
    # The child's next encoding begins after what its parent had reserved, under a key of its own.
    fresh = in_child(fork, lambda: Encoding(values, mechanism, range=1.0, rng=source).codes().tobytes())
    kept = encoding.codes()
    # Two independent draws of Bin(64, 1/2) agree with probability 0.0704: 70 of 1000 on average, 200 is 16 sigma off.
    assert int((np.frombuffer(fresh, kept.dtype) == kept).sum()) < 200


@FORKS
def test_a_seeded_source_is_dead_in_a_forked_process(fork) -> None:  # type: ignore[no-untyped-def]
    source = seeded_rng(seed=1)
    assert b"does not survive a fork" in in_child(fork, lambda: source.words(1).tobytes())
    assert b"does not survive a fork" in in_child(fork, lambda: source.fill(np.empty(2, np.uint64), block=0) or b"drew")
    assert len(source.words(4)) == 4  # the parent's source lives on
