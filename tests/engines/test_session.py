"""A run in one process: learns, repeats bit for bit, resumes, keeps its books."""

import numpy as np
import pytest

from bqsgd.engines.inprocess import InProcess
from bqsgd.engines.session import Session, Task
from bqsgd.errors import InvalidParameter, LedgerError
from bqsgd.ledger import Ledger
from bqsgd.privacy.accountant import Accountant
from bqsgd.reports.records import RoundRecord
from bqsgd.training.checkpoint import CheckpointError
from bqsgd.training.rounds import run_round


def trained(task, config, folder=None, stop_after=None):
    with Session.start(task, config, folder=folder) as session:
        records = []
        for record in session.rounds():
            records.append(record)
            if len(records) == stop_after:
                break
    return session, records


def test_it_learns_and_says_what_it_cost(task, settings, tmp_path):
    session, records = trained(task, settings(rounds=30), tmp_path)
    assert records[-1]["test_accuracy"] > 0.7
    assert [RoundRecord.from_dict(record).round for record in records] == list(range(30))
    last = records[-1]
    dimension = session.server.model.size
    assert last["bytes_up"] == sum(entry["frame_bytes"] for entry in last["clients"])
    assert last["bytes_up_float32"] == 4 * 4 * dimension
    assert last["bytes_up"] < 0.27 * last["bytes_up_float32"]
    assert last["bytes_down"] == 4 * (4 * dimension + 32)
    result = session.result()
    release = session.engine.clients[0].situation.release(session.config.mechanism)
    exact = Accountant().compose(release, 30).epsilon(1e-5)
    assert result.guarantee.epsilon >= exact * 0.999  # the client with the fewest samples has the largest
    assert result.guarantee.epsilon == last["epsilon_max"]
    assert result.guarantee.seeded
    for number in range(4):
        with Ledger(tmp_path / f"ledgers/client-{number:04}.ledger") as ledger:
            assert ledger.spent_rounds == 30


def test_same_seed_same_bits_whatever_the_workers_and_the_folder(task, settings, tmp_path):
    first, records = trained(task, settings(workers=1))
    second, _ = trained(task, settings(workers=3), tmp_path)
    other, _ = trained(task, settings(seed=2))
    np.testing.assert_array_equal(first.server.model, second.server.model)
    assert not np.array_equal(first.server.model, other.server.model)
    assert {"gradients", "encode", "frame", "ledger", "decode", "aggregate"} <= set(records[0]["seconds"])


def test_resume_gives_the_same_model_and_counts_seeded_rounds_once(task, settings, tmp_path):
    whole, _ = trained(task, settings(average=0.9))
    stopped, records = trained(task, settings(average=0.9), tmp_path, stop_after=8)
    assert len(records) == 8
    with Session.resume(task, stopped.config, folder=tmp_path) as session:
        assert session.server.round == 6  # the last checkpoint
        again = list(session.rounds())
    assert [record["round"] for record in again] == list(range(6, 12))
    np.testing.assert_array_equal(session.server.model, whole.server.model)
    np.testing.assert_array_equal(session.server.best_model, whole.server.best_model)
    with Ledger(tmp_path / "ledgers/client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 12
    assert session.engine.clients[0].spending.sent.total() == 12


def test_resume_with_fresh_noise_counts_repeated_rounds_again(task, settings, tmp_path):
    stopped, _ = trained(task, settings(seed=None), tmp_path, stop_after=8)
    with Session.resume(task, stopped.config, folder=tmp_path) as session:
        list(session.rounds())
    with Ledger(tmp_path / "ledgers/client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 14  # 8, then 6 to 11 again
        guarantee = ledger.guarantee()
    assert not guarantee.seeded
    assert session.engine.clients[0].spending.guarantee(delta=1e-5) == guarantee


def test_clients_drop_out_when_their_budget_is_spent_and_training_goes_on(task, settings, tmp_path):
    with Session.start(task, settings(), folder=tmp_path / "probe") as probe:
        release = probe.engine.clients[0].situation.release(probe.config.mechanism)
    enough_for_five = Accountant().compose(release, 5).epsilon(1e-5) * 1.0001
    session, records = trained(task, settings(epsilon=enough_for_five, seed=None), tmp_path / "run")
    statuses = [[entry["status"] for entry in record["clients"]] for record in records]
    sizes = [len(inputs) for inputs, _ in task.shares]
    same = [number for number in range(4) if sizes[number] == sizes[0]]
    for number in same:
        assert [status[number] for status in statuses] == ["ok"] * 5 + ["declined"] * 7
    assert records[-1]["clients"][0]["reason"] == "the privacy budget is spent"
    assert not records[-1]["stepped"]
    assert session.result().guarantee.epsilon <= enough_for_five


def test_refusals(task, settings, tmp_path):
    with pytest.raises(InvalidParameter, match="shares"):
        Session.start(Task(make_model=task.make_model, shares=task.shares[:2]), settings())
    with pytest.raises(InvalidParameter, match="each number once"):
        InProcess([])
    with pytest.raises(InvalidParameter, match="needs a ledger"):
        trained(task, settings(seed=None))
    stopped, _ = trained(task, settings(), tmp_path, stop_after=4)
    with pytest.raises(CheckpointError, match="holds a run already"):
        Session.start(task, settings(), folder=tmp_path)
    with pytest.raises(InvalidParameter, match="with a name"):
        Session.resume(task, settings(), folder=tmp_path)
    with pytest.raises(CheckpointError, match="is of run"):
        Session.resume(task, settings(run="another"), folder=tmp_path)
    (tmp_path / "ledgers/client-0002.ledger").unlink()
    with pytest.raises(LedgerError, match="no ledger"):
        Session.resume(task, stopped.config, folder=tmp_path)


def test_noise_free_training_needs_no_ledger_and_claims_nothing(task, settings):
    session, records = trained(task, settings(seed=None, trials=0, levels=127, rounds=6))
    assert records[-1]["epsilon_max"] is None or records[-1]["epsilon_max"] == float("inf")
    assert session.result().guarantee is None or session.result().guarantee.epsilon == float("inf")


def test_run_round_reports_what_a_silent_engine_knows(task, settings):
    class Silent:
        def exchange(self, message, *, round):
            return []

        def seconds(self):
            return {}

        def epsilon(self, *, delta):
            return None

    with Session.start(task, settings()) as session:
        outcome = run_round(session.server, Silent())
    assert [receipt.status for receipt in outcome.receipts] == ["missing"] * 4
    assert not outcome.stepped
