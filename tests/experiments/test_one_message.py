"""The page of one message says what its record says, and the comparison runs."""

import json
import statistics
from pathlib import Path

import numpy as np

from experiments import one_message

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "experiments/results/one_message_search.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/one_message.md").read_text(encoding="utf-8")


def best(rows, noise):
    return max((row["accuracy"] for row in rows if row["noise"] == noise), default=None)


def test_the_page_has_the_figures_of_the_search():
    fixed = [row for row in RECORD["one_message"]["rows"] if row["ridge"] == 0.6]
    assert len(fixed) == 5
    for row in fixed:
        line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row['noise']:g} |"))
        assert f"| {row['accuracy']:.1%} |".replace("%", " %") in line
        found = best(RECORD["rounds"]["rows"], row["noise"])
        assert ("not tried" if found is None else f"{found:.1%}".replace("%", " %")) in line
    projected = [row for row in RECORD["projected"]["rows"] if row["features"] == 128 and row["projection"] == "fc"]
    small = PAGE[PAGE.index("projected on 128") :]
    for noise in (30.7, 61.5, 115.0):
        line = next(line for line in small.splitlines() if line.startswith(f"| {noise:g} |"))
        near = min(projected, key=lambda row: abs(row["noise"] - noise))
        assert f"{near['accuracy']:.1%}".replace("%", " %") in line
        assert f"{best(RECORD['rounds_few_features']['rows'], noise):.1%}".replace("%", " %") in line


def test_the_page_has_the_runs_of_the_preset():
    accuracies = [run["accuracy"] for run in one_message.preset_runs()]
    error = statistics.stdev(accuracies) / len(accuracies) ** 0.5
    shown = f"{statistics.mean(accuracies):.1%} +- {error:.1%}".replace("%", " %")
    assert shown in PAGE


def test_the_comparison_runs_and_continues(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 12))

    def blobs(samples):
        labels = rng.integers(0, 10, samples)
        return (centres[labels] + 0.3 * rng.normal(size=(samples, 12))).astype(np.float32), labels

    parts = blobs(4000), blobs(400)
    monkeypatch.setattr(one_message, "_split", lambda: parts)
    monkeypatch.setattr(one_message, "NOISES", {6.05: ((5, 1.6),)})
    monkeypatch.setattr(one_message, "PLACE", tmp_path / "found.json")
    one_message.compare()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert len(found["one_message"]) == 12
    assert found["one_message"][-2]["accuracy"] > 0.8  # epsilon 1, only sums seen
    assert found["rounds"][0]["accuracy"] > 0.5
    one_message.compare()
    assert json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["rounds"] == found["rounds"]
