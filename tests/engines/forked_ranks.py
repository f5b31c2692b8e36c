"""The ranks of a worker script as forks of one process: importing torch takes longer than what most ranks do.

argv: the script, the number of ranks, a folder for what they print, and what the script's `main` reads from argv. A
script may have a `prepare()` too, which runs once, before the ranks are forked. Prints the ranks' exit codes as JSON.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch._inductor  # noqa: F401  torch imports it when it first traces a model, and no import takes longer


def main():
    script, size, outputs, asked = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    sys.argv = [str(script), asked]
    sys.path.append(str(Path(__file__).parents[1]))  # helpers that tests of several folders share
    worker = importlib.import_module(script.stem)
    getattr(worker, "prepare", lambda: None)()
    ranks = []
    for rank in range(size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = os.open(outputs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(output, stream)
            worker.main()
            return
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]))


if __name__ == "__main__":
    main()
