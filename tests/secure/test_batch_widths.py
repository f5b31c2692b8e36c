"""The server names the width of every key batch: any width opens the same sum, and different widths open nothing."""

from dataclasses import replace

import numpy as np
import pytest
from secure_sums import SMALL_SPARSE, Federation, agreement, identity, plain_sum, request_keys, some_codes

from bqsgd._src.errors import BadSecureMessage, InvalidParameter, ReplacedKeys, TooFewClients, WrongSession
from bqsgd._src.secure import masks, messages
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.messages import HEADER_BYTES, Kind, SumHeader
from bqsgd._src.secure.state import StateFile, read_state, write_state

N, WIDEST = 5, 12
NARROW = 7


def agreed(**changes):
    return agreement(N, dropouts=1, colluders=1, dimension=40, width=WIDEST, **changes)


@pytest.fixture
def federation():
    return Federation(agreed())


@pytest.mark.parametrize("sparse", [None, SMALL_SPARSE])
def test_every_width_opens_the_sum_modulo_its_power_of_two(sparse):
    made = agreement(12 if sparse else N, dropouts=1, dimension=40, width=WIDEST, sparse=sparse)
    federation = Federation(made)
    codes = some_codes(made, most=200)
    for epoch, width in enumerate((WIDEST, 2, NARROW, 9), start=1):
        federation.begin(epoch=epoch, first_round=epoch, width=width)
        total = federation.sum(codes, round=epoch)
        assert total.width == width
        np.testing.assert_array_equal(total.lanes, plain_sum(codes, total.survivors, width))
        message = federation.masked[epoch, 0]
        assert len(message) == HEADER_BYTES + -(-40 * width // 8)


@pytest.mark.parametrize("width", [0, 1, WIDEST + 1, 21, 255])
def test_a_client_refuses_a_width_that_was_not_agreed_on(federation, width):
    client = federation.clients[2]
    header = SumHeader(kind=Kind.BATCH, epoch=1, round=0, client=2)
    request = bytearray(messages.write_batch(header, federation.agreement))
    request[HEADER_BYTES] = width
    with pytest.raises(BadSecureMessage, match=f"from 2 to {WIDEST}"):
        client.keys(request)
    assert client._state.batch is None
    assert client._state.epoch == -1
    with pytest.raises(BadSecureMessage, match="got nothing"):
        client.keys(request[:HEADER_BYTES])
    with pytest.raises(InvalidParameter):
        federation.agreement.of(width=width)


def test_a_client_keeps_to_the_width_that_it_was_told_first(federation):
    client = federation.clients[2]
    keys = request_keys(client, width=NARROW)
    assert request_keys(client, width=NARROW) == keys
    with pytest.raises(ReplacedKeys, match="another cohort or width"):
        request_keys(client, width=NARROW + 1)
    assert client._state.batch.agreement.width == NARROW


def test_the_session_depends_on_the_width_and_the_run_on_the_widest():
    base = agreed()
    assert len({base.of(width=width).session for width in range(2, WIDEST + 1)}) == WIDEST - 1
    assert {base.of(width=width).run_digest for width in range(2, WIDEST + 1)} == {base.run_digest}
    assert replace(base, widest=WIDEST + 1).run_digest != base.run_digest
    assert base.of(width=WIDEST) is base
    assert base.of(width=3).before_batches == base


def test_clients_with_different_widths_find_no_partner(federation):
    """The server tells clients 0 and 1 another width, and then passes the keys on, as they are or rewritten."""
    wide, narrow = federation.agreement, federation.agreement.of(width=NARROW)
    told = {number: narrow if number < 2 else wide for number in range(N)}
    keys = {number: request_keys(client, width=told[number].width) for number, client in federation.clients.items()}

    def bundle(receiver, rewritten):
        session = told[receiver].session[:16]
        parts = {
            number: message[:8] + session + message[24:] if rewritten else message
            for number, message in keys.items()
            if number != receiver
        }
        header = SumHeader(kind=Kind.KEY_BUNDLE, epoch=1, round=0, client=receiver)
        return messages.write_parts(header, told[receiver], parts)

    # As they are, the keys belong to another session.
    with pytest.raises(WrongSession):
        federation.clients[2].shares(bundle(2, rewritten=False))
    # Rewritten, their signatures hold, because a client signs its key for the whole run. But nothing that is derived
    # from the keys agrees: the receiver derives from its own session and from the rewritten bytes.
    sealed = {
        number: messages.read_parts(client.shares(bundle(number, rewritten=True)), told[number], Kind.SHARES)
        for number, client in federation.clients.items()
    }
    for one in range(N):
        for other in range(one + 1, N):
            pairs = [federation.clients[end]._state.batch.pairs[far] for end, far in ((one, other), (other, one))]
            assert (pairs[0] == pairs[1]) == (told[one].width == told[other].width)
    for receiver in range(N):
        header = SumHeader(kind=Kind.SHARE_BUNDLE, epoch=1, round=0, client=receiver)
        parts = {number: said.parts[receiver] for number, said in sealed.items() if number != receiver}
        with pytest.raises(TooFewClients):
            federation.clients[receiver].take_shares(messages.write_parts(header, told[receiver], parts))
        assert not federation.clients[receiver].ready(0)


def test_masks_of_different_widths_are_independent_so_that_nothing_cancels():
    """If clients masked vectors under different widths all the same, what is left would be uniform in every bit.

    The keys of the masks under both widths, from the same secrets: no bit of one keystream follows from the other.
    """
    sessions = [agreed().of(width=width).session for width in (NARROW, NARROW + 1)]
    ones = []
    for attempt in range(40):
        seed = attempt.to_bytes(16, "little")
        lanes = []
        for session in sessions:
            lanes.append(np.zeros(500, masks.lane_type(NARROW)))
            key = masks.self_key(seed, session, client=0, round=0)
            masks.add_mask(lanes[-1], key, scratch=masks.scratch_for(lanes[-1]))
        left = (lanes[0] - lanes[1]) & np.uint8((1 << NARROW) - 1)
        ones += [np.bitwise_count(left)]
    bits = NARROW * 40 * 500
    # Of fair bits a share of one half is set; five standard errors, a false alarm in 2 million runs.
    assert abs(np.concatenate(ones).sum() - bits / 2) < 5 * np.sqrt(bits) / 2


def test_a_restarted_client_goes_on_with_the_width_of_its_batch(tmp_path):
    made = agreed()
    client = SumClient(made, identity=identity(1), number=1, keep=StateFile(tmp_path / "state"), seed=3)
    request_keys(client, width=NARROW)
    again = SumClient(made, identity=identity(1), number=1, keep=StateFile(tmp_path / "state"), seed=3)
    assert again._state.batch.agreement == made.of(width=NARROW)
    with pytest.raises(ReplacedKeys):
        request_keys(again, width=WIDEST)
    stored = write_state(client._state, made, 1)
    assert f",{NARROW}]".encode() in stored
    with pytest.raises(InvalidParameter, match="width"):
        read_state(stored.replace(f",{NARROW}]".encode(), b",13]"), made, 1)
