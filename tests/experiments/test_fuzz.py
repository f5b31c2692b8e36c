"""Every reader of a stranger's bytes: some hundred mutated documents each, and what the long batteries counted."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.assurance import fuzz  # noqa: E402

FOUND = json.loads(fuzz.RESULTS.read_text())["readers"] if fuzz.RESULTS.exists() else {}


@pytest.mark.parametrize("name", fuzz.READERS)
def test_mutants_are_read_or_refused_with_a_documented_error(name):
    found = fuzz.fuzz(name, cases=500)
    assert found["cases"] == 500
    assert found["outcomes"]["accepted"] >= 10, "mutations that break everything test nothing"
    assert found["cases"] - found["outcomes"]["accepted"] >= 100


@pytest.mark.parametrize("name", fuzz.READERS)
def test_the_long_battery_found_nothing_undocumented(name):
    found = FOUND[name]
    assert found["cases"] >= 100_000
    assert sum(found["outcomes"].values()) == found["cases"]
    assert found["undocumented"] == 0
    assert found["slowest_cpu_seconds"] < 10


def test_an_undocumented_error_ends_the_battery_and_shows_its_case(monkeypatch):
    def careless(folder):
        return fuzz.Reader([{"a": 1}], lambda tree, rng: b"[1]", lambda content: json.loads(content)["a"])

    monkeypatch.setitem(fuzz.READERS, "careless", careless)
    with pytest.raises(fuzz.Undocumented, match=r"careless, case 0: TypeError: b'\[1\]'"):
        fuzz.fuzz("careless", cases=10)
