"""A run in one process: learns, repeats bit for bit, resumes, keeps its books."""

import contextlib
import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter, LedgerError
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import to_vector
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.records.checkpoint import CheckpointError
from bqsgd._src.records.folder import read_history
from bqsgd._src.records.record import RoundRecord
from bqsgd._src.release import Release
from bqsgd._src.run import STILL_ROUNDS, Run, train
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task


class Killed(Exception):
    pass


def trained(task, config, folder=None, killed_after=None):
    """A run to its end, or one whose process is gone after so many rounds."""
    records = []
    with contextlib.suppress(Killed), Run.start(task, config, folder=folder) as run:
        for record in run.rounds():
            records.append(record)
            if len(records) == killed_after:
                raise Killed
    return run, records


def test_it_learns_and_says_what_it_cost(task, settings, tmp_path):
    run, records = trained(task, settings(rounds=30), tmp_path)
    assert records[-1].test_accuracy > 0.7
    assert [RoundRecord.from_dict(record.to_dict()) for record in records] == records
    assert [record.round for record in records] == list(range(30))
    last = records[-1]
    dimension = run.server.model.size
    assert last.bytes_up == sum(entry.frame_bytes for entry in last.clients)
    assert last.bytes_up_float32 == 4 * 4 * dimension
    assert last.bytes_up < 0.27 * last.bytes_up_float32
    assert last.bytes_down == 4 * (4 * dimension + 32)
    result = run.summary
    release = Release(mechanism=run.config.privacy.mechanism, terms=run.engine.clients[0].terms)
    exact = Accountant().compose(release, 30).epsilon(1e-5)
    assert result.guarantee.epsilon >= exact * 0.999  # the client with the fewest samples has the largest
    assert result.guarantee.epsilon == last.epsilon_max
    assert result.guarantee.seeded
    for number in range(4):
        with Ledger(tmp_path / f"ledgers/client-{number:04}.ledger") as ledger:
            assert ledger.spent_rounds == 30


def test_the_finished_model_is_a_state_dict_anyone_can_load(task, settings, tmp_path):
    run, _ = trained(task, settings(rounds=2, average=0.9), tmp_path)
    network = task.make_model()
    network.load_state_dict(load_file(tmp_path / "model.safetensors"))
    np.testing.assert_array_equal(to_vector(network), run.model)
    assert not np.array_equal(run.model, run.server.model)  # the average is what is kept


def test_same_seed_same_bits_whatever_the_workers_and_the_folder(task, settings, tmp_path):
    first, records = trained(task, settings(workers=1))
    second, _ = trained(task, settings(workers=3), tmp_path)
    other, _ = trained(task, settings(seed=2))
    np.testing.assert_array_equal(first.server.model, second.server.model)
    assert not np.array_equal(first.server.model, other.server.model)
    assert {"gradients", "encode", "frame", "ledger", "decode", "aggregate"} <= set(records[0].seconds)


def test_resume_gives_the_same_model_and_counts_seeded_rounds_once(task, settings, tmp_path):
    whole, _ = trained(task, settings(average=0.9))
    _, records = trained(task, settings(average=0.9), tmp_path, killed_after=8)
    assert len(records) == 8
    with Run.resume(task, folder=tmp_path) as run:
        assert run.server.round == 6  # the last checkpoint
        again = list(run.rounds())
    assert [record.round for record in again] == list(range(6, 12))
    np.testing.assert_array_equal(run.server.model, whole.server.model)
    np.testing.assert_array_equal(run.server.best_model, whole.server.best_model)
    with Ledger(tmp_path / "ledgers/client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 12
    assert run.engine.clients[0].spending.sent.total() == 12


def test_resume_with_fresh_noise_counts_repeated_rounds_again(task, settings, tmp_path):
    trained(task, settings(seed=None), tmp_path, killed_after=8)
    with Run.resume(task, folder=tmp_path) as run:
        list(run.rounds())
    with Ledger(tmp_path / "ledgers/client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 14  # 8, then 6 to 11 again
        guarantee = ledger.guarantee()
    assert not guarantee.seeded
    assert run.engine.clients[0].spending.guarantee(delta=1e-5) == guarantee


def test_clients_drop_out_when_their_budget_is_spent_and_the_run_ends_when_none_is_left(task, settings, tmp_path):
    # The last client holds fewer samples than the others, so it draws each more often and spends faster.
    task = replace(task, shares=[*task.shares[:3], tuple(part[:340] for part in task.shares[3])])
    with Run.start(task, settings(), folder=tmp_path / "probe") as probe:
        release = Release(mechanism=probe.config.privacy.mechanism, terms=probe.engine.clients[0].terms)
    enough_for_five = Accountant().compose(release, 5).epsilon(1e-5) * 1.0001
    run, records = trained(task, settings(epsilon=enough_for_five, seed=None), tmp_path / "run")
    statuses = [[entry.status for entry in record.clients] for record in records]
    sizes = [len(inputs) for inputs, _ in task.shares]
    same = [number for number in range(4) if sizes[number] == sizes[0]]
    for number in same:
        assert [status[number] for status in statuses] == ["ok"] * 5 + ["declined"] * (len(records) - 5)
    assert statuses[-1] == ["declined"] * 4
    assert all("ok" in status for status in statuses[:-1]), "the run ends at once"
    assert len(records) < 12
    assert run.out_of_budget.startswith(
        "4 of 4 clients have no privacy budget left, and a round needs 1 of them. Start"
    )
    assert "resumed" not in run.out_of_budget
    assert records[-1].clients[0].reason == "the privacy budget is spent"
    assert not records[-1].stepped
    assert run.summary.guarantee.epsilon <= enough_for_five


def test_refusals(task, settings, tmp_path):
    with pytest.raises(InvalidParameter, match="data for 2"):
        Run.start(Task(make_model=task.make_model, shares=task.shares[:2]), settings())
    with pytest.raises(InvalidParameter, match="needs a ledger"):
        trained(task, settings(seed=None))
    stopped, _ = trained(task, settings(), tmp_path, killed_after=4)
    with pytest.raises(CheckpointError, match="contains a run already"):
        Run.start(task, settings(), folder=tmp_path)
    with pytest.raises(InvalidParameter, match="contains no run to resume"):
        Run.resume(task, folder=tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    kept = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(kept.replace(stopped.config.run.name, "another"))
    with pytest.raises(CheckpointError, match="is of run"):
        Run.resume(task, folder=tmp_path)
    (tmp_path / "config.toml").write_text(kept.replace("name = ", "# "))
    with pytest.raises(InvalidParameter, match="does not name its run"):
        Run.resume(task, folder=tmp_path)
    for edit in (("learning_rate = ", "learning_rate = 1"), ("epsilon = 30.0", "epsilon = 31.0")):
        assert edit[0] in kept
        (tmp_path / "config.toml").write_text(kept.replace(*edit))
        with pytest.raises(CheckpointError, match="not as it was when the checkpoint was written"):
            Run.resume(task, folder=tmp_path)
    (tmp_path / "config.toml").write_text(kept)
    (tmp_path / "ledgers/client-0002.ledger").unlink()
    with pytest.raises(LedgerError, match="no ledger"):
        Run.resume(task, folder=tmp_path)


def test_noise_free_training_needs_no_ledger_and_claims_nothing(task, settings):
    run, records = trained(task, settings(seed=None, trials=0, levels=127, rounds=6))
    assert records[-1].epsilon_max is None or records[-1].epsilon_max == float("inf")
    assert run.summary.guarantee is None or run.summary.guarantee.epsilon == float("inf")


class Silent:
    """An engine whose clients never answer."""

    def __init__(self):
        self.samples, self.lost, self.claimed = {0: 360, 1: 360}, {}, False

    def exchange(self, messages, *, round, enough=None):
        return []

    def seconds(self):
        return {}

    def guarantees(self, *, delta):
        return {}

    def close(self):
        pass


def test_a_round_in_which_nobody_answers_is_recorded_logged_and_changes_nothing(task, settings, tmp_path, caplog):
    with Run.start(task, settings(rounds=2), folder=tmp_path, engine=lambda setup: Silent()) as run:
        before = run.model
        records = list(run.rounds())
    assert [[entry.status for entry in record.clients] for record in records] == [["missing"] * 2] * 2
    assert not any(record.stepped for record in records)
    np.testing.assert_array_equal(run.model, before)
    assert run.summary.guarantee is None
    assert "round 0: client 1 missing: no answer" in caplog.text
    assert "round 1: 0 frames are too few; the model stays as it is" in caplog.text


def test_a_run_that_lost_its_quorum_stops_with_a_checkpoint(task, settings, tmp_path, caplog):
    engine = Silent()
    engine.lost = {0: "rank 0 is gone"}
    with Run.start(task, settings(quorum=2), folder=tmp_path, engine=lambda setup: engine) as run:
        assert len(list(run.rounds())) == 1
    assert "1 clients are left and a round needs 2 frames: stopping" in caplog.text
    with Run.resume(task, folder=tmp_path, engine=lambda setup: Silent()) as again:
        assert again.round == 1


def test_the_python_api_leaves_the_folder_of_the_command_line(task, settings, tmp_path):
    run, records = trained(task, settings(), tmp_path)
    names = {"config.toml", "rounds.jsonl", "checkpoint.safetensors", "ledgers", "report.html", "summary.json"}
    names |= {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names
    history = read_history(tmp_path)
    assert history.summary == run.summary
    assert history.figures.rounds == 12
    assert Config.from_dict(tomllib.loads((tmp_path / "config.toml").read_text())) == run.config
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["guarantee"]["epsilon"] == records[-1].epsilon_max
    assert written["bytes_up"] == sum(record.bytes_up for record in records)
    (tmp_path / "report.html").unlink()
    assert main(["report", str(tmp_path)]) == 0
    assert "12 rounds" in (tmp_path / "report.html").read_text()


def test_a_resumed_run_sums_up_the_rounds_before_it(task, settings, tmp_path):
    trained(task, settings(), tmp_path, killed_after=8)
    with Run.resume(task, folder=tmp_path) as run:
        list(run.rounds())
    whole, _ = trained(task, settings())
    assert run.summary.bytes_up == whole.summary.bytes_up
    assert run.summary.rounds == 12


def test_evaluation_is_in_evaluation_mode_and_leaves_the_mode_as_it_was(task, settings):
    seen = []

    class Noted(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = task.make_model()

        def forward(self, inputs):
            seen.append(self.training)
            return self.inner(inputs)

    model = Noted()
    evaluate = Task(make_model=Noted, test=task.test).evaluator(model)
    evaluate(to_vector(model))
    assert seen
    assert not any(seen)
    assert model.training


def test_torch_keeps_the_threads_it_had(task, settings):
    torch.set_num_threads(2)
    try:
        trained(task, settings(rounds=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_train_runs_to_the_end(task, settings, tmp_path):
    summary = train(task, settings(rounds=3), folder=tmp_path)
    assert summary.rounds == 3
    assert read_history(tmp_path).summary == summary


def test_a_run_whose_model_no_longer_moves_stops(task, settings, tmp_path, caplog):
    with Run.start(task, settings(rounds=50), folder=tmp_path, engine=lambda setup: Silent()) as run:
        assert len(list(run.rounds())) == STILL_ROUNDS
    assert run.stalled
    assert run.steps == 0
    assert f"stopping after {STILL_ROUNDS} rounds: no round has moved the model" in caplog.text
    assert run.summary.stopped.startswith("no round has moved the model in the last 10")
