"""The ranks of a worker script as forks of one process: importing torch takes longer than what most ranks do.

argv: the script, the number of ranks, a folder for what they print, and what the script's `main` reads from argv. A
script may have a `prepare()` too, which runs once, before the ranks are forked. Prints the ranks' exit codes as JSON.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch._inductor  # before the ranks are forked, as `fork_preloads.py` does


def fork_ranks(script, size, outputs, asked):
    script, outputs = Path(script), Path(outputs)
    sys.argv = [str(script), asked]
    torch.set_num_threads(1)
    worker = importlib.import_module(script.stem)
    getattr(worker, "prepare", lambda: None)()
    ranks = []
    for rank in range(int(size)):
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
    sys.path.append(str(Path(sys.argv[1]).parent))
    fork_ranks(*sys.argv[1:])
