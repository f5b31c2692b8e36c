"""Secure sums over torch.distributed: the bytes of one process, and faults on real processes."""

import hashlib
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from secure_worker import DIMENSION, SEED, Mischief, small_task, write_keys
from test_exchange import Rank

from bqsgd._src.client.sums import SumSetup
from bqsgd._src.engines.engine import Setup, make_client
from bqsgd._src.engines.in_process import in_process
from bqsgd._src.engines.torch_distributed.engine import TorchDistributed
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.ledger import Ledger
from bqsgd._src.run import Run
from bqsgd._src.settings.config import Config
from distributed_processes import lines, run_ranks
from fault_book import counts, not_ok, seen, together

WORKER = Path(__file__).parent / "secure_worker.py"
SHIM = WORKER.with_name("clock_shim.c")
ENGINE = "torch.distributed"
CLIENTS = 4
ANSWERS = {
    "BATCH": "keys", "KEY_BUNDLE": "shares", "MODEL": "masked vector", "SURVIVORS": "signature",
    "CERTIFICATE": "unmasking",
}  # fmt: skip
"""What a client answers each message of the server with."""
SETTINGS = {
    "clients": CLIENTS, "rounds": 6, "batch_size": 16, "rate": 0.25, "levels": 20, "trials": 120, "epsilon": 50.0,
    "clip": "l2", "clip_norm": 1.0, "range": 1.0, "secure": True, "dropouts": 1, "key_rounds": 3,
    "evaluate_every": 3, "checkpoint_every": 1, "run": "ranks",
}  # fmt: skip


def over_ranks(folder):
    """The engine of ranks, without processes: each answers at once."""

    def make(setup):
        setup.check_separate()
        clients = [
            make_client(setup, number=number, model=setup.task.make_model(), share=share)
            for number, share in enumerate(setup.task.shares)
        ]
        for client in clients:
            client.answer = Mischief(client, {}, folder)
        samples = {client.client: client.public_size for client in clients}
        return TorchDistributed(clients[0], [Rank(client) for client in clients[1:]], samples=samples, most_bytes=10**7)

    return make


def sent(folder):
    return {client: lines(folder / f"sent-{client}.jsonl") for client in range(CLIENTS)}


def one_process(folder, **changes):
    """What every client sends, and the model, in one process with the same seed."""

    def make(setup):
        engine = in_process(setup)
        for client in engine.clients.values():
            client.answer = Mischief(client, {}, folder)
        return engine

    folder.mkdir()
    config = Config.of(**SETTINGS | changes, seed=SEED, workers=1)
    with Run.start(small_task(CLIENTS), config, engine=make, force=True) as run:
        records = list(run.rounds())
    assert all(record.used == CLIENTS for record in records)
    assert len({record.sum_width for record in records}) > 1  # key batches of several widths
    return sent(folder), run.model


def test_the_same_bytes_as_in_one_process(tmp_path):
    expected, model = one_process(tmp_path / "one")
    assert {note["step"] for note in expected[2]} == {
        "BATCH", "KEY_BUNDLE", "SHARE_BUNDLE", "MODEL", "SURVIVORS", "CERTIFICATE",
    }  # fmt: skip
    config = Config.of(**SETTINGS, seed=SEED, **write_keys(tmp_path / "keys", CLIENTS))
    with Run.start(small_task(CLIENTS), config, engine=over_ranks(tmp_path), force=True) as run:
        list(run.rounds())
    assert sent(tmp_path) == expected
    np.testing.assert_array_equal(run.model, model)
    assert run.server.way_down.descent is not None  # ranks were sent steps, and none asked for the whole model


def test_groups_have_the_same_bytes_as_in_one_process(tmp_path):
    groups = {"groups": 2, "dropouts": 0, "aggregation": "median", "rounds": 3}
    expected, model = one_process(tmp_path / "one", **groups)
    config = Config.of(**SETTINGS | groups, seed=SEED, **write_keys(tmp_path / "keys", CLIENTS))
    with Run.start(small_task(CLIENTS), config, engine=over_ranks(tmp_path), force=True) as run:
        list(run.rounds())
    assert sent(tmp_path) == expected
    np.testing.assert_array_equal(run.model, model)


def test_no_roster_no_sum_between_processes(tmp_path):
    with pytest.raises(InvalidParameter, match="need a roster"):
        Run.start(small_task(CLIENTS), Config.of(**SETTINGS, seed=1), engine=over_ranks(tmp_path), force=True)
    keys = write_keys(tmp_path / "keys", CLIENTS)
    with pytest.raises(InvalidParameter, match="leave both out"):
        Run.start(small_task(CLIENTS), Config.of(**SETTINGS, seed=1, **keys), force=True)
    with pytest.raises(InvalidParameter, match="must name clients 0 to 4"):
        Run.start(small_task(5), Config.of(**SETTINGS | keys | {"clients": 5}, seed=1), engine=over_ranks(tmp_path))
    with pytest.raises(InvalidParameter, match="needs its identity key"):
        Run.start(
            small_task(CLIENTS), Config.of(**SETTINGS, seed=1, roster=keys["roster"]), engine=over_ranks(tmp_path)
        )
    wrong = write_keys(tmp_path / "keys", CLIENTS, generation=1)
    mixed = {"roster": keys["roster"], "identity": wrong["identity"]}
    with pytest.raises(InvalidParameter, match="not the one that the roster has"):
        Run.start(small_task(CLIENTS), Config.of(**SETTINGS, seed=1, **mixed), engine=over_ranks(tmp_path))


def test_a_roster_that_changed_is_refused(tmp_path):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    config = Config.of(**SETTINGS, seed=SEED, **keys)
    folder = tmp_path / "run"
    with Run.start(small_task(CLIENTS), config, folder=folder, engine=over_ranks(tmp_path), force=True) as run:
        next(run.rounds())
    digest = hashlib.sha256(Path(keys["roster"]).read_bytes()).hexdigest()
    other = write_keys(tmp_path / "keys", CLIENTS, generation=1)
    Path(keys["roster"]).write_text(Path(other["roster"]).read_text())
    assert hashlib.sha256(Path(keys["roster"]).read_bytes()).hexdigest() != digest
    with pytest.raises(InvalidParameter, match="not the roster that the run began with"):
        Run.resume(small_task(CLIENTS), folder=folder, engine=over_ranks(tmp_path))


def test_no_message_is_longer_than_what_a_rank_reads():
    from bqsgd._src.client.sums import most_sum_bytes

    for dropouts, colluders, key_rounds in ((0, 0, 1), (1, 0, 7), (1, 1, 3)):
        config = Config.of(
            **SETTINGS | {"clients": 5, "dropouts": dropouts, "colluders": colluders, "key_rounds": key_rounds}, seed=1
        )
        sums = SumSetup.of(config, run="ranks", dimension=DIMENSION)
        setup = Setup(task=small_task(5), config=config, folder=None, resuming=False, dimension=DIMENSION, sums=sums)
        longest = []
        with closing(in_process(setup)) as engine:
            real = engine.exchange

            def exchange(messages, *, round, real=real, longest=longest):
                longest += [len(message) for message in messages.values() if message[:4] == b"BQSA"]
                masking = any(message[:4] != b"BQSA" for message in messages.values())
                for answer in real(messages, round=round):
                    longest += [] if masking else [len(answer.frame)]  # `most_sum_bytes` leaves out masked vectors
                    yield answer

            engine.exchange = exchange
            with Run.start(small_task(5), config, engine=lambda setup: engine, force=True) as run:
                next(run.rounds())
        assert 0 < max(longest) <= most_sum_bytes(config)


def run(folder, keys, **options):
    return run_ranks(folder, SETTINGS | keys, script=WORKER, **options)


def statuses(records, client):
    return ["ok" if entry["status"] == "ok" else "no" for record in records for entry in record["clients"]
            if entry["client"] == client]  # fmt: skip


def books(folder):
    """What each client sent masked, and what its ledger counts; never less."""
    found = []
    for client in range(CLIENTS):
        notes = [note["sha"] for note in lines(folder / f"sent-{client}.jsonl") if note["step"] == "MODEL"]
        assert len(set(notes)) == len(notes), "a mask was used twice"
        with Ledger(folder / f"disk-{client}" / "ledgers" / f"client-{client:04}.ledger") as ledger:
            found.append(counts((len(notes), len(notes)), ledger.spent_rounds))
    assert all(entry["sent"] <= entry["counted"] for entry in found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", ["BATCH:3", "KEY_BUNDLE:3", "MODEL:2", "SURVIVORS:2", "CERTIFICATE:2"])
def test_a_rank_killed_at_any_step_costs_no_round(tmp_path, step, fault_book):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    ended = run(tmp_path, keys, mischief={"3": {step: "kill"}})
    assert ended[0][0] == 0, ended[0][1]
    assert ended[3][0] == -9
    records = lines(tmp_path / "rounds.jsonl")
    assert [record["stepped"] for record in records] == [True] * 6
    kind, at = step.split(":")
    last = int(at) + (kind in ("SURVIVORS", "CERTIFICATE"))  # its masked vector was there by then
    assert statuses(records, 3) == ["ok"] * last + ["no"] * (6 - last)
    found = books(tmp_path)
    assert found[3]["counted"] == int(at) + (kind in ("MODEL", "SURVIVORS", "CERTIFICATE"))
    assert [entry["counted"] for entry in found[:3]] == [6, 6, 6]
    others = not_ok(records, {(3, round) for round in range(last, 6)})
    assert others == 0
    fault_book.row(
        engine=ENGINE,
        fault=f"secure sum: client killed before its {ANSWERS[kind]} left",
        injected=1,
        line=seen(ended[0][1], "rank 3 is gone: "),
        client=found[3],
        run=together(found),
        others_not_ok=others,
    )


@pytest.mark.slow
def test_a_late_rank_misses_the_round_and_comes_back(tmp_path, fault_book):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    settings = {"deadline_seconds": 20.0}
    ended = run_ranks(tmp_path, SETTINGS | keys | settings, script=WORKER, mischief={"2": {"MODEL:1": "late"}})
    assert ended[0][0] == 0, ended[0][1]
    records = lines(tmp_path / "rounds.jsonl")
    assert all(record["stepped"] for record in records)
    assert statuses(records, 2)[1] == "no"
    assert statuses(records, 2)[-1] == "ok"
    found = books(tmp_path)
    fault_book.row(
        engine=ENGINE,
        fault="secure sum: client answers after the deadline",
        injected=1,
        line=seen(ended[0][1], "round 1: client 2 missing: no answer within 20 s"),
        client=found[2],
        run=together(found),
        others_not_ok=not_ok(records, {(2, round) for round in range(1, 5)}),
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", ["MODEL:3", "SURVIVORS:3", "CERTIFICATE:3"])
def test_a_killed_server_goes_on_with_new_keys(tmp_path, step, fault_book):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    ended = run(tmp_path, keys, mischief={"0": {step: "kill"}})
    assert ended[0][0] == -9
    line = seen(ended[1][1], "rank 0 is gone: ")
    ended = run(tmp_path, keys, resume=True)
    assert all(code == 0 for code, _ in ended), ended
    records = lines(tmp_path / "rounds.jsonl")
    assert [record["round"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert all(record["stepped"] and record["clients"][3]["status"] == "ok" for record in records)
    found = books(tmp_path)
    assert all(entry["counted"] <= 7 for entry in found), "round 3 was made a second time, and no other"
    fault_book.row(
        engine=ENGINE,
        fault=f"secure sum: server killed when the {ANSWERS[step.split(':')[0]]}s were due, and restarted",
        injected=1,
        line=line,
        client=None,
        run=together(found),
        others_not_ok=not_ok(records),
    )


@pytest.mark.slow
def test_ranks_whose_keys_are_not_in_the_roster_send_nothing(tmp_path):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    other = write_keys(tmp_path / "keys", CLIENTS, generation=1)
    ended = run(tmp_path, keys | {"identity": other["identity"]})
    assert all(code != 0 for code, _ in ended)
    assert "not the one that the roster has" in ended[0][1]
    assert not list(tmp_path.glob("sent-*.jsonl"))


DAMAGED = ["BATCH:0", "MODEL:3", "SURVIVORS:4", "CERTIFICATE:5", "KEY_BUNDLE:6", "KEY_BUNDLE:7", "KEY_BUNDLE:8"]
"""Steps at which a client's answer is damaged: each of a sum once; the last key batch begins in round 6, 7 or 8."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["garbage", "long"])
def test_a_rank_whose_answers_are_damaged_at_every_step_spoils_no_sum(tmp_path, what, fault_book):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    settings = SETTINGS | keys | {"rounds": 9}
    ended = run_ranks(tmp_path, settings, script=WORKER, mischief={"3": dict.fromkeys(DAMAGED, what)})
    assert [code for code, _ in ended] == [0] * 4, ended
    records = lines(tmp_path / "rounds.jsonl")
    assert [record["stepped"] for record in records] == [True] * 9
    had = statuses(records, 3)
    assert had[:6] == ["no", "ok", "ok", "no", "ok", "ok"], "its vector was there when the last two were damaged"
    assert "no" in had[6:]
    found = books(tmp_path)
    others = not_ok(records, {(3, round) for round in range(9)})
    assert others == 0
    fault_book.row(
        engine=ENGINE,
        fault=f"secure sum: a client's answers at each step {DAMAGED_AS[what]}",
        injected=5,
        line=seen(ended[0][1], "round 3: client 3 "),
        client=found[3],
        run=together(found),
        others_not_ok=others,
    )


DAMAGED_AS = {"garbage": "replaced by random bytes", "long": "followed by seven bytes"}


LIES = {
    "share": (
        {"1": {"MODEL:2": "kill"}, "3": {"CERTIFICATE:2": "share"}},
        "client reveals a random share of the secret of one that was killed",
        "round 2: client 3 lied about secrets it shares with client 1",
        {1: 2},
    ),
    "seed": (
        {"3": {"CERTIFICATE:2": "seed"}},
        "client reveals a random seed in the place of its own",
        "round 2: client 3 lied about its own seed",
        {3: 3},
    ),
}
"""What is revealed: the mischief, its name, the line in the log, and how many sums a client is in that misses some."""


@pytest.mark.slow
@pytest.mark.parametrize("what", LIES)
def test_a_rank_that_lies_about_a_secret_is_named_and_costs_no_sum(tmp_path, what, fault_book):
    mischief, fault, line, sums = LIES[what]
    ended = run(tmp_path, write_keys(tmp_path / "keys", CLIENTS), mischief=mischief)
    assert ended[0][0] == 0, ended[0][1]
    records = lines(tmp_path / "rounds.jsonl")
    assert [record["stepped"] for record in records] == [True] * 6
    for client in range(CLIENTS):
        last = sums.get(client, 6)
        assert statuses(records, client) == ["ok"] * last + ["no"] * (6 - last)
    assert ended[0][1].count("lied about") == 1, "nobody else is named"
    found = books(tmp_path)
    others = not_ok(records, {(client, round) for client, last in sums.items() for round in range(last, 6)})
    assert others == 0
    fault_book.row(
        engine=ENGINE,
        fault=f"secure sum: {fault}",
        injected=1,
        line=seen(ended[0][1], line),
        client=found[3],
        run=together(found),
        others_not_ok=others,
    )


@pytest.mark.slow
def test_a_rank_without_memory_counts_what_it_sends(tmp_path, fault_book):
    keys = write_keys(tmp_path / "keys", CLIENTS)
    ended = run(tmp_path, keys, mischief={"3": {"MODEL:2": "memory"}})
    assert ended[0][0] == 0, ended[0][1]
    records = lines(tmp_path / "rounds.jsonl")
    assert [record["stepped"] for record in records] == [True] * 6
    found = books(tmp_path)
    others = not_ok(records, {(3, round) for round in range(2, 6)})
    assert others == 0
    fault_book.row(
        engine=ENGINE,
        fault="secure sum: client gets no more memory (`ulimit -v`) when its masked vector is due",
        injected=1,
        line=seen(ended[0][1], "round 2: client 3 missing: "),
        client=found[3],
        run=together(found),
        others_not_ok=others,
    )


@pytest.mark.slow
def test_a_clock_that_jumps_by_days_changes_nothing(tmp_path, monkeypatch):
    shim = tmp_path / "shim.so"
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", shim, SHIM, "-ldl"], check=False, capture_output=True
    )
    if built.returncode:
        pytest.skip("no C compiler")
    expected, model = one_process(tmp_path / "one")
    monkeypatch.setenv("LD_PRELOAD", str(shim))
    monkeypatch.setenv("CLOCK_SHIFT", str(tmp_path / "shift"))
    keys = write_keys(tmp_path / "keys", CLIENTS)
    jumps = {"MODEL:1": "clock 864000", "SURVIVORS:2": "clock -864000", "MODEL:3": "clock 0.5e9"}
    settings = SETTINGS | keys | {"deadline_seconds": 60.0, "seed": SEED}
    ended = run_ranks(tmp_path, settings, script=WORKER, mischief={"2": jumps})
    assert [code for code, _ in ended] == [0] * 4, ended
    records = lines(tmp_path / "rounds.jsonl")
    assert not_ok(records) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "model.npy"), model)
    assert sent(tmp_path) == expected
    books(tmp_path)
    with Ledger(tmp_path / "disk-2" / "ledgers" / "client-0002.ledger") as ledger:
        years = [int(entry.time[:4]) for entry in ledger.entries]
    assert max(years) - min(years) >= 15, "the clock did jump"
