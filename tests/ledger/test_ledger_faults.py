"""Real processes against real files: kill -9 at any point, and two clients of one ledger.

The children are forked so that they start in milliseconds and know what the parent's accountant does; each opens the
ledger itself and writes a line to a pipe for every message it "sends", after the ledger let it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from bqsgd._src.errors import BudgetExhausted
from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=1, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.NONE)),
)
KILLS = 50
FORK = multiprocessing.get_context("fork")


def _send(path: Path, run: str, block: int, epsilon: float, pipe: int) -> None:
    with Ledger.open(path, client=1, budget_epsilon=epsilon, budget_delta=1e-5) as ledger:
        number = 0
        try:
            while True:
                if block > 1 and number % block == 0:
                    ledger.reserve(RELEASE, run=run, first_round=number, rounds=block, seeded=False)
                ledger.spend(RELEASE, run=run, round=number, seeded=False)
                os.write(pipe, f"sent {number}\n".encode())
                number += 1
        except BudgetExhausted:
            os.write(pipe, b"exhausted\n")


def start(path: Path, *, run: str, block: int, epsilon: float) -> tuple[multiprocessing.process.BaseProcess, int]:
    read_end, write_end = os.pipe()
    process = FORK.Process(target=_send, args=(path, run, block, epsilon, write_end))
    process.start()
    os.close(write_end)
    return process, read_end


def lines(read_end: int) -> list[str]:
    with os.fdopen(read_end) as stream:
        return stream.read().splitlines()


@pytest.mark.parametrize("kills", [10, pytest.param(KILLS, marks=pytest.mark.slow)])
def test_kills_never_lose_a_sent_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    path, rng, sent = tmp_path / "ledger", np.random.default_rng(5), 0
    # How much a message costs has no part in this: every one costs the same, and nobody waits for an accountant.
    monkeypatch.setattr(Accountant, "epsilon", lambda self, delta: 1e-6 * sum(rounds for _, rounds in self.spent))
    for kill in range(kills):
        process, pipe = start(path, run=f"run {kill}", block=int(rng.choice([1, 7])), epsilon=1e4)
        if kill % 5:  # in the middle of sending; every fifth kill comes at the start instead
            assert os.read(pipe, 5) == b"sent "
        time.sleep(float(rng.uniform(0, 0.06)))
        process.kill()
        process.join()
        sent += len(lines(pipe))
        if path.exists():
            with Ledger(path) as ledger:
                assert ledger.spent_rounds >= sent, f"kill {kill}: {sent} sent, {ledger.spent_rounds} counted"
    with Ledger(path) as ledger:
        assert ledger.spent_rounds <= sent + 8 * kills  # and over-count by no more than a block each
    # A kill may leave a journal that was never needed (SQLite clears it at the next write), and files not yet linked.
    expected = (path.name, f"{path.name}-journal")
    leftovers = [e.name for e in tmp_path.iterdir() if e.name not in expected and not e.name.startswith(".ledger.")]
    assert leftovers == []


@pytest.mark.parametrize("block", [1, 4])
def test_two_processes_together_stay_within_the_budget(tmp_path: Path, block: int) -> None:
    path, epsilon = tmp_path / "ledger", 0.5
    with Ledger.open(tmp_path / "other", client=1, budget_epsilon=epsilon, budget_delta=1e-5) as other:
        assert other.headroom(RELEASE) > 2 * block  # what the children will ask, so that the accountant answers once
    started = [start(path, run=name, block=block, epsilon=epsilon) for name in ("left", "right")]
    outputs = [lines(pipe) for _, pipe in started]
    for process, _ in started:
        process.join()
        assert process.exitcode == 0
    assert all(output[-1] == "exhausted" for output in outputs)
    sent = sum(len(output) - 1 for output in outputs)
    with Ledger(path) as ledger:
        assert ledger.spent_rounds == sent
        guarantee = ledger.guarantee()
        assert guarantee is not None
        assert guarantee.epsilon <= epsilon
        assert ledger.headroom(RELEASE) < block


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger", client=1, budget_epsilon=5.0, budget_delta=1e-5) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=3, seeded=False)

        def child() -> None:
            try:
                ledger.spend(RELEASE, run="a", round=0, seeded=False)
            except Exception as error:
                os._exit(7 if "fork" in str(error) else 8)
            os._exit(9)

        process = FORK.Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 7
        ledger.spend(RELEASE, run="a", round=0, seeded=False)
