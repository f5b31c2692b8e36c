"""Cohorts, thousands of clients and changes of the model, in one process."""

import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.engines.engine import FEW
from bqsgd._src.errors import InvalidParameter, LedgerError
from bqsgd._src.ledger import Register
from bqsgd._src.records.folder import read_history
from bqsgd._src.records.record import Status
from bqsgd._src.reports.page import write_report
from bqsgd._src.run import Run
from bqsgd._src.server.cohort import Cohorts
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task

CLIENTS = 120
BASE = {
    "clients": CLIENTS,
    "rounds": 12,
    "batch_size": 8,
    "clip": "clamp",
    "clip_bound": 0.5,
    "levels": 4,
    "trials": 20,
    "epsilon": 1000.0,
    "learning_rate": 1.0,
    "seed": 1,
    "weights": "equal",
    "evaluate_every": 10,
    "checkpoint_every": 4,
    "cohort": 20,
}


class Shares:
    """Shares that are made from the client's number each time they are looked up."""

    def __init__(self, count=CLIENTS):
        self.count, self.looked_up = count, Counter()

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if not 0 <= number < self.count:
            raise IndexError
        self.looked_up[number] += 1
        return points(number)


def points(seed, samples=16):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(samples, 2)).astype(np.float32)
    return inputs, (inputs[:, 0] > inputs[:, 1]).astype(np.int64)


def make_model():
    model = nn.Linear(2, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def wide():
    torch.manual_seed(0)
    return nn.Linear(2, 400)


def task(shares=None):
    return Task(make_model=make_model, shares=Shares() if shares is None else shares, test=points(10**6, 500))


def done(config, folder=None, *, stop=None, choose=None, data=None):
    records = []
    with contextlib.suppress(KeyboardInterrupt), Run.start(data or task(), config, folder=folder, choose=choose) as run:
        for record in run.rounds():
            records.append(record)
            if len(records) == stop:
                raise KeyboardInterrupt
    return run, records


def asked(records):
    return [[entry.client for entry in record.clients] for record in records]


def test_everybody_is_asked_once_before_anybody_twice():
    run, records = done(Config.of(**BASE))
    assert run.config.turns == 2
    turns = Counter()
    for some in asked(records):
        assert len(some) == 20
        turns.update(some)
        assert max(turns.values()) - min(turns[client] for client in range(CLIENTS)) <= 1
    assert set(turns.values()) == {2}
    assert run.evaluate().accuracy > 0.8
    assert asked(records)[:3] != [sorted(some) for some in np.arange(60).reshape(3, 20).tolist()]


def test_ledgers_count_only_what_was_sent(tmp_path):
    run, records = done(Config.of(**{**BASE, "rounds": 8}), tmp_path)
    turns = Counter(client for some in asked(records) for client in some)
    assert not list((tmp_path / "ledgers").glob("*.ledger"))
    with Register(tmp_path / "ledgers" / "clients.register") as register:
        assert {client: register.ledger(client).spent_rounds for client in register.clients} == {
            client: turns[client] for client in range(CLIENTS)
        }
        worst = register.ledger(max(turns, key=lambda client: turns[client])).guarantee()
    assert run.summary.guarantee.epsilon == worst.epsilon
    assert read_history(tmp_path).summary.guarantee.epsilon == worst.epsilon
    write_report(tmp_path)


def test_the_plan_is_for_the_turns_of_a_client(tmp_path):
    """A sixth of the rounds: less noise for the same epsilon, which nobody passes."""
    planned = {**BASE, "levels": None, "trials": None, "epsilon": 8.0, "rounds": 12, "bits": 12}
    run, _ = done(Config.of(**planned), tmp_path)
    every, _ = done(Config.of(**{**planned, "rounds": 2, "cohort": None}))
    mechanism = run.engine.clients[0].charge(0).release.mechanism
    assert run.config.turns == 2
    assert mechanism == every.engine.clients[0].charge(0).release.mechanism
    assert 7 < run.summary.guarantee.epsilon <= 8


def test_only_those_who_are_asked_take_memory():
    shares = Shares()
    run, records = done(Config.of(**{**BASE, "rounds": 2}), data=task(shares))
    assert len(run.engine.samples) == CLIENTS > FEW
    assert len(run.engine.clients) == len({client for some in asked(records) for client in some})
    assert all(client.samples._held is None and client._last is None for client in run.engine.clients.values())


@pytest.mark.parametrize("down_bits", [None, 7])
def test_a_killed_run_continues_to_the_same_model(tmp_path, down_bits):
    config = Config.of(**{**BASE, "rounds": 7, "down_bits": down_bits})
    whole, records = done(config)
    done(config, tmp_path, stop=6)
    with Run.resume(task(), folder=tmp_path) as run:
        rest = list(run.rounds())
    assert asked(rest) == asked(records)[len(records) - len(rest) :]
    assert run.server.model.tobytes() == whole.server.model.tobytes()


def test_a_lost_register_is_not_replaced(tmp_path):
    done(Config.of(**{**BASE, "rounds": 5}), tmp_path, stop=4)
    (tmp_path / "ledgers" / "clients.register").unlink()
    with pytest.raises(LedgerError, match="no ledger"):
        Run.resume(task(), folder=tmp_path)


def test_the_number_of_workers_changes_no_bit():
    one, _ = done(Config.of(**{**BASE, "rounds": 6, "workers": 1}))
    three, _ = done(Config.of(**{**BASE, "rounds": 6, "workers": 3}))
    assert one.server.model.tobytes() == three.server.model.tobytes()


def test_a_function_chooses():
    seen = []

    def first(round, clients, wanted):
        seen.append((round, len(clients), wanted))
        return list(clients)[:wanted]

    config = Config.of(**{**BASE, "rounds": 6, "turns": 2})
    _, records = done(config, choose=first)
    assert asked(records) == [list(range(20))] * 2 + [list(range(20, 40))] * 2 + [list(range(40, 60))] * 2
    assert seen[4] == (4, 80, 20)
    for bad in (lambda *a: [CLIENTS], lambda *a: [1, 1], lambda *a: range(21), lambda *a: ["x"]):
        with pytest.raises(InvalidParameter, match="choose must return"):
            done(config, choose=bad)
    with pytest.raises(InvalidParameter, match="cohort"):
        done(config.but(cohort=None, turns=None), choose=first)


def test_spare_clients_take_the_place_of_those_that_decline(tmp_path):
    """Clients 0 to 9 have no plan; of 30 asked, 20 send frames."""
    budgets = tuple({"client": client, "epsilon": 1e-9} for client in range(10))
    config = Config.of(
        **{**BASE, "levels": None, "trials": None, "epsilon": 50.0, "rounds": 4, "ask": 30, "budgets": budgets}
    )
    _, records = done(config, tmp_path)
    statuses = [Counter(entry.status for entry in record.clients) for record in records]
    assert [len(record.clients) for record in records] == [30] * 4
    assert [record.used for record in records] == [20] * 4
    assert sum(count[Status.DECLINED] for count in statuses) > 0
    with Register(tmp_path / "ledgers" / "clients.register") as register:
        assert sum(register.ledger(client).spent_rounds for client in register.clients) == 80


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cohort": CLIENTS + 1}, "at most the next"),
        ({"ask": 10}, "at most the next"),
        ({"ask": CLIENTS + 1}, "at most the next"),
        ({"cohort": None, "ask": 30}, "set cohort as well"),
        ({"cohort": None, "turns": 3}, "set cohort as well"),
        ({"turns": 1}, "take 2 turns"),
        ({"quorum": 21}, "can never meet"),
        ({"budgets": ({"client": 1, "from_round": 3, "epsilon": 2.0},), "levels": None, "trials": None}, "mid-run"),
    ],
)
def test_settings_that_contradict_each_other(changes, says):
    with pytest.raises(InvalidParameter, match=says):
        Config.of(**{**BASE, **changes})


def test_a_run_stops_when_turns_run_out(caplog):
    config = Config.of(**{**BASE, "rounds": 6})
    run, records = done(config, choose=lambda round, clients, wanted: clients[:wanted] if round < 3 else [])
    assert len(records) == 3
    assert "have turns left" in caplog.text
    assert run.summary.rounds == 3


def test_without_a_seed_cohorts_differ():
    config = Config.of(**{**BASE, "seed": None, "trials": 0})
    drawn = [Cohorts(config, range(CLIENTS)).draw(0) for _ in range(3)]
    assert len({tuple(some) for some in drawn}) == 3
    assert sorted(Cohorts(config, range(30)).draw(0, lost=range(25))) == [25, 26, 27, 28, 29]


SECURE = {
    "clients": 12, "cohort": 6, "rounds": 4, "secure": True, "dropouts": 1, "levels": None, "trials": None,
    "epsilon": 8.0, "unit": "client", "clip": "l2", "clip_norm": 1.0, "range": 1.0, "local_steps": 2, "run": "sums",
}  # fmt: skip


@pytest.mark.parametrize("down_bits", [None, 6])
def test_secure_sums_over_cohorts(tmp_path, down_bits):
    config = Config.of(**{**BASE, **SECURE, "down_bits": down_bits})
    few = Task(make_model=make_model, shares=[points(seed) for seed in range(12)], test=points(10**6, 500))
    with Run.start(few, config, folder=tmp_path, force=True) as run:
        records = list(run.rounds())
    assert [record.used for record in records] == [6] * 4
    assert Counter(client for some in asked(records) for client in some) == dict.fromkeys(range(12), 2)
    stated = run.summary.guarantee
    assert stated.epsilon <= 8.0
    assert stated.unit == "client"
    assert "only sums" in str(stated)
    assert run.server.sums[0].rule.clients == 6
    again = Run.start(few, config, force=True)
    assert asked(list(again.rounds())) == asked(records)
    assert again.server.model.tobytes() == run.server.model.tobytes()
    again.close()


def test_a_secure_sum_takes_no_spare_clients():
    with pytest.raises(InvalidParameter, match="set cohort=8 and dropouts=2"):
        Config.of(**{**BASE, **SECURE, "ask": 8})
    assert Config.of(**{**BASE, **SECURE, "cohort": 8, "dropouts": 2}).secure.rule(8).fewest == 6


def test_a_secure_cohort_does_without_those_who_are_late():
    """What spare clients are without secure sums, dropouts are with them."""
    config = Config.of(**{**BASE, **SECURE, "cohort": 6, "dropouts": 2, "rounds": 3, "turns": 3})
    few = Task(make_model=make_model, shares=[points(seed) for seed in range(12)], test=points(10**6, 500))
    late = {0: (), 1: (0, 1), 2: (0, 1, 2)}
    with Run.start(few, config, force=True, choose=lambda round, *_: range(6)) as run:
        exchange = run.engine.exchange

        def with_stragglers(messages, *, round, enough=None):
            for answer in exchange(messages, round=round, enough=enough):
                masks = answer.frame is not None and messages[answer.client][:4] == b"BQSM"
                yield replace(answer, frame=None, reason="late") if masks and answer.client in late[round] else answer

        run.engine.exchange = with_stragglers
        records = list(run.rounds())
    assert [record.used for record in records] == [6, 4, 0]
    assert [record.stepped for record in records] == [True, True, False]
    assert "late" in {entry.reason for entry in records[1].clients}


class TestChanges:
    """The model's changes in place of the model."""

    def test_server_and_clients_hold_the_same_bits(self):
        config = Config.of(**{**BASE, "clients": 4, "cohort": None, "down_bits": 7, "rounds": 12})
        data = Task(make_model=wide, shares=[points(seed) for seed in range(4)])
        run = Run.start(data, config)
        models = []
        for record in run.rounds():
            models.append(run.server.model)
            whole = 4 * (4 * run.server.model.size + 32)
            assert record.bytes_down == whole if record.round == 0 else record.bytes_down < 0.3 * whole
        for client in run.engine.clients.values():
            assert client.held.round == 11
            assert client.held.model.tobytes() == models[-2].tobytes()
        run.close()

    def test_a_client_that_missed_rounds_catches_up_or_is_sent_the_model(self):
        config = Config.of(**{**BASE, "clients": 4, "cohort": 2, "down_bits": 2, "rounds": 12})
        data = Task(make_model=wide, shares=[points(seed) for seed in range(4)])
        picks = [[0, 1]] * 6 + [[2, 3]] + [[0, 2]] * 5
        with Run.start(data, config.but(turns=12), choose=lambda round, *_: picks[round]) as run:
            records = list(run.rounds())
        assert all(record.used == 2 for record in records)
        change = records[1].bytes_down // 2
        assert records[6].bytes_down == records[0].bytes_down  # 2 and 3 have nothing yet
        assert change < records[7].bytes_down - change < 3 * change  # client 0 takes two changes, client 2 one

    def test_a_client_that_lost_its_model_is_sent_the_whole_one(self):
        config = Config.of(**{**BASE, "clients": 4, "cohort": None, "down_bits": 5, "rounds": 6})
        data = Task(make_model=wide, shares=[points(seed) for seed in range(4)])
        steady, forgetful = Run.start(data, config), Run.start(data, config)
        for number, (_, record) in enumerate(zip(steady.rounds(), forgetful.rounds(), strict=True)):
            assert record.used == 4
            if number == 2:
                forgetful.engine.clients[3].held = None
            if number == 3:
                assert record.bytes_down > steady.last.bytes_down
        assert steady.server.model.tobytes() == forgetful.server.model.tobytes()
        steady.close()
        forgetful.close()

    @pytest.mark.parametrize("workers", [1, 3])
    def test_many_clients_of_one_process_hold_a_model_of_each_round_once(self, workers):
        run, records = done(Config.of(**{**BASE, "down_bits": 4, "rounds": 8, "workers": workers}))
        last = {client: record.round for record in records for client in asked([record])[0]}
        clients = run.engine.clients
        assert {number: client.held.round for number, client in clients.items()} == last
        kept = {id(client.held.model) for client in clients.values()}
        assert len(kept) == len(set(last.values())) if workers == 1 else len(kept) < len(clients) / 2

    def test_it_learns_as_with_whole_models(self):
        plain, _ = done(Config.of(**BASE))
        changed, _ = done(Config.of(**{**BASE, "down_bits": 4}))
        assert abs(plain.evaluate().accuracy - changed.evaluate().accuracy) < 0.05


def test_a_server_that_asks_the_same_clients_in_every_round_gets_what_their_budgets_allow(tmp_path, monkeypatch):
    """The turns are the server's to count, and the budget is not."""
    always = list(range(20))
    monkeypatch.setattr(Cohorts, "draw", lambda self, round, **_: always)
    planned = {**BASE, "levels": None, "trials": None, "epsilon": 8.0, "rounds": 12, "bits": 12}
    run, records = done(Config.of(**planned), tmp_path)
    assert run.config.turns == 2
    with Register(tmp_path / "ledgers" / "clients.register") as register:
        spent = [register.ledger(client) for client in always]
        assert {ledger.spent_rounds for ledger in spent} == {2}
        assert all(7 < ledger.guarantee().epsilon <= 8 for ledger in spent)
    statuses = [{entry.status for entry in record.clients} for record in records]
    assert statuses == [{"ok"}] * 2 + [{"declined"}] * 10
