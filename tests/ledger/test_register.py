"""The register: the contract of a ledger for many clients in one file, written together or not at all."""

import multiprocessing
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bqsgd._src.cli.app import app
from bqsgd._src.errors import BudgetExhausted, InvalidParameter, LedgerError
from bqsgd._src.ledger import Ledger, PrivacyBudget, Register
from bqsgd._src.ledger.register import Ledgers
from bqsgd._src.params import Mechanism
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=1, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.NONE)),
)
BUDGET = PrivacyBudget(epsilon=0.4, delta=1e-5)
PLENTY = PrivacyBudget(epsilon=1e4, delta=1e-5)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "clients.register"


def opened(path: Path, clients=range(200), budget=BUDGET) -> Register:
    return Register.open(path, budgets=dict.fromkeys(clients, budget))


def spend(register: Register, client: int, round: int, run: str = "a") -> None:
    register.ledger(client).spend(RELEASE, run=run, round=round, seeded=False)


def test_each_client_has_its_own_count(path, tmp_path):
    with opened(path) as register, register.together():
        for client in (3, 3, 7):
            spend(register, client, register.ledger(client).spent_rounds)
    alone = Ledger.open(tmp_path / "alone.ledger", client=3, budget_epsilon=0.4, budget_delta=1e-5)
    alone.reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
    with opened(path) as register:
        assert [register.ledger(client).spent_rounds for client in (3, 7, 8)] == [2, 1, 0]
        assert register.ledger(3).guarantee() == alone.guarantee()
        assert register.ledger(8).guarantee() is None
        with pytest.raises(LedgerError, match="already recorded"):
            spend(register, 3, 1)
    alone.close()


def test_no_client_passes_its_budget(path):
    with opened(path) as register:
        room = register.ledger(5).headroom(RELEASE)
        register.ledger(5).reserve(RELEASE, run="a", first_round=0, rounds=room, seeded=False)
        with pytest.raises(BudgetExhausted, match="client 5"):
            spend(register, 5, room)
        assert register.ledger(6).headroom(RELEASE) == room


def fail_after(register, clients):
    with register.together():
        for client in clients:
            spend(register, client, 0)
        raise RuntimeError("stop")


def test_what_is_written_together_is_there_whole_or_not_at_all(path):
    register = opened(path)
    with pytest.raises(RuntimeError, match="stop"):
        fail_after(register, (1, 2))
    with pytest.raises(LedgerError, match="open it again"):
        spend(register, 3, 0)
    register.close()
    with opened(path) as register:
        assert [register.ledger(client).spent_rounds for client in (1, 2, 3)] == [0, 0, 0]


def test_a_refusal_inside_leaves_the_others_recorded(path):
    with opened(path, budget=PrivacyBudget(epsilon=1e-3, delta=1e-5)) as register:
        register.ledger(2).change_budget(epsilon=1.0, delta=1e-5, reason="test")
        with register.together():
            with pytest.raises(BudgetExhausted):
                spend(register, 1, 0)
            spend(register, 2, 0)
    with Register(path) as register:
        assert [register.ledger(client).spent_rounds for client in (1, 2)] == [0, 1]


def test_what_was_reserved_and_not_sent_comes_back(path):
    with opened(path) as register:
        register.ledger(1).reserve(RELEASE, run="a", first_round=0, rounds=3, seeded=False)
        spend(register, 1, 0)
    with opened(path) as register:
        assert register.ledger(1).spent_rounds == 1


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM entries WHERE client = 3 AND number = 2", "lost entries"),
        ("UPDATE entries SET body = replace(body, '\"rounds\":1', '\"rounds\":0') WHERE client = 3", "altered"),
        ("DELETE FROM heads WHERE client = 3", "damaged"),
        ("UPDATE heads SET count = 1 WHERE client = 3", "lost entries|altered"),
        ("CREATE TRIGGER t AFTER INSERT ON entries BEGIN DELETE FROM entries; END", "another program"),
    ],
)
def test_meddling_is_found(path, statement, says):
    with opened(path) as register:
        spend(register, 3, 0)
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
    with pytest.raises(LedgerError, match=says), opened(path) as register:
        register.ledger(3)


def test_whose_register_it_is(path, tmp_path):
    opened(path).close()
    with pytest.raises(LedgerError, match="other clients"):
        opened(path, clients=range(199))
    with pytest.raises(LedgerError, match="no ledger of client 200"), Register(path) as register:
        register.ledger(200)
    with pytest.raises(LedgerError, match="register of 200 clients"):
        Ledger(path)
    with pytest.raises(InvalidParameter):
        opened(tmp_path / "none.register", clients=())
    Ledger.open(tmp_path / "one.register", client=1, budget_epsilon=1.0, budget_delta=1e-5).close()
    with pytest.raises(LedgerError, match="alone, not a register"):
        Register(tmp_path / "one.register")


def test_a_register_does_not_survive_a_fork(path):
    register = opened(path)
    register.ledger(1).reserve(RELEASE, run="a", first_round=0, rounds=2, seeded=False)
    child = os.fork()
    if not child:
        try:
            spend(register, 1, 0)
        except LedgerError:
            register.close()
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert register.ledger(1).spent_rounds == 2
    register.close()


def _send(path: Path, run: str, pipe: int) -> None:
    with opened(path, budget=PLENTY) as register:
        for round in range(10_000):
            asked = range(round % 7, 200, 7)
            with register.together():
                for client in asked:
                    register.ledger(client).reserve(RELEASE, run=run, first_round=round, rounds=1, seeded=False)
            for client in asked:
                spend(register, client, round, run=run)
                os.write(pipe, b"%d\n" % client)


def test_kill_9_never_loses_a_message(path):
    with opened(path, budget=PLENTY) as register:  # the children then know the accountant's answers
        for round in range(20):
            spend(register, 0, round, run="warm")
    sent = [20] + [0] * 199
    for kill in range(5):
        read_end, write_end = os.pipe()
        process = FORK.Process(target=_send, args=(path, f"run {kill}", write_end))
        process.start()
        os.close(write_end)
        with os.fdopen(read_end) as stream:
            for _ in range(20 + 31 * kill):
                sent[int(stream.readline())] += 1
            process.kill()
            process.join()
            for line in stream:
                sent[int(line)] += 1
        with Register(path) as register:
            counted = [register.ledger(client).spent_rounds for client in range(200)]
        assert all(one >= other for one, other in zip(counted, sent, strict=True))
        assert sum(counted) <= sum(sent) + 29 * (kill + 1)


def test_the_command_shows_a_register(path):
    with opened(path) as register:
        spend(register, 3, 0)
        spend(register, 3, 1)
        spend(register, 9, 0)
    run = CliRunner().invoke
    shown = run(app, ["ledger", "show", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "200; 2 of them have spent" in shown.output
    assert shown.output.index("client 3") < shown.output.index("client 9")
    one = run(app, ["ledger", "show", str(path), "--client", "9"])
    assert "1 rounds" in one.output
    assert "Ledger of client 9" in one.output
    assert '"client": 199' in run(app, ["ledger", "show", str(path), "--json"]).output
    out = path.with_name("three.json")
    assert run(app, ["ledger", "export", str(path), "--client", "3", "--out", str(out)]).exit_code == 0
    assert out.exists()
    assert run(app, ["ledger", "export", str(path), "--out", str(path.with_name("all.json"))]).exit_code != 0


def test_one_reader_for_both(path, tmp_path):
    with opened(path) as register:
        spend(register, 3, 0)
    with Ledger.open(tmp_path / "l.ledger", client=4, budget_epsilon=1.0, budget_delta=1e-5):
        pass
    with Ledgers(path) as ledgers:
        assert ledgers.ledger(3).spent_rounds == 1
    with Ledgers(tmp_path / "l.ledger") as ledgers:
        assert ledgers.clients == (4,)
        with pytest.raises(LedgerError, match="no ledger of client 5, but of client 4"):
            ledgers.ledger(5)


def test_another_release_is_another_history(path):
    finer = replace(RELEASE, mechanism=Mechanism(levels=2, trials=60))
    with opened(path) as register:
        register.ledger(1).spend(finer, run="a", round=0, seeded=False)
        spend(register, 2, 0)
        first, second = register.ledger(1).guarantee(), register.ledger(2).guarantee()
        assert first is not None
        assert second is not None
        assert first.epsilon > second.epsilon


def test_a_reader_does_not_wait_for_a_writer(path):
    with opened(path) as writer, writer.together(), Register(path) as reader:
        reader._file.connection.execute("PRAGMA busy_timeout = 50")  # closing would raise after this, not after 60 s
        assert reader.ledger(3).spent_rounds == 0


def test_clients_that_have_spent_the_same_share_a_line(path):
    with opened(path) as register, register.together():
        for client in range(150):
            spend(register, client, 0)
    out = CliRunner().invoke(app, ["ledger", "show", str(path)]).stdout
    assert "200; 150 of them have spent" in " ".join(out.split())
    assert "client 0 and 149 more" in out
    assert " ".join(out.split()).count("proven upper bound") == 1
