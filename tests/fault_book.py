"""What the fault tests saw on real processes: the line in the log, messages sent, rounds in the ledgers.

`experiments/assurance/faults.py` runs those tests with BQSGD_FAULT_BOOK naming a file, and the rows end up in it.
"""

import json
import os
import re
from pathlib import Path

BOOK_VARIABLE = "BQSGD_FAULT_BOOK"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def seen(log, text):
    """The line of the log from `text` on, which must be there."""
    found = next((line for line in _COLOUR.sub("", log).splitlines() if text in line), None)
    assert found is not None, f"no line with {text!r} in\n{log}"
    return found[found.index(text) :].strip()


def write_down(path, *, round, frame_digest):
    """A client's own note of a message, made before it leaves: never less than what was sent."""
    with Path(path).open("a") as stream:
        stream.write(json.dumps({"round": round, "sha": frame_digest}) + "\n")


def written_down(path):
    """(messages sent, different ones among them): with seeded noise a round made again is the same bytes."""
    found = Path(path).read_text().splitlines() if Path(path).exists() else []
    return len(found), len(set(found))


class FaultBook:
    """The rows of one test."""

    def __init__(self, test):
        self.test, self.rows = test, []

    def row(self, *, engine, fault, line, injected, client, run, others_not_ok):
        """One fault. client, run: {"sent", "different", "counted"} of the faulty client (None where it has none) and
        of all clients; others_not_ok: see `not_ok`, None where nothing tells."""
        self.rows.append(
            {
                "engine": engine,
                "fault": fault,
                "test": self.test,
                "injected": injected,
                "line": line,
                "client": client,
                "run": run,
                "others_not_ok": others_not_ok,
            }
        )

    def close(self):
        path = os.environ.get(BOOK_VARIABLE)
        if path is not None and self.rows:
            with Path(path).open("a") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in self.rows)


def counts(sent, counted):
    """Messages a client (or several) sent against rounds in the ledger."""
    return {"sent": sent[0], "different": sent[1], "counted": counted}


def together(found):
    """The sum over clients."""
    return {key: sum(entry[key] for entry in found) for key in ("sent", "different", "counted")}


def not_ok(records, explained=()):
    """Frames refused or missing that no injected fault explains."""
    return sum(
        entry["status"] != "ok" and (entry["client"], record["round"]) not in explained
        for record in records
        for entry in record["clients"]
    )
