"""The page of one message says what its record says, and the comparison runs."""

import json
from pathlib import Path

import numpy as np
from experiments.frontier import one_message

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "experiments/results/one_message.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/training.md").read_text(encoding="utf-8")


def test_the_page_has_the_figures_of_the_comparison():
    assert one_message.table(FOUND) in PAGE
    assert one_message.constants_table(FOUND) in PAGE
    assert {row["noise"] for row in FOUND["rounds"]} == set(one_message.NOISES)
    for row in FOUND["one_message"]:
        beside = [
            other["accuracy"] for other in FOUND["rounds"] if abs(other["noise"] / row["noise"] - 1) < one_message.NEAR
        ]
        assert not beside or max(beside) > row["accuracy"], "the page says that rounds were ahead"


def test_the_page_has_the_runs_of_the_preset():
    frontier = json.loads((ROOT / "experiments/results/frontier.json").read_text(encoding="utf-8"))
    row = next(row for row in frontier["rows"] if row["point"] == "cifar10-imagenet-eps01-one-message")
    count, mean, error = len(row["accuracies"]), 100 * row["mean"], 100 * row["standard_error"]
    assert f"{count} runs have {mean:.2f} % +- {error:.2f} % on the test split" in PAGE


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
