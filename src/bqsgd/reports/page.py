"""The report of one run, and the comparison of several: one self-contained HTML file each.

Every text from a run folder is escaped. A comparison warns where the epsilons of its runs do not mean the same.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bqsgd import __version__
from bqsgd.errors import InvalidParameter
from bqsgd.privacy.guarantee import MEANINGLESS_EPSILON, Guarantee, as_given, rounded_up
from bqsgd.records.folder import REPORT, SHOWN, ClientTally, History, Parameters
from bqsgd.records.record import Status
from bqsgd.reports._chart import Chart, Point, Quantity, Series, short
from bqsgd.reports._figures import measured, run_figures, running_total
from bqsgd.reports._ledgers import read_run
from bqsgd.storage import write_atomic

_MAX_CLIENT_ROWS = 40
_MAX_SETTINGS = 300
_MAX_SETTING_TEXT = 200


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Read a run folder and write its report, by default as report.html inside it."""
    target = Path(folder) / REPORT if out is None else Path(out)
    write_atomic(target, run_page(read_run(folder)).encode(), mode=SHOWN)
    return target


def _saving_down(run: History) -> str:
    """How many times fewer bytes than whole models take; empty where whole models were sent."""
    down, plain_down = run.total("bytes_down"), run.total("bytes_down_float32")
    return short(plain_down / down) if down and plain_down > 1.01 * down else ""


def run_page(run: History) -> str:
    """The report of `run` as HTML."""
    summary = run.summary
    claim = summary.guarantee if summary is not None else None
    nominal = summary.nominal_epsilon if summary is not None else None
    statuses: Counter[Status] = Counter()
    for tally in run.clients:
        statuses.update(tally.counts)
    up, plain_up = run.total("bytes_up"), run.total("bytes_up_float32")
    longest = max(up, plain_up, 1)
    mechanism = run.mechanism
    return _render(
        "run.html",
        title=run.name,
        run=run,
        lead=_lead(run),
        seeded=run.seeded,
        notices=_notices(run),
        accuracy=short(run.accuracy, Quantity.PERCENT, 4),
        rounds=short(run.round_count, Quantity.COUNT),
        seconds="" if run.seconds is None else short(run.seconds, Quantity.SECONDS),
        claim=claim,
        epsilon="" if claim is None else epsilon_text(claim),
        delta="" if claim is None else short(claim.delta),
        claim_terms=[] if claim is None else _claim_terms(claim),
        nominal="" if nominal is None else f"{rounded_up(nominal)} (Theorem 1)",
        bits=short(run.bits_per_coordinate, digits=4),
        mechanism=mechanism,
        mechanism_bits="" if mechanism is None else short(mechanism.bits_per_coordinate, digits=3),
        bytes_up=short(up, Quantity.BYTES),
        bytes_float=short(plain_up, Quantity.BYTES),
        bytes_down=short(run.total("bytes_down"), Quantity.BYTES),
        saving_down=_saving_down(run),
        saving="" if run.saving is None else short(run.saving),
        bar_sent=100 * up / longest,
        bar_float=100 * plain_up / longest,
        client_count=len(run.clients) or "–",
        used=short(statuses[Status.OK], Quantity.COUNT),
        unused=[(str(status), statuses[status]) for status in Status if status is not Status.OK and statuses[status]],
        charts=run_figures(run),
        clients=_client_rows(run.clients),
        clients_hidden=len(run.clients) > _MAX_CLIENT_ROWS,
        one_liar=(summary.one_liar if summary is not None else None) or "",
        tables=_tables(run),
    )


def epsilon_text(claim: Guarantee) -> str:
    """The bound with its sign, rounded up: "= 2.94", or "> 1000" where no effort is spent on the figure."""
    if not claim.epsilon <= MEANINGLESS_EPSILON:
        return f"> {MEANINGLESS_EPSILON:.0f}"
    return f"= {short(claim.epsilon, Quantity.EPSILON, digits=4)}"


def _claim_terms(claim: Guarantee) -> list[tuple[str, str]]:
    """What stands beside an epsilon, named."""
    floor = [] if not claim.delta_floor else [("delta floor", short(claim.delta_floor))]
    return [
        ("neighbours", claim.relation),
        ("unit", claim.unit),
        ("trust", claim.trust_text),
        ("sampling", claim.sampling),
        ("method", claim.method),
        *([("assuming", claim.assumption)] if claim.assumption else []),
        *floor,
    ]


def _render(template: str, **fields: Any) -> str:
    """Fill a template; the page allows itself one script, by its hash, and no request at all."""
    script = (files("bqsgd.reports") / "templates" / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    css = (files("bqsgd.reports") / "templates" / "page.css").read_text("utf-8")
    trusted = {"css": Markup(css), "script": Markup(script), "script_hash": digest}
    return _environment().get_template(template).render(version=__version__, **trusted, **fields)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("bqsgd.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _lead(run: History) -> str:
    """Data, model and clients in one line, where the settings name them."""
    settings = dict(flatten(run.config))
    named = []
    for word in ("dataset", "model", "aggregation", "optimiser"):
        value = settings.get(word) or next(
            (v for key, v in settings.items() if key.endswith((f".{word}", f"{word}.name"))), None
        )
        if value:
            named.append(f"{word} {value}")
    return " · ".join(named)


def _notices(run: History) -> list[tuple[str, str]]:
    notices = []
    if run.summary is None:
        notices.append(("Unfinished run", "It has written no summary yet, so nothing is claimed about its privacy."))
    if run.repeated_rounds:
        notices.append(
            ("Resumed", f"{run.repeated_rounds} rounds were run again after a resume; the later records are shown.")
        )
    idle = sum(not record.stepped for record in run.rounds)
    if idle:
        notices.append(
            (
                "Rounds without a step",
                f"Too few clients answered in {idle} {'round' if idle == 1 else 'rounds'}, so the model stood still.",
            )
        )
    claim = run.summary.guarantee if run.summary is not None else None
    if claim is not None and not claim.epsilon <= MEANINGLESS_EPSILON:
        notices.append(
            ("No meaningful guarantee", f"The epsilon proven at this delta is above {MEANINGLESS_EPSILON:.0f}.")
        )
    return notices


def _parameters(used: Parameters) -> str:
    levels, trials, points, _ = used
    return f"{levels}, {trials}" + (f" to {points} points" if points else "")


def _client_rows(clients: tuple[ClientTally, ...]) -> list[dict[str, Any]]:
    """The clients with most trouble first when there are too many to show, else in order."""
    if len(clients) > _MAX_CLIENT_ROWS:
        worst = sorted(clients, key=lambda tally: (tally.counts[Status.OK] - tally.counts.total(), tally.client))
        clients = tuple(worst[:_MAX_CLIENT_ROWS])
    return [
        {
            "client": tally.client,
            "counts": [tally.counts[status] for status in Status],
            "sent": short(tally.frame_bytes, Quantity.BYTES),
            "mechanisms": "; ".join(_parameters(used) for used, _ in tally.mechanisms.most_common(3)) or "–",
            "reasons": "; ".join(f"{_cut(reason)} ({n})" for reason, n in tally.reasons.most_common(3)),
        }
        for tally in clients
    ]


def _tables(run: History) -> list[tuple[str, list[tuple[str, str]]]]:
    settings = run.config or (run.summary.config if run.summary is not None else {})
    versions = run.summary.versions if run.summary is not None else {}
    named = [("Settings", flatten(settings)), ("Versions", flatten(versions))]
    return [(name, rows) for name, rows in named if rows]


def flatten(table: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested tables as dotted names, at most 300 rows of 200 characters, eight tables deep."""
    rows: list[tuple[str, str]] = []
    for key, value in table.items():
        name = _cut(f"{prefix}{key}")
        if isinstance(value, Mapping) and depth < 8:
            rows += flatten(value, f"{name}.", depth + 1)
        else:
            rows.append((name, _cut(_setting(name, value))))
        if len(rows) >= _MAX_SETTINGS:
            break
    return rows[:_MAX_SETTINGS]


def _setting(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return as_given(value) if "epsilon" in name else short(value, digits=6)


def _cut(words: str) -> str:
    return words if len(words) <= _MAX_SETTING_TEXT else words[: _MAX_SETTING_TEXT - 1] + "…"


_MAX_RUNS = 16
_TERMS = "Proven epsilon of the client that spent most; its delta and terms are in the table."
_NOTES = {
    "accuracy": "On the public test split.",
    "accuracy-bytes": "Further left is cheaper: measured frames, headers included.",
    "accuracy-epsilon": f"Further left is more private. {_TERMS}",
    "loss": "On the public test split.",
    "epsilon": _TERMS,
    "bytes": "Measured frames, headers included, summed over clients and rounds.",
}
_COLOURS = (0, 1, 2, 4, 6, 7, 5, 3)


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Read the run folders and write one page that compares them."""
    write_atomic(Path(out), comparison_page([read_run(folder) for folder in folders]).encode(), mode=SHOWN)
    return Path(out)


def comparison_page(runs: Sequence[History]) -> str:
    """The comparison of 2 to 16 runs as HTML."""
    if not 2 <= len(runs) <= _MAX_RUNS:
        raise InvalidParameter(f"a comparison takes 2 to {_MAX_RUNS} runs, got {len(runs)}")
    runs = _distinct(runs)
    return _render(
        "compare.html",
        title=f"{len(runs)} runs compared",
        runs=[_row(index, run) for index, run in enumerate(runs)],
        seeded=[run.name for run in runs if run.seeded],
        differing=_differing_terms(runs),
        charts=comparison_figures(runs),
    )


def comparison_figures(runs: Sequence[History]) -> list[Chart]:
    """Accuracy against rounds, bytes and epsilon; loss, epsilon and bytes against rounds."""
    draw = _Overlay(runs)
    return [
        draw("accuracy", "Test accuracy", "round", "accuracy", _named("test_accuracy"), y_unit=Quantity.PERCENT),
        draw(
            "accuracy-bytes",
            "Accuracy for the bytes sent",
            "bytes up so far",
            "accuracy",
            _against("bytes_up"),
            x_unit=Quantity.BYTES,
            log_x=True,
            y_unit=Quantity.PERCENT,
        ),
        draw(
            "accuracy-epsilon",
            "Accuracy for the privacy spent",
            "proven epsilon so far",
            "accuracy",
            _against("epsilon_max"),
            x_unit=Quantity.EPSILON,
            y_unit=Quantity.PERCENT,
        ),
        draw("loss", "Test loss", "round", "loss", _named("test_loss")),
        draw(
            "epsilon", "Privacy spent", "round", "proven epsilon so far", _named("epsilon_max"), y_unit=Quantity.EPSILON
        ),
        draw(
            "bytes",
            "Bytes sent by the clients",
            "round",
            "bytes up so far",
            lambda run: running_total(run.rounds, "bytes_up"),
            y_unit=Quantity.BYTES,
        ),
    ]


def _differing_terms(runs: Sequence[History]) -> list[str]:
    """The terms (delta, neighbours, unit, trust) in which the runs' guarantees differ; then epsilons do not compare."""
    claims = [run.summary.guarantee for run in runs if run.summary is not None and run.summary.guarantee is not None]
    terms: dict[str, set[object]] = {
        "delta": {claim.delta for claim in claims},
        "neighbours": {claim.relation for claim in claims},
        "unit": {claim.unit for claim in claims},
        "trust": {claim.trust_text for claim in claims},
    }
    return [name for name, stated in terms.items() if len(stated) > 1]


class _Overlay:
    """Draws one figure of every run in the run's colour; beyond eight runs the curves are dashed."""

    def __init__(self, runs: Sequence[History]) -> None:
        self.runs = runs

    def __call__(
        self, key: str, title: str, x_label: str, y_label: str, points: Callable[[History], list[Point]], **options: Any
    ) -> Chart:
        series = [
            Series(label=run.name, points=points(run), colour=_COLOURS[i % 8], dashed=i >= 8)
            for i, run in enumerate(self.runs)
        ]
        options = {"x_unit": Quantity.COUNT, "note": _NOTES.get(key, ""), **options}
        return Chart(key=key, title=title, x_label=x_label, y_label=y_label, series=series, **options)


def _named(name: str) -> Callable[[History], list[Point]]:
    return lambda run: measured(run.rounds, name)


def _against(name: str) -> Callable[[History], list[Point]]:
    """(what was spent when, accuracy) over the rounds where both are known."""

    def points(run: History) -> list[Point]:
        spent = dict(running_total(run.rounds, name) if name.startswith("bytes") else measured(run.rounds, name))
        return [(spent[at], value) for at, value in measured(run.rounds, "test_accuracy") if at in spent]

    return points


def _row(index: int, run: History) -> dict[str, Any]:
    claim = run.summary.guarantee if run.summary is not None else None
    return {
        "name": run.name,
        "colour": _COLOURS[index % 8],
        "accuracy": short(run.accuracy, Quantity.PERCENT, 4),
        "epsilon": "none" if claim is None else f"ε {epsilon_text(claim)} at δ = {short(claim.delta)}",
        "terms": "" if claim is None else "; ".join(value for _, value in _claim_terms(claim)[:5]),
        "seeded": run.seeded,
        "bytes_up": short(run.total("bytes_up"), Quantity.BYTES),
        "saving": "–" if run.saving is None else f"{short(run.saving)}×",
        "bits": short(run.bits_per_coordinate, digits=4),
        "rounds": short(run.round_count, Quantity.COUNT),
        "seconds": short(run.seconds, Quantity.SECONDS),
        "finished": run.summary is not None,
    }


def _distinct(runs: Sequence[History]) -> list[History]:
    """Runs whose folders share a name get a number."""
    shared, seen = Counter(run.name for run in runs), Counter[str]()
    named = []
    for run in runs:
        seen[run.name] += 1
        named.append(replace(run, name=f"{run.name} ({seen[run.name]})") if shared[run.name] > 1 else run)
    return named
