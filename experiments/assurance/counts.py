"""Noise for counts, histograms and sums: what tight accounting needs, beside the bound of cpSGD.

python -m experiments.assurance.counts  # everything (two minutes on one core), and the page
"""

from __future__ import annotations

import argparse
from typing import Any

from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.planner.queries import plan_query
from bqsgd._src.privacy.guarantee import as_given
from bqsgd._src.release import RELATIONS
from experiments import lab, pages

RESULTS = lab.RESULTS / "counts.json"
CASES: list[dict[str, Any]] = [
    {"query": "count", "epsilon": 1.0, "delta": 1e-6},
    {"query": "count", "epsilon": 0.1, "delta": 1e-6},
    {"query": "count", "epsilon": 0.5, "delta": 1e-6},
    {"query": "count", "epsilon": 2.0, "delta": 1e-6},
    {"query": "count", "epsilon": 1.0, "delta": 1e-9},
    {"query": "count", "epsilon": 1.0, "delta": 1e-6, "relation": "replace"},
    {"query": "count", "epsilon": 1.0, "delta": 1e-6, "times": 10},
    {"query": "count", "epsilon": 1.0, "delta": 1e-6, "times": 100},
    {"query": "histogram", "epsilon": 1.0, "delta": 1e-6, "bins": 1000},
    {"query": "histogram", "epsilon": 1.0, "delta": 1e-6, "bins": 1000, "relation": "replace"},
    {"query": "sum", "epsilon": 1.0, "delta": 1e-6},
]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One case with the least noise of each law."""
    options = {key: value for key, value in case.items() if key not in ("epsilon", "delta", "query", "relation")}
    budget = PrivacyBudget(epsilon=case["epsilon"], delta=case["delta"])
    planned = plan_query(case["query"], budget, relation=RELATIONS[case.get("relation", "add-remove")], **options)
    print(planned.title, flush=True)
    return {"case": case, **planned.to_dict()}


def section(results: dict[str, Any]) -> str:
    """The table of docs/counts.md, every figure from the results."""
    lines = [
        "Made by `python -m experiments.assurance.counts` from `experiments/results/counts.json`; do not edit.",
        "",
        "| query | epsilon, delta | neighbours | trials by cpSGD | trials by tight accounting | error: binomial "
        "| discrete Gaussian | Skellam | geometric |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["rows"]:
        case, laws = row["case"], row["laws"]
        what = case["query"] + (f", {case['bins']:,} bins" if "bins" in case else "")
        what += f", {case['times']} times" if "times" in case else ""
        trials = row["cpsgd_trials"]
        errors = " | ".join(
            f"{laws[law]['error']:.3g}" if law in laws else "–"
            for law in ("binomial", "discrete gaussian", "skellam", "geometric")
        )
        tight = f"{laws['binomial']['law']['trials']:,}" if "binomial" in laws else "–"
        lines.append(
            f"| {what} | {as_given(case['epsilon'])}, {case['delta']:g} | {case.get('relation', 'add-remove')} "
            f"| {'more than 2^20' if trials is None else f'{trials:,}'} | {tight} | {errors} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure everything and write the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = [measure(case) for case in CASES]
    lab.write_json(RESULTS, {"provenance": lab.provenance(), "rows": rows})
    pages.write()


if __name__ == "__main__":
    main()
