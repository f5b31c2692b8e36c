"""What the first use costs beside the second, in CPU seconds of a process: `bqsgd demo`, and `make_private`.

At first there are no compiled loops and no features in the cache; the second process finds both. The data are there.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import benchmarks
from bqsgd._src.data._sources import cache_folder

DEMO = "import sys; from bqsgd.__main__ import main; sys.exit(main(['demo', '--dataset', '{}', '--out', '{{out}}']))"
PRIVATE = """
import bqsgd, torch
from torch import nn

digits = torch.utils.data.TensorDataset(torch.zeros(1400, 1, 8, 8), torch.zeros(1400, dtype=torch.long))
loader = torch.utils.data.DataLoader(digits, batch_size=256)
model = nn.Sequential({}, nn.Linear({}, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loss = nn.CrossEntropyLoss(reduction="none")
private = bqsgd.make_private(
    model, optimizer, loader, loss_fn=loss, epsilon=3, delta=1e-5, bits=8, epochs=20, ledger="{{out}}"
)
private.step(next(iter(private.loader)))
"""
CONVOLUTIONS = "nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()"
PROGRAMS = {
    "bqsgd demo --dataset digits": DEMO.format("digits"),
    "bqsgd demo --dataset mnist": DEMO.format("mnist"),
    "imports alone": "import bqsgd, torch; bqsgd.make_private",
    "make_private and a step, linear": PRIVATE.format("nn.Flatten()", 64),
    "make_private and a step, convolutions": PRIVATE.format(CONVOLUTIONS, 72),
}


def cpu_seconds(program: str, cache: Path, *, out: Path) -> float:
    """CPU seconds of a process that runs `program`, and of its children."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "NUMBA_CACHE_DIR": str(cache / "loops")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", program.format(out=out)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_and_second(program: str) -> dict[str, float]:
    """The first run, with empty caches, and the second."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        (cache / "bqsgd").mkdir(parents=True)
        (cache / "bqsgd/mnist").symlink_to(cache_folder() / "mnist")
        return {turn: round(cpu_seconds(program, cache, out=Path(folder) / turn), 1) for turn in ("first", "second")}


def main() -> None:
    """Measure and print."""
    output = benchmarks.parser("first_use", __doc__).parse_args().output
    result = {
        "cpu_seconds": {name: first_and_second(program) for name, program in PROGRAMS.items()},
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
    }
    benchmarks.write(output, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
