"""The bytes of every message: as written down, and whatever a stranger makes of them."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from secure_sums import SMALL_SPARSE, Federation, agreement, some_codes

from bqsgd._src.errors import SecureSumError, WrongSession
from bqsgd._src.secure import messages
from bqsgd._src.secure.messages import Kind

GOLDEN = Path(__file__).with_name("golden_messages.json")
READERS = {
    "batch": messages.read_batch,
    "keys": messages.read_keys,
    "key_bundle": partial(messages.read_parts, kind=Kind.KEY_BUNDLE),
    "shares": partial(messages.read_parts, kind=Kind.SHARES),
    "share_bundle": partial(messages.read_parts, kind=Kind.SHARE_BUNDLE),
    "partners": partial(messages.read_parts, kind=Kind.PARTNERS),
    "partner_bundle": partial(messages.read_parts, kind=Kind.PARTNER_BUNDLE),
    "masked": messages.read_masked,
    "survivors": partial(messages.read_listed, kind=Kind.SURVIVORS),
    "signature": messages.read_signature,
    "certificate": messages.read_certificate,
    "unmasking": partial(messages.read_parts, kind=Kind.UNMASKING),
    "silent": partial(messages.read_listed, kind=Kind.SILENT),
    "recovery": partial(messages.read_parts, kind=Kind.RECOVERY),
}


GRAPHS = ("full", "sparse")
CASES = [(graph, kind) for graph in GRAPHS for kind in READERS if graph == "sparse" or "partner" not in kind]


def agreed(graph="full", trials=7):
    if graph == "full":
        return agreement(4, dropouts=1, dimension=5, width=9, trials=trials)
    return agreement(12, dropouts=2, dimension=5, width=9, trials=trials, sparse=SMALL_SPARSE)


def one_of_each(graph: str) -> dict[str, bytes]:
    """The messages of a client in a seeded sum of two rounds; client 3 misses the first, and a survivor leaves it."""
    federation = Federation(agreed(graph), seed=11)
    number = federation.agreement.graph.committee[1]
    server, client = federation.server, federation.clients[number]
    federation.begin(epoch=2, first_round=6, rounds=2)
    codes = some_codes(federation.agreement)
    there = [other for other in federation.clients if other != 3]
    federation.sum(codes, round=6, masked=there, unmasked=there[: -1 if graph == "sparse" else None])
    batch = client._state.batch
    silent = messages.write_listed(batch.header(Kind.SILENT, number, round=6), federation.agreement, there[-1:])
    said = {
        "batch": server.requests()[number],
        "keys": batch.keys,
        "key_bundle": server.key_bundles()[number],
        "shares": batch.shares,
        "share_bundle": server.share_bundles()[number],
        "partners": batch.statement,
        "partner_bundle": server.partner_bundles()[number] if graph == "sparse" else b"",
        "masked": federation.masked[6, number],
        "survivors": server.survivor_lists()[number],
        "signature": batch.rounds[6].signature,
        "certificate": server.certificates()[number],
        "unmasking": batch.rounds[6].unmasking,
        "silent": silent,
        "recovery": client.recover(silent),
    }
    return {kind: message for kind, message in said.items() if (graph, kind) in CASES}


@pytest.fixture(scope="module")
def written():
    return {graph: one_of_each(graph) for graph in GRAPHS}


def test_every_kind_has_a_reader_and_golden_bytes():
    golden = json.loads(GOLDEN.read_text())
    assert [kind.name.lower() for kind in Kind] == list(READERS)
    assert [(graph, kind) for graph in golden for kind in golden[graph]] == CASES


@pytest.mark.parametrize(("graph", "kind"), CASES)
def test_golden_bytes(written, graph, kind):
    assert written[graph][kind].hex() == json.loads(GOLDEN.read_text())[graph][kind]


@pytest.mark.parametrize(("graph", "kind"), CASES)
def test_readers_give_back_what_was_written(written, graph, kind):
    agreement_, message = agreed(graph), written[graph][kind]
    read = READERS[kind](message, agreement_)
    match kind:
        case "batch":
            again = messages.write_batch(read[0], read[1])
        case "keys":
            nonce = message[messages.HEADER_BYTES + len(read.cipher) :][:16]
            again = read.header.pack(agreement_) + read.cipher + nonce + read.signature
            assert read.message == message
        case "key_bundle" | "shares" | "share_bundle" | "partners" | "partner_bundle" | "unmasking" | "recovery":
            again = messages.write_parts(read.header, agreement_, read.parts, own=read.own)
        case "signature":
            again = read[0].pack(agreement_) + read[1]
        case "survivors" | "silent":
            again = messages.write_listed(read[0], agreement_, read[1])
        case _:
            again = getattr(messages, f"write_{kind}")(read[0], agreement_, read[1])
    assert again == message


@pytest.mark.parametrize(("graph", "kind"), CASES)
def test_another_session_is_refused(written, graph, kind):
    with pytest.raises(WrongSession):
        READERS[kind](written[graph][kind], agreed(graph, trials=8))


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


def fuzz(graph: str, kind: str, message: bytes, others: list[bytes], count: int) -> int:
    """Every mutation is read or refused with a SecureSumError; returns how many were refused."""
    rng, agreement_, refused = random.Random(graph + kind), agreed(graph), 0
    for _ in range(count):
        try:
            READERS[kind](mutated(message, rng, others), agreement_)
        except SecureSumError:
            refused += 1
    return refused


@pytest.mark.parametrize(("graph", "kind"), CASES)
def test_readers_refuse_or_read_whatever_comes(written, graph, kind):
    assert fuzz(graph, kind, written[graph][kind], list(written[graph].values()), 500) > 150


@pytest.mark.parametrize(("graph", "kind"), CASES)
def test_server_and_client_survive_mutations(written, graph, kind):
    """The state machines raise SecureSumError as well, and go on with the true message afterwards."""
    rng = random.Random(kind)
    federation = Federation(agreed(graph), seed=11)
    server = federation.server
    number = federation.agreement.graph.committee[1]
    client = federation.clients[number]
    federation.begin(epoch=2, first_round=6, rounds=2)
    server.open(7)
    zeros = np.zeros(5, dtype=np.uint8)
    for each in federation.clients.values():
        server.take_masked(each.mask(7, zeros))
    takers = {
        "batch": Federation(agreed(graph), seed=11).clients[number].answer,  # a later epoch would begin a batch anew
        "keys": server.take_keys,
        "key_bundle": client.shares,
        "shares": server.take_shares,
        "share_bundle": client.take_shares,
        "partners": server.take_partners,
        "partner_bundle": client.take_partners,
        "masked": server.take_masked,
        "survivors": client.sign,
        "signature": server.take_signature,
        "certificate": client.unmask,
        "unmasking": server.take_unmasking,
        "silent": client.recover,
        "recovery": server.take_recovery,
    }
    for _ in range(60):
        try:
            takers[kind](mutated(written[graph][kind], rng, list(written[graph].values())))
        except SecureSumError:
            continue
    for each, listed in server.survivor_lists().items():
        signature = federation.clients[each].sign(listed)
        if signature:
            server.take_signature(signature)
    for each, certificate in server.certificates().items():
        server.take_unmasking(federation.clients[each].unmask(certificate))
    assert server.total().survivors == federation.agreement.members.clients
