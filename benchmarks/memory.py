"""Peak memory of a step against the batch size: plain, ours with the L2 clip, and every mode of opacus.

Every figure is the peak of a fresh process on one thread, beyond what it held with model, data and warm kernels. A step
that would need more than 4 GiB is ended.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import benchmarks
from benchmarks.persample_models import MODELS
from benchmarks.persample_rivals import OPACUS, make_step
from experiments import lab

PAGE = Path(__file__).parent.parent / "docs" / "persample.md"
TABLE_STARTS, TABLE_ENDS = "<!-- table of benchmarks/memory.py -->\n", "<!-- end of the table of memory -->\n"
LABELS, BATCHES, RIVALS = ("LeNet-5", "MLP 784-2048-2048-10", "Transformer"), (64, 256, 1024), ("plain", "L2", *OPACUS)
MOST_GIB, WARM_SAMPLES, AT_ONCE = 4, 8, 3


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measured(label: str, batch_size: int, rival: str) -> int | None:
    """Bytes; None if they are more than the limit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = MODELS[label]
    model = case.build()
    make_step(rival, case, model, WARM_SAMPLES)()  # imports and compilation are not the step's memory
    step = make_step(rival, case, model, batch_size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident_bytes("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_GIB << 30, resource.RLIM_INFINITY))
    try:
        for _ in range(2):
            step()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return None
        raise
    return resident_bytes("VmHWM") - before


def in_fresh_process(label: str, batch_size: int, rival: str) -> int | str | None:
    """The same; the error of a rival that does not run."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.memory", "--step", label, str(batch_size), rival]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.splitlines() or ["it was ended"])[-1]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(result: dict[str, Any]) -> str:
    """MiB, by model and batch size."""
    lines = ["| MiB | " + " | ".join(RIVALS) + " |", "|---" + "|---:" * len(RIVALS) + "|"]
    for row in result["rows"]:
        cells = [_cell(row["bytes"][rival]) for rival in RIVALS]
        lines.append(f"| {row['model']}, {row['batch_size']} samples | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(size: int | str | None) -> str:
    if size is None:
        return f"> {MOST_GIB * 1024}"
    return "fails" if isinstance(size, str) else f"{size / 2**20:.0f}"


def main() -> int:
    """Measure, print, and write the table of the page."""
    parser = benchmarks.parser("memory", __doc__)
    parser.add_argument("--step", nargs=3, metavar=("MODEL", "BATCH", "RIVAL"), help="measure one step only")
    options = parser.parse_args()
    if options.step:
        label, batch_size, rival = options.step
        print(json.dumps(measured(label, int(batch_size), rival)))
        return 0
    rows = []
    for label in LABELS:
        for batch_size in BATCHES:
            with ThreadPoolExecutor(AT_ONCE) as several:  # a peak is that of its own process
                sizes = list(several.map(partial(in_fresh_process, label, batch_size), RIVALS))
            rows.append({"model": label, "batch_size": batch_size, "bytes": dict(zip(RIVALS, sizes, strict=True))})
            print(rows[-1], file=sys.stderr, flush=True)
    result = {
        "rows": rows,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "most_gib": MOST_GIB,
        "processor": platform.processor() or platform.machine(),
        "opacus": version("opacus"),
        **lab.provenance(),
    }
    if benchmarks.write(options.output, result):
        before, rest = PAGE.read_text().split(TABLE_STARTS)
        PAGE.write_text(before + TABLE_STARTS + table(result) + TABLE_ENDS + rest.split(TABLE_ENDS)[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
