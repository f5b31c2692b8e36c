"""What liars do to secure sums over groups: accuracy, what the ledgers hold at the end, and whom the log names.

python -m experiments.assurance.liars   # the runs that are missing, then the table of docs/secure.md

Thirty clients share scikit-learn's digits and train a linear model for 15 rounds at epsilon 3, with noise from the
operating system. In every round one honest client, another each time, is missing after keys were exchanged, so that the
others reveal shares of its secrets. The liars are in different groups. They keep to the protocol but for one thing:

- wrong vector: the liar adds a quarter of the modulus to each coordinate of its codes, up or down, the same in every
  round.
- wrong shares: what it reveals of the secrets of missing clients is random.
- garbage: all that it reveals is random, its own seed too.
- silent: it sends its masked vector, and then nothing more in the round.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from experiments.lab import RESULTS, provenance, read_json, write_json

from bqsgd._src.privacy.guarantee import as_given, rounded_up
from bqsgd._src.run import Run
from bqsgd._src.secure.masks import lane_type
from bqsgd._src.secure.messages import HEADER_BYTES, Kind, is_sum_message, message_kind, read_parts
from bqsgd._src.tasks.resolve import resolve
from bqsgd._src.wire.reply import Reply
from experiments import pages

GROUPS = (1, 3, 5, 10)
LIES = ("wrong vector", "wrong shares", "garbage", "silent")
LIARS = (0, 1, 2)
CLIENTS = 30
_PLACES = (4, 11)
"""The liars; in different groups for 3, 5 and 10 groups."""
_SETTINGS = {
    "dataset": "digits", "model": "linear", "clients": CLIENTS, "secure": True, "rounds": 15, "epsilon": 3.0,
    "key_rounds": 15, "evaluate_every": 15, "workers": 1,
}  # fmt: skip
_PATH = RESULTS / "liars.json"
_NAMED = re.compile(r"client (\d+) (?:lied about|is left out)")


class _Liar:
    """In the place of a client's side of the sums."""

    def __init__(self, real: Any, lie: str) -> None:
        self.real, self.lie, self.number = real, lie, real.number

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def mask(self, round: int, codes: Any, *, model: bytes) -> bytearray:
        """The masked vector, of wrong codes if that is the lie."""
        if self.lie == "wrong vector":
            width = self.real._current().agreement.width
            signs = np.random.default_rng(self.number).integers(0, 2, len(codes)) * 2 - 1
            codes = ((codes.astype(np.int64) + signs * (1 << (width - 2))) % (1 << width)).astype(lane_type(width))
        return self.real.mask(round, codes, model=model)  # type: ignore[no-any-return]

    def answer(self, message: Any) -> bytes:
        """The answer to a step of the sum."""
        said: bytes = self.real.answer(message)
        if message_kind(message) is not Kind.CERTIFICATE or self.lie not in ("wrong shares", "garbage"):
            return said
        parts = read_parts(said, self.real._current().agreement, Kind.UNMASKING)
        shares, own = len(parts.parts) * 16, len(parts.own)
        assert len(said) >= HEADER_BYTES + shares + own
        hidden = said[: len(said) - shares - own] + os.urandom(shares)
        return hidden + (os.urandom(own) if self.lie == "garbage" else parts.own)


def _lying(run: Run, lie: str | None, liars: int) -> None:
    """Put liars into the place of clients, and let one honest client miss the vectors of each round."""
    lying = _PLACES[:liars] if lie is not None else ()
    clients: Mapping[int, Any] = run.engine.clients  # type: ignore[attr-defined]
    for number in lying:
        clients[number].sums = _Liar(clients[number].sums, lie or "")
    honest, real = [number for number in clients if number not in lying], run.engine.exchange

    def exchange(messages: Mapping[int, bytes], *, round: int, enough: int | None = None) -> Iterator[Reply]:
        missing = honest[7 * round % len(honest)]
        for reply in real(messages, round=round, enough=enough):
            message = messages[reply.client]
            kind = message_kind(message) if is_sum_message(message) else None
            late = kind in (Kind.SURVIVORS, Kind.CERTIFICATE, Kind.SILENT)
            if (kind is None and reply.client == missing) or (late and lie == "silent" and reply.client in lying):
                reply = Reply(client=reply.client, reason="nothing came")
            yield reply

    run.engine.exchange = exchange  # type: ignore[method-assign]


class _Names(logging.Handler):
    """Counts the lines of the log that name a client."""

    def __init__(self) -> None:
        super().__init__()
        self.named: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Note the client that a line is about."""
        if found := _NAMED.search(record.getMessage()):
            self.named[found[1]] = self.named.get(found[1], 0) + 1


def measure(groups: int, lie: str | None, liars: int) -> dict[str, Any]:
    """One run."""
    started, cpu, names = time.monotonic(), time.process_time(), _Names()
    resolved = resolve(_SETTINGS | {"groups": groups, "dropouts": max(1, CLIENTS // groups // 10)})
    task, config = resolved.source.task(resolved.config), resolved.config
    logging.getLogger("bqsgd.sums").addHandler(names)
    try:
        with tempfile.TemporaryDirectory() as folder, Run.start(task, config, folder=Path(folder), force=True) as run:
            _lying(run, lie, liars)
            records = list(run.rounds())
            guarantees = run.engine.guarantees(delta=config.privacy.delta)
            evaluation = run.evaluate()
            assert evaluation is not None
    finally:
        logging.getLogger("bqsgd.sums").removeHandler(names)
    epsilons = [0.0 if one is None else one.epsilon for one in guarantees.values()]
    return {
        "groups": groups,
        "lie": lie,
        "liars": liars,
        "accuracy": evaluation.accuracy,
        "rounds": len(records),
        "steps": sum(record.stepped for record in records),
        "used": sum(record.used for record in records) / len(records),
        "least_epsilon": min(epsilons),
        "largest_epsilon": max(epsilons),
        "named": dict(sorted(names.named.items(), key=lambda item: int(item[0]))),
        "trust": next(one.trust_text for one in guarantees.values() if one is not None),
        "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu,
    }


def _runs() -> Iterator[tuple[int, str | None, int]]:
    for groups in GROUPS:
        yield groups, None, 0
    for lie in LIES:
        for liars in LIARS[1:]:
            for groups in GROUPS:
                yield groups, lie, liars


def section(fields: dict[str, Any]) -> str:
    """The table: a row for each lie, a column for each number of groups."""
    done = {(run["groups"], run["lie"], run["liars"]): run for run in fields["runs"]}
    head = " | ".join(f"{groups} group{'s' * (groups > 1)}" for groups in GROUPS)
    lines = [f"| lie | liars | {head} |", f"|---|---:|{'---|' * len(GROUPS)}"]
    for lie, liars in dict.fromkeys((lie, liars) for _, lie, liars in _runs()):
        cells = [_cell(done[groups, lie, liars]) if (groups, lie, liars) in done else "" for groups in GROUPS]
        lines.append(f"| {lie or 'none'} | {liars} | {' | '.join(cells)} |")
    settings, places = fields["settings"], ", ".join(map(str, fields["places"]))
    return (
        f"{settings['clients']} clients, scikit-learn's digits, a linear model, {settings['rounds']} rounds, epsilon "
        f"{as_given(settings['epsilon'])} at delta 1e-5, noise from the operating system, one run each (`python -m "
        "experiments.assurance.liars`). One sum has the mean, several have the median of their groups. In every round "
        f"one honest client is missing. The liars are clients {places}. Each cell: test accuracy in %; rounds that "
        "moved the model; clients in a sum in an average round; least and largest epsilon of all ledgers at "
        "the end; clients that the log names (how often), or nobody.\n\n" + "\n".join(lines) + "\n"
    )


def _cell(run: dict[str, Any]) -> str:
    named = ", ".join(f"{client} ({times})" for client, times in run["named"].items()) or "nobody"
    least, largest = rounded_up(run["least_epsilon"]), rounded_up(run["largest_epsilon"])
    return f"{100 * run['accuracy']:.1f}; {run['steps']}; {run['used']:.1f}; {least} to {largest}; {named}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    logging.getLogger("bqsgd.run").setLevel(logging.ERROR)
    fields = read_json(_PATH) if _PATH.exists() else {"settings": _SETTINGS, "places": _PLACES, "runs": []}
    done = {(run["groups"], run["lie"], run["liars"]) for run in fields["runs"]}
    for groups, lie, liars in _runs():
        if (groups, lie, liars) not in done:
            run = measure(groups, lie, liars)
            print(run, flush=True)
            fields["runs"].append(run)
            write_json(_PATH, fields | provenance())
    pages.write()


if __name__ == "__main__":
    main()
