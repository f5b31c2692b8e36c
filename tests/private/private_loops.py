"""What the tests of private loops share: a loss, two mechanisms, a look into a ledger, and loops in several ranks."""

import json
import sys

from torch import nn

import bqsgd
from distributed_processes import environment, finish, free_port, processes

LOSS = nn.CrossEntropyLoss(reduction="none")
QUIET = bqsgd.Mechanism(levels=1, trials=2000)
EXACT = bqsgd.Mechanism(levels=1000, trials=0)
"""Without noise: what is left is the rounding to a thousandth of the range."""


def recorded(path):
    """Rounds that the ledger file counts, once it is closed."""
    with bqsgd.Ledger(path) as ledger:
        return ledger.spent_rounds


def told_by_ranks(script, folder, ranks):
    """What each rank of a script tells: torchrun's variables are in its environment, folder and rank in argv."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(free_port())}
    commands = [
        (
            [sys.executable, str(script), str(folder), str(rank)],
            environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
        )
        for rank in range(ranks)
    ]
    found = []
    with processes(commands) as started:
        for _, output in finish(started):
            lines = [line for line in output.splitlines() if line.startswith("TOLD ")]
            assert lines, output
            found.append(json.loads(lines[0].removeprefix("TOLD ")))
    return found
