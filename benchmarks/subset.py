"""CPU time of a step whose messages carry one in N coordinates, beside a plain step, on one thread.

The linear model on scattering features that the MNIST presets train (batch 2048) and LeNet-5 (batch 256), with the L2
clip. Rivals take turns, and each keeps its best CPU time, which a busy machine disturbs less than the wall clock.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import benchmarks
from benchmarks.persample_models import MODELS
from benchmarks.persample_rivals import EACH, NORM, Step, plain
from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.subset import Subsets

PAGE = Path(__file__).parent.parent / "docs" / "persample.md"
TABLE_STARTS, TABLE_ENDS = "<!-- table of benchmarks/subset.py -->\n", "<!-- end of the table of subsets -->\n"
LABELS, ONE_IN, TURNS = ("Linear 3969-10", "LeNet-5"), (1, 10, 20, 100), 15


def steps_of(label: str) -> dict[str, Step]:
    """A plain step, and ours with every share of the coordinates."""
    case = MODELS[label]
    x, y = case.batch(case.batch_size)
    model = case.build()
    steps = {"plain": plain(model, x, y)}
    for one_in in ONE_IN:
        subsets = Subsets.of(model.parameters(), one_in=one_in, rotated=True)
        drawn = None if subsets is None else subsets.drawn(round=0, client=0)
        clip = L2(NORM).of_share(1 / one_in)

        def step(clip: Any = clip, drawn: Any = drawn) -> dict[str, torch.Tensor]:
            clipped = clipped_gradients(model, EACH, (x, y), clip=clip, batch_size=len(x), subset=drawn)
            return {"": clipped.mean}

        steps[f"one in {one_in}"] = step
    return steps


def measured(label: str) -> dict[str, float]:
    """Milliseconds of the fastest turn of each."""
    steps = steps_of(label)
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(TURNS):
        for name, step in steps.items():
            started = time.process_time()
            step()
            best[name] = min(best[name], 1e3 * (time.process_time() - started))
    return best


def table(result: dict[str, Any]) -> str:
    """The times in units of a plain step."""
    names = [f"one in {one_in}" for one_in in ONE_IN]
    lines = [f"| model | plain, ms | {' | '.join(names)} |", "|---|" + "---:|" * (1 + len(names))]
    for label, times in result["milliseconds"].items():
        cells = " | ".join(f"{times[name] / times['plain']:.2f}" for name in names)
        lines.append(f"| {label} | {times['plain']:.1f} | {cells} |")
    return "\n".join([*lines, "", f"Load average of the machine meanwhile: {result['load']:.1f}."]) + "\n"


def main() -> int:
    """Measure, print, and write the table of the page."""
    output = benchmarks.parser("subset", __doc__).parse_args().output
    torch.set_num_threads(1)
    result = {
        "milliseconds": {label: measured(label) for label in LABELS},
        "turns": TURNS,
        "threads": 1,
        "load": os.getloadavg()[0],
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    if benchmarks.write(output, result):
        before, rest = PAGE.read_text().split(TABLE_STARTS)
        PAGE.write_text(before + TABLE_STARTS + table(result) + TABLE_ENDS + rest.split(TABLE_ENDS)[1])
    print(table(result), end="")
    return 0
