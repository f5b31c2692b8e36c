"""Faults on real ranks: a client that is late, damaged, foreign, hostile or killed, and a server killed and restarted.

Every process has a time limit, and nothing it left is running after the test.
"""

import numpy as np
from distributed_processes import lines, run_ranks
from distributed_worker import recording, task

from bqsgd.engines.session import Session
from bqsgd.privacy.ledger import Ledger
from bqsgd.training.checkpoint import load_checkpoint
from bqsgd.training.config import Config

SETTINGS = {
    "clients": 4,
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


def test_a_round_survives_what_a_client_may_do_and_a_client_that_dies(tmp_path):
    settings = {**SETTINGS, "quorum": 3, "deadline_seconds": 6.0}
    mischief = {
        "1": {"1": "corrupt", "5": "kill"},
        "2": {"2": "foreign"},
        "3": {"3": "late", "8": "flood"},
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
    assert "round 1, client 1: refused (ChecksumMismatch" in log
    assert "rank 1 is gone: the connection was closed by the other side" in log

    second = statuses(records, 2)
    assert second == {round: ["refused"] if round == 2 else ["ok"] for round in range(9)}
    assert "round 2, client 2: refused (WrongOrigin" in log

    third = statuses(records, 3)
    assert third[0] == third[1] == third[2] == ["ok"]
    assert third[3] == ["missing"]
    assert "round 3, client 3: missing (no frame within 6 s)" in log
    late = [entry for record in records for entry in record["clients"] if "a replay or late" in (entry["reason"] or "")]
    assert [entry["client"] for entry in late] == [3]
    assert third[6] == third[7] == ["ok"]
    assert third[8] == ["missing"]
    assert f"rank 3 announced {1 << 40} bytes" in log

    assert all(statuses(records, 0)[round] == ["ok"] for round in range(9)), "no other client is made late"
    assert len(records) == 9, "two of four are left and the quorum is three: the run stops, with a checkpoint"
    assert "2 of 4 clients are left and a round needs 3: stopping" in log
    assert load_checkpoint(tmp_path / "disk-0")[1]["round"] == 9

    frames = lines(tmp_path / "frames.jsonl")
    for rank in range(4):  # nothing counted less than sent; the killed one keeps its reservation counted
        sent = sum(frame["client"] == rank for frame in frames)
        assert sent <= spent(tmp_path, rank) <= sent + SETTINGS["reserve_rounds"]
    assert spent(tmp_path, 0) == 9, "a clean end gives back what was reserved and not sent"


def test_a_killed_server_goes_on_from_its_checkpoint_to_the_model_of_one_process(tmp_path):
    settings = {**SETTINGS, "clients": 3, "seed": 7, "rounds": 8, "checkpoint_every": 2}
    ended = run_ranks(tmp_path, settings, mischief={"0": {"5": "kill"}})
    assert ended[0][0] == -9
    for code, output in ended[1:]:
        assert code not in (0, -9)
        assert "rank 0 is gone: the connection was closed by the other side" in output
    assert load_checkpoint(tmp_path / "disk-0")[1]["round"] == 4

    ended = run_ranks(tmp_path, settings, resume=True)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    one = tmp_path / "one"
    one.mkdir()
    with Session.start(task(3), Config(**settings), folder=one) as session:
        recording(session.engine, one / "frames.jsonl")
        for _ in session.rounds():
            pass
    assert np.load(tmp_path / "model.npy").tobytes() == session.result().model.tobytes()
    expected = lines(one / "frames.jsonl")
    assert len(expected) == 24
    found = lines(tmp_path / "frames.jsonl")
    unique = {(frame["round"], frame["client"]): frame for frame in found}
    assert [unique[frame["round"], frame["client"]] for frame in expected] == expected
    assert all(frame in expected for frame in found), "rounds made again are the same bytes"
    for rank in range(3):
        assert spent(tmp_path, rank) >= 8
