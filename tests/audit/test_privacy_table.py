"""The table about the published settings: its committed results cover every setting and stay within their bounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from experiments.paper.published import ROWS

from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.privacy.guarantee import MEANINGLESS_EPSILON, method_name

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.paper import privacy_table  # noqa: E402


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return privacy_table


@pytest.fixture(scope="module")
def results(table: ModuleType) -> dict[str, Any]:
    return json.loads(table.RESULTS.read_text(encoding="utf-8"))


def test_the_results_cover_the_ten_settings(results: dict[str, Any]) -> None:
    found = [(row["bits"], row["published_epsilon"], tuple(row["mechanism"].values())) for row in results["rows"]]
    assert found == [(row.bits, row.epsilon, (row.corrected.levels, row.corrected.trials)) for row in ROWS]


def test_every_audit_stays_below_its_exact_figure(results: dict[str, Any]) -> None:
    audits = [clip[name] for row in results["rows"] for clip in row["clips"].values() for name in clip if "_" in name]
    assert len(audits) == 25
    for audit in audits:
        assert audit["verdict"] == "no violation found"
        assert audit["epsilon_lower"] < float(audit["claimed"]["epsilon"])
        assert audit["seeded"] is False


def test_the_accountant_still_says_what_the_table_says(table: ModuleType, results: dict[str, Any]) -> None:
    for published, row in zip(ROWS[:5], results["rows"], strict=False):
        stated = row["clips"]["per-sample clamp"]["exact"]
        release = table.release(published, scheme="poisson", linf=None, dimension=row["dimension"])
        proven = Accountant().compose(release, row["rounds"]).guarantee(delta=results["delta"])
        assert proven.epsilon == pytest.approx(stated["epsilon"], rel=0.01)
        assert (str(proven.relation), str(proven.trust), proven.method) == (
            stated["relation"],
            stated["trust"],
            method_name(stated["method"]),
        )


def test_the_batch_mean_clip_has_no_meaningful_guarantee(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        assert float(row["clips"]["batch-mean clip"]["exact"]["epsilon"]) > MEANINGLESS_EPSILON
