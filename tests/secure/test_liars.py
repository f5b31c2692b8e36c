"""Clients that lie about secrets: they are named, nobody else is, and the sum is right or the round is lost."""

import numpy as np
import pytest
from secure_sums import SMALL_SPARSE, Federation, agreement, plain_sum, some_codes

from bqsgd._src.errors import BadShares, TooFewClients
from bqsgd._src.secure import blame, messages
from bqsgd._src.secure.messages import Kind


def test_uniform_numbers_are_not_gathered_and_sums_are():
    """d |mean point|^2 of d uniform numbers is about exponential with mean 1, whatever the width."""
    rng = np.random.default_rng(1)
    for width in (2, 8, 11, 21):
        scores = [blame.gathered(rng.integers(0, 1 << width, 300, dtype=np.uint32), width) for _ in range(500)]
        assert 0.8 < np.mean(scores) < 1.25  # 5 standard errors
        assert max(scores) < 30
        # Noise of a thirteenth of the modulus is the widest that a run has (server.widths); 300 (e^-0.117)^2 = 237.
        noise = rng.normal(0, (1 << width) / 13, 300).round().astype(np.int64).astype(np.uint32)
        assert blame.gathered(noise, width) > 150


@pytest.mark.parametrize("framed", [1, 2, 3])
@pytest.mark.parametrize("dimension", [4, 300])
def test_a_client_that_gives_false_corrections_and_leaves_frames_nobody(framed, dimension):
    """Client 0 says that the shares of others differ. The sum shows that it lied: their masks were not of what it says.

    With four coordinates there is too little to see, so it can frame one other client, once; of two it is the liar.
    """
    federation = Federation(agreement(8, dropouts=2, dimension=dimension))
    real = federation.clients[0].shares

    def shares(bundle):
        said = bytearray(real(bundle))
        for index in range(framed):  # the last corrections are those of the mask seed
            said[-1 - 16 * index] ^= 1
        return bytes(said)

    federation.clients[0].shares = shares
    federation.begin()
    codes, there = some_codes(federation.agreement), range(1, 8)
    total = federation.sum(codes, masked=there)
    if (framed, dimension) == (1, 4):
        assert federation.server.blamed == {7: {0}}
    else:
        assert federation.server.blamed == {0: set(range(8 - framed, 8))}
        assert np.array_equal(total.lanes, plain_sum(codes, there, 8))


def lying_about(federation, lies):
    """Clients that tell random shares of the mask seeds of others: client -> those that it lies about."""
    rng = np.random.default_rng(1)
    for number, about in lies.items():
        client = federation.clients[number]

        def unmask(message, real=client.unmask, about=about):
            said = messages.read_parts(real(message), federation.agreement, Kind.UNMASKING)
            parts = {n: rng.bytes(16) if n in about else part for n, part in said.parts.items()}
            return messages.write_parts(said.header, federation.agreement, parts, own=said.own)

        client.unmask = unmask


@pytest.mark.parametrize(
    ("lies", "false", "blamed"),
    [
        ({3: (5,), 7: (5,)}, (), {3: {5}, 7: {5}}),
        ({3: (5, 6), 7: (5, 6)}, (), {3: {5, 6}, 7: {5, 6}}),  # two liars, each about two others
        ({1: (6,), 3: (6,), 7: (6,)}, (), {1: {6}, 3: {6}, 7: {6}}),
        ({3: (5,)}, (6,), {3: {5}, 6: {9}}),  # one that lies when it reveals, one in its corrections
        ({}, (5, 6), {5: {9}, 6: {9}}),
    ],
)
def test_more_liars_than_colluders_are_named_and_nobody_else(lies, false, blamed):
    """Nobody is expected to lie (t = 0). Before, the client whose secret two others lied about was blamed for good, and
    the sum was noise."""
    federation = Federation(agreement(10, dropouts=2, dimension=300))
    for number in false:

        def shares(bundle, real=federation.clients[number].shares):
            said = bytearray(real(bundle))
            said[-1] ^= 1  # the correction of the share of client 9
            return bytes(said)

        federation.clients[number].shares = shares
    federation.begin()
    lying_about(federation, lies)
    codes, there = some_codes(federation.agreement), [c for c in range(10) if c not in (5, 6)]
    total = federation.sum(codes, masked=there)
    assert np.array_equal(total.lanes, plain_sum(codes, there, 8))
    assert federation.server.blamed == blamed


def test_a_lie_about_a_liar_loses_the_round_and_no_noise_passes_for_a_sum():
    """Client 5 gave a false correction of client 9's share, and client 9 lies about it: the mask is lost."""
    federation = Federation(agreement(10, dropouts=2, dimension=300))
    real = federation.clients[5].shares
    federation.clients[5].shares = lambda bundle: bytes([*real(bundle)[:-1], real(bundle)[-1] ^ 1])
    federation.begin()
    lying_about(federation, {9: (5,)})
    with pytest.raises(BadShares, match="what is left is no sum"):
        federation.sum(some_codes(federation.agreement), masked=[c for c in range(10) if c != 5])
    assert federation.server.blamed == {9: {5}}


def test_two_liars_as_many_as_colluders_are_named_in_a_sum_of_few_coordinates():
    federation = Federation(agreement(10, dropouts=1, colluders=2, dimension=4))
    federation.begin()
    lying_about(federation, {3: (5,), 7: (5,)})
    codes, there = some_codes(federation.agreement), [c for c in range(10) if c != 5]
    total = federation.sum(codes, masked=there)
    assert np.array_equal(total.lanes, plain_sum(codes, there, 8))
    assert federation.server.blamed == {3: {5}, 7: {5}}


def test_wrong_shares_of_a_survivor_that_fell_silent_are_blamed_on_their_holders():
    federation = Federation(agreement(10, dropouts=2, dimension=4))
    federation.begin()
    for number in (3, 7):

        def recover(message, real=federation.clients[number].recover):
            return bytes([*(said := real(message))[:-1], said[-1] ^ 1])

        federation.clients[number].recover = recover
    codes = some_codes(federation.agreement)
    total = federation.sum(codes, unmasked=[c for c in range(10) if c != 5])
    assert np.array_equal(total.lanes, plain_sum(codes, range(10), 8))
    assert federation.server.blamed == {3: {5}, 7: {5}}


def all_false(client, agreed, *, masks):
    """The client's corrections of the shares of its mask seeds, or of its self seeds, are random."""
    real, rng = client.shares, np.random.default_rng(3)

    def shares(bundle):
        said, count = real(bundle), len(agreed.roster.clients) - 1
        beyond = count - agreed.rule.share_threshold  # of masks; one more of self seeds
        end = len(said) if masks else len(said) - 16 * beyond
        start = end - 16 * (beyond if masks else beyond + 1)
        return said[:start] + rng.bytes(end - start) + said[end:]

    client.shares = shares


@pytest.mark.parametrize("other", [None, 0, 8])
def test_a_client_all_of_whose_corrections_are_false_loses_no_round_when_it_leaves(other):
    """With client 0 a share without a correction is missing too, so the secret does not open. Before, such rounds were
    lost after they were counted, and nobody was named."""
    federation = Federation(agreement(10, dropouts=2, dimension=300))
    all_false(federation.clients[5], federation.agreement, masks=True)
    federation.begin()
    codes, there = some_codes(federation.agreement), [c for c in range(10) if c not in (5, other)]
    total = federation.sum(codes, masked=there)
    assert np.array_equal(total.lanes, plain_sum(codes, there, 8))
    assert federation.server.blamed == {5: set(there) | {5} if other == 0 else {6, 7, 8, 9} - {other}}


def test_a_client_all_of_whose_corrections_are_false_is_named_when_it_falls_silent():
    """Its own mask stays closed, so the round is lost; it has no part in the next."""
    federation = Federation(agreement(10, dropouts=2, dimension=300))
    all_false(federation.clients[5], federation.agreement, masks=False)
    federation.begin()
    with pytest.raises(BadShares):
        federation.sum(some_codes(federation.agreement), unmasked=[c for c in range(10) if c != 5])
    assert federation.server.blamed == {5: {5}}


def test_a_secret_that_does_not_open_because_too_few_came_is_nobodys_lie():
    """With four dropouts six shares are left where five are enough: one liar among them may be any of them."""
    federation = Federation(agreement(10, dropouts=4, dimension=300))
    federation.begin()
    lying_about(federation, {3: (5,), 7: (5,)})
    with pytest.raises(BadShares):
        federation.sum(some_codes(federation.agreement), masked=[c for c in range(10) if c not in (5, 6, 8, 9)])
    assert 5 not in federation.server.blamed


def test_two_holders_that_lie_are_named_on_a_sparse_graph_too():
    """A share says nothing about a mask there, so the sum is right whoever lied."""
    federation = Federation(agreement(14, dropouts=2, dimension=4, sparse=SMALL_SPARSE))
    federation.begin()
    liars = federation.agreement.graph.holders(5)[:2]
    lying_about(federation, dict.fromkeys(liars, (5,)))
    codes, there = some_codes(federation.agreement), [c for c in range(14) if c != 5]
    total = federation.sum(codes, masked=there)
    assert np.array_equal(total.lanes, plain_sum(codes, total.survivors, 8))
    assert federation.server.blamed == {liar: {5} for liar in liars}


def test_a_false_correction_for_a_survivor_that_falls_silent_is_no_sum():
    """Only clients 5 and 9 know their mask: 5 lied about it and left, and 9 says nothing. Before, the sum was noise."""
    federation = Federation(agreement(10, dropouts=2, dimension=300))
    federation.clients[5].shares = lambda bundle, real=federation.clients[5].shares: bytes(
        [*(said := real(bundle))[:-1], said[-1] ^ 1]
    )
    federation.begin()
    there = [c for c in range(10) if c != 5]
    with pytest.raises(BadShares, match="what client 5 said about its masks is false, or so is a vector"):
        federation.sum(some_codes(federation.agreement), masked=there, unmasked=there[:-1])


def test_a_client_that_wraps_false_secrets_on_a_sparse_graph_leaves_no_noise_in_the_place_of_a_sum():
    federation = Federation(agreement(14, dropouts=2, dimension=300, sparse=SMALL_SPARSE))
    federation.clients[5].shares = lambda bundle, real=federation.clients[5].shares: bytes(
        [*(said := real(bundle))[:-1], said[-1] ^ 1]
    )
    federation.begin()
    with pytest.raises(BadShares, match="what client 5 said about its masks is false"):
        federation.sum(some_codes(federation.agreement), masked=[c for c in range(14) if c != 5])


def lie_at_random(federation, number, rng):
    """One client lies about some of what it says: corrections, tells of mask seeds and self seeds, its own seed."""
    client, agreed = federation.clients[number], federation.agreement
    beyond = len(agreed.roster.clients) - 1 - agreed.rule.share_threshold

    def shares(bundle, real=client.shares):
        said = bytearray(real(bundle))
        for piece in rng.choice(2 * beyond + 1, rng.integers(2 * beyond + 2), replace=False):
            said[-1 - 16 * int(piece)] ^= 1
        return bytes(said)

    def told(message, real, kind, own):
        said = messages.read_parts(real(message), agreed, kind)
        parts = {n: rng.bytes(16) if rng.random() < 0.5 else part for n, part in said.parts.items()}
        return messages.write_parts(said.header, agreed, parts, own=rng.bytes(16) if own else said.own)

    if rng.random() < 0.5:
        client.shares = shares
    if rng.random() < 0.7:
        own = rng.random() < 0.3
        client.unmask = lambda message, real=client.unmask: told(message, real, Kind.UNMASKING, own)
    if rng.random() < 0.5:
        client.recover = lambda message, real=client.recover: told(message, real, Kind.RECOVERY, False)


def lies_at_random(seed):
    """Whether the sum opened. Whatever is opened is right, and no honest client is left out while no more clients lie
    than are expected."""
    rng = np.random.default_rng(seed)
    clients = int(rng.integers(8, 16))
    colluders = int(rng.integers(0, 3))
    dropouts = int(rng.integers(1, (clients - colluders) // 2 - 1))
    federation = Federation(agreement(clients, dropouts=dropouts, colluders=colluders, dimension=300))
    rule = federation.agreement.rule
    liars = set(rng.choice(clients, int(rng.integers(1, rule.liars + 1)), replace=False).tolist())
    for number in liars:
        lie_at_random(federation, number, rng)
    federation.begin()
    gone = set(rng.choice(clients, int(rng.integers(0, dropouts + 1)), replace=False).tolist())
    there = [c for c in range(clients) if c not in gone]
    silent = set(rng.choice(clients, int(rng.integers(0, 2)), replace=False).tolist())
    codes, total = some_codes(federation.agreement, seed=seed), None
    try:
        total = federation.sum(codes, masked=there, unmasked=[c for c in there if c not in silent])
    except (BadShares, TooFewClients):
        pass
    else:
        assert np.array_equal(total.lanes, plain_sum(codes, there, 8)), seed
    blamed = federation.server.blamed
    left_out = {client for client, about in blamed.items() if client in about or len(about) > rule.liars}
    assert left_out <= liars, (seed, blamed, liars)
    return total is not None


def test_lies_at_random():
    assert sum(map(lies_at_random, range(20))) > 10


@pytest.mark.slow
def test_many_lies_at_random():
    assert sum(map(lies_at_random, range(20, 1500))) > 750
