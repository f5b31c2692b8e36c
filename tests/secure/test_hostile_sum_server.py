"""A server that lies: each lie is refused by the client with its own error, and nothing was revealed."""

from dataclasses import replace

import numpy as np
import pytest
from secure_sums import Federation, agreement, identity, plain_sum, request_keys, request_shares, roster, some_codes

from bqsgd._src.errors import (
    BadSignature,
    ConflictingSurvivors,
    ForeignClient,
    InvalidParameter,
    ReplacedKeys,
    RoundUsed,
    TooFewClients,
    WrongRound,
    WrongSession,
)
from bqsgd._src.secure import messages
from bqsgd._src.secure.agreement import Agreement
from bqsgd._src.secure.client import SumClient
from bqsgd._src.secure.masks import NO_MODEL, model_digest
from bqsgd._src.secure.messages import Kind, SumHeader
from bqsgd._src.secure.noise_shares import NoiseParts
from bqsgd._src.secure.roster import Roster, public_key
from bqsgd._src.secure.sharing import check_of
from bqsgd._src.secure.state import EpochFile

N = 5
CLIENT = 2


@pytest.fixture
def federation():
    return Federation(agreement(N, dropouts=1, colluders=1, dimension=4))


def key_messages(federation, **batch):
    asked = {"epoch": 1, "first_round": 0, "rounds": 1} | batch
    return {number: request_keys(client, **asked) for number, client in federation.clients.items()}


def bundle(federation, keys, **changes):
    about = {"kind": Kind.KEY_BUNDLE, "epoch": 1, "round": 0, "client": CLIENT} | changes
    others = {number: message for number, message in keys.items() if number != CLIENT}
    return messages.write_parts(SumHeader(**about), federation.agreement, others)


def refused(federation, error, keys, **changes):
    with pytest.raises(error):
        federation.clients[CLIENT].shares(bundle(federation, keys, **changes))
    assert federation.clients[CLIENT]._state.batch.shares == b""


def test_keys_signed_by_another_identity(federation):
    """The server puts itself in the place of client 0."""
    keys = key_messages(federation)
    everybody = {number: public_key(identity(number)) for number in range(N)}
    own = Agreement(
        roster=Roster(everybody | {0: public_key(identity(0, generation=9))}),
        run=federation.agreement.run,
        rule=federation.agreement.rule,
        dimension=4,
        width=8,
        seeded=True,
    )
    impostor = SumClient(own, identity=identity(0, generation=9), number=0, seed=7)
    forged = bytearray(request_keys(impostor))
    refused(federation, WrongSession, keys | {0: bytes(forged)})
    forged[8:24] = federation.agreement.session[:16]
    refused(federation, BadSignature, keys | {0: bytes(forged)})


def test_keys_that_were_changed(federation):
    keys = key_messages(federation)
    for place in (50, 79, len(keys[0]) - 1):
        changed = bytearray(keys[0])
        changed[place] ^= 1
        refused(federation, BadSignature, keys | {0: bytes(changed)})


def test_a_nonce_that_was_changed_gives_another_channel(federation):
    """The nonce is not signed: the tag of its client is wrong, and nobody else can make one."""
    keys = key_messages(federation)
    changed = bytearray(keys[0])
    changed[85] ^= 1
    client, other = federation.clients[CLIENT], federation.clients[0]
    client.shares(bundle(federation, keys | {0: bytes(changed)}))
    for_other = messages.write_parts(
        SumHeader(kind=Kind.KEY_BUNDLE, epoch=1, round=0, client=0),
        federation.agreement,
        {number: message for number, message in keys.items() if number != 0},
    )
    tag = messages.read_parts(other.shares(for_other), federation.agreement, Kind.SHARES).parts[CLIENT]
    with pytest.raises(TooFewClients, match=r"^0 other clients sent shares with a good tag"):
        client.take_shares(share_bundle(federation, {0: tag, 1: tag, 3: tag}))
    assert not client._state.batch.share_bundle


def test_keys_of_another_client_in_its_place(federation):
    keys = key_messages(federation)
    refused(federation, ForeignClient, keys | {0: keys[1]})
    refused(federation, ForeignClient, keys | {0: keys[CLIENT]})


def test_keys_of_an_earlier_batch_played_again(federation):
    old = key_messages(federation)
    keys = key_messages(federation, epoch=2)
    refused(federation, WrongRound, keys | {0: old[0]}, epoch=2)
    other_rounds = key_messages(federation, epoch=3, first_round=7)
    keys = key_messages(federation, epoch=4)
    refused(federation, WrongRound, keys | {0: other_rounds[0]}, epoch=4)


def test_another_bundle_after_the_first(federation):
    keys = key_messages(federation)
    client = federation.clients[CLIENT]
    first = client.shares(bundle(federation, keys))
    assert client.shares(bundle(federation, keys)) == first
    with pytest.raises(ReplacedKeys):
        client.shares(bundle(federation, {number: keys[number] for number in (0, 1, 3)}))


def test_a_batch_whose_shares_would_fill_the_memory():
    agreed = agreement(200, dropouts=50, dimension=4, trials=200_000)
    client = SumClient(agreed, identity=identity(0), number=0, seed=1)
    most = messages.most_rounds(agreed)
    assert 1 < most < 2000
    with pytest.raises(messages.BadSecureMessage, match="rounds at once"):
        request_keys(client, rounds=messages.MAX_BATCH)
    assert client._state.batch is None
    assert messages.most_rounds(agreement(4)) == messages.MAX_BATCH


def test_too_few_keys(federation):
    keys = key_messages(federation)
    refused(federation, TooFewClients, {number: keys[number] for number in (0, 1)})


def test_bits_after_the_last_neighbour(federation):
    message = bytearray(bundle(federation, key_messages(federation)))
    message[48] |= 0x80  # a sixth client
    with pytest.raises(messages.BadSecureMessage):
        federation.clients[CLIENT].shares(message)


def test_a_message_for_another_client_or_run(federation):
    keys = key_messages(federation)
    refused(federation, ForeignClient, keys, client=3)
    other = agreement(N, dropouts=1, colluders=0, dimension=4)
    with pytest.raises(WrongSession):
        federation.clients[CLIENT].shares(
            messages.write_parts(SumHeader(kind=Kind.KEY_BUNDLE, epoch=1, round=0, client=CLIENT), other, keys)
        )


@pytest.mark.parametrize("change", ["dimension", "width", "trials", "run", "roster", "rule", "seeded"])
def test_the_session_depends_on_everything_agreed(change):
    base = {"roster": roster(5), "run": "a", "dimension": 4, "width": 8, "trials": 3}
    base["rule"] = agreement(5, dropouts=1).rule
    other = {
        "dimension": 5,
        "width": 9,
        "trials": 4,
        "run": "b",
        "seeded": True,
        "roster": Roster({number: public_key(identity(number, generation=1)) for number in range(5)}),
        "rule": agreement(5, dropouts=1, colluders=1).rule,
    }
    assert Agreement(**base).session != Agreement(**base | {change: other[change]}).session


def share_bundle(federation, sealed, client=CLIENT):
    header = SumHeader(kind=Kind.SHARE_BUNDLE, epoch=1, round=0, client=client)
    return messages.write_parts(header, federation.agreement, sealed)


def tags_for_client(federation):
    server = federation.server
    server.begin(epoch=1, first_round=0, rounds=1)
    for message in key_messages(federation).values():
        server.take_keys(message)
    for number, keys in server.key_bundles().items():
        server.take_shares(federation.clients[number].shares(keys))
    return {number: server._batch.shares[number].parts[CLIENT] for number in range(N) if number != CLIENT}


def test_tags_that_were_changed_exchanged_or_held_back(federation):
    tags, client = tags_for_client(federation), federation.clients[CLIENT]
    changed = bytes([tags[0][0] ^ 1]) + tags[0][1:]
    three = {number: tags[number] for number in (0, 1, 3)}  # as many as are needed
    for wrong in (
        three | {0: changed},
        three | {0: tags[1]},
        three | {0: federation.server._batch.shares[0].parts[1]},  # made for client 1
        {0: tags[0], 1: tags[1]},
    ):
        with pytest.raises(TooFewClients, match=r"^2 other clients sent shares with a good tag, 3 are needed"):
            client.take_shares(share_bundle(federation, wrong))
        assert not client._state.batch.share_bundle
        with pytest.raises(WrongRound):
            client.mask(0, np.zeros(4, dtype=np.uint8))
    client.take_shares(share_bundle(federation, tags))
    with pytest.raises(ReplacedKeys):
        client.take_shares(share_bundle(federation, {number: tags[number] for number in (0, 1, 3)}))


def test_a_client_with_a_wrong_tag_is_no_partner_and_no_list_with_it_is_signed(federation):
    """As if its tag had been held back: nothing is revealed of it, and no list on which it stands is signed."""
    tags, client = tags_for_client(federation), federation.clients[CLIENT]
    federation.server.share_bundles()
    said = client.take_shares(share_bundle(federation, tags | {0: bytes(16)}))
    stated = messages.read_parts(said, federation.agreement, Kind.PARTNERS)
    assert (stated.parts, messages.chosen_of(stated.own, [0, 1, 3, 4])) == ({}, (1, 3, 4))
    assert client._state.batch.partners == {1, 3, 4}
    federation.server.take_partners(said)
    assert federation.server.disputes == {0: {CLIENT}, CLIENT: {0}}
    assert federation.server.to_leave_out() == {0}
    client.mask(0, np.zeros(4, dtype=np.uint8))
    with pytest.raises(ForeignClient, match="client 0 is listed as a survivor and shares no mask"):
        client.sign(survivors(federation, tuple(range(N))))
    listed = (1, 2, 3, 4)
    client.sign(survivors(federation, listed))
    signatures = {number: signature_of(federation, number, listed) for number in listed}
    revealed = client.unmask(certificate(federation, signatures))
    assert not messages.read_parts(revealed, federation.agreement, Kind.UNMASKING).parts
    assert request_shares(client, listed) == {1, 3, 4}


def test_two_clients_with_many_disputes_and_what_a_false_statement_is(federation):
    tags_for_client(federation)
    server, clients = federation.server, federation.clients
    for number, sealed in server.share_bundles().items():
        if number != 1:
            parts = messages.read_parts(sealed, federation.agreement, Kind.SHARE_BUNDLE)
            lies = {other: bytes(16) for other in (1,) if other in parts.parts}
            said = clients[number].take_shares(
                messages.write_parts(parts.header, federation.agreement, {**parts.parts, **lies})
            )
            server.take_partners(said)
    # However many statements the accused makes, it has the most disputes.
    header = SumHeader(kind=Kind.PARTNERS, epoch=1, round=0, client=1)
    server.take_partners(
        messages.write_parts(header, federation.agreement, {}, own=messages.bits_of([0, 2, 3, 4], [0, 3, 4]))
    )
    assert server.to_leave_out() == {1}
    federation.begin(epoch=2, without=server.to_leave_out())
    assert not server.disputes
    codes = some_codes(federation.agreement)
    assert federation.sum(codes).survivors == (0, 2, 3, 4)


def test_a_check_of_one_secret_is_not_that_of_another(federation):
    """The same secret in another run, key batch, round, client or place has another check, and another chain."""
    federation.begin(rounds=2)
    batch = federation.server._batch
    here = {"client": 1, "round": 0}
    others = [
        batch.about("self-check", **here),
        batch.about("seed-check", client=2, round=0),
        batch.about("seed-check", client=1, round=1),
        replace(batch, epoch=2).about("seed-check", **here),
        replace(batch, agreement=replace(batch.agreement, run="another")).about("seed-check", **here),
        batch.about("seed-check", **here),
    ]
    assert len({check_of([bytes(16)], about=about) for about in others}) == len(others)
    noise, run = NoiseParts(total=9, rule=federation.agreement.rule), batch.agreement.run_digest
    ends = {
        noise.chain(0, bytes(16), r, client=c, round=n)[-1] for r in (run, bytes(32)) for c in (1, 2) for n in (0, 1)
    }
    assert len(ends) == 8


def masked(federation, rounds=1):
    federation.begin(rounds=rounds)
    codes = some_codes(federation.agreement)
    for number, client in federation.clients.items():
        client.mask(0, codes[number])
    return codes


def survivors(federation, listed, round=0, epoch=1):
    header = SumHeader(kind=Kind.SURVIVORS, epoch=epoch, round=round, client=CLIENT)
    return messages.write_listed(header, federation.agreement, listed)


def certificate(federation, signatures, round=0, epoch=1):
    header = SumHeader(kind=Kind.CERTIFICATE, epoch=epoch, round=round, client=CLIENT)
    return messages.write_certificate(header, federation.agreement, signatures)


def signature_of(federation, number, listed, round=0):
    statement = messages.survivors_statement(federation.agreement, epoch=1, round=round, survivors=listed)
    return identity(number).sign(statement)


def test_a_second_vector_under_the_same_masks(federation):
    codes = masked(federation)
    with pytest.raises(RoundUsed):
        federation.clients[CLIENT].mask(0, codes[CLIENT])
    with pytest.raises(RoundUsed):
        federation.clients[CLIENT].mask(0, codes[0])


def test_lists_of_survivors_that_are_too_short_foreign_or_not_the_first(federation):
    masked(federation)
    client = federation.clients[CLIENT]
    for listed, error in (((0, 1, 2), TooFewClients), ((0, 1, 3, 4), ForeignClient)):
        with pytest.raises(error):
            client.sign(survivors(federation, listed))
    first = client.sign(survivors(federation, (0, 1, 2, 3)))
    assert client.sign(survivors(federation, (0, 1, 2, 3))) == first
    with pytest.raises(ConflictingSurvivors):
        client.sign(survivors(federation, (0, 1, 2, 4)))
    with pytest.raises(WrongRound):
        client.sign(survivors(federation, (0, 1, 2, 3), round=1))
    with pytest.raises(WrongRound):
        client.sign(survivors(federation, (0, 1, 2, 3), epoch=2))


def test_survivors_that_were_cut_off_before(federation):
    """Clients whose keys the server held back, listed all the same: they are in no sum, and noise that is needed would
    be revealed."""
    there = [0, 1, 2, 3]
    federation.begin(keys=there)
    codes = some_codes(federation.agreement)
    for number in there:
        federation.clients[number].mask(0, codes[number])
    with pytest.raises(ForeignClient, match="shares no mask"):
        federation.clients[CLIENT].sign(survivors(federation, (0, 1, 2, 3, 4)))
    federation.clients[CLIENT].sign(survivors(federation, (0, 1, 2, 3)))


def test_certificates_that_are_too_short_or_on_another_list(federation):
    masked(federation)
    client, listed, other = federation.clients[CLIENT], (0, 1, 2, 3), (0, 1, 2, 4)
    good = {number: signature_of(federation, number, listed) for number in listed}
    with pytest.raises(WrongRound):
        client.unmask(certificate(federation, good))
    client.sign(survivors(federation, listed))
    with pytest.raises(TooFewClients):
        client.unmask(certificate(federation, {number: good[number] for number in (0, 1, 3)}))
    for wrong, error in (
        (good | {1: signature_of(federation, 1, other)}, BadSignature),
        (good | {1: good[0]}, BadSignature),
        ({number: signature_of(federation, number, listed) for number in (0, 1, 2, 4)}, ForeignClient),
        (good | {1: signature_of(federation, 1, listed, round=1)}, BadSignature),
    ):
        with pytest.raises(error):
            client.unmask(certificate(federation, wrong))
        assert client._state.batch.rounds[0].unmasking == b""
    revealed = client.unmask(certificate(federation, good))
    assert client.unmask(certificate(federation, good)) == revealed
    said = messages.read_parts(revealed, federation.agreement, Kind.UNMASKING)
    assert set(said.parts) == {4}
    for asked in ((4,), (0, 4), (0, 1, 2, 3, 4)):  # its mask seed was opened, so its self seed must stay closed
        with pytest.raises(ForeignClient):
            request_shares(client, asked)
    assert request_shares(client, (0, 2, 3)) == {0, 3}


def test_self_seeds_are_not_opened_before_a_certificate_or_in_another_round(federation):
    masked(federation, rounds=2)
    client, listed = federation.clients[CLIENT], (0, 1, 2, 3)
    with pytest.raises(WrongRound):
        request_shares(client, listed)
    client.sign(survivors(federation, listed))
    with pytest.raises(WrongRound):
        request_shares(client, listed)
    client.unmask(certificate(federation, {n: signature_of(federation, n, listed) for n in listed}))
    assert request_shares(client, listed) == {0, 1, 3}
    for other in ({"round": 1}, {"epoch": 2}):
        with pytest.raises(WrongRound):
            request_shares(client, listed, **other)


def test_an_unseeded_client_does_not_sum_with_seeded_ones(federation):
    """A server that starts the same run seeded towards nodes that allow it: their keys are of another session."""
    with pytest.raises(InvalidParameter, match="seed"):
        SumClient(federation.agreement, identity=identity(0), number=0)
    unseeded = replace(federation.agreement, seeded=False)
    with pytest.raises(InvalidParameter, match="seed"):
        SumClient(unseeded, identity=identity(0), number=0, seed=7)
    client = SumClient(unseeded, identity=identity(CLIENT), number=CLIENT)
    request_keys(client)
    others = {number: message for number, message in key_messages(federation).items() if number != CLIENT}
    header = SumHeader(kind=Kind.KEY_BUNDLE, epoch=1, round=0, client=CLIENT)
    with pytest.raises(WrongSession):
        client.shares(messages.write_parts(header, unseeded, others))
    renamed = {n: m[:8] + unseeded.session[:16] + m[24:] for n, m in others.items()}
    with pytest.raises(BadSignature):  # they signed their keys for the other run
        client.shares(messages.write_parts(header, unseeded, renamed))


def test_different_models_leave_noise_instead_of_a_sum(federation):
    """A server that sends one client a model of its own gets a vector in which that client's masks are left over."""
    federation.begin(rounds=3)
    codes = some_codes(federation.agreement)
    same, other = dict.fromkeys(range(N), NO_MODEL), model_digest(np.ones(3, np.float32), "")
    assert np.array_equal(federation.sum(codes, models=same).lanes, plain_sum(codes, range(N), 8))
    for round, apart in ((1, [CLIENT]), (2, [0, 1])):
        total = federation.sum(codes, round=round, models=same | dict.fromkeys(apart, other))
        assert (total.lanes != plain_sum(codes, range(N), 8)).sum() > 1


def test_signatures_of_an_earlier_epoch_played_again(federation):
    """The same list in the same round of a later batch: what was signed before certifies nothing now."""
    masked(federation)
    listed = (0, 1, 2, 3)
    old = {number: signature_of(federation, number, listed) for number in listed}
    federation.begin(epoch=2)
    client = federation.clients[CLIENT]
    client.mask(0, some_codes(federation.agreement)[CLIENT])
    client.sign(survivors(federation, listed, epoch=2))
    with pytest.raises(BadSignature):
        client.unmask(certificate(federation, old, epoch=2))
    with pytest.raises(WrongRound):
        client.unmask(certificate(federation, old, epoch=1))
    assert client._state.batch.rounds[0].unmasking == b""


def test_a_round_that_was_not_masked_is_not_unmasked(federation):
    masked(federation, rounds=2)
    with pytest.raises(WrongRound):
        federation.clients[CLIENT].sign(survivors(federation, (0, 1, 2, 3), round=1))


def test_two_lists_cannot_both_be_certified(federation):
    """Four honest clients of five, one colluder that signs anything: whatever the server shows to whom."""
    rule = federation.agreement.rule
    honest = rule.clients - rule.colluders
    for shown_first in range(honest + 1):
        first, second = shown_first + rule.colluders, honest - shown_first + rule.colluders
        assert min(first, second) < rule.quorum


def test_a_restarted_client_sits_out_the_epochs_it_has_seen(tmp_path, federation):
    remembered = EpochFile(tmp_path / "epoch")
    agreed = federation.agreement
    client = SumClient(agreed, identity=identity(0), number=0, last_epoch=remembered, seed=7)
    request_keys(client, epoch=5, rounds=2)
    again = SumClient(agreed, identity=identity(0), number=0, last_epoch=remembered, seed=7)
    for epoch in (5, 3):
        with pytest.raises(WrongRound):
            request_keys(again, epoch=epoch, rounds=2)
    request_keys(again, epoch=6, rounds=2)
    assert remembered() == 6
    (tmp_path / "epoch").write_text("what")
    with pytest.raises(InvalidParameter):
        SumClient(agreed, identity=identity(0), number=0, last_epoch=remembered, seed=7)


@pytest.mark.parametrize("lost", range(1, 6))
def test_clients_that_lost_their_epoch_files_in_mid_batch(lost):
    """They can be asked for keys of the same epoch again, and find partners for it only among those like them."""
    federation = Federation(agreement(5, dropouts=2, dimension=4))
    masked(federation)
    anew = range(lost)
    rule, clients = federation.agreement.rule, federation.clients
    again = {n: SumClient(federation.agreement, identity=identity(n), number=n, seed=8) for n in anew}
    old = {number: client._state.batch.keys for number, client in clients.items()}
    keys = old | {number: request_keys(client) for number, client in again.items()}

    def bundle_for(number, kind, parts):
        header = SumHeader(kind=kind, epoch=1, round=0, client=number)
        return messages.write_parts(header, federation.agreement, parts)

    def others(number, parts):
        return {other: part for other, part in parts.items() if other != number}

    for number in range(lost, 5):  # who lost nothing keeps to the keys that it has seen
        with pytest.raises(ReplacedKeys):
            clients[number].shares(bundle_for(number, Kind.KEY_BUNDLE, others(number, keys)))
    sealed = {}
    for number, client in again.items():
        message = client.shares(bundle_for(number, Kind.KEY_BUNDLE, others(number, keys)))
        sealed[number] = messages.read_parts(message, federation.agreement, Kind.SHARES).parts
    for number, client in again.items():
        stale = messages.read_parts(clients[4]._state.batch.shares, federation.agreement, Kind.SHARES).parts.get(number)
        if lost < 5:
            with pytest.raises(TooFewClients, match=r"^0 other"):
                client.take_shares(bundle_for(number, Kind.SHARE_BUNDLE, {4: stale}))
        mine = {other: sealed[other][number] for other in anew if other != number}
        fresh = bundle_for(number, Kind.SHARE_BUNDLE, mine)
        if lost < rule.quorum - rule.colluders:
            with pytest.raises(TooFewClients):
                client.take_shares(fresh)
            assert not client.ready(0)
        else:  # what docs/secure.md warns of: there are enough for a second list
            client.take_shares(fresh)
            assert client.ready(0)


def test_an_identity_that_is_not_in_the_roster(federation):
    with pytest.raises(InvalidParameter):
        SumClient(federation.agreement, identity=identity(1), number=0)
    with pytest.raises(ForeignClient):
        SumClient(federation.agreement, identity=identity(9), number=9)


def test_public_keys_of_low_order_are_no_partners(federation):
    """A colluder's cipher key that gives everybody the same secret: it gets no shares, and takes no part."""
    keys = key_messages(federation)
    forged = bytearray(keys[0])
    forged[48:80] = bytes(32)
    forged[-64:] = identity(0).sign(messages.keys_statement(federation.agreement, 0, bytes(32)))
    message = federation.clients[CLIENT].shares(bundle(federation, keys | {0: bytes(forged)}))
    assert set(messages.read_parts(message, federation.agreement, Kind.SHARES).parts) == {1, 3, 4}
