"""`torchrun -m bqsgd train --engine torch-distributed`: the model of one process, bit for bit; a killed rank ends the
job, which can be resumed. And what ranks say to each other before the first round."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from bqsgd._src.cli.app import main
from bqsgd._src.engines.engine import Setup
from bqsgd._src.engines.torch_distributed.client import (
    SettingsDiffer,
    greeting,
    read_greeting,
    read_reply,
    reply_to_greeting,
)
from bqsgd._src.engines.torch_distributed.ranks import PeerLost, as_tensor
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.settings.config import Config
from bqsgd._src.tasks.named import NamedTask
from bqsgd._src.tasks.task import Task
from bqsgd.distributed import join
from distributed_processes import environment, finish, lines, processes, run_ranks
from fault_book import counts, seen, together

RANKS, ROUNDS = 4, 250
COMMAND_WORKER = Path(__file__).parent / "command_worker.py"
SETTINGS = (
    *("--dataset", "digits", "--rounds", str(ROUNDS), "--batch-size", "32", "--levels", "17", "--trials", "220"),
    *("--epsilon", "1000", "--seed", "5", "--evaluate-every", "1000"),
)


def settings_file(folder, **server):
    path = folder / "settings.toml"
    lines = [f"{key} = {value}" for key, value in server.items()]
    path.write_text("\n".join(["[run]", "checkpoint_every = 100000", "[server]", 'weights = "equal"', *lines]))
    return "--config", str(path)


def torchrun(*arguments, ranks=RANKS):
    """torchrun with a file in the place of its own store, which would listen on every interface of the machine."""
    store = f"{arguments[arguments.index('--out') + 1]}.store-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint", store]
    command += ["--rdzv-id", "one", "--local-addr", "127.0.0.1"]
    own = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [*command, "-m", "bqsgd", "train", "--engine", "torch-distributed", *arguments], own


def rank_process(parent, rank):
    """The process that the launcher started as this rank."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    raise AssertionError(f"rank {rank} has no process")


def wait_for_rounds(path, count, launcher):
    until = time.monotonic() + 500
    while not path.exists() or len(path.read_bytes().splitlines()) < count:
        assert launcher.poll() is None, launcher.stdout.read()
        assert time.monotonic() < until
        time.sleep(0.05)


def received_and_counted(folder, rank):
    """The command keeps no note of what a rank sent, so these are the frames that the server took."""
    taken = sum(
        (entry["client"], entry["status"]) == (rank, "ok")
        for record in lines(folder / "rounds.jsonl")
        for entry in record["clients"]
    )
    with Ledger(folder / "ledgers" / f"client-{rank:04}.ledger") as ledger:
        return counts((taken, taken), ledger.spent_rounds)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
def test_a_killed_rank_ends_the_job_with_a_checkpoint_and_resume_goes_on_to_the_end(tmp_path, fault_book):
    folder = tmp_path / "ranks"
    with processes([torchrun(*SETTINGS, *settings_file(tmp_path), "--out", str(folder))]) as started:
        wait_for_rounds(folder / "rounds.jsonl", 3, started[0])
        os.kill(rank_process(started[0].pid, 2), signal.SIGKILL)
        [(code, output)] = finish(started)
    assert code != 0
    line = seen(output, "rank 2 is gone: the connection was closed by the other side")
    assert "client 2 missing: rank 2 is gone" in output
    assert "continue with: the same torchrun command and --resume" in " ".join(output.split())
    stopped = load_checkpoint(folder)[1]["round"]
    assert 3 <= stopped < ROUNDS
    found = [received_and_counted(folder, rank) for rank in range(RANKS)]
    assert all(entry["sent"] <= entry["counted"] for entry in found), found
    assert 3 <= found[2]["sent"] < found[0]["sent"]
    assert found[2]["counted"] % 20 == 0, "killed: all it had reserved stays counted"
    fault_book.row(
        engine="torch.distributed", fault="rank killed under torchrun", injected=1, line=line, client=found[2],
        run=together(found), others_not_ok=None,
    )  # fmt: skip

    with processes([torchrun("--out", str(folder), "--resume")]) as started:
        [(code, output)] = finish(started)
    assert code == 0, output
    assert load_checkpoint(folder)[1]["round"] == ROUNDS
    assert [record["round"] for record in lines(folder / "rounds.jsonl")] == list(range(ROUNDS))


def under_torchrun(arguments):
    with processes([torchrun(*arguments, ranks=2)]) as started:
        [(code, output)] = finish(started)
    assert code == 0, output


def in_forks(arguments):
    """The command on ranks that are forked, with the variables that torchrun sets."""
    ended = run_ranks(None, list(arguments), script=COMMAND_WORKER, ranks=2)
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.parametrize(
    ("start", "more", "server"),
    [
        pytest.param(in_forks, (), {}, id="all, whole models, forks"),
        pytest.param(under_torchrun, (), {}, id="all, whole models", marks=pytest.mark.slow),
        pytest.param(
            under_torchrun, ("--cohort", "1", "--force"), {"down_bits": 5}, id="cohort, changes", marks=pytest.mark.slow
        ),
    ],
)
def test_the_model_is_that_of_one_process_bit_for_bit(tmp_path, capsys, start, more, server):
    settings = [*SETTINGS, *settings_file(tmp_path, **server), "--rounds", "12", *more]
    start([*settings, "--out", str(tmp_path / "ranks")])
    assert main(["train", *settings, "--clients", "2", "--out", str(tmp_path / "one")]) == 0
    capsys.readouterr()
    several, one = (load_checkpoint(tmp_path / name) for name in ("ranks", "one"))
    assert several[0].keys() == one[0].keys()
    assert all(several[0][name].tobytes() == one[0][name].tobytes() for name in one[0])
    books = [
        [{key: record[key] for key in ("bytes_up", "bytes_down", "clients", "stepped")} for record in found]
        for found in (lines(tmp_path / name / "rounds.jsonl") for name in ("ranks", "one"))
    ]
    assert books[0] == books[1]
    assert all(entry["status"] == "ok" for record in books[0] for entry in record["clients"])
    assert main(["report", str(tmp_path / "ranks"), "--out", str(tmp_path / "ranks.html")]) == 0
    assert "12 rounds" in (tmp_path / "ranks.html").read_text()


def test_ranks_agree_on_settings_before_anything_is_sent():
    def task(**settings):
        return Task(make_model=None, source=NamedTask.of(**settings))

    config, here = Config.of(clients=3, rounds=5, run="a", seed=1), task(data_folder="here")
    first = memoryview(greeting(config, here, resuming=True))
    assert read_greeting(first, config.but(run=None), task(data_folder="there")) == ("a", True)
    with pytest.raises(SettingsDiffer, match="epsilon, rounds"):
        read_greeting(first, config.but(rounds=6, epsilon=2.0), here)
    with pytest.raises(SettingsDiffer, match=r"data\.dataset"):
        read_greeting(first, config, task(dataset="digits"))
    with pytest.raises(SettingsDiffer, match="'b'"):
        read_greeting(first, config.but(run="b"), here)
    assert read_reply(memoryview(reply_to_greeting(samples=7))) == 7
    hidden = reply_to_greeting(samples=None)
    assert b"samples" not in hidden
    assert read_reply(memoryview(hidden)) is None


def counted(claimed, **settings):
    config = Config.of(clients=3, batch_size=20, **settings)
    setup = Setup(task=Task(make_model=None), config=config, folder=None, resuming=False, dimension=6)
    return setup.counted_samples(1, claimed)


def test_a_client_counts_as_what_it_claims_unless_the_guarantee_hides_it():
    assert [counted(claimed) for claimed in (1, 7, 2**40 - 1)] == [1, 7, 2**40 - 1]
    assert [counted(claimed, unit="client") for claimed in (None, 7, "many")] == [20, 20, 20]


@pytest.mark.parametrize("claimed", [None, 0, -1, True, 2.0, "7", 2**40, [7]])
def test_a_claim_that_is_not_a_number_of_samples_is_refused(claimed):
    with pytest.raises(InvalidParameter, match="client 1 claims"):
        counted(claimed)


def test_fixed_size_batches_need_as_many_samples():
    assert counted(20, sampling="fixed") == 20
    with pytest.raises(InvalidParameter, match="client 1 claims 19 samples; this run needs 20"):
        counted(19, sampling="fixed")


@pytest.mark.parametrize("message", [b"", b"[]", b"{", b"[" * 60000, b'{"format": "other"}', b"\x80\x02"])
def test_a_first_message_that_is_none_is_refused(message):
    with pytest.raises(PeerLost):
        read_reply(memoryview(message))
    for greeted in (message, reply_to_greeting(samples=0)):
        with pytest.raises(PeerLost):
            read_greeting(memoryview(greeted), Config(), Task(make_model=None))


def test_a_process_without_a_launcher_or_a_backend_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InvalidParameter, match="torchrun"), join():
        pass
    with pytest.raises(InvalidParameter, match="gloo, nccl, mpi"), join(backend="carrier-pigeon"):
        pass
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidParameter, match="that this build of torch has, got 'mpi'"), join(backend="mpi"):
        pass


def test_the_command_asks_for_a_folder_and_a_known_engine(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert main(["train", "--engine", "torch-distributed"]) == 2
    assert "needs --out" in capsys.readouterr().err
    assert main(["train", "--engine", "abacus"]) == 2
    assert "in-process or torch-distributed" in capsys.readouterr().err


def test_bytes_become_tensors_and_back():
    assert as_tensor(b"").numel() == 0
    assert bytes(as_tensor(b"\x00\xff").numpy()) == b"\x00\xff"
    frame = bytearray(b"ab")
    tensor = as_tensor(frame)
    frame[0] = 0
    assert tensor.tolist() == [0, 98], "a frame is not copied on its way out"
    assert as_tensor(torch.ones(2, dtype=torch.uint8)).tolist() == [1, 1]
