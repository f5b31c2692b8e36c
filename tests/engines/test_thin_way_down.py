"""Clients that are sent aggregates in place of models: the same models bit for bit, in as few bytes as the way up."""

from collections import Counter
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.records.folder import read_history
from bqsgd._src.run import Run
from bqsgd._src.secure.messages import is_sum_message
from bqsgd._src.server.way_down import WayDown
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from bqsgd._src.wire.model_steps import STEPS_HEADER_BYTES, is_steps
from long_suite import others_slow

CLIENTS = 5
BASE = {
    "clients": CLIENTS, "rounds": 8, "batch_size": 16, "rate": 0.25, "clip": "l2", "clip_norm": 1.0, "range": 0.3,
    "levels": 20, "trials": 120, "epsilon": 90.0, "seed": 3, "evaluate_every": 4, "checkpoint_every": 2,
    "weights": "equal", "learning_rate": 0.2, "run": "thin", "workers": 1,
}  # fmt: skip
SUMS = {"secure": True, "dropouts": 1, "key_rounds": 3, "window": 1.0}  # one width, so that bytes compare
MEDIAN = {"aggregation": "median", "one_in": 3}
OPTIMIZERS = {
    "momentum, linear": {"momentum": 0.9, "schedule": "linear"},
    "adam without its noise, cosine": {"optimizer": "adam", "subtract_noise": True, "schedule": "cosine"},
    "sgd, constant": {"momentum": 0.0, "schedule": "constant"},
}


def points(seed, samples=60):
    inputs = np.random.default_rng(seed).normal(size=(samples, 12)).astype(np.float32)
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


def wide():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 2))


def task(clients=CLIENTS):
    return Task(make_model=wide, shares=[points(client) for client in range(clients)], test=points(99, 300))


class Watched:
    """A run whose messages down are noted by round and client; `lose` drops replies to models."""

    def __init__(self, config, folder=None, *, lose=lambda round, client: False, choose=None, data=None):
        self.run = Run.start(data or task(), config, folder=folder, choose=choose, force=True)
        self.down, self.up, self.lose, self.real = {}, {}, lose, self.run.engine.exchange
        self.run.engine.exchange = self.exchange

    def exchange(self, messages, *, round, enough=None):
        models = {client: message for client, message in messages.items() if not is_sum_message(message)}
        for client, message in models.items():
            self.down.setdefault((round, client), []).append(message)
        for reply in self.real(messages, round=round, enough=enough):
            if reply.client in models and reply.frame is not None:
                self.up[round, reply.client] = len(reply.frame)
                if self.lose(round, reply.client):
                    reply = replace(reply, frame=None, reason="lost on the way")
            yield reply

    def train(self, each=lambda record: None):
        with self.run:
            self.records = []
            for record in self.run.rounds():
                self.records.append(record)
                each(record)
        return self

    def kinds(self, client):
        """Round -> what the client was sent: w for a whole model, s for steps."""
        rounds = sorted(round for round, other in self.down if other == client)
        return ["".join("s" if is_steps(one) else "w" for one in self.down[round, client]) for round in rounds]

    def state(self):
        server = self.run.server
        return server.model.tobytes(), {name: array.tobytes() for name, array in server.state.items()}


def with_whole_models(config, **options):
    watched = Watched(config, **options)
    watched.run.server.way_down = WayDown(watched.run.server.model, bits=None)
    return watched.train()


@lru_cache
def expected_state(config):
    """How a run that sends whole models ends; tests with the same settings share it."""
    return with_whole_models(config).state()


CHANGES = {"sums": SUMS, "sums of subsets": SUMS | {"one_in": 3}, "median": MEDIAN}
PAIRS = [(changes, optimizer) for changes in CHANGES for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("changes", "optimizer"), others_slow(PAIRS, PAIRS[::4]))
def test_the_same_model_as_with_whole_models(changes, optimizer):
    config = Config.of(**{**BASE, **CHANGES[changes], **OPTIMIZERS[optimizer]})
    thin = Watched(config).train()
    assert all(record.used == CLIENTS for record in thin.records)
    assert thin.kinds(2) == ["w"] + ["s"] * 7
    assert thin.state() == expected_state(config)


@pytest.mark.parametrize("one_in", [1, 3])
def test_as_thin_as_the_way_up(tmp_path, one_in):
    """With secure sums a client is sent no more bytes than its own vector takes, apart from one header."""
    config = Config.of(**{**BASE, **SUMS, "one_in": one_in})
    thin = Watched(config, tmp_path).train()
    dimension = thin.run.server.model.size
    width = thin.run.server.sums[0].width
    for (round, client), messages in thin.down.items():
        if round:
            (message,) = messages
            assert len(message) == STEPS_HEADER_BYTES + 8 + -(-config.kept(dimension) * width // 8)
            assert len(message) <= 1.2 * thin.up[round, client]
    whole = with_whole_models(config)
    saved = [a.bytes_down - b.bytes_down for a, b in zip(whole.records, thin.records, strict=True)]
    assert saved[0] == 0
    assert saved[1:] == [CLIENTS * (32 + 4 * dimension - len(thin.down[1, 0][0]))] * 7
    summary = read_history(tmp_path).summary
    assert summary.bytes_down == sum(record.bytes_down for record in thin.records)
    assert summary.saving_down > whole.run.summary.saving_down


def test_robust_rules_send_a_float_for_each_kept_coordinate():
    thin = Watched(Config.of(**{**BASE, **MEDIAN})).train()
    kept = thin.run.server.dimension
    assert {len(thin.down[round, 0][0]) for round in range(1, 8)} == {STEPS_HEADER_BYTES + 16 + 4 * kept}
    assert 3 * kept >= thin.run.server.model.size


@pytest.mark.parametrize("forget", ["model", "memory", "everything"])
@pytest.mark.parametrize("changes", [SUMS, MEDIAN], ids=["sums", "median"])
def test_a_client_that_diverged_is_found_out_and_recovers(forget, changes):
    config = Config.of(**{**BASE, **changes, "momentum": 0.9})
    thin = Watched(config)

    def diverge(record):
        if record.round == 3:
            client = thin.run.engine.clients[1]
            held = client.held
            client.held = {
                "model": replace(held, model=held.model * np.float32(1.01)),
                "memory": replace(held, memory=held.memory * 1.01),
                "everything": None,
            }[forget]

    thin.train(diverge)
    assert thin.kinds(1) == ["w", "s", "s", "s", "sw", "s", "s", "s"]
    assert thin.kinds(0) == ["w"] + ["s"] * 7
    assert all(record.used == CLIENTS for record in thin.records)
    assert thin.state() == expected_state(config)
    whole = thin.down[4, 1][1]
    size = thin.run.server.model.size
    assert len(whole) == 32 + 4 * size + 8 * size  # with the velocity
    assert thin.records[4].bytes_down - thin.records[5].bytes_down == len(whole)


def test_stragglers_take_several_steps_and_lost_rounds_take_none():
    """Client 4 has taken the steps whose replies were lost; in round 5 two are missing and there is no sum."""
    lost = {(2, 4), (3, 4), (5, 3), (5, 4)}
    config = Config.of(**{**BASE, **SUMS, "momentum": 0.9})
    thin = Watched(config, lose=lambda *who: who in lost).train()
    assert [record.used for record in thin.records] == [5, 5, 4, 4, 5, 0, 5, 5]
    assert thin.kinds(4) == ["w"] + ["s"] * 7
    one, three = len(thin.down[2, 4][0]), len(thin.down[4, 4][0])
    assert three - STEPS_HEADER_BYTES == 3 * (one - STEPS_HEADER_BYTES)
    assert len(thin.down[6, 4][0]) == len(thin.down[6, 0][0]) == one + 8  # a step, and a round without one
    assert thin.state() == with_whole_models(config, lose=lambda *who: who in lost).state()


def test_a_client_too_far_behind_is_sent_the_model_and_the_memory():
    config = Config.of(**{**BASE, **MEDIAN, "rounds": 16, "momentum": 0.9})
    thin = Watched(config)
    real = thin.real

    def absent(messages, *, round, enough=None):
        present = {client: message for client, message in messages.items() if client != 4 or round not in range(2, 14)}
        yield from real(present, round=round, enough=enough)

    thin.real = absent
    thin.train()
    assert Counter(record.used for record in thin.records) == {5: 4, 4: 12}
    # As many steps as are together shorter than model and velocity, a third of a model each; then these.
    assert thin.kinds(4) == ["w"] + ["s"] * 9 + ["w"] * 5 + ["s"]
    assert len(thin.down[14, 4][0]) == 32 + 12 * thin.run.server.model.size


@pytest.mark.parametrize("optimizer", others_slow(OPTIMIZERS, ["momentum, linear"]))
def test_cohorts(optimizer):
    """Half of the clients in every round: each is a few rounds behind, and catches up."""
    changes = SUMS | {"clients": 6, "cohort": 3, "turns": 8, "one_in": 3, "dropouts": 0} | OPTIMIZERS[optimizer]
    config = Config.of(**{**BASE, **changes})
    thin = Watched(config, data=task(6)).train()
    assert all(record.used == 3 for record in thin.records)
    sent = Counter(kind for client in range(6) for kind in thin.kinds(client)[1:])
    assert sent == {"s": 18}
    assert thin.state() == with_whole_models(config, data=task(6)).state()


def test_clients_that_are_asked_rarely_are_sent_models():
    """The steps between two turns would be longer than a model, and the memory longer still."""
    changes = SUMS | {"clients": 24, "cohort": 4, "rounds": 12, "dropouts": 0, "momentum": 0.9}
    config = Config.of(**{**BASE, **changes})
    run = Watched(config, data=task(24)).train()
    assert run.run.server.way_down.descent is None
    assert {len(message) for messages in run.down.values() for message in messages} == {
        32 + 4 * run.run.server.model.size
    }


@pytest.mark.parametrize(("changes", "optimizer"), others_slow(PAIRS[3:], PAIRS[4::4]))
def test_a_killed_run_continues_to_the_same_model(tmp_path, changes, optimizer):
    config = Config.of(**{**BASE, **CHANGES[changes], **OPTIMIZERS[optimizer]})

    def stop(record):
        if record.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Watched(config, tmp_path).train(stop)
    with Run.resume(task(), folder=tmp_path) as run:
        assert run.round == 4
        records = list(run.rounds())
    assert [record.used for record in records] == [CLIENTS] * 4
    assert run.server.model.tobytes() == expected_state(config)[0]
    assert records[0].bytes_down > records[1].bytes_down  # nobody holds anything yet


def test_down_bits_are_a_choice():
    config = Config.of(**{**BASE, **SUMS, "down_bits": 4})
    changed = Watched(config).train()
    assert {message[:4] for messages in changed.down.values() for message in messages} == {b"BQSM", b"BQSC"}


def test_which_runs_repeat_steps():
    def repeats(**changes):
        return Config.of(**{**BASE, **changes}).repeats_steps

    assert repeats(**SUMS)
    assert repeats(**MEDIAN)
    assert not repeats()
    assert not repeats(one_in=3)  # every client has a subset of its own
    assert not repeats(aggregation="median")  # a float for every coordinate is no shorter than the model
    assert not repeats(**SUMS, down_bits=4)
