"""Speed and memory of encode -> frame -> accumulate against naive NumPy and torch's Gaussian noise, on one core.

`python -m benchmarks mechanism` prints the table, writes benchmarks/results/mechanism.json and exits with 1 if a target
is missed. Rivals take turns in one process and each keeps its best time. Times are CPU time of the process: every rival
runs on one thread, so on a quiet machine that is the wall time, and on a busy one it leaves out the waiting.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import benchmarks
from bqsgd._src.codec import Accumulator, encode_frame
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism

DIMENSION = 10**7
GROWTH = [10**4, 10**5, 10**6, 10**7, 10**8]
MEMORY_DIMENSION = 10**8
MAX_EXTRA_MIB = 64
LINEAR_FACTOR = 2.0
"""How much the cost of a coordinate, the fixed cost of a call left out, may change from 10^4 to 10^8 coordinates."""
EIGHT_BITS, FOURTEEN_BITS = Mechanism(levels=2, trials=251), Mechanism(levels=52, trials=16279)
RANGE = 0.0015


def gradient(dimension: int) -> np.ndarray:
    """A float32 vector of which about 5 % lies beyond the range."""
    values = np.random.default_rng(0).standard_normal(dimension, dtype=np.float32)
    values *= np.float32(RANGE / 2)
    return values


def ours(values: np.ndarray, mechanism: Mechanism) -> bytearray:
    return encode_frame(values, mechanism, range=RANGE, rng=privacy_rng(), client=0, round=0, clamp=True)


def naive_numpy(values: np.ndarray, mechanism: Mechanism, rng: np.random.Generator) -> bytes:
    """Written by hand: clip, floor, compare, rng.binomial, cast, and packbits where codes are not whole bytes."""
    steps = np.clip(values, -RANGE, RANGE) * np.float32(mechanism.levels / RANGE)
    low = np.floor(steps)
    up = rng.random(values.size, dtype=np.float32) < steps - low
    noise = rng.binomial(mechanism.trials, 0.5, values.size)
    codes = low.astype(np.int64) + up + noise + mechanism.levels
    if mechanism.code_count <= 256:
        return codes.astype(np.uint8).tobytes()
    width = (mechanism.code_count - 1).bit_length()
    bits = np.unpackbits(codes.astype("<u2").view(np.uint8).reshape(-1, 2), axis=1, bitorder="little")
    return np.packbits(bits[:, :width], bitorder="little").tobytes()


def best_seconds(rivals: dict[str, Callable[[], object]], repeats: dict[str, int]) -> dict[str, float]:
    """The best of several interleaved runs of each rival; one untimed run of each first."""
    for run in rivals.values():
        run()
    best = dict.fromkeys(rivals, float("inf"))
    for turn in range(max(repeats.values())):
        for name, run in rivals.items():
            if turn < repeats[name]:
                start = time.process_time()
                run()
                best[name] = min(best[name], time.process_time() - start)
    return best


def against_rivals() -> dict[str, float]:
    import torch

    torch.set_num_threads(1)
    values, rng = gradient(DIMENSION), np.random.default_rng(1)
    tensor = torch.from_numpy(values)
    frames = {8: ours(values, EIGHT_BITS), 14: ours(values, FOURTEEN_BITS)}
    server = Accumulator(DIMENSION)
    rivals: dict[str, Callable[[], object]] = {
        "encode, 8 bits": lambda: ours(values, EIGHT_BITS),
        "torch Gaussian noise": lambda: tensor + torch.randn_like(tensor),
        "accumulate, 8 bits": lambda: server.add(frames[8], range=RANGE),
        "encode, 14 bits": lambda: ours(values, FOURTEEN_BITS),
        "accumulate, 14 bits": lambda: server.add(frames[14], range=RANGE),
        "naive NumPy, 8 bits": lambda: naive_numpy(values, EIGHT_BITS, rng),
        "naive NumPy, 14 bits": lambda: naive_numpy(values, FOURTEEN_BITS, rng),
    }
    return best_seconds(rivals, {name: 4 if name.startswith("naive") else 12 for name in rivals})


def growth() -> dict[str, Any]:
    """The fixed cost of a call, and nanoseconds per coordinate of encode and of accumulate beyond it."""
    fixed = encode_and_add_seconds(1, repeats=500)
    rows = []
    for dimension in GROWTH:
        seconds = encode_and_add_seconds(dimension, repeats=int(np.clip(10**8 // dimension, 4, 300)))
        row: dict[str, float] = {"dimension": dimension}
        for name in ("encode", "accumulate"):
            row[f"{name}_seconds"] = seconds[name]
            row[f"{name}_ns_per_coordinate"] = (seconds[name] - fixed[name]) / dimension * 1e9
        rows.append(row)
    return {"fixed_seconds": fixed, "rows": rows}


def encode_and_add_seconds(dimension: int, repeats: int) -> dict[str, float]:
    values, server = gradient(dimension), Accumulator(dimension)
    frame = ours(values, EIGHT_BITS)
    rivals = {"encode": lambda: ours(values, EIGHT_BITS), "accumulate": lambda: server.add(frame, range=RANGE)}
    return best_seconds(rivals, dict.fromkeys(rivals, repeats))


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM (its peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this measurement needs Linux")


def extra_memory() -> None:
    """In a process of its own: print the peak bytes beyond input and output of one encode at 10^8."""
    values = gradient(MEMORY_DIMENSION)
    extra = {}
    for name, mechanism in (("8 bits", EIGHT_BITS), ("14 bits", FOURTEEN_BITS)):
        ours(values[:1000], mechanism)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = resident_bytes("VmRSS")
        frame = ours(values, mechanism)
        extra[name] = resident_bytes("VmHWM") - before - len(frame)
        del frame
    print(json.dumps(extra))


def environment() -> dict[str, object]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    packages = ("bqsgd", "numpy", "numba", "cryptography", "torch")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def targets(seconds: dict[str, float], memory: dict[str, int], rows: list[dict[str, float]]) -> list[dict[str, object]]:
    def ratio(rival: str, us: str) -> float:
        return seconds[rival] / seconds[us]

    faster = [
        ("clip + encode + frame, 8 bits, against naive NumPy", ratio("naive NumPy, 8 bits", "encode, 8 bits"), 12.0),
        ("the same against torch x + randn_like(x)", ratio("torch Gaussian noise", "encode, 8 bits"), 1.3),
        ("m = 16279, s = 52 (14 bits), against naive NumPy", ratio("naive NumPy, 14 bits", "encode, 14 bits"), 5.0),
        ("frame -> accumulate, 8 bits, against encode", ratio("encode, 8 bits", "accumulate, 8 bits"), 2.0),
    ]
    table: list[dict[str, object]] = [
        {"what": what, "unit": "times faster", "got": got, "must_reach": least, "passed": got >= least}
        for what, got, least in faster
    ]
    peak = max(memory.values()) / 2**20
    costs = [row["encode_ns_per_coordinate"] for row in rows]
    spread = max(costs) / min(costs)
    table.append(
        {
            "what": "extra memory beyond input and output, d = 10^8",
            "unit": "MiB at most",
            "got": peak,
            "must_reach": MAX_EXTRA_MIB,
            "passed": peak <= MAX_EXTRA_MIB,
        }
    )
    table.append(
        {
            "what": "cost of a coordinate, largest over smallest, d = 10^4 to 10^8",
            "unit": "times at most",
            "got": spread,
            "must_reach": LINEAR_FACTOR,
            "passed": spread <= LINEAR_FACTOR,
        }
    )
    return table


def main() -> int:
    parser = benchmarks.parser("mechanism", __doc__)
    parser.add_argument("--extra-memory", action="store_true", help="only print the extra memory of one encode")
    options = parser.parse_args()
    if options.extra_memory:
        extra_memory()
        return 0
    command = [sys.executable, "-m", "benchmarks", "mechanism", "--extra-memory"]
    memory = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds, scaling = against_rivals(), growth()
    fixed, rows = scaling["fixed_seconds"], scaling["rows"]
    table = targets(seconds, memory, rows)
    print(f"d = {DIMENSION:,}, float32, one core")
    for name, best in seconds.items():
        print(f"  {name:<24} {best * 1e3:9.2f} ms {DIMENSION / best / 1e6:9.1f} M coordinates/s")
    print(f"  one call: encode {fixed['encode'] * 1e6:.0f} us, accumulate {fixed['accumulate'] * 1e6:.0f} us, and then")
    for row in rows:
        print(
            f"  d = {row['dimension']:>11,}: encode {row['encode_ns_per_coordinate']:.2f} ns, "
            f"accumulate {row['accumulate_ns_per_coordinate']:.2f} ns per coordinate"
        )
    for line in table:
        verdict = "pass" if line["passed"] else "MISS"
        print(f"  {verdict}  {line['what']}: {line['got']:.2f} (target {line['must_reach']:g} {line['unit']})")
    record = {
        "dimension": DIMENSION,
        "clock": "CPU time of one thread, best of interleaved runs",
        "environment": environment(),
        "targets": table,
        "best_seconds": seconds,
        "growth": scaling,
        "extra_memory_bytes": memory,
    }
    benchmarks.write(options.output, record)
    return 0 if all(line["passed"] for line in table) else 1
