"""The JSON of the fault tests holds every fault with its books in order."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.assurance import faults  # noqa: E402

ROWS = json.loads(faults.RESULTS.read_text())["rows"]


def test_every_fault_was_seen_once():
    assert [(row["engine"], row["fault"]) for row in ROWS] == list(faults.WHAT_HAPPENS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['engine']}-{row['fault']}".replace(" ", "-"))
def test_nothing_is_counted_less_than_sent_and_nobody_else_is_hurt(row):
    for found in (row["client"], row["run"]):
        assert found is None or 0 <= found["different"] <= min(found["sent"], found["counted"])
    assert row["others_not_ok"] in (0, None)
    assert row["injected"] >= 1
    assert row["line"] or row["engine"] == "in-process"
    path, name = row["test"].split("[")[0].split("::")
    assert f"def {name}(" in (ROOT / path).read_text()
