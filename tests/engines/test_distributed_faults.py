"""Faults on real ranks: a client that is late, damaged, foreign, hostile or killed, and a server killed and restarted.

Every process has a time limit, and nothing it left is running after the test.
"""

import numpy as np
import pytest
from distributed_worker import recording, task

from bqsgd._src.ledger import Ledger
from bqsgd._src.records.checkpoint import load_checkpoint
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from distributed_processes import lines, run_ranks
from fault_book import counts, not_ok, seen, together, written_down

ENGINE = "torch.distributed"
SETTINGS = {
    "clients": 4,
    "weights": "equal",
    "rounds": 12,
    "batch_size": 20,
    "clip": "clamp",
    "clip_bound": 0.5,
    "levels": 20,
    "trials": 200,
    "epsilon": 1e6,
    "learning_rate": 1.0,
    "schedule": "constant",
    "reserve_rounds": 4,
    "evaluate_every": 100,
    "run": "a",
}


def statuses(records, client):
    return {
        record["round"]: [entry["status"] for entry in record["clients"] if entry["client"] == client]
        for record in records
    }


def spent(folder, rank):
    with Ledger(folder / f"disk-{rank}" / "ledgers" / f"client-{rank:04}.ledger") as ledger:
        return ledger.spent_rounds


def books(folder, clients):
    """What each client sent and what its ledger counts; never less than was sent."""
    found = [counts(written_down(folder / f"sent-{rank}.jsonl"), spent(folder, rank)) for rank in range(clients)]
    assert all(entry["different"] <= entry["counted"] for entry in found), found
    return found


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nobody late", "late"])
def test_a_round_survives_what_a_client_may_do_and_a_client_that_dies(tmp_path, fault_book, late):
    """A round with a late client lasts as long as its deadline; one with a dead client ends when it is gone."""
    settings = {**SETTINGS, "quorum": 3, "deadline_seconds": 20.0 if late else 280.0}
    mischief = {
        "1": {"1": "corrupt", "5": "kill"},
        "2": {"2": "foreign"},
        "3": {"8": "flood"} | ({"3": "late"} if late else {}),
    }
    ended = run_ranks(tmp_path, settings, mischief=mischief)
    log = ended[0][1]
    assert ended[0][0] == 0, log
    assert ended[1][0] == -9, (log, ended[1][1])
    assert ended[2][0] == 0, ended[2][1]
    records = lines(tmp_path / "rounds.jsonl")

    first = statuses(records, 1)
    assert [first[round] for round in range(5)] == [["ok"], ["refused"], ["ok"], ["ok"], ["ok"]]
    assert all(first[round] == ["missing"] for round in range(5, 9))
    damaged = seen(log, "round 1: client 1 refused: ChecksumMismatch")
    gone = seen(log, "rank 1 is gone: the connection was closed by the other side")

    second = statuses(records, 2)
    assert second == {round: ["refused"] if round == 2 else ["ok"] for round in range(9)}
    foreign = seen(log, "round 2: client 2 refused: WrongOrigin")

    third = statuses(records, 3)
    assert third[0] == third[1] == third[2] == ["ok"]
    if late:
        assert third[3] == ["missing"]
        overdue = seen(log, "round 3: client 3 missing: no answer within 20 s")
        refused = [
            entry for record in records for entry in record["clients"] if "a replay or late" in str(entry["reason"])
        ]
        assert [entry["client"] for entry in refused] == [3]
    assert third[6] == third[7] == ["ok"]
    assert third[8] == ["missing"]
    flood = seen(log, f"rank 3 announced {1 << 40} bytes")

    assert all(statuses(records, 0)[round] == ["ok"] for round in range(9)), "no other client is made late"
    assert len(records) == 9, "two of four are left and the quorum is three: the run stops, with a checkpoint"
    stopped = seen(log, "2 clients are left and a round needs 3 frames: stopping")
    assert load_checkpoint(tmp_path / "disk-0")[1]["round"] == 9

    frames = lines(tmp_path / "frames.jsonl")
    found = books(tmp_path, 4)
    for rank, entry in enumerate(found):  # the killed one keeps its reservation counted
        assert sum(frame["client"] == rank for frame in frames) <= entry["sent"]
        assert entry["counted"] <= entry["sent"] + SETTINGS["reserve_rounds"]
    assert found[0] == {"sent": 9, "different": 9, "counted": 9}, "a clean end gives back what was not sent"

    explained = {(1, 1), (2, 2), (3, 8), *((1, round) for round in range(5, 9))}
    explained |= {(3, round) for round in range(3, 6)} if late else set()
    run = {"run": together(found), "others_not_ok": not_ok(records, explained), "engine": ENGINE, "injected": 1}
    assert run["others_not_ok"] == 0
    if not late:
        return  # the book has each fault once
    fault_book.row(fault="frame damaged on its way", line=damaged, client=found[1], **run)
    fault_book.row(fault="frame in another client's name", line=foreign, client=found[2], **run)
    fault_book.row(fault="client answers after the deadline", line=overdue, client=found[3], **run)
    fault_book.row(fault="client killed in mid-round", line=gone, client=found[1], **run)
    fault_book.row(fault="client announces a message of 2^40 bytes", line=flood, client=found[3], **run)
    fault_book.row(fault="fewer clients left than the quorum", line=stopped, client=None, **run)


def killed_and_resumed(folder, settings):
    """The server dies in round 5 and the job is started again; the line that the clients logged."""
    ended = run_ranks(folder, settings, mischief={"0": {"5": "kill"}})
    assert ended[0][0] == -9
    for code, output in ended[1:]:
        assert code not in (0, -9)
        line = seen(output, "rank 0 is gone: the connection was closed by the other side")
    assert load_checkpoint(folder / "disk-0")[1]["round"] == 4
    ended = run_ranks(folder, settings, resume=True)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    return line


@pytest.mark.slow
def test_a_killed_server_goes_on_from_its_checkpoint_to_the_model_of_one_process(tmp_path, fault_book):
    settings = {**SETTINGS, "clients": 3, "seed": 7, "rounds": 8, "checkpoint_every": 2}
    line = killed_and_resumed(tmp_path, settings)
    one = tmp_path / "one"
    one.mkdir()
    with Run.start(task(3), Config.of(**settings), folder=one) as run:
        recording(run.engine, one / "frames.jsonl")
        for _ in run.rounds():
            pass
    assert np.load(tmp_path / "model.npy").tobytes() == run.model.tobytes()
    expected = lines(one / "frames.jsonl")
    assert len(expected) == 24
    found = lines(tmp_path / "frames.jsonl")
    unique = {(frame["round"], frame["client"]): frame for frame in found}
    assert [unique[frame["round"], frame["client"]] for frame in expected] == expected
    assert all(frame in expected for frame in found), "rounds made again are the same bytes"
    note_killed_server(fault_book, tmp_path, line, fault="server killed in mid-round and restarted, seeded noise")


@pytest.mark.slow
def test_a_killed_server_that_goes_on_with_fresh_noise_counts_every_round_made_again(tmp_path, fault_book):
    settings = {**SETTINGS, "clients": 3, "rounds": 8, "checkpoint_every": 2}
    line = killed_and_resumed(tmp_path, settings)
    found = note_killed_server(fault_book, tmp_path, line, fault="server killed in mid-round and restarted")
    assert all(entry["sent"] == entry["different"] for entry in found), "fresh noise: no two messages are the same"
    assert all(entry["sent"] > 8 for entry in found[1:]), "rounds after the checkpoint were made again"


def note_killed_server(fault_book, folder, line, *, fault):
    found, records = books(folder, 3), lines(folder / "rounds.jsonl")
    assert {record["round"] for record in records} == set(range(8))
    assert all(entry["counted"] >= 8 for entry in found)
    others = not_ok(records)
    assert others == 0
    fault_book.row(
        engine=ENGINE, fault=fault, injected=1, line=line, client=found[0], run=together(found), others_not_ok=others
    )
    return found
