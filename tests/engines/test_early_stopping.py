"""`patience`: a run stops by its results on public test data, keeps the best model, and resumes in the middle of it."""

import json
import math
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bqsgd import Config, Run, Task
from bqsgd._src.cli.app import main
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.models import to_vector
from bqsgd._src.records.record import RoundRecord, Summary
from bqsgd._src.reports.page import read_run, run_page
from bqsgd._src.tasks.best import Best
from long_suite import others_slow
from tiny_task import linear, points

ROUNDS = 40
BASE = {
    "clients": 2, "rounds": ROUNDS, "batch_size": 40, "levels": 8, "trials": 60, "epsilon": 900.0, "seed": 4,
    "clip": "clamp", "clip_bound": 0.5, "learning_rate": 1.0, "schedule": "constant", "momentum": 0.0,
    "evaluate_every": 2, "checkpoint_every": 5, "reserve_rounds": 4, "workers": 1, "run": "early",
}  # fmt: skip


def mae_task(**changes):
    """Regression: the lower the metric the better."""
    inputs, _ = points(200, 9)
    share = inputs, inputs.sum(axis=1, keepdims=True) * 0.5

    def make_model():
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    return Task(
        make_model=make_model,
        shares=[share, share],
        test=share,
        loss_fn=lambda outputs, targets: ((outputs - targets) ** 2).sum(dim=1),
        **{"metric": "MAE"} | changes,
    )


def class_task(**changes):
    return Task(make_model=linear, shares=[points(100, 1), points(100, 2)], test=points(300, 3), **changes)


def followed(task, folder, killed_after=None, **settings):
    """Run to the end, or until the process is gone; returns the run, and (rounds done, record, model) of each."""
    seen = []
    with Run.start(task, Config.of(**BASE | settings), folder=folder, force=True) as run:
        for record in run.rounds():
            seen.append((run.round, record, run.model.copy()))
            if run.round == killed_after:
                raise KeyboardInterrupt
    return run, seen


def expected(seen, figure, patience):
    """The rounds after which a run with this patience stops and had its best model: the definition, spelt out."""
    best, best_at, waited = None, None, 0
    for done, record, model in seen:
        if record.test_loss is None:
            continue
        score = figure(record)
        if best is None or score > best:
            best, best_at, waited = score, (done, model), 0
        else:
            waited += 1
        if waited == patience:
            return done, best_at
    return ROUNDS, best_at


CASES = {
    "accuracy up": (class_task, {}, lambda record: record.test_accuracy, "accuracy"),
    "MAE down": (mae_task, {}, lambda record: -record.test_metric, "MAE"),
    "R2 up": (mae_task, {"metric": None}, lambda record: record.test_metric, "R2"),
    "own metric: loss down": (
        mae_task,
        {"metric": lambda outputs, targets: outputs.mean()},
        lambda record: -record.test_loss,
        "loss",
    ),
}


@pytest.mark.parametrize("case", others_slow(CASES, ["accuracy up", "own metric: loss down"]))
def test_a_run_stops_when_its_patience_is_exhausted_and_keeps_the_best_model(case, tmp_path):
    make, changes, figure, name = CASES[case]
    task = make(**changes)
    _, seen = followed(task, tmp_path / "all")
    assert len(seen) == ROUNDS
    done, (best_at, best_model) = expected(seen, figure, patience=3)
    assert best_at < done < ROUNDS, "the noise of this seed should stop the run early"
    run, early = followed(task, tmp_path / "early", patience=3)
    assert len(early) == run.round == done
    summary = run.summary
    assert summary.best_rounds == best_at
    assert (summary.best_metric, summary.best_model) == (name, "best.safetensors")
    assert summary.stopped.startswith(f"no better {name} on the public test data in 3 evaluations; {done} of 40 rounds")
    model = task.make_model()
    model.load_state_dict(load_file(tmp_path / "early" / "best.safetensors"))
    np.testing.assert_array_equal(to_vector(model), best_model)
    model.load_state_dict(load_file(tmp_path / "early" / "model.safetensors"))
    np.testing.assert_array_equal(to_vector(model), early[-1][2])
    assert not np.array_equal(best_model, early[-1][2])


def test_the_ledgers_count_the_rounds_taken_and_the_guarantee_says_what_it_assumes(tmp_path):
    run, seen = followed(class_task(), tmp_path, patience=3)
    whole, _ = followed(class_task(), tmp_path / "whole")
    for client in range(2):
        with Ledger(tmp_path / f"ledgers/client-{client:04}.ledger") as ledger:
            assert ledger.spent_rounds == len(seen) < ROUNDS
    assert run.summary.guarantee.epsilon < whole.summary.guarantee.epsilon
    assert "the test data that stopped the run early are public" in str(run.summary.guarantee)
    assert "public" not in str(whole.summary.guarantee)
    assert "the rest of the budget is unspent" in run.summary.stopped
    assert whole.summary.stopped is whole.summary.best_rounds is None
    assert not (tmp_path / "whole" / "best.safetensors").exists()


@pytest.mark.parametrize("killed_after", others_slow([3, 6, 11], [6]))
def test_a_killed_run_continues_its_patience_exactly(killed_after, tmp_path):
    through, seen = followed(class_task(), tmp_path / "through", patience=3)
    with pytest.raises(KeyboardInterrupt):
        followed(class_task(), tmp_path / "killed", patience=3, killed_after=killed_after)
    assert killed_after < len(seen)
    with Run.resume(class_task(), folder=tmp_path / "killed") as run:
        list(run.rounds())
    assert run.summary.stopped == through.summary.stopped
    assert run.summary.best_rounds == through.summary.best_rounds
    for name in ("best.safetensors", "model.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "through" / name).read_bytes()


def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(tmp_path):
    first, seen = followed(class_task(), tmp_path, patience=3)
    best = (tmp_path / "best.safetensors").read_bytes()
    with Run.resume(class_task(), folder=tmp_path) as run:
        assert list(run.rounds()) == []
    assert run.summary.stopped == first.summary.stopped
    assert run.summary.rounds == len(seen)
    assert (tmp_path / "best.safetensors").read_bytes() == best


def test_a_model_that_diverges_is_never_the_best():
    best = Best(None, patience=2)
    for number, accuracy in enumerate([math.nan, 0.5, math.nan]):
        best.note(RoundRecord(round=number, test_loss=1.0, test_accuracy=accuracy), np.full(2, number, np.float32))
        assert best.exhausted is None
    best.note(RoundRecord(round=3), np.zeros(2, np.float32))  # not evaluated: does not count
    assert best.exhausted is None
    best.note(RoundRecord(round=4, test_loss=1.0, test_accuracy=0.5), np.zeros(2, np.float32))  # as good: not better
    assert best.exhausted == "no better accuracy on the public test data in 2 evaluations"
    assert (best.rounds, best.model.tolist()) == (2, [1.0, 1.0])


def test_without_test_data_patience_is_refused_before_anything_is_spent(tmp_path):
    task = Task(make_model=linear, shares=[points(100, 1), points(100, 2)])
    with pytest.raises(InvalidParameter, match="give the task public test data"):
        Run.start(task, Config.of(**BASE, patience=2), folder=tmp_path, force=True)
    assert not list(tmp_path.glob("ledgers/*"))


def test_the_summary_and_the_report_say_it_and_survive_a_round_trip(tmp_path):
    run, _ = followed(class_task(), tmp_path, patience=3)
    stored = json.loads((tmp_path / "summary.json").read_text())
    assert stored["best_model"] == "best.safetensors"
    assert Summary.from_dict(stored) == run.summary
    page = run_page(read_run(tmp_path))
    assert "Stopped early" in page
    assert "no better accuracy on the public test data in 3 evaluations" in page
    assert run.summary.best_text in page
    assert tomllib.loads((tmp_path / "config.toml").read_text())["run"]["patience"] == 3


def test_the_command_ends_well_and_names_the_best_model(tmp_path, capsys):
    (tmp_path / "early.toml").write_text("[run]\npatience = 1\nevaluate_every = 1\n[server]\nlearning_rate = 20.0\n")
    arguments = ["--dataset", "digits", "--epsilon", "8", "--rounds", "30", "--seed", "3", "--clients", "2"]
    out = ["--config", str(tmp_path / "early.toml"), "--out", str(tmp_path / "run")]
    assert main(["train", *arguments, *out]) == 0
    shown = capsys.readouterr().out
    assert "stopped early" in shown
    assert "best.safetensors" in shown
    summary = Summary.from_dict(json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert summary.best_rounds < summary.rounds < 30
