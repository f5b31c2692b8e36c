"""`bqsgd train`, `bqsgd demo` and the examples, as a user calls them."""

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bqsgd._src.cli import train
from bqsgd._src.cli.app import main
from bqsgd._src.data._sources import SourceFailed
from bqsgd._src.ledger import Ledger
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.records.folder import read_rounds
from forked import SECONDS, forked

ROOT = Path(__file__).parents[2]
QUICK = ["--dataset", "digits", "--levels", "17", "--trials", "220", "--epsilon", "30", "--rounds", "8"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    code = main(["train", *QUICK, *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else None, captured.err


def test_a_run_leaves_everything_in_its_folder(capsys, somewhere):
    code, printed, progress = run(capsys, "--out", "one", "--evaluate-every", "4", "--tensorboard")
    assert code == 0
    folder = somewhere / "one"
    names = {"config.toml", "rounds.jsonl", "checkpoint.safetensors", "ledgers", "report.html", "summary.json"}
    assert names <= {path.name for path in folder.iterdir()}
    assert list((folder / "tensorboard").iterdir())
    assert not (folder / "private").exists()
    summary = json.loads((folder / "summary.json").read_text())
    records = list(read_rounds(folder))
    assert len(records) == summary["rounds"] == printed["rounds"] == 8
    assert summary["bytes_up"] == sum(record.bytes_up for record in records)
    assert summary["seeded"] is False
    guarantee = summary["guarantee"]
    assert {"epsilon", "delta", "relation", "unit", "trust", "sampling", "method"} <= set(guarantee)
    with Ledger(folder / "ledgers/client-0000.ledger") as ledger:
        assert ledger.guarantee().epsilon <= guarantee["epsilon"] == records[-1].epsilon_max
    assert "round 4/8  test accuracy" in progress
    assert "epsilon" in progress
    assert "at delta 1e-05" in progress


def test_seeded_runs_repeat_and_say_so(capsys, somewhere):
    for name in ("a", "b"):
        code, printed, progress = run(capsys, "--out", name, "--seed", "4")
        assert code == 0
        assert printed["seeded"] is True
        assert "seeded: no claim" in progress
    models = [load_checkpoint(somewhere / name)[0]["model"] for name in ("a", "b")]
    np.testing.assert_array_equal(*models)
    assert main(["train", *QUICK, "--out", "c", "--seed", "4"]) == 0
    assert "no privacy claim" in " ".join(capsys.readouterr().out.split())


def test_config_file_and_options_that_win(capsys, somewhere):
    (somewhere / "run.toml").write_text(
        '[clip]\nrule = "clamp"\nbound = 0.02\n[run]\nrounds = 99\n[server]\nlearning_rate = 2.0\n'
    )
    code, printed, _ = run(capsys, "--config", "run.toml", "--out", "one", "--seed", "1")
    assert code == 0
    assert printed["rounds"] == 8
    assert 'rule = "clamp"' in (somewhere / "one/config.toml").read_text()


def test_private_metrics_are_labelled_and_stay_with_the_client(capsys, somewhere):
    (somewhere / "run.toml").write_text("[privacy]\nprivate_metrics = true\n")
    assert main(["train", *QUICK, "--out", "one", "--config", "run.toml"]) == 0
    assert "outside the guarantee" in capsys.readouterr().out
    lines = (somewhere / "one/private/client-0002.jsonl").read_text().splitlines()
    assert len(lines) == 8
    assert all(json.loads(line)["outside_the_guarantee"] for line in lines)
    assert "batch_size" not in (somewhere / "one/rounds.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local-steps", "3"], "no claim about one sample"),
        (["--clip", "soft"], "clip must be one of"),
        (["--resume"], "--resume needs --out"),
        (["--config", "absent.toml"], "not a readable TOML"),
        (["--batch-size", "5000"], "more than the 359 samples"),
        (["--model", "lenet5"], "try mlp"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["train", *QUICK, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_deadline_that_refuses_every_frame_is_said_stops_the_run_and_fails(capsys, caplog, somewhere):
    (somewhere / "run.toml").write_text("[server]\ndeadline_seconds = 1e-9\n")
    code, printed, progress = run(capsys, "--out", "late", "--config", "run.toml", "--rounds", "30")
    assert code == 1
    assert printed["rounds"] == len(list(read_rounds(somewhere / "late"))) == 10
    assert "it came after the deadline" in caplog.text
    assert "nothing was learnt, because no round moved the model" in progress


def test_settings_are_checked_before_any_feature_is_computed(capsys, somewhere, monkeypatch):
    monkeypatch.setattr("bqsgd._src.data.shares.compute_features", None)
    assert main(["train", "--dataset", "digits", "--clients", "100", "--batch-size", "512", "--out", "none"]) == 2
    assert "more than the 14 samples that each of 100 clients holds" in capsys.readouterr().err
    assert not (somewhere / "none").exists()


@pytest.mark.slow
def test_a_run_that_cannot_learn_is_refused_before_there_is_a_folder_unless_forced(capsys, somewhere):
    hopeless = ["train", "--dataset", "digits", "--epsilon", "0.05", "--rounds", "3", "--out", "none"]
    assert main(hopeless) == 2
    assert "the model will not learn" in (refused := capsys.readouterr().err)
    assert "Settings that learn something: --" in refused
    assert not (somewhere / "none").exists()
    assert main([*hopeless, "--force"]) == 0
    assert "the model will not learn" in capsys.readouterr().err


@pytest.mark.slow
def test_clients_of_all_sizes_take_part_under_label_skew(capsys, somewhere):
    skewed = ["--dataset", "digits", "--clients", "30", "--concentration", "0.3", "--rounds", "3", "--epsilon", "30"]
    assert main(["train", *skewed, "--out", "skewed", "--json"]) == 0
    assert all(record.used == 30 for record in read_rounds(somewhere / "skewed"))


def test_a_folder_is_never_run_over_and_resume_keeps_the_settings(capsys):
    assert run(capsys, "--out", "one", "--seed", "1")[0] == 0
    assert main(["train", *QUICK, "--out", "one"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", *QUICK, "--out", "one", "--resume", "--seed", "2"]) == 2
    assert "started with seed=1" in capsys.readouterr().err
    assert main(["train", "--out", "one", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 8


def no_network(*_):
    raise SourceFailed("no network")


def test_without_mnist_the_run_says_so_and_takes_digits(capsys, somewhere, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(somewhere / "empty"))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("bqsgd._src.data._sources._download", no_network)
    arguments = [argument for argument in QUICK if argument not in ("--dataset", "digits")]
    assert main(["train", *arguments, "--out", "one", "--seed", "1"]) == 0
    error = capsys.readouterr().err
    assert "no source of mnist is available" in error
    assert "uses digits instead" in error
    assert 'dataset = "digits"' in (somewhere / "one/config.toml").read_text()


def exit_with_the_code(folder, command):
    os.chdir(folder)
    sys.exit(main(command))


def test_ctrl_c_stops_after_the_round_with_a_checkpoint(somewhere):
    arguments = [*QUICK[:-2], "--rounds", "100000", "--epsilon", "900", "--out", "one", "--evaluate-every", "100000"]
    (somewhere / "run.toml").write_text("[run]\ncheckpoint_every = 100000\n")
    command = ["train", *arguments, "--seed", "1", "--config", "run.toml"]
    with forked(exit_with_the_code, somewhere, command) as (process, printed):
        rounds = somewhere / "one/rounds.jsonl"
        while not (rounds.exists() and rounds.stat().st_size):
            assert process.is_alive(), printed()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        process.join(SECONDS)
        assert process.exitcode == 130, printed()
        assert "continue with:" in printed()
    _, state = load_checkpoint(somewhere / "one")
    records = list(read_rounds(somewhere / "one"))
    assert state["round"] == len(records) > 0
    assert json.loads((somewhere / "one/summary.json").read_text())["rounds"] == len(records)


def test_the_demo_trains_and_reports(capsys):
    assert main(["demo", "--dataset", "digits", "--rounds", "10", "--out", "shown"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("accuracy", "epsilon", "at delta 1e-05", "add/remove one sample", "than float32", "report.html"):
        assert part in shown
    assert main(["demo", "--dataset", "fashion-mnist"]) == 2


def test_the_demo_says_first_how_long_it_takes_as_was_measured(capsys, monkeypatch):
    measured = json.loads((ROOT / "benchmarks/results/first_use.json").read_text())["cpu_seconds"]
    monkeypatch.setattr(train, "_train_here", lambda request: None)
    for dataset in ("mnist", "digits"):
        assert main(["demo", "--dataset", dataset]) == 0
        said = capsys.readouterr().err
        seconds = measured[f"bqsgd demo --dataset {dataset}"]
        assert f"takes about {seconds['second']:.0f} CPU seconds, {seconds['first']:.0f} the first" in said
    figures = measured["make_private and a step, convolutions"]
    page = " ".join((ROOT / "docs/persample.md").read_text().split())
    imports = measured["imports alone"]["second"]
    assert f"{figures['first']} CPU seconds, a second process's {figures['second']}, {imports} of them imports" in page


def test_own_model_example_is_short_and_learns(somewhere, capsys, monkeypatch):
    script = ROOT / "examples/own_model.py"
    assert len(script.read_text().splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [str(script), "run"])
    runpy.run_path(str(script), run_name="__main__")
    result = capsys.readouterr().out.splitlines()[-1]
    # Chance is 50; noise and first model are fresh: 94 to 99.9 were seen.
    assert float(result.split()[1].rstrip("%,")) > 80
    assert "epsilon 2.9" in result
    assert "at delta 1e-05" in result
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [result]
