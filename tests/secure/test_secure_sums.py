"""The sum is the sum, whoever leaves at whichever step; and one message says nothing."""

import itertools
import os

import numpy as np
import pytest
from scipy import stats
from secure_sums import Federation, agreement, plain_sum, request_keys, some_codes

from bqsgd._src.errors import RoundUsed, TooFewClients
from bqsgd._src.noise import seeded_rng
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.masks import NO_MODEL, add_mask, pair_keys, scratch_for, self_key
from bqsgd._src.secure.messages import read_masked
from bqsgd._src.secure.noise_shares import encode_base

STEPS = ("keys", "shares", "masked", "signed", "unmasked")


def expected_to_succeed(agreed, stay):
    """What the thresholds say, from the clients that are there at each step (full graph)."""
    rule, (keys, shares, masked, signed, unmasked) = agreed.rule, [stay[step] for step in STEPS]
    if min(len(keys), len(shares), len(masked)) < rule.fewest or len(signed) < rule.quorum:
        return False
    to_recover = (set(masked) - set(unmasked)) | (set(shares) - set(masked))
    return not to_recover or len(unmasked) >= min(rule.share_threshold, len(keys) - 1)


def check_pattern(federation, codes, stay, round):
    agreed = federation.agreement
    steps = {step: stay[step] for step in STEPS[2:]}
    if expected_to_succeed(agreed, stay):
        total = federation.sum(codes, round=round, **steps)
        assert total.survivors == tuple(sorted(stay["masked"]))
        assert np.array_equal(total.lanes, plain_sum(codes, stay["masked"], agreed.width))
    else:
        with pytest.raises(TooFewClients):
            federation.sum(codes, round=round, **steps)


def all_patterns(n, f, t):
    """Every client leaves before one of the five steps, or never: 6^n patterns, those of one batch together."""
    agreed = agreement(n, dropouts=f, colluders=t, dimension=3, width=6)
    codes = some_codes(agreed)
    tried = 0
    for start in itertools.product((0, 1, 2), repeat=n):
        keys = [c for c in range(n) if start[c] > 0]
        shares = [c for c in range(n) if start[c] > 1]
        rounds = list(itertools.product((2, 3, 4, 5), repeat=len(shares)))
        tried += len(rounds)
        federation = Federation(agreed)
        if min(len(keys), len(shares)) < agreed.rule.fewest:
            with pytest.raises(TooFewClients):
                federation.begin(keys=keys, shares=shares, rounds=1)
            continue
        federation.begin(keys=keys, shares=shares, rounds=len(rounds))
        for round, leaves in enumerate(rounds):
            at = dict(zip(shares, leaves, strict=True))
            later = {step: [c for c in shares if at[c] > index] for index, step in enumerate(STEPS) if index > 1}
            check_pattern(federation, codes, {"keys": keys, "shares": shares} | later, round)
        assert all(len(kinds) == 1 for kinds in federation.revealed.values())
    assert tried == 6**n


def test_every_way_to_leave_gives_the_sum_or_a_refusal():
    all_patterns(3, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "f", "t"), [(4, 1, 0), (4, 1, 1), (5, 2, 0), (5, 1, 1), (6, 2, 1)])
def test_every_way_to_leave_gives_the_sum_or_a_refusal_of_more_clients(n, f, t):
    all_patterns(n, f, t)


@pytest.mark.parametrize("n", [7, 12])
def test_random_ways_to_leave(n):
    agreed = agreement(n, dropouts=n // 4, colluders=1, dimension=3, width=6)
    rng, codes = np.random.default_rng(n), some_codes(agreed)
    federation = Federation(agreed)
    federation.begin(rounds=6)
    for round in range(6):
        at = rng.choice(4, n, p=[0.1, 0.05, 0.05, 0.8])
        later = {step: [c for c in range(n) if at[c] > index] for index, step in enumerate(STEPS[2:])}
        check_pattern(federation, codes, {"keys": range(n), "shares": range(n)} | later, round)


@pytest.mark.parametrize("width", [2, 5, 8, 9, 13, 16, 17, 21])
def test_every_width_gives_the_sum_modulo_its_power_of_two(width):
    agreed = agreement(3, dropouts=1, dimension=300, width=width)
    federation = Federation(agreed, seed=None)
    federation.begin(rounds=2)
    codes = some_codes(agreed, most=200)
    total = federation.sum(codes)
    assert np.array_equal(total.lanes, plain_sum(codes, range(3), width))
    total = federation.sum(codes, round=1, masked=[0, 2])
    assert np.array_equal(total.lanes, plain_sum(codes, [0, 2], width))


def test_one_masked_message_is_uniform_at_every_position_and_rounds_are_independent():
    """The plaintext is the same in all 1,200 rounds; seeds are fixed, so the outcome is too."""
    agreed = agreement(3, dropouts=1, dimension=12, width=3)
    federation = Federation(agreed)
    federation.begin(rounds=1200)
    codes = np.full(12, 5, dtype=np.uint8)
    seen = np.array([read_masked(federation.clients[1].mask(r, codes), agreed)[1] for r in range(1200)])
    by_position = [stats.chisquare(np.bincount(seen[:, j], minlength=8)).pvalue for j in range(12)]
    pairs = [stats.chisquare(np.bincount((seen[1:, j] - seen[:-1, j]) % 8, minlength=8)).pvalue for j in range(12)]
    beside = [stats.chisquare(np.bincount((seen[:, j + 1] - seen[:, j]) % 8, minlength=8)).pvalue for j in range(11)]
    assert min(by_position + pairs + beside) > 1e-4
    assert len(np.unique(seen, axis=0)) == 1200


def test_server_and_colluders_together_are_left_with_a_uniform_vector_of_each_honest_client():
    """They pool everything: all that was revealed, and the colluders' own secrets. What is left adds up to the sum of
    the honest codes, and alone it is uniform."""
    n, honest, colluder, gone = 5, [0, 1, 2], 3, 4
    agreed = agreement(n, dropouts=1, colluders=1, dimension=8, width=3)
    federation = Federation(agreed)
    rounds = 160
    federation.begin(rounds=rounds)
    codes = {client: np.full(8, client, dtype=np.uint8) for client in range(n)}
    left = {client: [] for client in honest}
    for round in range(rounds):
        federation.sum(codes, round=round, masked=[0, 1, 2, 3])
        batch = {client: federation.clients[client]._state.batch for client in range(n)}
        total = np.zeros(8, dtype=np.int64)
        for client in honest:
            lanes = read_masked(federation.masked[round, client], agreed)[1].copy()
            scratch, session = scratch_for(lanes), agreed.session
            said = federation.server._round.seeds[client]  # its self-mask is revealed: it survived
            own = self_key(said[-1], session, client=client, round=round)
            add_mask(lanes, own, scratch=scratch, subtract=True)
            for other in (gone, colluder):  # of the missing one its secrets were recovered, the colluder has its own
                secret = batch[other].at(batch[other].pairs[client], round)
                (pair,) = pair_keys([secret], session, round=round, model=NO_MODEL)
                add_mask(lanes, pair, scratch=scratch, subtract=True)  # the honest client is the lower: it added
            left[client].append(lanes % 8)
            total += lanes
        assert np.array_equal(total % 8, plain_sum(codes, honest, 3))
    for client in honest:
        seen = np.array(left[client])
        assert min(stats.chisquare(np.bincount(seen[:, j], minlength=8)).pvalue for j in range(8)) > 1e-4


def test_below_the_thresholds_nothing_is_revealed():
    agreed = agreement(5, dropouts=1, colluders=1, dimension=3)
    federation = Federation(agreed)
    federation.begin(rounds=2)
    codes = some_codes(agreed)
    with pytest.raises(TooFewClients):
        federation.sum(codes, masked=[0, 1, 2])  # the server itself stops
    assert federation.revealed == {}


def test_masks_are_fresh_after_a_restart_and_in_a_fork():
    agreed = agreement(3, dropouts=1, dimension=64, width=16, seeded=False)
    codes = {client: np.zeros(64, dtype=np.uint8) for client in range(3)}
    messages = []
    for epoch in (1, 2):
        federation = Federation(agreed, seed=None)
        federation.begin(epoch=epoch, rounds=2)
        messages += [bytes(federation.clients[0].mask(round, codes[0])) for round in range(2)]
        with pytest.raises(RoundUsed):
            federation.clients[0].mask(0, codes[0])
    assert len({message[48:] for message in messages}) == 4
    fresh = SumClient(agreed, identity=federation.clients[0]._identity, number=0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, request_keys(fresh, epoch=3))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 1 << 16) != request_keys(fresh, epoch=3)
    os.close(reading)
    os.close(writing)


def test_the_same_seed_gives_the_same_bytes_and_says_so():
    agreed = agreement(3, dropouts=1, trials=12)
    first, second = Federation(agreed, seed=3), Federation(agreed, seed=3)
    codes = some_codes(agreed)
    totals = []
    for federation in (first, second):
        federation.begin(rounds=1)
        totals.append(federation.sum(codes))
    assert first.clients[1]._state.batch.shares == second.clients[1]._state.batch.shares
    assert np.array_equal(totals[0].lanes, totals[1].lanes)
    assert totals[0].seeded
    # Nobody is missing, so every further part of the noise was revealed and taken out again.
    assert np.array_equal(totals[0].lanes, plain_sum(codes, range(3), 8))


@pytest.mark.parametrize(("n", "f", "t", "trials"), [(4, 1, 0, 40), (4, 1, 1, 41), (5, 2, 0, 37), (6, 1, 2, 100)])
def test_the_sum_carries_exactly_the_trials_that_are_needed(n, f, t, trials):
    """Zero codes plus the parts that stay: with the base drawn as well, the sum is Bin(in_sum, 1/2)."""
    agreed = agreement(n, dropouts=f, colluders=t, dimension=4000, width=10, trials=trials)
    federation = Federation(agreed)
    federation.begin(rounds=f + 1)
    zeros = np.zeros(4000, dtype=np.float32)
    for missing in range(f + 1):
        codes = {
            client: encode_base(
                zeros, 2, agreed.noise.cuts[0], width=10, range=1.0, rng=seeded_rng(seed=100 * missing + client)
            )
            for client in range(n)
        }
        there = list(range(missing, n))
        total = federation.sum(codes, round=missing, masked=there)
        in_sum = agreed.noise.in_sum(len(there))
        assert total.trials == in_sum
        noise = total.lanes.astype(float) - 2 * len(there)
        kept = sorted(agreed.noise.kept(len(there), rank) for rank in range(len(there)))
        assert sum(kept[: len(there) - t]) == trials  # whoever colludes, the others bring as many as are needed
        assert abs(noise.mean() - in_sum / 2) < 5 * np.sqrt(in_sum / 4 / 4000)
        assert abs(noise.var() / (in_sum / 4) - 1) < 5 * np.sqrt(2 / 4000)
        bins = np.clip(noise, *stats.binom.ppf([0.02, 0.98], in_sum, 0.5)).astype(int)
        values, seen = np.unique(bins, return_counts=True)
        cdf = stats.binom.cdf(values, in_sum, 0.5)
        cdf[-1] = 1.0
        assert stats.chisquare(seen, 4000 * np.diff(cdf, prepend=0.0)).pvalue > 1e-4


@pytest.mark.parametrize(("n", "f", "t", "trials"), [(4, 1, 0, 40), (6, 2, 1, 101)])
def test_the_noise_of_a_survivor_that_leaves_before_it_unmasks_stays_in_the_sum(n, f, t, trials):
    """More noise than is needed and never less; the mean is where it would be without it."""
    agreed = agreement(n, dropouts=f, colluders=t, dimension=4000, width=10, trials=trials)
    federation = Federation(agreed)
    federation.begin()
    zeros, base = np.zeros(4000, dtype=np.float32), agreed.noise.cuts[0]
    codes = {c: encode_base(zeros, 2, base, width=10, range=1.0, rng=seeded_rng(seed=c)) for c in range(n)}
    total = federation.sum(codes, unmasked=range(1, n))
    extra = agreed.noise.drawn - agreed.noise.kept(n, 0)
    assert extra > 1
    assert total.trials == agreed.noise.in_sum(n) + extra
    noise = total.lanes.astype(float) - 2 * n
    assert abs(noise.mean() - (total.trials / 2 - extra // 2)) < 5 * np.sqrt(total.trials / 4 / 4000)
    assert abs(noise.var() / (total.trials / 4) - 1) < 5 * np.sqrt(2 / 4000)
