"""`bqsgd train --task my_module:task`: your own data and model from the command line."""

import json
import shlex
import sys
import tomllib

import numpy as np
import pytest

from bqsgd._src.cli.app import main
from bqsgd._src.records.checkpoint import load_checkpoint
from distributed_processes import environment, finish, free_port, processes

MODULE = """
import os
import signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
import bqsgd

def share(n):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(n))
    return TensorDataset(x, (x[:, 0] > 0).long())

def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)

task = bqsgd.Task(make_model=model, shares=[share(0), share(1)], test=share(2))
nothing = 3

def made(config):
    return bqsgd.Task(make_model=model, shares=[share(n) for n in range(config.clients.count)], test=share(9))

def hospitals(config):
    # Divides its data by itself, whatever the number of clients.
    x = torch.randn(342, 4, generator=torch.Generator().manual_seed(3))
    y = (x[:, 0] > 0).long()
    return bqsgd.Task(make_model=model, shares=[(x[n::3], y[n::3]) for n in range(3)])

calls = []

def interrupting(outputs, targets):
    # Ctrl-C during the first evaluation; the call before it tries the metric.
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGINT)
    return 1.0

stopped = bqsgd.Task(make_model=model, shares=[share(0)], test=share(2), metric=interrupting)

def fails(config):
    raise OSError("no such disk")
"""
QUICK = ["--batch-size", 16, "--rounds", 3, "--levels", 4, "--trials", 800, "--epsilon", 30, "--range", 0.1, "--force"]
"""Three rounds learn nothing, as a run says unless it is forced."""


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine_alone.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    monkeypatch.delitem(sys.modules, "mine_alone", raising=False)

    def run(*arguments):
        capsys.readouterr()
        code = main(["train", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_a_task_of_ones_own_trains_with_as_many_clients_as_shares(train, tmp_path):
    code, out, err = train("--task", "mine_alone:task", *QUICK, "--out", "one", "--json")
    assert code == 0, err
    assert json.loads(out)["accuracy"] is not None
    assert sorted(path.name for path in (tmp_path / "one" / "ledgers").iterdir()) == [
        "client-0000.ledger",
        "client-0001.ledger",
    ]
    assert 'load_from = "mine_alone:task"' in (tmp_path / "one" / "config.toml").read_text()
    code, _, err = train("--out", "one", "--resume")
    assert (code, "give it again" in err) == (2, True)
    code, out, _ = train("--task", "mine_alone:task", "--out", "one", "--resume", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 3)


def test_least_squares_needs_no_more_settings_for_ones_own_task_than_for_a_named_one(train, tmp_path):
    code, _, err = train("--task", "mine_alone:task", "--method", "least-squares", "--epsilon", 50, "--out", "solved")
    assert code == 0, err
    assert "rounds = 1\n" in (tmp_path / "solved" / "config.toml").read_text()


def test_a_function_is_given_the_settings(train, tmp_path):
    code, _, err = train("--task", "mine_alone:made", "--clients", 3, *QUICK, "--out", "three")
    assert code == 0, err
    assert len(list((tmp_path / "three" / "ledgers").iterdir())) == 3


def test_a_task_is_fitted_as_named_data_are(train, tmp_path):
    """Three hospitals of 114 patients: batches and rounds follow from that, and so does the number of clients."""
    code, _, err = train("--task", "mine_alone:hospitals", "--epsilon", 20, "--out", "fitted")
    assert code == 0, err
    settings = tomllib.loads((tmp_path / "fitted" / "config.toml").read_text())
    assert settings["clients"]["count"] == 3
    assert settings["privacy"]["batch_size"] <= 114
    assert settings["run"]["rounds"] == 60
    assert "the model learns " in err, "the verdict in words"


def test_the_hint_after_an_interrupt_works_as_printed(train, capsys):
    code, _, err = train("--task", "mine_alone:stopped", *QUICK, "--evaluate-every", 1, "--out", "with a blank")
    assert code == 130
    hint = err.split("continue with: ")[1].strip()
    assert hint == "bqsgd train --out 'with a blank' --resume --task mine_alone:stopped"
    code, _, err = train(*shlex.split(hint)[2:])
    assert code == 0, err


def test_a_second_run_in_one_folder_is_refused_with_a_hint_that_works_as_printed(train, capsys):
    again = ["--task", "mine_alone:task", *QUICK, "--epsilon", 900, "--out", "one"]
    assert train(*again)[0] == 0
    code, _, err = train(*again)
    assert code == 2
    code, _, err = train(*shlex.split(err.split("`")[1])[2:])
    assert code == 0, err


def test_a_run_whose_clients_have_spent_their_budgets_ends_at_once_with_a_code_of_its_own(train, tmp_path):
    code, out, _ = train("--task", "mine_alone:task", *QUICK, "--epsilon", 1e-3, "--out", "spent")
    assert code == 3
    said = " ".join(out.split())
    assert said.count("2 of 2 clients have no privacy budget left") == 1
    assert "Start a run with a larger epsilon than 0.001" in said
    assert "2 of 2 clients have no privacy budget left" in (tmp_path / "spent" / "report.html").read_text()
    assert len((tmp_path / "spent" / "rounds.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--task", "mine_alone"], "module:name"),
        (["--task", "nowhere_at_all:task"], "No module named 'nowhere_at_all'"),
        (["--task", "broken_module:task"], "ZeroDivisionError"),
        (["--task", "mine_alone:tusk"], "no attribute 'tusk'"),
        (["--task", "mine_alone:nothing"], "not a bqsgd.Task"),
        (["--task", "mine_alone:fails"], "no such disk"),
        (["--task", "mine_alone:task", "--dataset", "digits"], "leave out dataset"),
        (["--task", "mine_alone:task", "--preset", "mnist-eps3"], "leave out"),
        (["--task", "mine_alone:task", "--clients", 5], "data for 2"),
        (["--task", "mine_alone:task", "--engine", "flower"], "bqsgd flower init"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(train, tmp_path, arguments, says):
    code, out, err = train(*QUICK, *arguments, "--out", "bad")
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("bad/ledgers/*"))


@pytest.mark.slow
def test_ranks_of_torch_distributed_train_it_too(train, tmp_path):
    port = free_port()
    command = [
        sys.executable, "-m", "bqsgd", "train", "--engine", "torch-distributed", "--task", "mine_alone:task",
        *map(str, QUICK), "--seed", "1", "--out", "ranks",
    ]  # fmt: skip
    ranks = [
        (command, environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=str(port)))
        for rank in range(2)
    ]
    with processes(ranks) as started:
        for code, output in finish(started):
            assert code == 0, output
    code, _, err = train("--task", "mine_alone:task", *QUICK, "--seed", 1, "--out", "here")
    assert code == 0, err
    here, there = (load_checkpoint(tmp_path / name)[0] for name in ("here", "ranks"))
    assert all(np.array_equal(here[name], there[name]) for name in here)
