"""Speed and memory of clipped per-sample gradients against plain training, opacus and torch.func.

`python -m benchmarks.persample` prints the tables, writes benchmarks/results/persample.json and the table of
docs/persample.md, and exits with 1 if a target is missed. Rivals take turns in one process and each keeps its best
time, all doing the same work: forward, per-sample gradients, clip, sum. Our steps have indices drawn at random from
60,000. On one core the time is CPU time, which on a quiet machine is the wall time and on a busy one leaves out the
waiting; on two cores it is wall time. Memory is the peak of a fresh process beyond what it held before its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.persample_rivals import (
    CLIPS,
    MATERIALISING,
    MODELS,
    OPACUS,
    RIVALS,
    Step,
    batch_of,
    make_step,
    plain,
)

RESULTS = Path(__file__).parent / "results" / "persample.json"
PAGE = Path(__file__).parent.parent / "docs" / "persample.md"
TABLE_STARTS, TABLE_ENDS = "<!-- table of benchmarks/persample.py -->\n", "<!-- end of table -->\n"
ROUNDS, PATIENCE_SECONDS = 10, 15.0
SPEED_LIMIT, LENET_LIMIT, MEMORY_LIMIT = 2.0, 1.6, 1.5
MEMORY_MODEL = "MLP 784-2048-2048-10"
FAST_CLIPS = ("L2", "Scale", "Clamp")
PER_SAMPLE = (*FAST_CLIPS, "Dual")


def best_seconds(steps: dict[str, Step], threads: int) -> dict[str, float]:
    """The best of interleaved turns; a rival that has used up its patience sits the later turns out."""
    clock = time.process_time if threads == 1 else time.perf_counter
    best, spent = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0.0)
    for turn in range(ROUNDS + 1):
        for name, step in steps.items():
            if spent[name] > PATIENCE_SECONDS and turn > 2:
                continue
            start, wall = clock(), time.perf_counter()
            step()
            spent[name] += time.perf_counter() - wall
            if turn:  # the first turn warms up
                best[name] = min(best[name], clock() - start)
    return best


def check_agreement(steps: dict[str, Step], batch_size: int) -> dict[str, float]:
    """Relative distance of every L2 rival's sum from ours: they must all do the same work."""
    reference = steps["L2"]()[0] * batch_size
    distances = {}
    for name in steps:
        if name in OPACUS or name == "torch.func.vmap":
            flat = torch.cat([g.flatten() for g in steps[name]()])
            distances[name] = float((flat - reference).norm() / reference.norm())
            if distances[name] > 1e-3:  # our L2 clip aims sqrt(dimension) / 2^22 inside its bound
                raise AssertionError(f"{name} does other work than ours: relative distance {distances[name]}")
    return distances


def measure_speed(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    for label, (build, batch_size) in MODELS.items():
        torch.manual_seed(0)
        model, steps, failed = build(), {}, {}
        for name in RIVALS:
            try:
                step = make_step(name, model, batch_size)
                step()
                steps[name] = step
            except Exception as error:  # a rival that does not run is reported, not hidden
                failed[name] = f"{type(error).__name__}: {error}"
        agreement = check_agreement(steps, batch_size)
        found[label] = {"seconds": best_seconds(steps, threads), "failed": failed, "distance_from_ours": agreement}
    return found


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(name: str) -> int:
    """Peak resident bytes of two steps beyond what the process held with model, data and warm kernels."""
    torch.set_num_threads(1)
    build, batch_size = MODELS[MEMORY_MODEL]
    torch.manual_seed(0)
    small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    make_step(name, small, 4)()  # imports and compilation are not the step's memory
    plain(small, *batch_of(4))()
    step = make_step(name, build(), batch_size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident_bytes("VmRSS")
    for _ in range(2):
        step()
    return resident_bytes("VmHWM") - before


def in_fresh_process(*arguments: str, threads: int) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.persample", *arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def verdicts(speed: dict[str, Any], memory: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    for threads, models in speed.items():
        for label, found in models.items():
            seconds = found["seconds"]
            best = min(seconds[name] for name in OPACUS if name in seconds)
            building = min(seconds[name] for name in MATERIALISING if name in seconds)
            rows += [(f"{label}, {clip}, {threads} core(s): faster than the best opacus mode", seconds[clip], best)
                     for clip in FAST_CLIPS]  # fmt: skip
            rows.append(
                (f"{label}, Dual, {threads} core(s): faster than materialising opacus", seconds["Dual"], building)
            )
            if label != "AlexNet28":
                limit = SPEED_LIMIT * seconds["plain"]
                rows += [
                    (f"{label}, {clip}, {threads} core(s): <= 2.0x plain", seconds[clip], limit) for clip in FAST_CLIPS
                ]
    seconds = speed["1"]["LeNet-5"]["seconds"]
    best = min(seconds[name] for name in OPACUS if name in seconds)
    for clip in PER_SAMPLE:
        rows.append((f"LeNet-5, {clip}, 1 core: <= 1.6x plain", seconds[clip], LENET_LIMIT * seconds["plain"]))
        rows.append((f"LeNet-5, {clip}, 1 core: faster than every opacus mode", seconds[clip], best))
    limit = MEMORY_LIMIT * memory["plain"]
    rows += [(f"{MEMORY_MODEL}, {clip}: memory <= 1.5x plain", memory[clip], limit) for clip in ("Clamp", "L2")]
    return [{"target": name, "value": value, "limit": limit, "met": value <= limit} for name, value, limit in rows]


def page_table(result: dict[str, Any]) -> str:
    """The figures of `docs/persample.md`: in times of plain on one core and on two, and memory."""
    lines = [
        *_ratios(result["speed"]["1"], "CPU time on one core"),
        "",
        *_ratios(result["speed"]["2"], "time on two cores"),
    ]
    memory = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in result["memory_bytes"].items())
    missed = [row["target"] for row in result["targets"] if not row["met"]]
    load = ", ".join(f"{value:.1f}" for value in result["load_average_before"])
    texts = [
        f"Load averages before the run: {load}. Peak memory of {MEMORY_MODEL} beyond the model, in MiB: {memory}.",
        f"Targets missed: {'; '.join(missed) or 'none'}.",
    ]
    return "\n".join([*lines, *("\n" + textwrap.fill(text, 120) for text in texts), ""])


def _ratios(models: dict[str, Any], heading: str) -> list[str]:
    lines = [f"| {heading}, times plain | " + " | ".join(f"{m}, batch {MODELS[m][1]}" for m in models) + " |"]
    lines.append("|---" * (len(models) + 1) + "|")
    for names in (PER_SAMPLE, OPACUS, ("torch.func.vmap",)):
        cells = []
        for found in models.values():
            seconds = found["seconds"]
            ratios = [seconds[name] / seconds["plain"] if name in seconds else None for name in names]
            cells.append(" / ".join("fails" if ratio is None else f"{ratio:.2f}" for ratio in ratios))
        lines.append(f"| {' / '.join(names)} | " + " | ".join(cells) + " |")
    return lines


def page_with(table: str) -> str:
    """The page with this table in place of its own."""
    before, rest = PAGE.read_text().split(TABLE_STARTS)
    return before + TABLE_STARTS + table + TABLE_ENDS + rest.split(TABLE_ENDS)[1]


def print_tables(result: dict[str, Any]) -> None:
    for threads, models in result["speed"].items():
        print(f"\n{threads} core(s), times plain" + "".join(f"{label:>24}" for label in models))
        print(f"{'plain (ms)':24}" + "".join(f"{m['seconds']['plain'] * 1e3:24.1f}" for m in models.values()))
        for name in RIVALS[1:]:
            cells = [m["seconds"].get(name, float("nan")) / m["seconds"]["plain"] for m in models.values()]
            print(f"{name:24}" + "".join(f"{cell:24.2f}" for cell in cells))
    print(f"\npeak memory of {MEMORY_MODEL}, batch {MODELS[MEMORY_MODEL][1]} (MiB; times plain)")
    for name, size in result["memory_bytes"].items():
        print(f"{name:24}{size / 2**20:10.1f}{size / result['memory_bytes']['plain']:10.2f}")
    print()
    for row in result["targets"]:
        print("PASS" if row["met"] else "FAIL", f"{row['target']}: {row['value']:.4g} against {row['limit']:.4g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.speed:
        print(json.dumps(measure_speed(chosen.speed)))
        return 0
    if chosen.memory:
        print(json.dumps(measure_memory(chosen.memory)))
        return 0
    load = os.getloadavg()
    speed = {str(n): in_fresh_process("--speed", str(n), threads=n) for n in (1, 2)}
    memory = {
        name: in_fresh_process("--memory", name, threads=1)
        for name in ("plain", *CLIPS, "opacus ghost", *MATERIALISING)
    }
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average_before": load,
        "versions": {name: version(name) for name in ("torch", "opacus", "numba", "numpy")},
        "clock": {"1": "CPU time", "2": "wall time"},
        "speed": speed,
        "memory_bytes": memory,
        "targets": verdicts(speed, memory),
    }
    print_tables(result)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page_with(page_table(result)))
    return 0 if all(row["met"] for row in result["targets"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
