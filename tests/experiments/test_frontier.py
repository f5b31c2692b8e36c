"""The frontier: its presets run, its table says what its runs measured, and its targets hold."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.frontier import own_clients  # noqa: E402
from experiments.frontier import points as frontier  # noqa: E402
from experiments.frontier.sections import CHANGED  # noqa: E402
from experiments.lab import Options  # noqa: E402

from bqsgd._src.answers import plan_secure  # noqa: E402
from bqsgd._src.errors import InvalidParameter  # noqa: E402
from bqsgd._src.tasks.named import plain_settings, preset, presets, settings_of  # noqa: E402
from experiments import pages  # noqa: E402

RESULTS = ROOT / "experiments" / "results"
QUOTED = (
    "mnist-eps3-sums-whitened",
    "fashion-eps3-sums-whitened",
    "cifar10-eps3-sums-centred",
    "cifar10-imagenet-pair-eps1-sums",
    "cifar10-imagenet-eps059-sums",
    "mnist-eps3-4bit",
    "mnist-eps3-100",
    "fashion-eps3",
)


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return dict(json.loads((RESULTS / "frontier.json").read_text(encoding="utf-8")))


def test_presets_are_settings_with_a_guarantee_to_plan_for() -> None:
    assert {point.preset for point in frontier.POINTS} <= set(presets())
    for point in frontier.POINTS:
        _, config = settings_of(**preset(point.preset))
        assert config.privacy.seed is None, "a seed would void the claim"
        assert config.privacy.mechanism is None, "planned, so that the budget holds"
        assert config.privacy.sampling == "poisson"
        assert config.clip.rule in ("l2", "dual")


PLANNED = [point for point in frontier.POINTS if point.sum_of is not None]


@pytest.mark.parametrize("point", [PLANNED[0], *(pytest.param(point, marks=pytest.mark.slow) for point in PLANNED[1:])])
def test_sums_in_few_bits_have_the_levels_and_trials_that_the_plan_finds(point: frontier.Point) -> None:
    _, config = settings_of(**preset(point.preset))
    privacy = config.privacy
    found = plan_secure(
        clients=config.clients.count, dropouts=0, colluders=0, epsilon=privacy.epsilon, delta=privacy.delta,
        dimension=12_810, dataset_size=privacy.batch_size, batch_size=privacy.batch_size, rounds=config.run.rounds,
        bits=point.bits, linf=1 / (privacy.batch_size * 0.002), l2=1 / (privacy.batch_size * 0.002),
    )  # fmt: skip
    assert (found.plan.levels, found.plan.trials) == point.sum_of


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(InvalidParameter, match=r"one of mnist-eps3, .*fashion-eps3, .*, got .mnist-eps2"):
        preset("mnist-eps2")


@pytest.mark.slow
def test_quick_points_run_to_their_end_within_budget_and_bits(tmp_path: Path) -> None:
    found = frontier.frontier(Options(seeds=(0,), quick=True, figures=tmp_path))
    assert [row["point"] for row in found["rows"]] == [point.name for point in frontier.POINTS]
    for row in found["rows"]:
        assert 0 < row["guarantee"]["epsilon"] <= frontier.QUICK["epsilon"]
        assert ("sums" in row["guarantee"]["trust"]) == row["secure"]
        assert row["secure"] or row["bits_measured"] <= row["bits"] + 0.25  # an 80-byte header over few coordinates
        assert not row["seeded"]
    assert pages.section("frontier", found).startswith("## ")


def test_the_table_holds_what_the_runs_measured(table: dict[str, Any]) -> None:
    assert [row["point"] for row in table["rows"]] == [point.name for point in frontier.POINTS]
    text = pages.section("frontier", table)
    kept = {path.stem for path in (RESULTS / "frontier").glob("*.json")}
    for row, point in zip(table["rows"], frontier.POINTS, strict=True):
        names = [f"{point.name}-seed{seed}" for seed in range(5)]
        runs = {
            seed: json.loads((RESULTS / "frontier" / f"{name}.json").read_text(encoding="utf-8"))
            for seed, name in enumerate(names)
            if name in kept
        }
        kept -= set(names)
        assert row["accuracies"] == [run["accuracy"] for run in runs.values()]
        if not runs:
            assert row["mean"] is None
            continue
        assert row["mean"] == statistics.mean(row["accuracies"])
        assert row["guarantee"]["epsilon"] == max(run["guarantee"]["epsilon"] for run in runs.values())
        line = next(line for line in text.splitlines() if line.startswith(f"| `{row['point']}`"))
        assert f"**{100 * row['mean']:.2f}**" in line
        assert row["features"].startswith("imagenet") == ("ImageNet" in line)
        # The commit that a run names holds the files that it was made with; the page would mark any other.
        assert CHANGED not in line
        assert not row["changed"]
        assert not any(run.get("changed", False) for run in runs.values())
        chosen = plain_settings(*point.settings(0, quick=False))
        del chosen["run"]  # a label; points whose preset has changed were renamed since
        for seed, run in runs.items():
            settings = chosen | {"init_seed": seed}
            defaults, asked = (json.loads(json.dumps(each)) for each in (plain_settings(*settings_of()), settings))
            recorded = defaults | run["config"]
            assert asked == {name: recorded.get(name) for name in asked}, "a run of other settings than the preset's"
            assert not run["seeded"]
            assert run["rounds"] == settings["rounds"]
            assert run["guarantee"]["epsilon"] <= settings["epsilon"]
            assert row["secure"] or run["bits_per_coordinate"] <= row["bits"] + 0.06
    assert not kept, "every run that was kept is in the table"


def test_the_readme_quotes_the_table(table: dict[str, Any]) -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    points = {row["point"]: row for row in table["rows"]}
    rows = [points[name] for name in QUOTED]
    for row in rows:
        assert len(row["accuracies"]) == 5
        assert f"{100 * row['mean']:.2f} %" in text
    bits = {row["point"]: row["bits_measured"] for row in rows}
    assert f"in **{bits['mnist-eps3-sums-whitened']:.2f} bits** per coordinate of the model" in text
    assert f"in {bits['fashion-eps3-sums-whitened']:.2f} bits, CIFAR-10" in text
    assert f"without other data, in {bits['cifar10-eps3-sums-centred']:.2f} bits." in text
    assert f"in {round(bits['cifar10-imagenet-eps059-sums'])} bits." in text
    assert f"in **{bits['mnist-eps3-4bit']:.2f} bits**" in text
    assert f"in {bits['mnist-eps3-100']:.2f} bits;" in text
    assert f"Fashion-MNIST {100 * points['fashion-eps3']['mean']:.2f} % in {bits['fashion-eps3']:.2f} bits." in text


def test_pages_say_that_the_sums_withstand_no_colluding_client(table: dict[str, Any]) -> None:
    assert {row["config"]["colluders"] for row in table["rows"] if row["secure"] and row["config"]} == {0}
    assert "no client that helps it" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(`colluders = 0`)" in (ROOT / "docs/frontier.md").read_text(encoding="utf-8")


def test_references_state_whom_they_trust(table: dict[str, Any]) -> None:
    text = pages.section("frontier", table)
    for one in table["references"]:
        assert one["trust"] in ("server trusted with all data", "server sees only sums")
        assert f"| {one['name']} | {one['dataset']} | {100 * one['accuracy']:.2f}" in text


def test_clients_of_their_own_stand_beside_the_runs_without_noise() -> None:
    fields = json.loads((RESULTS / "frontier_own_clients.json").read_text(encoding="utf-8"))
    assert fields == json.loads(json.dumps(own_clients.gathered())), "the table is older than its runs"
    for row in fields["rows"]:
        for seed, _ in enumerate(row["accuracies"]):
            run = json.loads((own_clients.RUNS / f"{row['preset']}-seed{seed}.json").read_text(encoding="utf-8"))
            asked = json.loads(json.dumps(plain_settings(*settings_of(**preset(row["preset"])))))
            asked |= {"init_seed": seed, "run": run["config"]["run"]}
            recorded = json.loads(json.dumps(plain_settings(*settings_of()))) | run["config"]
            assert asked == {name: recorded.get(name) for name in asked}, "a run of other settings than the preset's"
            assert not run["seeded"]
            assert run["guarantee"]["epsilon"] <= asked["epsilon"]
        unit = "client" if row["preset"].startswith("shakespeare") else "sample"
        assert row["guarantee"]["unit"].endswith(unit)
        if row["below"] is not None:
            assert statistics.mean(row["accuracies"]) >= own_clients.reference_of(row) - row["below"]
