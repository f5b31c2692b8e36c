"""The report of one run, and the comparison of several: one self-contained HTML file each.

Every text from a run folder is escaped. A comparison warns where the epsilons of its runs do not mean the same. The
guarantee comes from the ledgers where there are any (`read_run`): a summary knows only what one process spent.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bqsgd import __version__
from bqsgd._src.errors import AccountingError, InvalidParameter
from bqsgd._src.ledger.register import SUFFIX, Ledgers
from bqsgd._src.privacy.guarantee import MEANINGLESS_EPSILON, Guarantee, as_given
from bqsgd._src.records.folder import REPORT, SHOWN, ClientTally, History, Parameters, read_history
from bqsgd._src.records.record import RunFolderError, Status, Summary
from bqsgd._src.reports._chart import Chart, Point, Quantity, Series, short
from bqsgd._src.reports._figures import framed, measured, run_figures, running_total
from bqsgd._src.storage import write_atomic
from bqsgd._src.text import one_line

_MAX_CLIENT_ROWS = 40
_MAX_SETTINGS = 300
_MAX_SETTING_TEXT = 200
_MAX_NOTICE = 600


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Read a run folder and write its report, by default as report.html inside it."""
    target = Path(folder) / REPORT if out is None else Path(out)
    write_atomic(target, run_page(read_run(folder)).encode(), mode=SHOWN)
    return target


def run_page(run: History, *, live: tuple[str, str] | None = None) -> str:
    """The report of `run` as HTML. live: where the run is, as a title and a text, if it has not ended."""
    statuses: Counter[Status] = Counter()
    for tally in run.clients:
        statuses.update(tally.counts)
    return _render(
        "run.html",
        title=run.name,
        run=run,
        lead=_lead(run),
        notices=([(live[0], _cut(live[1], limit=_MAX_NOTICE))] if live else []) + _notices(run, live=live is not None),
        statuses=statuses,
        charts=run_figures(run),
        clients=_client_rows(run.clients),
        tables=_tables(run),
    )


def message_page(title: str, heading: str, text: str) -> str:
    """A page with one message, for a run that has nothing else to show."""
    return _render("message.html", title=_cut(title), heading=heading, text=_cut(text, limit=_MAX_NOTICE))


def epsilon_text(claim: Guarantee) -> str:
    """The bound with its sign, rounded up: "= 2.94", or "> 1000" beyond the largest epsilon that means anything."""
    # `not <=` and not `>`: a NaN must also count as meaningless.
    if not claim.epsilon <= MEANINGLESS_EPSILON:
        return f"> {MEANINGLESS_EPSILON:.0f}"
    return f"= {short(claim.epsilon, Quantity.EPSILON, digits=4)}"


def _claim_terms(claim: Guarantee) -> list[tuple[str, str]]:
    """(name, value) of everything that must be stated beside an epsilon."""
    terms = {
        "neighbours": claim.neighbours,
        "unit": claim.unit,
        "trust": claim.trust_text,
        "sampling": claim.sampling,
        "method": claim.method,
        "assuming": claim.assumption,
        "delta floor": short(claim.delta_floor) if claim.delta_floor else "",
    }
    return [(name, value) for name, value in terms.items() if value]


def _render(template: str, **fields: Any) -> str:
    """Fill a template. The page's security policy allows one script, by its hash, and no requests."""
    script = (files("bqsgd._src.reports") / "templates" / "page.js").read_text("utf-8")
    # Only a script with this hash runs: text from a run folder cannot, even if escaping had a fault.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    css = (files("bqsgd._src.reports") / "templates" / "page.css").read_text("utf-8")
    trusted = {"css": Markup(css), "script": Markup(script), "script_hash": digest}
    return _environment().get_template(template).render(version=__version__, **trusted, **fields)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("bqsgd._src.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        # Autoescape keeps a text from being markup; this keeps it from hiding or reversing the text around it.
        finalize=lambda value: one_line(value, limit=None) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "epsilon_text": epsilon_text, "claim_terms": _claim_terms}
    environment.globals |= {"Quantity": Quantity, "Status": Status}
    return environment


def _lead(run: History) -> str:
    """Data set, model, aggregation and optimizer in one line, as far as the settings name them; then widths of sums."""
    settings = dict(flatten(run.config))
    named = []
    for word in ("dataset", "model", "aggregation", "optimiser"):
        value = settings.get(word) or next(
            (v for key, v in settings.items() if key.endswith((f".{word}", f"{word}.name"))), None
        )
        if value:
            named.append(f"{word.replace('optimiser', 'optimizer')} {value}")  # files write it the other way
    widths = sorted({record.sum_width for record in run.rounds if record.sum_width})
    if widths:
        least, most = widths[0], widths[-1]
        named.append(f"secure sums in {least} to {most} bits" if least < most else f"secure sums in {least} bits")
    return " · ".join(named)


def _notices(run: History, *, live: bool) -> list[tuple[str, str]]:
    """(title, text) of everything that a reader must know before the figures."""
    stated = run.summary or Summary()
    idle = sum(not record.stepped for record in run.rounds)
    # `not <=` and not `>`: a NaN must also count as meaningless.
    meaningless = run.guarantee is not None and not run.guarantee.epsilon <= MEANINGLESS_EPSILON
    notices = [
        (
            run.summary is None and not live,
            "Unfinished run",
            "It has no summary yet, so nothing is claimed about its privacy.",
        ),
        (
            run.repeated_rounds,
            "Resumed",
            f"{run.repeated_rounds} rounds were run again after a resume; the later records are shown.",
        ),
        (
            idle,
            "Rounds without a step",
            f"Too few clients replied in {idle} {'round' if idle == 1 else 'rounds'}, so the model did not change.",
        ),
        (
            stated.stopped,
            "Stopped early",
            f"After {stated.rounds} rounds: {_cut(stated.stopped or '', limit=_MAX_NOTICE)}.",
        ),
        (stated.best_text, "Best model", f"By the public test data: {_cut(stated.best_text or '')}."),
        (meaningless, "No meaningful guarantee", f"The proven epsilon is above {MEANINGLESS_EPSILON:.0f}."),
    ]
    return [(title, text) for applies, title, text in notices if applies]


def _parameters(used: Parameters) -> str:
    levels, trials, points, _ = used
    return f"{levels}, {trials}" + (f" to {points} points" if points else "")


def _client_rows(clients: tuple[ClientTally, ...]) -> list[dict[str, Any]]:
    """One row for each client, in order. If there are too many, only those with most trouble, the worst first."""
    # The key is minus the number of rounds in which the client's frame was not used.
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
    """Nested tables as dotted names: at most 300 rows of 200 characters, eight tables deep."""
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


def _cut(words: str, *, limit: int = _MAX_SETTING_TEXT) -> str:
    # Escaped text is still text that somebody else wrote; a page must not grow without bound.
    return words if len(words) <= limit else words[: limit - 1] + "…"


_MAX_RUNS = 16
_TERMS = "Proven epsilon of the client that spent most; its delta and terms are in the table."
_COMPARED: dict[str, tuple[str, Callable[[History], list[Point]]]] = {
    "accuracy": ("On the public test split.", lambda run: measured(run.rounds, "test_accuracy")),
    "accuracy-bytes": (
        "Further left is cheaper: measured frames, headers included.",
        lambda run: _accuracy_for(running_total(run.rounds, "bytes_up"), run),
    ),
    "accuracy-epsilon": (
        f"Further left is more private. {_TERMS}",
        lambda run: _accuracy_for(measured(run.rounds, "epsilon_max"), run),
    ),
    "metric": ("On the public test split.", lambda run: measured(run.rounds, "test_metric")),
    "loss": ("On the public test split.", lambda run: measured(run.rounds, "test_loss")),
    "epsilon": (_TERMS, lambda run: measured(run.rounds, "epsilon_max")),
    "bytes": (
        "Measured frames, headers included, summed over clients and rounds.",
        lambda run: running_total(run.rounds, "bytes_up"),
    ),
}
"""Chart of a comparison -> its note, and the points of one run."""
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
        runs=runs,
        colours=_COLOURS,
        seeded=[run.name for run in runs if run.figures.seeded],
        differing=_differing_terms(runs),
        charts=comparison_figures(runs),
    )


def comparison_figures(runs: Sequence[History]) -> list[Chart]:
    """Accuracy against rounds, bytes and epsilon; loss, epsilon and bytes against rounds. Each run has its colour.

    From the ninth run on, colours repeat and curves are dashed.
    """
    # Runs of regression have a metric of their own and no accuracy.
    metric_only = not any(measured(run.rounds, "test_accuracy") for run in runs) and any(
        measured(run.rounds, "test_metric") for run in runs
    )
    return [
        framed(
            key,
            note,
            *(
                Series(label=run.name, points=points(run), colour=_COLOURS[i % 8], dashed=i >= 8)
                for i, run in enumerate(runs)
            ),
        )
        for key, (note, points) in _COMPARED.items()
        if not key.startswith("accuracy" if metric_only else "metric")
    ]


def _differing_terms(runs: Sequence[History]) -> list[str]:
    """The terms in which the runs' guarantees differ. If there are any, their epsilons cannot be compared."""
    claims = [run.guarantee for run in runs if run.guarantee is not None]
    terms = {"delta": "delta", "neighbours": "relation", "unit": "unit", "trust": "trust_text"}
    return [label for label, name in terms.items() if len({getattr(claim, name) for claim in claims}) > 1]


def _accuracy_for(spent: list[Point], run: History) -> list[Point]:
    """(bytes or epsilon spent so far, accuracy) for the rounds in which both are known."""
    by_round = dict(spent)
    return [(by_round[at], value) for at, value in measured(run.rounds, "test_accuracy") if at in by_round]


def _distinct(runs: Sequence[History]) -> list[History]:
    """The runs, with numbers added to the names that several folders share."""
    shared, seen = Counter(run.name for run in runs), Counter[str]()
    named = []
    for run in runs:
        seen[run.name] += 1
        named.append(replace(run, name=f"{run.name} ({seen[run.name]})") if shared[run.name] > 1 else run)
    return named


_MAX_LEDGERS = 100_000


def read_run(folder: str | Path) -> History:
    """Read a run folder. If it holds clients' ledgers, epsilon is computed from what they count now.

    Raises:
        RunFolderError: the folder does not follow the schema.
        LedgerError: one of its ledgers is damaged.
    """
    history = read_history(folder)
    if history.summary is None:
        return history
    return replace(history, summary=_from_ledgers(history.summary, Path(folder) / "ledgers"))


def _from_ledgers(summary: Summary, folder: Path) -> Summary:
    stated, client = summary.guarantee, summary.guarantee_client
    guarantees = dict(_spent(folder, delta=None if stated is None else stated.delta))
    if stated is not None and client is not None and client not in guarantees:
        guarantees[client] = stated  # its ledger is on the client's own machine
    if not guarantees:
        return summary
    # Of equal epsilons the smallest client number, so that the page does not depend on the order of files.
    worst = max(guarantees, key=lambda number: (guarantees[number].epsilon, -number))
    claim = guarantees[worst]
    if stated is not None:  # a ledger does not know which data the run assumed to be public
        claim = claim.assuming(stated.assumption)
    return replace(summary, guarantee=claim, guarantee_client=worst, seeded=summary.seeded or claim.seeded)


def _spent(folder: Path, *, delta: float | None) -> Iterator[tuple[int, Guarantee]]:
    """Client -> the guarantee of all that its ledger counts. Clients with the same history share a computation."""
    # A run folder from somebody else could otherwise make us read ledgers anywhere on this machine.
    if folder.is_symlink():
        raise RunFolderError(f"{folder} is a link; the ledgers must be in the run folder itself")
    paths = sorted([*folder.glob("client-*.ledger"), *folder.glob(f"*{SUFFIX}")])
    if len(paths) > _MAX_LEDGERS:
        raise RunFolderError(f"{folder} holds more than {_MAX_LEDGERS} ledgers")
    for path in paths:
        with Ledgers(path) as ledgers:
            for client in ledgers.clients:
                try:
                    guarantee = ledgers.ledger(client).guarantee(delta=delta)
                except AccountingError as error:
                    raise RunFolderError(f"{path}: no epsilon can be proven for what it counts ({error})") from error
                if guarantee is not None:
                    yield client, guarantee
