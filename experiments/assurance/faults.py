"""The fault table: what each engine does when something breaks, with the counts that the fault tests saw.

python -m experiments.assurance.faults  # runs the fault tests on real processes (minutes), writes both
python -m experiments.assurance.faults --rows F  # the same from the rows of tests that ran with BQSGD_FAULT_BOOK=F; the
    # rows of other faults stay as they are
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments import lab, pages

RESULTS = lab.RESULTS / "faults.json"
BOOK_VARIABLE = "BQSGD_FAULT_BOOK"
WHAT_HAPPENS = {
    (
        "in-process",
        "the whole process killed at random moments and resumed",
    ): "`--resume` continues from the checkpoint",
    ("torch.distributed", "client killed in mid-round"): "missing from then on, while the quorum is met",
    (
        "torch.distributed",
        "client answers after the deadline",
    ): "the round continues at the deadline; the late frame is refused when it comes; the client takes part again",
    ("torch.distributed", "frame damaged on its way"): "refused; the round continues without it",
    ("torch.distributed", "frame in another client's name"): "refused; the round continues without it",
    ("torch.distributed", "client announces a message of 2^40 bytes"): "cut off before anything is allocated",
    ("torch.distributed", "fewer clients left than the quorum"): "the run stops with a checkpoint",
    (
        "torch.distributed",
        "server killed in mid-round and restarted",
    ): "clients close their ledgers and end; `--resume` continues, and rounds made again are counted again",
    (
        "torch.distributed",
        "server killed in mid-round and restarted, seeded noise",
    ): "the same, and frames and model end as in one process, bit for bit",
    ("torch.distributed", "rank killed under torchrun"): "torchrun ends the job, rank 0 writes a checkpoint on its way "
    "out; `--resume` continues",
    (
        "torch.distributed",
        "secure sum: client killed before its keys left",
    ): "a dropout from that batch of rounds on: the sums are those of the others, with all of their noise",
    ("torch.distributed", "secure sum: client killed before its shares left"): "the same",
    (
        "torch.distributed",
        "secure sum: client killed before its masked vector left",
    ): "a dropout from that round on; the vector that it had made and not sent stays counted",
    (
        "torch.distributed",
        "secure sum: client killed before its signature left",
    ): "in the sum of that round, whose list the others sign; a dropout from the next one on",
    (
        "torch.distributed",
        "secure sum: client killed before its unmasking left",
    ): "in the sum of that round, which the others' shares open; a dropout from the next one on",
    (
        "torch.distributed",
        "secure sum: client answers after the deadline",
    ): "a dropout of the round; its vector is refused when it comes and stays counted; the client takes part again",
    (
        "torch.distributed",
        "secure sum: server killed when the masked vectors were due, and restarted",
    ): "`--resume` continues with new keys; the open round is made again under other masks and counted again",
    ("torch.distributed", "secure sum: server killed when the signatures were due, and restarted"): "the same",
    ("torch.distributed", "secure sum: server killed when the unmaskings were due, and restarted"): "the same",
    (
        "torch.distributed",
        "secure sum: a client's answers at each step replaced by random bytes",
    ): "each is refused; without keys, shares or vector it is a dropout and takes part again from the next key batch "
    "or round on; without signature or unmasking its vector is in the sum all the same",
    ("torch.distributed", "secure sum: a client's answers at each step followed by seven bytes"): "the same",
    (
        "torch.distributed",
        "secure sum: client reveals a random share of the secret of one that was killed",
    ): "the sum opens from the other shares; the log names the liar, and the client that was killed is a dropout",
    (
        "torch.distributed",
        "secure sum: client reveals a random seed in the place of its own",
    ): "the others' shares open the sum; the log names the liar, and it has no part in the next ones",
    (
        "torch.distributed",
        "secure sum: client gets no more memory (`ulimit -v`) when its masked vector is due",
    ): "as if it had been killed",
    ("Flower", "client killed in mid-round"): "missing, at the latest at the deadline; the frame it had made and not "
    "sent stays counted",
    ("Flower", "client answers after the deadline"): "missing in its round; the frame is refused when it comes",
    ("Flower", "frame damaged on its way"): "refused; the round continues without it",
    ("Flower", "frame in another client's name"): "refused; the other client's own frame counts",
    (
        "Flower",
        "server killed in mid-round and restarted, seeded noise",
    ): "SuperLink and ServerApp killed; `flwr run` with "
    "the same `run` and `folder` continues to the model of one process, bit for bit",
    ("Flower", "node whose key is not registered"): "turned away; no run hears of it",
    ("Flower", "plain HTTP to the TLS port"): "closed without an answer",
    (
        "Flower",
        "secure sum: client killed before its keys left",
    ): "a dropout of that batch of rounds; its node starts another process, which takes part in the next batch",
    ("Flower", "secure sum: client killed before its shares left"): "the same",
    (
        "Flower",
        "secure sum: node killed in mid-round",
    ): "a dropout: the sum is that of the others, with all of its noise; the vector that it had made and not sent "
    "stays counted",
    (
        "Flower",
        "secure sum: client killed before its signature left",
    ): "in the sum all the same, as the others' signatures suffice; the next process goes on from the state on disk",
    (
        "Flower",
        "secure sum: client killed before its unmasking left",
    ): "in the sum all the same, as the others' shares open it; the next process goes on from the state on disk",
    (
        "Flower",
        "secure sum: client answers after the deadline",
    ): "a dropout of the round; its vector is refused when it comes and stays counted; the client takes part again",
    (
        "Flower",
        "secure sum: server killed when the signatures were due, and restarted, seeded noise",
    ): "SuperLink and ServerApp killed; `flwr run` with the same `run` and `folder` continues with new keys to the "
    "model of one process, bit for bit",
}
"""Every fault of the table, in its order."""


def run() -> dict[str, Any]:
    """Run the fault tests; what they found."""
    with tempfile.TemporaryDirectory() as folder:
        book = Path(folder) / "book.jsonl"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "tests/engines",
            "tests/flower",
            "-m",
            "slow or not slow",
            "-p",
            "no:cacheprovider",
        ]
        subprocess.run(command, cwd=lab.ROOT, env=os.environ | {BOOK_VARIABLE: str(book)}, check=True)
        return read_rows(book, before=[])


def read_rows(book: Path, *, before: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows `before` and those that the tests wrote, in the order of the table; of a fault with several the last."""
    rows = [*before, *(json.loads(line) for line in book.read_text().splitlines())]
    by_fault = {(row["engine"], row["fault"]): row for row in rows}
    if by_fault.keys() != WHAT_HAPPENS.keys():
        raise SystemExit(f"the tests and the table differ in {sorted(by_fault.keys() ^ WHAT_HAPPENS.keys())}")
    versions = {name: importlib.metadata.version(name) for name in ("bqsgd", "torch", "flwr")}
    return {"versions": versions, "rows": [by_fault[key] for key in WHAT_HAPPENS]}


def section(results: dict[str, Any]) -> str:
    """A table for each engine, every figure from the results."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if name != "bqsgd")
    lines = [
        "Made by `python -m experiments.assurance.faults` from `experiments/results/faults.json`; do not edit.",
        "",
        "The tests named below injected each fault into real processes, and the figures and log lines are those of "
        f"that run ({versions}). **Sent, counted**: messages that the client itself noted before they left, and the "
        "rounds that its ledger counts at the end; then the same over all clients of the run.",
        "Counted is never less. It is more where a client was killed: rounds reserved ahead (`reserve_rounds`) or made "
        "and not sent stay counted. `a (b different)`: with seeded noise a round made again is the same bytes and is "
        "counted once. No frame of another client was lost. Several faults share one run.",
    ]
    for engine in dict.fromkeys(row["engine"] for row in results["rows"]):
        lines += [
            "",
            f"### {engine}",
            "",
            "| fault | what happens | line in the log | client: sent, counted | run |",
            "|---|---|---|---|---|",
        ]
        rows = [row for row in results["rows"] if row["engine"] == engine]
        lines += [_line(row, before) for row, before in zip(rows, [None, *rows], strict=False)]
        tests = dict.fromkeys(row["test"].split("[")[0] for row in rows)  # without the case of the test
        lines += ["", *_NOTES[engine], "", "Tests:", "", *(f"- `{test}`" for test in tests)]
    return "\n".join(lines)


_NOTES = {
    "in-process": ("kill -9 leaves nobody to write a line.",),
    "torch.distributed": (
        "Under torchrun *sent* is what the server took, since the command keeps no other note; torchrun ends the other "
        "ranks as well.",
        "Gloo has neither keys nor TLS, so an unregistered node and plain HTTP have no meaning here: keep the ranks "
        "on a private network.",
    ),
    "Flower": ("A SuperLink and four SuperNodes with TLS and node keys, started by `bqsgd flower superlink`.",),
}


def _line(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    line = "–" if row["line"] is None else f"`{row['line'].replace('|', '/')}`"
    if before is not None and row["line"] == before["line"]:
        line = "the same"
    fault = row["fault"] if row["injected"] == 1 else f"{row['fault']} ({row['injected']} times)"
    happens = WHAT_HAPPENS[row["engine"], row["fault"]]
    return "| " + " | ".join((fault, happens, line, _counts(row["client"]), _counts(row["run"]))) + " |"


def _counts(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "–"
    different = "" if counts["different"] == counts["sent"] else f" ({counts['different']} different)"
    return f"{counts['sent']}{different}, {counts['counted']}"


def main() -> None:
    """Run the fault tests, or read the rows of tests that ran before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, help="the file of BQSGD_FAULT_BOOK, where the tests ran before")
    rows = parser.parse_args().rows
    before = json.loads(RESULTS.read_text())["rows"]
    lab.write_json(RESULTS, run() if rows is None else read_rows(rows, before=before))
    pages.write()


if __name__ == "__main__":
    main()
