"""The bytes of every message: as written down, and whatever a stranger makes of them."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from secure_sums import Federation, agreement, some_codes

from bqsgd.errors import SecureSumError, WrongSession
from bqsgd.secure import messages
from bqsgd.secure.messages import Kind

GOLDEN = Path(__file__).with_name("golden_messages.json")
READERS = {
    "batch": messages.read_batch,
    "keys": messages.read_keys,
    "key_bundle": messages.read_key_bundle,
    "shares": lambda m, a: messages.read_shares(m, a, Kind.SHARES),
    "share_bundle": lambda m, a: messages.read_shares(m, a, Kind.SHARE_BUNDLE),
    "masked": messages.read_masked,
    "survivors": messages.read_survivors,
    "signature": messages.read_signature,
    "certificate": messages.read_certificate,
    "unmasking": messages.read_unmasking,
}


def agreed():
    return agreement(4, dropouts=1, dimension=5, width=9, trials=7)


def one_of_each() -> dict[str, bytes]:
    """The messages of client 1 in a seeded sum of two rounds, of which client 3 misses the first."""
    federation = Federation(agreed(), seed=11)
    server, client = federation.server, federation.clients[1]
    federation.begin(epoch=2, first_round=6, rounds=2)
    codes = some_codes(federation.agreement)
    federation.sum(codes, round=6, masked=[0, 1, 2])
    state = client._batch.rounds[6]
    return {
        "batch": server.request(1),
        "keys": client._batch.message,
        "key_bundle": server.key_bundle(1),
        "shares": client._batch.shares_message,
        "share_bundle": server.share_bundle(1),
        "masked": bytes(state.masked),
        "survivors": server.survivors(1),
        "signature": state.signature,
        "certificate": server.certificate(1),
        "unmasking": state.unmasking,
    }


@pytest.fixture(scope="module")
def written():
    return one_of_each()


def test_every_kind_has_a_reader_and_golden_bytes():
    assert [kind.name.lower() for kind in Kind] == list(READERS) == list(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("kind", READERS)
def test_golden_bytes(written, kind):
    assert written[kind].hex() == json.loads(GOLDEN.read_text())[kind]


@pytest.mark.parametrize("kind", READERS)
def test_readers_give_back_what_was_written(written, kind):
    agreement_, message = agreed(), written[kind]
    read = READERS[kind](message, agreement_)
    if kind == "masked":
        assert messages.write_masked(read[0], agreement_, read[1]) == message
    elif kind == "survivors":
        assert messages.write_survivors(*read[:1], agreement_, read[1]) == message
    elif kind == "unmasking":
        assert messages.write_unmasking(read, agreement_) == message
    elif kind == "batch":
        assert messages.write_batch(read, agreement_) == message
    elif kind == "signature":
        assert messages.write_signature(read[0], agreement_, read[1]) == message
    elif kind == "keys":
        unsigned = messages.write_keys(read.header, agreement_, cipher=read.cipher, masks=list(read.masks))
        assert unsigned + message[-64:] == message
    else:
        assert messages._write_parts(read[0], agreement_, read[1]) == message


@pytest.mark.parametrize("kind", READERS)
def test_another_session_is_refused(written, kind):
    with pytest.raises(WrongSession):
        READERS[kind](written[kind], agreement(4, dropouts=1, dimension=5, width=9, trials=8))


def mutated(message: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    changed = bytearray(message)
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        case 1:
            del changed[rng.randrange(len(changed)) :]
        case 2:
            changed += rng.randbytes(rng.randint(1, 40))
        case 3:
            at = rng.randrange(len(changed))
            changed[at : at + 4] = rng.choice([b"\xff\xff\xff\xff", b"\x00\x00\x00\x00", b"\xff\xff\xff\x7f"])
        case 4:
            other, at = rng.choice(others), rng.randrange(len(changed))
            changed[at:] = other[at:]
        case _:
            at = rng.randrange(min(48, len(changed)), len(changed) + 1)
            changed[at : at + rng.randint(0, 8)] = rng.randbytes(rng.randint(0, 8))
    return bytes(changed)


def fuzz(kind: str, message: bytes, others: list[bytes], count: int) -> int:
    """Every mutation is read or refused with a SecureSumError; returns how many were refused."""
    rng, agreement_, refused = random.Random(kind), agreed(), 0
    for _ in range(count):
        try:
            READERS[kind](mutated(message, rng, others), agreement_)
        except SecureSumError:
            refused += 1
    return refused


@pytest.mark.parametrize("kind", READERS)
def test_readers_refuse_or_read_whatever_comes(written, kind):
    assert fuzz(kind, written[kind], list(written.values()), 500) > 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", READERS)
def test_readers_refuse_or_read_a_hundred_thousand_mutations(written, kind):
    assert fuzz(kind, written[kind], list(written.values()), 100_000) > 50_000


@pytest.mark.parametrize("kind", READERS)
def test_server_and_client_survive_mutations(written, kind):
    """The state machines raise SecureSumError as well, and go on with the true message afterwards."""
    rng = random.Random(kind)
    federation = Federation(agreed(), seed=11)
    server, client = federation.server, federation.clients[1]
    federation.begin(epoch=2, first_round=6, rounds=2)
    server.open(7)
    zeros = np.zeros(5, dtype=np.uint8)
    for number, other in federation.clients.items():
        server.take_masked(other.mask(7, zeros))
        assert number in server._round.masked
    takers = {
        "batch": Federation(agreed(), seed=11).clients[1].answer,  # a later epoch begins a batch anew: not on this one
        "keys": server.take_keys,
        "key_bundle": client.shares,
        "shares": server.take_shares,
        "share_bundle": client.take_shares,
        "masked": server.take_masked,
        "survivors": client.sign,
        "signature": server.take_signature,
        "certificate": client.unmask,
        "unmasking": server.take_unmasking,
    }
    for _ in range(60):
        try:
            takers[kind](mutated(written[kind], rng, list(written.values())))
        except SecureSumError:
            continue
    for number in server.close():
        server.take_signature(federation.clients[number].sign(server.survivors(number)))
    for number in server.signed:
        server.take_unmasking(federation.clients[number].unmask(server.certificate(number)))
    assert server.total().survivors == (0, 1, 2, 3)
