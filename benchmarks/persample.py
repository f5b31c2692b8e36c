"""Speed and memory of clipped per-sample gradients against plain training, opacus and torch.func.

`python -m benchmarks.persample` prints the tables, writes benchmarks/results/persample.json and the table of
docs/persample.md, and exits with 1 if a target is missed. `--only NAME --threads N` runs the models whose name contains
NAME and only prints; `--rivals` narrows it further, and `--keep` puts these rows in the place of the recorded ones.
Every row has its date and the load of the machine. Each model has a process of its own in which rivals take turns;
each keeps its best time, all doing the same work: forward, per-sample gradients, clip, sum. On one core the time is CPU
time, which on a quiet machine is the wall time and on a busy one leaves out the waiting; on two cores it is wall time.
Memory is the peak of a fresh process beyond what it held before its steps.
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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.persample_models import MODELS
from benchmarks.persample_rivals import (
    CLIPS,
    MATERIALISING,
    OPACUS,
    PACKED,
    RIVALS,
    VMAP,
    Step,
    make_step,
    plain,
    rivals_of,
)

RESULTS = Path(__file__).parent / "results" / "persample.json"
PAGE = Path(__file__).parent.parent / "docs" / "persample.md"
TABLE_STARTS, TABLE_ENDS = "<!-- table of benchmarks/persample.py -->\n", "<!-- end of table -->\n"
TURNS, LEAST_TURNS, PATIENCE_SECONDS = 10, 2, 2.0
FAST_CLIPS = ("L2", "Scale", "Clamp")
PER_SAMPLE = (*FAST_CLIPS, "Dual")
TIMES_PLAIN = {
    "Linear 3969-10": {"L2": 1.5},
    "Linear 1280-10": {"L2": 1.5},
    "LeNet-5": {"L2": 1.5, "Scale": 1.6, "Clamp": 1.6, "Dual": 1.6},
    "MLP 784-2048-2048-10": dict.fromkeys(FAST_CLIPS, 2.0),
    "Transformer": {"L2": 1.5},
    "LoRA": {"L2": 1.5},
    "ResNet-18": {"L2": 2.0},
    "ResNet-18, few images": {"L2": 2.0},
    "BERT 2x128": {"L2": 2.0},
    "BERT 2x128 LoRA": {"L2": 2.0},
    "GPT-2 2x128": {"L2": 2.0},
    "GPT-2 2x128 LoRA": {"L2": 2.0},
    "GPT-2 small LoRA": {"L2": 2.0},
}
"""The most that a clip may cost, in times of plain."""
MEMORY_MODEL, MEMORY_LIMIT = "MLP 784-2048-2048-10", 1.5
HEADINGS = ("plain, ms", *PER_SAMPLE, PACKED, *OPACUS, "vmap")


def best_seconds(steps: dict[str, Step], threads: int) -> dict[str, float]:
    """The best of interleaved turns; a rival that has used up its patience sits the later turns out.

    Every second turn goes backwards: the threads of a step that has just ended spin on the cores of the next one.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    best, spent = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, 0.0)
    for turn in range(TURNS):
        for name, step in reversed(steps.items()) if turn % 2 else steps.items():
            if spent[name] > PATIENCE_SECONDS and turn >= LEAST_TURNS:
                continue
            start, wall = clock(), time.perf_counter()
            step()
            best[name] = min(best[name], clock() - start)
            spent[name] += time.perf_counter() - wall
    return best


def check_agreement(results: dict[str, dict[str, Tensor]], batch_size: int) -> dict[str, float]:
    """Relative distance of every L2 rival's sum from ours: they must all do the same work."""
    if "L2" not in results:
        return {}
    ours = results["L2"]
    reference = torch.cat([part.flatten() for part in ours.values()]) * batch_size
    limit = 1e-3 + len(reference) ** 0.5 / 2**22  # how far inside its bound our L2 clip aims
    distances = {}
    for name in (PACKED, *OPACUS, VMAP):
        if name in results:
            flat = torch.cat([results[name][part].flatten() for part in ours]) * (batch_size if name == PACKED else 1)
            distances[name] = float((flat - reference).norm() / reference.norm())
            if distances[name] > limit:
                raise AssertionError(f"{name} does other work than ours: relative distance {distances[name]}")
    return distances


def measure_speed(label: str, threads: int, rivals: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    case = MODELS[label]
    model = case.build()
    steps: dict[str, Step] = {}
    results: dict[str, dict[str, Tensor]] = {}
    failed: dict[str, str] = {}
    for name in rivals_of(case):
        if name in rivals:
            try:
                step = make_step(name, case, model, case.batch_size)
                results[name] = step()  # also the warm-up
                steps[name] = step
            except Exception as error:  # a rival that does not run is reported, not hidden
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    agreement = check_agreement(results, case.batch_size)
    results.clear()
    return {"seconds": best_seconds(steps, threads), "failed": failed, "distance_from_ours": agreement}


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory(name: str) -> int:
    """Peak resident bytes of two steps beyond what the process held with model, data and warm kernels."""
    torch.set_num_threads(1)
    case = MODELS[MEMORY_MODEL]
    torch.manual_seed(0)
    layers = [layer for wide in (784, 72) for layer in (torch.nn.Linear(wide, 72), torch.nn.ReLU())]
    small = torch.nn.Sequential(torch.nn.Flatten(), *layers, torch.nn.Linear(72, 10))
    make_step(name, case, small, 32)()  # imports and compilation are not the step's memory
    plain(small, *case.batch(32))()
    step = make_step(name, case, case.build(), case.batch_size)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident_bytes("VmRSS")
    for _ in range(2):
        step()
    return resident_bytes("VmHWM") - before


def in_fresh_process(*arguments: str, threads: int) -> Any:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.persample", *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def speed_of(labels: Sequence[str], threads: int, rivals: Sequence[str]) -> dict[str, Any]:
    """The speed of every rival on every model, each model in a process of its own."""
    found = {}
    for label in labels:
        start, load = time.perf_counter(), os.getloadavg()[0]
        found[label] = in_fresh_process(
            "--speed", label, "--threads", str(threads), "--rivals", *rivals, threads=threads
        )
        found[label] |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "load": round(load, 1)}
        print(f"{label}, {threads} core(s): {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def verdicts(speed: dict[str, Any], memory: dict[str, int]) -> list[dict[str, Any]]:
    """Every target with what was measured; a step of ours that failed misses its targets."""
    rows: list[tuple[str, float | None, float]] = []
    for threads, models in speed.items():
        for label, found in models.items():
            rows += _speed_targets(f"{label}, {{}}, {threads} core(s): {{}}", label, found["seconds"])
    limit = MEMORY_LIMIT * memory["plain"]
    rows += [
        (f"{MEMORY_MODEL}, {clip}: memory <= {MEMORY_LIMIT}x plain", memory[clip], limit) for clip in ("Clamp", "L2")
    ]
    return [
        {"target": name, "value": value, "limit": limit, "met": value is not None and value <= limit}
        for name, value, limit in rows
    ]


def _speed_targets(text: str, label: str, seconds: dict[str, float]) -> list[tuple[str, float | None, float]]:
    best = min(seconds.get(name, float("inf")) for name in OPACUS)
    building = min(seconds.get(name, float("inf")) for name in MATERIALISING)
    clips = MODELS[label].clips
    rows = [
        (text.format(clip, "at most the best opacus mode"), seconds.get(clip), best)
        for clip in FAST_CLIPS
        if clip in clips
    ]
    if "Dual" in clips:
        target = text.format("Dual", "at most the best opacus mode that builds gradients")
        rows.append((target, seconds.get("Dual"), building))
    for clip, limit in TIMES_PLAIN.get(label, {}).items():
        rows.append((text.format(clip, f"<= {limit}x plain"), seconds.get(clip), limit * seconds["plain"]))
    return rows


def page_table(result: dict[str, Any]) -> str:
    """The figures of `docs/persample.md`: in times of plain on one core and on two, and memory."""
    speed = result["speed"]
    lines = [*_ratios(speed["1"], "CPU time on one core"), "", *_ratios(speed["2"], "time on two cores")]
    memory = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in result["memory_bytes"].items())
    missed = [row["target"] for row in result["targets"] if not row["met"]]
    texts = [
        *(f"{label}: {MODELS[label].about}." for label in speed["1"] if MODELS[label].about),
        *_failures(speed),
        *_circumstances(speed),
        f"Peak memory of {MEMORY_MODEL} beyond the model, in MiB: {memory}.",
        f"Targets missed: {'; '.join(missed) or 'none'}.",
    ]
    return "\n".join([*lines, *("\n" + textwrap.fill(text, 120) for text in texts), ""])


def _circumstances(speed: dict[str, Any]) -> list[str]:
    """When rows were measured, and how busy the machine was."""
    rows: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for threads, models in speed.items():
        for label, found in models.items():
            rows.setdefault((found["date"], threads), []).append((label, found["load"]))
    texts = []
    for (date, threads), measured in sorted(rows.items()):
        low, high = (pick(load for _, load in measured) for pick in (min, max))
        labels = ", ".join(label for label, _ in measured)
        texts.append(f"{date}, {threads} core(s), load averages {low:.1f} to {high:.1f}: {labels}.")
    return texts


def _failures(speed: dict[str, Any]) -> list[str]:
    """What did not run and why, once for each rival and model."""
    reasons = {
        (label, name): reason
        for models in speed.values()
        for label, found in models.items()
        for name, reason in found["failed"].items()
    }
    return [f"{label}, {name} fails: {reason}" for (label, name), reason in reasons.items()]


def _ratios(models: dict[str, Any], heading: str) -> list[str]:
    lines = [f"| {heading}, times plain | " + " | ".join(HEADINGS) + " |", "|---" * (len(HEADINGS) + 1) + "|"]
    for label, found in models.items():
        seconds = found["seconds"]
        cells = [f"{seconds['plain'] * 1e3:.1f}"]
        cells += [_cell(found, name, seconds["plain"]) for name in (*PER_SAMPLE, PACKED, *OPACUS, VMAP)]
        lines.append(f"| {label}, batch {MODELS[label].batch_size} | " + " | ".join(cells) + " |")
    return lines


def _cell(found: dict[str, Any], name: str, plain_seconds: float) -> str:
    if name in found["seconds"]:
        return f"{found['seconds'][name] / plain_seconds:.2f}"
    return "fails" if name in found["failed"] else "-"


def page_with(table: str, page: Path = PAGE) -> str:
    """The page with this table in place of its own."""
    before, rest = page.read_text().split(TABLE_STARTS)
    return before + TABLE_STARTS + table + TABLE_ENDS + rest.split(TABLE_ENDS)[1]


def print_speed(speed: dict[str, Any]) -> None:
    for threads, models in speed.items():
        for label, found in models.items():
            seconds = found["seconds"]
            print(
                f"\n{label}, batch {MODELS[label].batch_size}, {threads} core(s): ms, times plain, distance from ours"
            )
            for name in RIVALS:
                if name in seconds:
                    distance = found["distance_from_ours"].get(name)
                    ratio = seconds[name] / seconds["plain"] if "plain" in seconds else float("nan")
                    shown = "" if distance is None else f"{distance:12.1e}"
                    print(f"{name:24}{seconds[name] * 1e3:12.2f}{ratio:10.2f}{shown}")
                elif name in found["failed"]:
                    print(f"{name:24}{'fails':>12}  {found['failed'][name]}")


def print_tables(result: dict[str, Any]) -> None:
    print_speed(result["speed"])
    print(f"\npeak memory of {MEMORY_MODEL}, batch {MODELS[MEMORY_MODEL].batch_size} (MiB; times plain)")
    for name, size in result["memory_bytes"].items():
        print(f"{name:24}{size / 2**20:10.1f}{size / result['memory_bytes']['plain']:10.2f}")
    print()
    for row in result["targets"]:
        value = "failed" if row["value"] is None else f"{row['value']:.4g}"
        print("PASS" if row["met"] else "FAIL", f"{row['target']}: {value} against {row['limit']:.4g}")


def record(result: dict[str, Any]) -> None:
    result["targets"] = verdicts(result["speed"], result["memory_bytes"])
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page_with(page_table(result)))


def keep_rows(speed: dict[str, Any]) -> None:
    """Put these rows in the place of the recorded ones, in the order of the models."""
    result = json.loads(RESULTS.read_text())
    for threads, models in speed.items():
        every = result["speed"][threads] | models
        result["speed"][threads] = {label: every[label] for label in MODELS if label in every}
    record(result)


def whole_run() -> int:
    speed = {str(n): speed_of(list(MODELS), n, RIVALS) for n in (1, 2)}
    memory = {  # of two processes the larger, because what the allocator gives back differs
        name: max(in_fresh_process("--memory", name, threads=1) for _ in range(2))
        for name in ("plain", *CLIPS, "opacus ghost", *MATERIALISING)
    }
    result = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "opacus", "numba", "numpy")},
        "clock": {"1": "CPU time", "2": "wall time"},
        "speed": speed,
        "memory_bytes": memory,
    }
    record(result)
    print_tables(result)
    return 0 if all(row["met"] for row in result["targets"]) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="only the models whose name contains NAME; prints")
    parser.add_argument("--threads", type=int, default=1, help="with --only: the number of cores")
    parser.add_argument(
        "--rivals", nargs="+", default=RIVALS, choices=RIVALS, metavar="RIVAL", help="only these rivals"
    )
    parser.add_argument("--keep", action="store_true", help="with --only: record these rows")
    parser.add_argument("--speed", help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.speed:
        print(json.dumps(measure_speed(chosen.speed, chosen.threads, chosen.rivals)))
        return 0
    if chosen.memory:
        print(json.dumps(measure_memory(chosen.memory)))
        return 0
    if chosen.only:
        labels = [label for label in MODELS if chosen.only.lower() in label.lower()]
        if not labels:
            parser.error(f"no model's name contains {chosen.only!r}; the models are {', '.join(MODELS)}")
        for label in labels:
            speed = {str(chosen.threads): speed_of([label], chosen.threads, chosen.rivals)}
            print_speed(speed)
            if chosen.keep:
                keep_rows(speed)
        return 0
    return whole_run()


if __name__ == "__main__":
    raise SystemExit(main())
