"""Mechanisms whose law depends on the value beside noise that is added, at one proven epsilon.

python -m experiments.assurance.by_value  # what is missing of it (some minutes on one core), and the page
"""

from __future__ import annotations

import argparse
import math
from typing import Any

from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.planner.compare import BY_VALUE, LAWS, compare, compare_by_value
from bqsgd._src.privacy.guarantee import rounded_up
from bqsgd._src.release import Relation, Sampling, Scheme, Sensitivity, Terms, Trust, Unit
from experiments import lab, pages

RESULTS = lab.RESULTS / "by_value.json"
BUDGET = PrivacyBudget(epsilon=3.0, delta=1e-5)
DIMENSION, ROUNDS = 16, 1
CELLS = ((1, 2), (1, 4), (1, 8), (10, 8))
"""(clients, bits); with one client each message is seen, with more only sums."""


def measure(clients: int, bits: int) -> dict[str, Any]:
    """One comparison, for values in [-1, 1] any of which may be replaced by any other."""
    terms = Terms(
        dimension=DIMENSION,
        sensitivity=Sensitivity(linf=2.0, relation=Relation.REPLACE),
        sampling=Sampling(scheme=Scheme.NONE),
        unit=Unit.CLIENT,
        trust=Trust.SUMS_ONLY if clients > 1 else Trust.EACH_CLIENT,
    )
    rows = [
        *compare(BUDGET, terms, rounds=ROUNDS, bits=bits, clients=clients),
        *compare_by_value(BUDGET, terms, rounds=ROUNDS, bits=bits, clients=clients),
    ]
    laws = {name: None if row is None else row.to_dict() for name, row in rows}
    for row in laws.values():
        if row is not None and math.isinf(row["published"]):
            row["published"] = "inf"
    return {"clients": clients, "bits": bits, "laws": laws}


def run() -> dict[str, Any]:
    """Measure what is missing; every comparison is kept as soon as it is there."""
    rows = lab.read_json(RESULTS)["rows"] if RESULTS.exists() else []
    for clients, bits in CELLS[len(rows) :]:
        rows.append(measure(clients, bits))
        lab.write_json(RESULTS, {"provenance": lab.provenance(), "rows": rows})
    return {"rows": rows}


def _cell(fields: dict[str, Any] | None) -> str:
    if fields is None:
        return "–"
    published = "none" if fields["published"] == "inf" else rounded_up(float(fields["published"]), 3)
    return f"{fields['error']:.3f}, {fields['entropy']:.2f}, {published}"


def section(results: dict[str, Any]) -> str:
    """The table of docs/mechanisms.md, every figure from the results."""
    names = (*LAWS, *BY_VALUE)
    lines = [
        "Made by `python -m experiments.assurance.by_value` from `experiments/results/by_value.json`; do not edit.",
        "",
        f"Epsilon {rounded_up(BUDGET.epsilon, 1)} at delta {BUDGET.delta:g}, {DIMENSION} coordinates in [-1, 1], one "
        "message; all values may be replaced, and nothing is sampled.",
        "",
        "| seen | bits | " + " | ".join(f"{name}: error, bits, papers" for name in names) + " |",
        "|---|--:|" + "---|" * len(names),
    ]
    for row in results["rows"]:
        seen = "each message" if row["clients"] == 1 else f"sums of {row['clients']}"
        lines.append(f"| {seen} | {row['bits']} | " + " | ".join(_cell(row["laws"][name]) for name in names) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    run()
    pages.write()


if __name__ == "__main__":
    main()
