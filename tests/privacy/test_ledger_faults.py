"""Real processes against real files: kill -9 at any point, and two clients of one ledger."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bqsgd.params import Mechanism
from bqsgd.privacy.ledger import Ledger
from bqsgd.release import Release, Sampling, Scheme, Sensitivity

RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    dimension=4,
    sensitivity=Sensitivity(linf=0.125),
    sampling=Sampling(scheme=Scheme.POISSON, rate=0.1),
)
KILLS = 50

SENDER = """
import json, sys
from bqsgd.errors import BudgetExhausted
from bqsgd.privacy.ledger import Ledger
from bqsgd.release import Release
path, run, block, epsilon, release = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
release = Release.from_dict(json.loads(release))
with Ledger.open(path, client=1, budget_epsilon=epsilon, budget_delta=1e-5) as ledger:
    print("ready", flush=True)
    sys.stdin.readline()
    number = 0
    try:
        while True:
            if block > 1 and number % block == 0:
                ledger.reserve(release, run=run, first_round=number, rounds=block, seeded=False)
            ledger.spend(release, run=run, round=number, seeded=False)
            sys.stdout.write(f"sent {number}\\n"); sys.stdout.flush()
            number += 1
    except BudgetExhausted:
        print("exhausted", flush=True)
"""


def start(path: Path, *, run: str, block: int, epsilon: float) -> subprocess.Popen[str]:
    import json

    arguments = [str(path), run, str(block), str(epsilon), json.dumps(RELEASE.to_dict())]
    return subprocess.Popen(
        [sys.executable, "-c", SENDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_fifty_kills_never_lose_a_sent_message(tmp_path: Path) -> None:
    path, rng, sent = tmp_path / "ledger", np.random.default_rng(5), 0
    for kill in range(KILLS):
        process = start(path, run=f"run {kill}", block=int(rng.choice([1, 7])), epsilon=1e4)
        assert process.stdin is not None
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("go\n")
            process.stdin.flush()
            time.sleep(float(rng.uniform(0, 0.06)))
            process.kill()
            lines = process.stdout.read().splitlines()
        sent += sum(line.startswith("sent ") for line in lines)
        with Ledger(path) as ledger:
            assert ledger.spent_rounds >= sent, f"kill {kill}: {sent} sent, {ledger.spent_rounds} counted"
    assert sent > KILLS  # the kills came in the middle of sending, not before it
    with Ledger(path) as ledger:
        assert ledger.spent_rounds <= sent + 8 * KILLS  # and over-count by no more than a block each


@pytest.mark.parametrize("block", [1, 4])
def test_two_processes_together_stay_within_the_budget(tmp_path: Path, block: int) -> None:
    path, epsilon = tmp_path / "ledger", 0.5
    processes = [start(path, run=name, block=block, epsilon=epsilon) for name in ("left", "right")]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    outputs = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        outputs.append(output.splitlines())
    sent = sum(line.startswith("sent ") for output in outputs for line in output)
    assert all(output[-1] == "exhausted" for output in outputs)
    with Ledger(path) as ledger:
        assert ledger.spent_rounds == sent
        guarantee = ledger.guarantee()
        assert guarantee is not None
        assert guarantee.epsilon <= epsilon
        assert ledger.headroom(RELEASE) < block
