"""Time and memory of the accountant and planner, each case in a fresh process."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import benchmarks
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.release import Release, Terms

CASES: dict[str, dict[str, Any]] = {
    "LeNet-5, s=1 m=251": {"levels": 1, "trials": 251, "dimension": 61_706, "batch_size": 32, "rounds": 1000},
    "LeNet-5, s=2 m=251": {"levels": 2, "trials": 251, "dimension": 61_706, "batch_size": 32, "rounds": 1000},
    "26,010 coordinates, L2 too": {
        "levels": 8,
        "trials": 239,
        "dimension": 26_010,
        "batch_size": 512,
        "rounds": 1400,
        "l2": 100 / 512,
    },
    "10^8 coordinates, s=1 m=4079": {
        "levels": 1,
        "trials": 4079,
        "dimension": 10**8,
        "batch_size": 4096,
        "rounds": 1000,
        "dataset_size": 10**6,
    },
    "preset mnist-eps3, L2": {
        "levels": 4,
        "trials": 217,
        "dimension": 39_700,
        "batch_size": 1024,
        "rounds": 300,
        "linf": 1 / 1.024,
        "l2": 1 / 1.024,
    },
    "the same, 100 clients summed, L2": {
        "levels": 4,
        "trials": 21_700,
        "dimension": 39_700,
        "batch_size": 1024,
        "rounds": 300,
        "linf": 1 / 1.024,
        "l2": 1 / 1.024,
    },
    "10^8 coordinates, 10^6 trials, L2": {
        "levels": 100,
        "trials": 10**6,
        "dimension": 10**8,
        "batch_size": 4096,
        "dataset_size": 10**6,
        "rounds": 1000,
        "linf": 1.0,
        "l2": 1.0,
    },
    "plan the preset mnist-eps3, L2": {
        "plan": True,
        "dimension": 39_700,
        "batch_size": 1024,
        "rounds": 300,
        "linf": 1 / 1.024,
        "l2": 1 / 1.024,
    },
    "plan 8 bits, epsilon 3": {"plan": True, "dimension": 61_706, "batch_size": 512, "rounds": 600},
}
TARGETS = {"LeNet": (10.0, 2048.0), "L2": (10.0, 512.0), "plan": (30.0, 512.0)}
"""Most seconds and MiB of the cases whose name holds the word; the last that fits counts."""


def one(name: str) -> dict[str, Any]:
    """Run one case here: cold, then again from the cache."""
    from bqsgd._src.params import Mechanism
    from bqsgd._src.planner.plan import Budget
    from bqsgd._src.planner.search import make_plan
    from bqsgd._src.privacy.accountant import Accountant

    case = {"dataset_size": 15_000, **CASES[name]}
    rounds = case.pop("rounds")
    started = time.process_time()
    if case.pop("plan", False):
        plan = make_plan(Budget(bits=8, epsilon=3.0, delta=1e-5), Terms.of_batch(**case), rounds=rounds)
        assert plan.guarantee is not None
        release, guarantee = plan.release, plan.guarantee
    else:
        mechanism = Mechanism(levels=case.pop("levels"), trials=case.pop("trials"))
        release = Release(mechanism=mechanism, terms=Terms.of_batch(**case))
        guarantee = Accountant().compose(release, rounds).guarantee(delta=1e-5)
    cold = time.process_time() - started
    started = time.process_time()
    Accountant().compose(release, rounds).guarantee(delta=1e-5)
    return {
        "case": name,
        "release": release.to_dict(),
        "guarantee": guarantee.to_dict(),
        "cpu_seconds": cold,
        "cpu_seconds_cached": time.process_time() - started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> int:
    """All cases, the table, and 1 when a case misses its target."""
    parser = benchmarks.parser("accountant", __doc__)
    parser.add_argument("--case", choices=CASES, help="only print one case")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(one(options.case)))
        return 0
    rows = []
    for name in CASES:
        command = [sys.executable, "-m", "benchmarks", "accountant", "--case", name]
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        row = rows[-1]
        print(
            f"{name:34} epsilon {rounded_up(row['guarantee']['epsilon']):10} {row['cpu_seconds']:7.2f} s CPU, "
            f"{row['cpu_seconds_cached'] * 1e3:.2f} ms cached, peak {row['peak_mib']:.0f} MiB"
        )
    benchmarks.write(options.output, {"delta": 1e-5, "rows": rows})
    missed = [
        row["case"]
        for row in rows
        for seconds, mib in [limit for word, limit in TARGETS.items() if word in row["case"]][-1:]
        if row["cpu_seconds"] > seconds or row["peak_mib"] > mib
    ]
    print(f"beyond their targets: {', '.join(missed) or 'none'}")
    return 1 if missed else 0
