"""Sums of our clients and one that was written from docs/wire.md alone."""

from dataclasses import replace

import numpy as np
import pytest
from page_client import PageClient, Refused
from secure_sums import SMALL_SPARSE, Federation, agreement, identity, plain_sum, some_codes

from bqsgd._src.secure import messages
from bqsgd._src.secure.masks import MAX_WIDTH

SPARSE = SMALL_SPARSE
NUMBERS = SPARSE.masks, SPARSE.away, SPARSE.holders, SPARSE.threshold, SPARSE.committee, SPARSE.quorum


def with_page_clients(agreed, numbers):
    """A federation whose clients of these numbers are from the page."""
    federation = Federation(agreed, seed=None)
    agreed = federation.agreement
    for number in numbers:
        client = PageClient(
            {
                "run": agreed.run,
                "clients": agreed.rule.clients,
                "dropouts": agreed.rule.dropouts,
                "colluders": agreed.rule.colluders,
                "dimension": agreed.dimension,
                "widest": agreed.widest,
                "trials": agreed.trials,
                "seeded": 0,
                "roster": {
                    "keys": [[n, key.hex()] for n, key in agreed.roster.keys.items()],
                    "seed": agreed.roster.seed.hex(),
                },
                "number": number,
                "identity": identity(number).private_bytes_raw().hex(),
            },
            None if agreed.rule.sparse is None else NUMBERS,
        )
        for name in ("shares", "take_shares", "take_partners", "sign", "unmask", "recover"):
            setattr(client, name, client.answer)
        federation.clients[number] = client
    return federation


GRAPHS = {
    "full": (agreement(6, dropouts=2, colluders=1, dimension=9, width=11), (0, 3)),
    "sparse": (agreement(14, dropouts=2, dimension=9, width=11, sparse=SPARSE), (1, 6, 11)),
}


@pytest.fixture(params=sorted(GRAPHS))
def graph(request):
    return GRAPHS[request.param]


def test_sums_with_clients_that_leave_at_every_step(graph):
    agreed, page = graph
    federation = with_page_clients(agreed, page)
    everybody = agreed.roster.clients
    for batch, width in enumerate((None, 7, 3)):
        first = 4 * batch
        federation.begin(epoch=batch + 1, first_round=first, rounds=4, width=width)
        for round, leaves in enumerate(({}, {"masked": {2, page[-1]}}, {"unmasked": {page[0]}}, {"unmasked": {4}})):
            there = {step: [c for c in everybody if c not in gone] for step, gone in leaves.items()}
            codes = some_codes(agreed, seed=first + round)
            total = federation.sum(codes, round=first + round, **there)
            survivors = there.get("masked", list(everybody))
            assert np.array_equal(total.lanes, plain_sum(codes, survivors, width or agreed.width))
            assert not federation.server.blamed


@pytest.mark.parametrize("trials", [1, 100])
def test_noise_that_is_not_needed_is_taken_out_of_a_page_clients_vector(trials):
    """All clients but one are from the page: with a wrong noise stream the sum would be off by whole trials."""
    agreed = agreement(6, dropouts=2, colluders=1, dimension=400, width=11, trials=trials)
    federation = with_page_clients(agreed, (0, 1, 2, 4, 5))
    federation.begin(rounds=2)
    zeros = {c: np.zeros(400, np.uint16) for c in range(6)}
    for round, there in enumerate((range(6), range(5))):
        total = federation.sum(zeros, round=round, masked=there)
        noise = total.lanes.astype(int)
        # Base noise is drawn by the caller and is left out here, so what is in the sum is that of the parts.
        parts = total.trials - len(there) * agreed.noise.cuts[0]
        assert 0 <= noise.min() <= noise.max() <= parts
        assert abs(noise.mean() - parts / 2) < 5 * np.sqrt(max(parts, 1) / 4 / 400)


def test_a_second_message_or_one_too_early_is_refused(graph):
    agreed, page = graph
    federation = with_page_clients(agreed, page)
    client, kept = federation.clients[page[0]], []
    real = client.answer

    def answer(message):
        kept.append(bytes(message))
        said = real(message)
        assert real(message) == said  # asked again it says the same
        return said

    for name in ("answer", "shares", "take_shares", "take_partners", "sign", "unmask", "recover"):
        setattr(client, name, answer)
    federation.begin(rounds=2)
    federation.sum(some_codes(agreed), masked=[c for c in agreed.roster.clients if c != 2])
    for message in kept[1:]:  # a changed first message may begin another key batch
        kind = messages.message_kind(message)
        for position in range(len(message)):
            changed = bytearray(message)
            changed[position] ^= 1
            try:
                said = real(bytes(changed))
            except Refused:
                continue
            # Asked again, it says the same again whatever certificate comes with the question, or a repeated list.
            assert kind in (messages.Kind.CERTIFICATE, messages.Kind.SILENT), (kind, position)
            assert kind is messages.Kind.SILENT or said == real(message)


def test_a_cohort_of_the_roster():
    agreed = replace(agreement(5, dropouts=1, dimension=7), roster=agreement(8).roster)
    federation = with_page_clients(agreed, (3, 6))
    codes = some_codes(agreed)
    for epoch, cohort in enumerate(((1, 3, 4, 6, 7), (0, 2, 3, 5, 6))):
        federation.begin(epoch=epoch, first_round=epoch, cohort=cohort)
        there = [c for c in cohort if c != cohort[0]]
        total = federation.sum(codes, round=epoch, masked=there)
        assert np.array_equal(total.lanes, plain_sum(codes, there, 8))


def test_the_widest_modulus():
    agreed = agreement(4, dropouts=1, dimension=5, width=MAX_WIDTH)
    federation = with_page_clients(agreed, (2,))
    federation.begin()
    codes = {c: np.full(5, 500_000 + c, np.uint32) for c in range(4)}
    total = federation.sum(codes, masked=[0, 1, 2])
    assert np.array_equal(total.lanes, plain_sum(codes, range(3), MAX_WIDTH))
