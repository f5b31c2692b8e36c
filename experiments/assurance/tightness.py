"""How far proven epsilons lie above attained ones, over random settings with few trials and extreme rates among them.

python -m experiments.assurance.tightness          # what is missing of 420 settings, and the page
python -m experiments.assurance.tightness --again  # what the accountant proves today for the same settings and data
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from bqsgd._src.errors import AccountingError
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.search import LEAST_L2_TRIALS
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms
from experiments import lab, pages

RESULTS = lab.RESULTS / "tightness.json"
SETTINGS, SEED = 420, 35
LEAST_EPSILON, MOST_EPSILON = 0.02, 50.0
"""Settings whose attained epsilon lies outside are drawn again: nobody would run them."""


def draws(seed: int) -> Iterator[dict[str, Any]]:
    """Random settings without end: half of them with few trials, half with an L2 bound."""
    rng = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    while True:
        trials = round(log_uniform(20, 120) if rng.random() < 0.5 else log_uniform(64, 2e4))
        dimension = 1 if rng.random() < 0.1 else round(log_uniform(1, 3e4))
        length = log_uniform(0.05, 3.0) * math.sqrt(trials) / 2
        with_l2 = dimension > 1 and rng.random() < 0.5
        if with_l2:
            linf = length if rng.random() < 0.4 else length / log_uniform(1, 30)
            l2: float | None = min(length, 0.97 * math.sqrt(dimension) * linf)
        else:
            linf, l2 = length / math.sqrt(dimension), None
        scheme = list(Scheme)[rng.choice(3, p=[0.6, 0.2, 0.2])]
        rate = log_uniform(1e-5, 1.0) if rng.random() < 0.5 else rng.uniform(0.02, 1.0)
        yield {
            "trials": trials,
            "dimension": dimension,
            "linf": linf,
            "l2": l2,
            "scheme": str(scheme),
            "rate": 1.0 if scheme is Scheme.NONE else rate,
            "rounds": round(log_uniform(1, 1000)),
            "delta": 10.0 ** -rng.uniform(3, 10),
        }


def tally(setting: dict[str, Any]) -> Accountant:
    """The accountant of a setting; its bounds are in quantiser steps."""
    scheme = Scheme(setting["scheme"])
    relation = Relation.REPLACE if scheme is Scheme.FIXED_SIZE else Relation.ADD_REMOVE
    terms = Terms(
        dimension=setting["dimension"],
        sensitivity=Sensitivity(linf=setting["linf"], l2=setting["l2"], relation=relation),
        sampling=Sampling(scheme=scheme, rate=setting["rate"]),
    )
    release = Release(mechanism=Mechanism(levels=1, trials=setting["trials"]), terms=terms)
    return Accountant().compose(release, setting["rounds"])


def proven(setting: dict[str, Any]) -> dict[str, Any]:
    """The proven epsilon of a setting and the method; infinite where nothing is proven."""
    try:
        guarantee = tally(setting).guarantee(delta=setting["delta"])
    except AccountingError as error:
        return {"epsilon": "inf", "method": str(error)[:120]}
    return {
        "epsilon": guarantee.epsilon if math.isfinite(guarantee.epsilon) else "inf",
        "method": guarantee.method,
        "floor": guarantee.delta_floor,
    }


def ratio(row: dict[str, Any], of: str = "proven") -> float:
    """Proven over attained; `of` is "before" for what was proven when the settings were drawn."""
    attained: float = row["attained"]
    return float(row.get(of, row["proven"])["epsilon"]) / attained


def run() -> dict[str, Any]:
    """The first so many settings of the draws that somebody might want; rows that are there are kept."""
    results: dict[str, Any] = lab.read_json(RESULTS) if RESULTS.exists() else {"rows": [], "drawn": 0}
    drawing = draws(SEED)
    for _ in range(results["drawn"]):
        next(drawing)
    while len(results["rows"]) < SETTINGS:
        setting = next(drawing)
        results["drawn"] += 1
        attained = tally(setting).attained_epsilon(setting["delta"])
        if LEAST_EPSILON <= attained <= MOST_EPSILON:
            row = {**setting, "attained": attained, "proven": proven(setting)}
            results["rows"].append(row)
            print(len(results["rows"]), f"{ratio(row):.4f}", row, flush=True)
            lab.write_json(RESULTS, results)
    return results


def again(results: dict[str, Any]) -> dict[str, Any]:
    """Prove the settings with an L2 bound anew, and keep what was proven when they were drawn as "before"."""
    results = {"drawn_at": results["provenance"], **results}
    for row in sorted((row for row in results["rows"] if row["l2"] is not None), key=lambda row: int(row["trials"])):
        if "before" not in row:
            row["before"], row["proven"] = row["proven"], proven(row)
            print(f"{ratio(row, 'before'):.4f} -> {ratio(row):.4f}", row, flush=True)
            lab.write_json(RESULTS, results)
    return results


def _planned(row: dict[str, Any]) -> bool:
    """Whether the planner may return the mechanism of this setting."""
    return row["l2"] is None or row["trials"] >= LEAST_L2_TRIALS


def _groups(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    fixed = str(Scheme.FIXED_SIZE)
    return {
        "all": rows,
        "what the planner may return": [row for row in rows if _planned(row)],
        "L-infinity alone": [row for row in rows if row["l2"] is None],
        "L2 as well": [row for row in rows if row["l2"] is not None],
        "up to 120 trials": [row for row in rows if row["trials"] <= 120],
        "fixed-size batches": [row for row in rows if row["scheme"] == fixed],
        "Poisson or no sampling": [row for row in rows if row["scheme"] != fixed],
    }


def section(results: dict[str, Any]) -> str:
    """The table of docs/accounting.md, every figure from the results."""
    rows = results["rows"]
    lines = [
        "Made by `python -m experiments.assurance.tightness` from `experiments/results/tightness.json`; do not edit.",
        "",
        f"{len(rows)} random settings: 20 to 20,000 trials (half of them up to 120), 1 to 30,000 coordinates, rates "
        f"1e-5 to 1, up to 1,000 rounds, delta 1e-10 to 1e-3, attained epsilon {LEAST_EPSILON:g} to {MOST_EPSILON:g}. "
        "*Before*: as proven when the settings were drawn; the attained figures are of that time. Settings without an "
        "L2 bound were not proven again: nothing that accounts for them has changed.",
        "",
        "| before → after | settings | median | 90 % | 99 % | largest | above 1.25 | nothing proven |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, group in _groups(rows).items():
        cells = []
        for of in ("before", "proven"):
            every = np.array([ratio(row, of) for row in group])
            finite = every[np.isfinite(every)]
            figures = [f"{x:.4f}" for x in (*np.quantile(finite, [0.5, 0.9, 0.99]), finite.max())]
            cells.append([*figures, str((finite > 1.25).sum()), str(np.isinf(every).sum())])
        columns = (old if old == new else f"{old} → {new}" for old, new in zip(*cells, strict=True))
        lines.append(f"| {name} | {len(group)} | {' | '.join(columns)} |")
    lines += [
        "",
        "The loosest, before or after:",
        "",
        "| trials | coordinates | linf, l2 in steps | sampling, rate | rounds | delta | attained | before | after |",
        "|--:|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in sorted(rows, key=lambda row: max(ratio(row), ratio(row, "before")), reverse=True)[:12]:
        l2 = "–" if row["l2"] is None else f"{row['l2']:.3g}"
        lines.append(
            f"| {row['trials']} | {row['dimension']:,} | {row['linf']:.3g}, {l2} | {row['scheme']}, {row['rate']:.3g} "
            f"| {row['rounds']} | {row['delta']:.1e} | {row['attained']:.4g} "
            f"| {ratio(row, 'before'):.4f} | {ratio(row):.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true")
    results = again(lab.read_json(RESULTS)) if parser.parse_args().again else run()
    lab.write_json(RESULTS, results | {"provenance": lab.provenance()})
    pages.write()


if __name__ == "__main__":
    main()
