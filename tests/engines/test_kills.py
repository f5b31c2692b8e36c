"""kill -9 again and again: the same final model under seeded noise, and never a message that is not in a ledger."""

import os
import random
import signal
import time
from collections import Counter

import numpy as np
import pytest

from bqsgd._src.ledger import Ledger
from bqsgd._src.records.folder import read_rounds
from bqsgd._src.run import Run, named
from digits_fixtures import digits_task
from fault_book import counts, not_ok, together
from forked import fork_server

KILLS = 4


def work(task, config, folder):
    """What `bqsgd train --resume` does, with every message that leaves written down first thing."""
    resuming = (folder / "config.toml").exists()
    with Run.resume(task, folder=folder) if resuming else Run.start(task, config, folder=folder) as run:
        log = os.open(folder / "sent.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for client in run.engine.clients.values():

            def answer(message, client=client, ask=client.answer):
                reply = ask(message)
                os.write(log, f"{client.client} {int.from_bytes(reply.frame[32:40], 'little')}\n".encode())
                return reply

            client.answer = answer
        list(run.rounds())
        os.close(log)
    return run


def killed_run(config, folder, kills):
    """Kill `kills` processes, each after it sent so many messages more; returns how many died at work.

    The moments are counted in messages, not in seconds: on a busy machine a process may do nothing for a while. Each is
    forked from a server that has only imported torch: torch's threads, which other tests of this process may have
    used, do not survive a fork.
    """
    moments, at_work, processes = random.Random(5), 0, fork_server()
    for _ in range(kills):
        process = processes.Process(target=work_on_digits, args=(config, folder), daemon=True)
        process.start()
        enough = messages_sent(folder) + moments.randrange(60)
        while messages_sent(folder) < enough and process.is_alive():
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.005))  # within a round, too
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL), "a process raised an error: see what it printed"
        at_work += process.exitcode != 0
    return at_work


def work_on_digits(config, folder):
    work(digits_task(), config, folder)


def messages_sent(folder):
    log = folder / "sent.log"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def sent(folder):
    lines = (folder / "sent.log").read_text().splitlines()
    return Counter(tuple(map(int, line.split())) for line in lines)


@pytest.mark.parametrize(("kills", "rounds"), [(3, 40), pytest.param(20, 250, marks=pytest.mark.slow)])
def test_same_model_after_many_kills(task, settings, tmp_path, kills, rounds):
    config = named(
        settings(rounds=rounds, workers=1, checkpoint_every=7, reserve_rounds=10, epsilon=900.0, evaluate_every=100)
    )
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = work(task, config, tmp_path / "whole")
    at_work = killed_run(config, tmp_path / "killed", kills)
    run = work(task, config, tmp_path / "killed")
    assert at_work >= kills // 2
    np.testing.assert_array_equal(run.server.model, whole.server.model)
    assert [record.round for record in read_rounds(tmp_path / "killed")] == list(range(rounds))
    messages = sent(tmp_path / "killed")
    assert set(messages) == {(client, round_) for client in range(4) for round_ in range(rounds)}
    assert messages.total() > 4 * rounds  # some rounds were made again, and were the same bytes
    for number in range(4):
        with Ledger(tmp_path / f"killed/ledgers/client-{number:04}.ledger") as ledger:
            assert ledger.spent_rounds == rounds


def test_no_uncounted_message_with_fresh_noise(task, settings, tmp_path, fault_book):
    config = named(
        settings(
            seed=None, rounds=40, workers=1, checkpoint_every=7, reserve_rounds=10, epsilon=900.0, evaluate_every=40
        )
    )
    at_work = killed_run(config, tmp_path, KILLS)
    assert at_work > 0
    run = work(task, config, tmp_path)
    messages, found = sent(tmp_path), []
    for number in range(4):
        by_client = sum(count for (client, _), count in messages.items() if client == number)
        with Ledger(tmp_path / f"ledgers/client-{number:04}.ledger") as ledger:
            found.append(counts((by_client, by_client), ledger.spent_rounds))
            assert by_client <= ledger.spent_rounds
            assert ledger.guarantee() == run.engine.clients[number].spending.guarantee(delta=1e-5)
    records = [record.to_dict() for record in read_rounds(tmp_path)]
    assert len(records) == 40
    assert not list(tmp_path.rglob(".*")), "drafts and locks of killed processes are taken over by the next"
    fault_book.row(
        engine="in-process",
        fault="the whole process killed at random moments and resumed",
        injected=at_work,
        line=None,
        client=None,
        run=together(found),
        others_not_ok=not_ok(records),
    )
