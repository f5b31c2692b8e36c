"""Laws of noise side by side: error, bits, speed and smallest delta at equal proven epsilon, and the papers' bounds.

python -m experiments.assurance.mechanisms  # what is missing of it (about twenty minutes on one core), page and figure
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq

from bqsgd._src.codec import encode_frame
from bqsgd._src.laws import law_from
from bqsgd._src.ledger import PrivacyBudget
from bqsgd._src.noise import privacy_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.compare import LAWS, compare
from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.release import Terms, Trust
from bqsgd._src.settings.client_plan import client_terms
from bqsgd._src.tasks.named import preset, settings_of
from experiments import lab, pages

RESULTS = lab.RESULTS / "mechanisms.json"
FIGURE = lab.DOCS / "figures" / "mechanisms.png"
DELTA = 1e-5
CASES: dict[str, dict[str, Any]] = {
    "mnist-eps3": {"dimension": 1_985, "dataset_size": 15_000},
    "mnist-eps3-100": {"dimension": 397, "dataset_size": 600},
    "cifar10-imagenet-eps1": {"dimension": 20_490, "dataset_size": 12_500},
}
"""Presets, whose clip, range, rate, rounds and epsilon are compared; coordinates of a message; samples of a client."""
SUMS = (10, 100, 1000)
"""Clients in sums, each with the terms of the first case."""
BITS, SUM_BITS = tuple(range(2, 17)), tuple(range(6, 17))
SPEED_COORDINATES, SPEED_TRIES = 1_000_000, 9
_COLOURS = {"binomial": "#0b6e99", "discrete gaussian": "#3d8c40", "skellam": "#b8860b", "geometric": "#d1495b"}
_MARKERS = {"binomial": "o", "discrete gaussian": "s", "skellam": "^", "geometric": "D"}


@cache
def case(name: str) -> tuple[PrivacyBudget, Terms, int]:
    """Budget, terms and rounds of a preset."""
    _, config = settings_of(**preset(name))
    assert config.privacy.epsilon is not None
    budget = PrivacyBudget(epsilon=config.privacy.epsilon, delta=DELTA)
    return budget, client_terms(config, **CASES[name]), config.turns


@cache
def gaussian_error(name: str) -> float:
    """The error of real Gaussian noise without rounding, by Google's accountant."""
    budget, terms, rounds = case(name)

    def excess(log_sigma: float) -> float:
        accountant = PLDAccountant()
        event = dp_event.GaussianDpEvent(math.exp(log_sigma))
        accountant.compose(dp_event.PoissonSampledDpEvent(terms.sampling.rate, event), rounds)
        return float(accountant.get_epsilon(budget.delta)) - budget.epsilon

    return math.exp(brentq(excess, math.log(0.3), math.log(300), xtol=1e-5))


def cells() -> list[tuple[str, int, int]]:
    """(preset, clients, bits) of every comparison."""
    alone = [(name, 1, bits) for name in CASES for bits in BITS]
    return alone + [(next(iter(CASES)), clients, bits) for clients in SUMS for bits in SUM_BITS]


def measure(name: str, clients: int, bits: int) -> dict[str, Any]:
    """One comparison: a row for each law."""
    budget, terms, rounds = case(name)
    if clients > 1:
        terms = replace(terms, trust=Trust.SUMS_ONLY)
    rows = compare(budget, terms, rounds=rounds, bits=bits, clients=clients)
    laws = {law: None if row is None else row.to_dict() for law, row in rows}
    for row in laws.values():
        if row is not None and math.isinf(row["published"]):
            row["published"] = "inf"
    return {"preset": name, "clients": clients, "bits": bits, "gaussian": gaussian_error(name), "laws": laws}


def speeds(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Nanoseconds for a coordinate of `encode_frame` with each law, at the 8 bits of the first preset; the best try."""
    found = next(row for row in rows if row["clients"] == 1 and row["bits"] == 8)
    values, times = np.zeros(SPEED_COORDINATES, np.float32), dict.fromkeys(LAWS, math.inf)
    for _ in range(SPEED_TRIES):  # in turns, so that other work on the machine hits all laws alike
        for name in LAWS:
            fields = found["laws"][name]
            mechanism = Mechanism.of(levels=fields["mechanism"]["levels"], noise=law_from(fields["law"]))
            start = time.perf_counter()
            encode_frame(values, mechanism, range=1.0, rng=privacy_rng(), client=0, round=0)
            times[name] = min(times[name], time.perf_counter() - start)
    return {name: 1e9 * seconds / SPEED_COORDINATES for name, seconds in times.items()}


def run() -> dict[str, Any]:
    """Measure what is missing; every comparison is kept as soon as it is there."""
    results = lab.read_json(RESULTS) if RESULTS.exists() else {"rows": []}
    rows = {(row["preset"], row["clients"], row["bits"]): row for row in results["rows"]}
    for cell in cells():
        if cell not in rows:
            rows[cell] = measure(*cell)
            print(json.dumps(rows[cell])[:200], flush=True)
            lab.write_json(RESULTS, {"delta": DELTA, "provenance": lab.provenance(), "rows": list(rows.values())})
    if "speed" not in results:
        results["speed"] = speeds(list(rows.values()))
    results = {"delta": DELTA, "provenance": lab.provenance(), "rows": list(rows.values()), "speed": results["speed"]}
    lab.write_json(RESULTS, results)
    return results


def _error(row: dict[str, Any], law: str) -> float | None:
    """The error in units of that of real Gaussian noise; for a sum the whole sum's."""
    fields = row["laws"][law]
    return None if fields is None else fields["error"] / row["gaussian"]


def _rows(results: dict[str, Any], name: str, clients: int) -> list[dict[str, Any]]:
    return [row for row in results["rows"] if (row["preset"], row["clients"]) == (name, clients)]


def _text(value: float | None, digits: str = ".3f") -> str:
    return "–" if value is None else format(value, digits)


def _published(fields: dict[str, Any] | None) -> str:
    if fields is None:
        return "–"
    return "none" if fields["published"] == "inf" else rounded_up(float(fields["published"]), 3)


def section(results: dict[str, Any]) -> str:
    """The tables of docs/mechanisms.md, every figure from the results."""
    lines = [
        "Made by `python -m experiments.assurance.mechanisms` from `experiments/results/mechanisms.json`; do not edit.",
        "",
    ]
    header = "| bits | " + " | ".join(f"{law}: error, bits, papers" for law in LAWS) + " |"
    for name, clients in [(name, 1) for name in CASES] + [(next(iter(CASES)), clients) for clients in SUMS]:
        rows = _rows(results, name, clients)
        budget, terms, rounds = case(name)
        seen = "each message seen" if clients == 1 else f"sums over {clients} clients"
        lines += [
            f"### {seen[0].upper()}{seen[1:]}: {name}",
            "",
            f"Epsilon {as_given(budget.epsilon)} at delta {budget.delta:g}, rate {terms.sampling.rate:.4g}, "
            f"{rounds} rounds, {terms.dimension:,} coordinates. Real Gaussian noise has the error "
            f"{rows[0]['gaussian']:.4g}.",
            "",
            header,
            "|--:|" + "---|" * len(LAWS),
        ]
        # From 12 bits on a message has as many levels as are any use, so the rows after are all alike.
        shown = [row for row in rows if any(row["laws"].values()) and (clients > 1 or row["bits"] <= 12)]
        for row in shown:
            figures = [
                f"{_text(_error(row, law))}, {_text(None if fields is None else fields['entropy'], '.2f')}, "
                f"{_published(fields)}"
                for law, fields in row["laws"].items()
            ]
            bits = "12 to 16" if clients == 1 and row["bits"] == 12 else row["bits"]
            lines.append(f"| {bits} | " + " | ".join(figures) + " |")
        lines.append("")
    floors = {
        law: max(
            float(row["laws"][law]["guarantee"]["delta_floor"])
            for row in results["rows"]
            if row["laws"][law] is not None
        )
        for law in LAWS
    }
    lines += [
        "| | " + " | ".join(LAWS) + " |",
        "|---|" + "--:|" * len(LAWS),
        "| smallest delta, the largest of all rows | " + " | ".join(rounded_up(floors[law], 2) for law in LAWS) + " |",
        "| nanoseconds for a coordinate of a frame | "
        + " | ".join(f"{results['speed'][law]:.1f}" for law in LAWS)
        + " |",
    ]
    return "\n".join(lines)


def draw(results: dict[str, Any], path: Path = FIGURE) -> None:
    """How much the error exceeds that of real Gaussian noise, against bits: each message seen, and sums."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    first = next(iter(CASES))
    shown = {"each message seen": 1, "sums over 10 clients": 10, "sums over 100 clients": 100}
    for panel, (title, clients) in zip(figure.subplots(1, len(shown), sharey=True), shown.items(), strict=True):
        for index, law in enumerate(LAWS):
            errors = [(row["bits"], _error(row, law)) for row in _rows(results, first, clients)]
            points = [(bits, 100 * (error - 1)) for bits, error in errors if error is not None]
            # Later markers are smaller, so that one lying on another still shows both.
            style = {"color": _COLOURS[law], "marker": _MARKERS[law], "markersize": 8 - 1.5 * index, "linewidth": 1.2}
            panel.plot(*zip(*points, strict=True) if points else ([], []), label=law, **style)
        panel.set(title=title, xlabel="bits of a coordinate", yscale="log", xlim=(1.5, 16.5), ylim=(0.2, 300))
        panel.set_yticks([0.3, 1, 3, 10, 30, 100, 300], ["0.3 %", "1 %", "3 %", "10 %", "30 %", "100 %", "300 %"])
        panel.set_xticks(range(2, 17, 2))
        panel.minorticks_off()
        panel.grid(visible=True, alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if clients == 1:
            panel.set_ylabel("error above that of real Gaussian noise")
        if clients == 100:
            panel.legend(frameon=False, loc="lower left")
    figure.suptitle(f"Four laws of noise at one proven epsilon ({first}: 3 at delta {DELTA:g})", x=0.01, ha="left")
    figure.savefig(path)


def main() -> None:
    """Measure what is missing, then write the page and the figure."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    draw(run())
    pages.write()


if __name__ == "__main__":
    main()
