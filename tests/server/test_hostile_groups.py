"""A server of groups that resends, drops and revives as it likes, all at once, against clients of a whole run."""

import random
from collections import defaultdict

import pytest
from test_secure_runs import settings, small_task

from bqsgd._src.errors import BqsgdError
from bqsgd._src.ledger import Ledger
from bqsgd._src.run import Run
from bqsgd._src.secure.messages import Kind, message_kind, read_parts

CLIENTS = 9
GROUPS = 3


class Server:
    """In the place of an engine's exchange: it drops answers, and asks clients again, with messages of this round or
    earlier ones, their own or another client's, of any group."""

    def __init__(self, run, seed):
        self.run, self.rng, self.real = run, random.Random(seed), run.engine.exchange
        self.messages, self.said = [], defaultdict(list)
        run.engine.exchange = self

    def __call__(self, messages, *, round):
        self._old()
        self.messages += messages.items()
        for reply in self.real(messages, round=round):
            if reply.frame is not None:
                self.said[reply.client].append(bytes(reply.frame))
            if self.rng.random() < 0.04:  # dropped, in this step only
                reply = type(reply)(client=reply.client, reason="nothing came")
            yield reply
            self._old()

    def _old(self):
        """Some message that was sent before, to the client that it was for or to any other."""
        for client, message in self.rng.sample(self.messages, min(1, len(self.messages))):
            receiver = client if self.rng.random() < 0.7 else self.rng.randrange(CLIENTS)
            try:
                reply = self.run.engine.clients[receiver].answer(message)
            except BqsgdError:
                continue
            if reply.frame is not None:
                self.said[receiver].append(bytes(reply.frame))


@pytest.mark.parametrize("seed", [1, 2, pytest.param(range(3, 40), marks=pytest.mark.slow)])
def test_whatever_a_server_resends_or_drops_a_round_has_one_vector_one_list_and_one_kind_of_share(tmp_path, seed):
    for number in seed if isinstance(seed, range) else [seed]:
        attack(tmp_path / str(number), number)


def attack(folder, seed):
    config = settings(
        clients=CLIENTS, groups=GROUPS, aggregation="median", rounds=6, seed=None, dropouts=1, key_rounds=3
    )
    with Run.start(small_task(CLIENTS), config, folder=folder, force=True) as run:
        server = Server(run, seed)
        list(run.rounds())
        agreed = {client: run.engine.clients[client].sums.agreement for client in range(CLIENTS)}
        spent = {}
        for client in range(CLIENTS):
            with Ledger(folder / f"ledgers/client-{client:04}.ledger") as ledger:
                spent[client] = ledger.spent_rounds
    vectors, answers, shares = defaultdict(set), defaultdict(set), defaultdict(set)
    for client, frames in server.said.items():
        for frame in filter(len, frames):
            kind = message_kind(frame)
            place = client, frame[8:48]  # session, epoch, round and client
            answers[kind, place].add(frame)
            if kind is Kind.MASKED:
                vectors[client].add(frame)
            elif kind in (Kind.UNMASKING, Kind.RECOVERY):
                # The session names the width of the key batch, so shares are read with the agreement for it.
                parts = parts_of(frame, kind, agreed[client])
                about = frame[8:44]
                for other in parts:
                    shares[other, about].add("mask" if kind is Kind.UNMASKING else "self")
                if kind is Kind.UNMASKING:
                    shares[client, about].add("self")
    assert all(len(said) == 1 for (kind, _), said in answers.items() if kind is not Kind.RECOVERY)
    assert all(len(kinds) == 1 for kinds in shares.values())
    assert all(len(vectors[client]) <= spent[client] for client in range(CLIENTS))
    assert sum(map(len, vectors.values())) > CLIENTS


def parts_of(frame, kind, agreement):
    for width in range(agreement.widest, 1, -1):
        named = agreement.of(width=width)
        if named.session[:16] == frame[8:24]:
            return read_parts(frame, named, kind).parts
    raise AssertionError("a message of no session of this group")
