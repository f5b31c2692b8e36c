"""A run folder on a shared machine: one writer, private files, no trap followed, and epsilon as the ledgers have it."""

import json
import os
import resource
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from bqsgd._src.cli.app import main
from bqsgd._src.errors import FolderInUse, LedgerError, NotWritten, UnsafeFile
from bqsgd._src.ledger import Ledger
from bqsgd._src.records.checkpoint import FILE_NAME, CheckpointError
from bqsgd._src.records.record import RunFolderError
from bqsgd._src.records.tensorboard import TensorBoardLog
from bqsgd._src.reports.page import read_run
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.task import Task
from distributed_processes import environment, finish, free_port, processes

ROUNDS = 4


def config(**changes):
    settings = {"clients": 2, "rounds": ROUNDS, "batch_size": 8, "levels": 4, "trials": 400, "epsilon": 50.0}
    return Config.of(**settings | {"evaluate_every": 2, "checkpoint_every": 1, "quorum": 1} | changes)


@pytest.fixture(scope="module")
def task():
    rng = np.random.default_rng(0)
    shares = [(rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)) for _ in range(2)]

    def model():
        torch.manual_seed(0)
        return nn.Linear(3, 2)

    return Task(make_model=model, shares=shares, test=shares[0], loss_fn=nn.CrossEntropyLoss(reduction="none"))


@pytest.fixture
def stopped(task, tmp_path):
    """The folder of a run that was stopped after two of its rounds."""
    with Run.start(task, config(), folder=tmp_path / "run") as run:
        for record in run.rounds():
            if record.round == 1:
                break
    return tmp_path / "run"


def spent(folder):
    found = {}
    for path in sorted((folder / "ledgers").glob("*.ledger")):
        with Ledger(path) as ledger:
            found[ledger.client] = ledger.spent_rounds
    return found


def test_a_second_run_in_a_folder_is_refused_before_anything_is_spent(task, stopped):
    before = spent(stopped)
    with Run.resume(task, folder=stopped) as run:
        for again in (lambda: Run.resume(task, folder=stopped), lambda: Run.start(task, config(), folder=stopped)):
            with pytest.raises(FolderInUse, match=f"process {os.getpid()}"):
                again()
        assert spent(stopped) == before == {0: 2, 1: 2}
        list(run.rounds())
    assert spent(stopped) == {0: ROUNDS, 1: ROUNDS}
    assert not (stopped / ".lock").exists()


def test_a_run_that_fails_to_begin_leaves_no_lock(task, stopped):
    (stopped / "ledgers" / "client-0001.ledger").unlink()
    for _ in range(2):
        with pytest.raises(LedgerError, match="no ledger at"):
            Run.resume(task, folder=stopped)


def test_summary_and_report_say_what_the_ledgers_say(task, stopped):
    summary = json.loads((stopped / "summary.json").read_text())
    with Ledger(stopped / "ledgers" / "client-0001.ledger") as ledger:
        assert summary["guarantee"]["epsilon"] == ledger.guarantee(delta=1e-5).epsilon
        release = next(entry.release for entry in ledger.entries if entry.release is not None)
        ledger.spend(release, run="of another process", round=0, seeded=False)
        now = ledger.guarantee(delta=1e-5)
    assert now.epsilon > summary["guarantee"]["epsilon"]
    found = read_run(stopped).summary
    assert (found.guarantee, found.guarantee_client) == (now, 1)
    assert main(["report", str(stopped)]) == 0
    assert f"{now.epsilon_text}" in (stopped / "report.html").read_text()


def test_a_run_counts_what_another_process_spends_meanwhile(task, stopped):
    with Run.resume(task, folder=stopped) as run:
        list(run.rounds())
        with Ledger(stopped / "ledgers" / "client-0000.ledger") as other:
            release = next(entry.release for entry in other.entries if entry.release is not None)
            other.spend(release, run="of another process", round=0, seeded=False)
    with Ledger(stopped / "ledgers" / "client-0000.ledger") as ledger:
        assert ledger.spent_rounds == ROUNDS + 1
        assert run.summary.guarantee.epsilon == ledger.guarantee(delta=1e-5).epsilon
    assert run.summary.guarantee_client == 0


def test_a_reservation_that_was_not_used_is_in_neither_figure(task, tmp_path):
    with Run.start(task, config(reserve_rounds=ROUNDS), folder=tmp_path) as run:
        for record in run.rounds():
            if record.round == 0:
                break
    with Ledger(tmp_path / "ledgers" / "client-0000.ledger") as ledger:
        assert ledger.spent_rounds == 1
        assert run.summary.guarantee.epsilon == ledger.guarantee(delta=1e-5).epsilon
    assert read_run(tmp_path).summary.guarantee == run.summary.guarantee


def test_private_files_are_private(task, tmp_path):
    with Run.start(task, config(private_metrics=True), folder=tmp_path / "run") as run:
        list(run.rounds())
    folder = tmp_path / "run"
    private = [*folder.rglob("*.ledger"), *folder.glob("private/*"), folder / FILE_NAME]
    assert len(private) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    for name in ("ledgers", "private"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o700
    shown = [folder / name for name in ("config.toml", "rounds.jsonl", "summary.json", "report.html")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in shown} == {0o644}
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize("name", ["rounds.jsonl", FILE_NAME, "config.toml", "ledgers/client-0000.ledger"])
@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_a_resumed_run_follows_no_link_and_waits_for_no_pipe(task, stopped, tmp_path, name, trap, capsys):
    path, elsewhere = stopped / name, tmp_path / "elsewhere"
    path.rename(elsewhere)
    content = elsewhere.read_bytes()
    path.symlink_to(elsewhere) if trap == "link" else os.mkfifo(path)
    with pytest.raises((UnsafeFile, CheckpointError, RunFolderError, LedgerError), match=path.name):
        Run.resume(task, folder=stopped)
    assert elsewhere.read_bytes() == content
    if name == "config.toml":
        assert main(["train", "--resume", "--out", str(stopped)]) == 2
        assert main(["train", "--config", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 2


def test_a_link_in_the_place_of_the_private_figures_is_refused(task, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "private").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="private"):
        Run.start(task, config(private_metrics=True), folder=tmp_path / "run")


def test_other_writers_follow_no_link_either(stopped, tmp_path, capsys):
    elsewhere = tmp_path / "elsewhere"
    for name in ("entries.json", "entries.csv"):
        (tmp_path / name).symlink_to(elsewhere)
        ledger = stopped / "ledgers" / "client-0000.ledger"
        assert main(["ledger", "export", str(ledger), "--out", str(tmp_path / name)]) == 2
        assert "exists; give a new file name" in capsys.readouterr().err
        (tmp_path / name).unlink()
        assert main(["ledger", "export", str(ledger), "--out", str(tmp_path / name)]) == 0
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    elsewhere.mkdir()
    (stopped / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(UnsafeFile, match="is a link"):
        TensorBoardLog(stopped / "tensorboard")
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("limit", [50, 700, 1500, 9000, 13_000, 20_000])
def test_a_full_disk_ends_a_run_with_a_documented_error_and_it_goes_on_later(task, tmp_path, limit):
    folder, (soft, hard) = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = config(private_metrics=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises((NotWritten, LedgerError)), Run.start(task, settings, folder=folder) as run:
            list(run.rounds())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(folder.rglob("*.draft"))
    begun = (folder / "config.toml").exists()
    with Run.resume(task, folder=folder) if begun else Run.start(task, settings, folder=folder) as run:
        list(run.rounds())
    assert run.summary.rounds == ROUNDS
    assert all(rounds >= ROUNDS for rounds in spent(folder).values())
    assert read_run(folder).figures.rounds == ROUNDS


@pytest.mark.slow
def test_of_processes_that_begin_at_once_one_trains(tmp_path):
    command = [sys.executable, "-m", "bqsgd", "train", "--dataset", "digits", "--clients", "2", "--rounds", "3"]
    command += ["--levels", "17", "--trials", "220", "--epsilon", "30", "--out", str(tmp_path / "run")]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate(timeout=500)[1].decode() for process in started]
    assert sorted(process.returncode for process in started) == [0, 2, 2], errors
    assert sum("is being written by process" in error or "contains a run already" in error for error in errors) == 2
    assert spent(tmp_path / "run") == {0: 3, 1: 3}


@pytest.mark.slow
def test_ranks_on_one_machine_listen_on_loopback_only(tmp_path):
    code = (
        "import psutil, torch.distributed as dist\n"
        "from bqsgd.distributed import join\n"
        "with join() as group:\n"
        "    dist.barrier()\n"
        "    print(*{c.laddr.ip for c in psutil.Process().net_connections() if c.status == 'LISTEN'})\n"
        "    dist.barrier()\n"
    )
    ranks = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    commands = [([sys.executable, "-c", code], environment(RANK=str(rank), **ranks)) for rank in range(2)]
    with processes(commands) as started:
        for exit_code, output in finish(started):
            assert (exit_code, output.split()) == (0, ["127.0.0.1"])


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--dataset", "digits"),
        ("demo",),
        ("flower", "demo"),
        ("report", "run"),
        ("paper", "tradeoffs"),
        ("ledger", "export", "x.ledger"),
    ],
)
def test_an_empty_out_is_not_the_current_folder(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--out", ""]) == 2
    assert "the path is empty" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dataset", ["mnist", "digits"])
def test_a_data_folder_that_is_not_there_is_refused(dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--dataset", dataset, "--data-folder", "nowhere", "--rounds", "1"]) == 2
    assert "the data folder 'nowhere' does not exist" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
