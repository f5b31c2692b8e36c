"""The reproduction: quick runs of every row, runs that survive a kill, and pages that say what the JSON says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.paper.published import ROWS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from experiments.paper import baselines, compare, runs, tables  # noqa: E402
from experiments.paper.baseline_figure import draw_baselines, place_of  # noqa: E402
from experiments.reproduce import PAPER  # noqa: E402

from experiments import pages, reproduce  # noqa: E402

RESULTS = ROOT / "experiments" / "results"


def kept() -> dict[str, str]:
    """Every committed result, so that a quick run can be seen to touch none."""
    return {str(path): path.read_text(encoding="utf-8") for path in sorted(RESULTS.rglob("*.json"))}


@pytest.fixture(scope="module")
def quick(made_once: Callable[[str, Callable[[], Any]], Any]) -> dict[str, Any]:
    """All of it, every row for one round, as the command line gives it."""
    return dict(made_once("quick", _reproduced))


def _reproduced() -> dict[str, Any]:
    before = kept()
    asked = subprocess.run(
        [sys.executable, "-m", "experiments.reproduce", "all", "compare", "--quick", "--seeds", "1", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    after = kept()
    assert {name: after[name] for name in before} == before
    return dict(json.loads(asked.stdout))


@pytest.mark.slow
def test_quick_covers_every_table_and_figure(quick: dict[str, Any]) -> None:
    assert set(quick) == {*PAPER, "compare"}
    for number in (2, 3):
        rows = [row for row in ROWS if number in row.tables]
        found = quick[f"table{number}"]["rows"]
        assert len(found) == len(rows) + sum(row.misprint for row in rows)
        for row in found:
            for clip in row["clips"].values():
                assert len(clip["accuracies"]) == 1
                assert 0 <= clip["mean"] <= 1


@pytest.mark.slow
def test_measured_bits_are_the_bits_of_the_codes_and_a_small_header(quick: dict[str, Any]) -> None:
    for row in [*quick["table2"]["rows"], *quick["table3"]["rows"]]:
        for clip in row["clips"].values():
            assert row["bits_of_codes"] <= clip["bits_measured"] <= np.ceil(row["bits_of_codes"]) + 0.02
            if row["variant"] != "misprinted":
                assert clip["bits_measured"] <= row["bits_asked"] + 0.02


@pytest.mark.slow
def test_quick_baselines_order_as_they_must(quick: dict[str, Any]) -> None:
    rows = {row["label"]: row for row in quick["compare"]["rows"]}
    assert rows["plain, float32"]["bits_measured"] > 32
    assert rows["QSGD, 8 bits"]["exact"] is None
    clamp, alone = rows["BQ, per-sample clamp"], rows["cpSGD (CQSGD)"]
    assert clamp["accuracies"] == alone["accuracies"]
    assert float(alone["exact"]["epsilon"]) > float(clamp["exact"]["epsilon"])


@pytest.mark.slow
def test_every_quick_section_can_be_printed(quick: dict[str, Any]) -> None:
    for name, fields in quick.items():
        assert pages.section(name, fields).startswith("## ")


@pytest.mark.parametrize("name", ["table2", "table3", "compare"])
def test_the_tables_hold_what_the_runs_measured(name: str) -> None:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    cells = [cell for row in rows for cell in (row["clips"].values() if "clips" in row else [row])]
    for cell in cells:
        found = [json.loads((RESULTS / "training" / f"{run}.json").read_text(encoding="utf-8")) for run in cell["runs"]]
        assert cell["accuracies"] == [run["accuracy"] for run in found]
        assert {key: cell[key] for key in tables.summary(found) if key != "claim"} == {
            key: value for key, value in tables.summary(found).items() if key != "claim"
        }


@pytest.mark.parametrize("number", [2, 3])
def test_the_published_accuracy_is_reached_with_the_batch_mean_clip(number: int) -> None:
    """MNIST at or above it, Fashion-MNIST within a point or above, in every row whose run is kept."""
    for row in json.loads((RESULTS / f"table{number}.json").read_text(encoding="utf-8"))["rows"]:
        reached = row["clips"]["batch-mean"]["mean"]
        slack = 0.0 if row["dataset"] == "MNIST" else 0.01
        assert reached is None or reached >= row["published_accuracy"] - slack


def test_every_kept_run_is_whole_and_of_the_one_recipe() -> None:
    found = sorted((RESULTS / "training").glob("*.json"))
    assert found
    settings = {tables.DATASETS[row.setting.dataset][0]: row.setting for row in ROWS}
    for path in found:
        run = json.loads(path.read_text(encoding="utf-8"))
        published = settings[run["config"]["dataset"]]
        assert run["name"] == path.stem
        assert run["config"]["rounds"] == published.rounds
        assert run["frames"] == published.rounds * published.clients
        assert run["config"]["learning_rate"] == published.learning_rate
        stored = run["config"] | {"optimizer": run["config"]["optimiser"]}  # files keep the older spelling
        assert {key: stored[key] for key in tables.RECIPE} == tables.RECIPE
        assert run["claim"] in ("seeded: no privacy claim", "no privacy")


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from pathlib import Path
def die(event, arguments):  # in the middle of the second checkpoint
    if event == "os.rename" and str(arguments[1]).endswith("checkpoint.safetensors") and Path(arguments[1]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
if {dies}:
    sys.addaudithook(die)
from bqsgd._src.tasks.named import settings_of
from experiments.paper import runs
runs.RESULTS, runs.CHECKPOINTS = Path({folder!r}) / "results", Path({folder!r}) / "checkpoints"
named, config = settings_of(dataset="digits", model="mlp", clients=2, rounds=200, batch_size=32, clip="clamp",
                clip_bound=0.05, levels=2, trials=251, optimizer="adam", learning_rate=0.006, seed=3, workers=1,
                run="test")
runs.run(runs.Job(name="killed", named=named, config=config))
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    def start(folder: str, *, dies: bool = False) -> subprocess.Popen[bytes]:
        code = KILLED.format(root=str(ROOT), folder=str(tmp_path / folder), dies=dies)
        return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    whole, cut = start("whole"), start("cut", dies=True)
    assert cut.wait() == -signal.SIGKILL
    assert (tmp_path / "cut" / "checkpoints" / "killed" / "checkpoint.safetensors").exists()
    assert start("cut").wait() == whole.wait() == 0
    found = [json.loads((tmp_path / name / "results" / "killed.json").read_text()) for name in ("whole", "cut")]
    for key in ("accuracy", "loss", "curve", "bytes_up", "frames"):
        assert found[0][key] == found[1][key]
    assert found[0]["frames"] == 400


def test_a_finished_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    job = tables.job(ROWS[0].setting, ROWS[0].corrected, clip="clamp", seed=0)
    job.result.write_text('{"accuracy": 0.5}', encoding="utf-8")
    assert runs.results([job]) == {job.name: {"accuracy": 0.5}}


@pytest.mark.slow
def test_two_workers_find_what_one_finds() -> None:
    jobs = tables.jobs(ROWS[:2], clip="clamp", seeds=[0], quick=True)
    one, two = runs.results(jobs), runs.results(jobs, workers=2)
    assert [found["loss"] for found in one.values()] == [found["loss"] for found in two.values()]
    assert list(two) == [job.name for job in jobs]


def test_gaussian_noise_is_just_enough() -> None:
    asked = {"rate": 32 / 15_000, "rounds": 50}
    noise = baselines.noise_for(2.0, delta=1e-5, **asked)

    def epsilon(multiplier: float) -> float:
        accountant = baselines.pld.PLDAccountant(
            baselines.dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=1e-3
        )
        return float(accountant.compose(baselines.gaussian_event(multiplier, **asked)).get_epsilon(1e-5))

    assert epsilon(noise) <= 2.0 < epsilon(noise - 0.01)


def test_counting_the_binomial_alone_costs_more() -> None:
    alone = compare.binomial_alone(compare.BQ, 1000)
    whole = tables.exact(compare.MNIST, compare.BQ, clip="clamp", rounds=1000)
    assert float(alone["epsilon"]) > 10 * float(whole["epsilon"])


def test_what_cannot_be_reproduced_is_refused_with_what_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m experiments.reproduce", "table9"])
    with pytest.raises(SystemExit) as asked:
        reproduce.main()
    assert asked.value.code == 2
    assert "table9" in (said := capsys.readouterr().err)
    assert "frontier" in said


def test_the_baselines_without_a_finite_epsilon_stand_at_the_edge(tmp_path: Path) -> None:
    rows = [
        {"label": "a", "mean": 0.9, "deviation": None, "frame_bytes": 60_000, "exact": {"epsilon": 4.5}},
        {"label": "b", "mean": 0.95, "deviation": 0.01, "frame_bytes": 240_000, "exact": None},
        {"label": "not run", "mean": None, "deviation": None, "frame_bytes": None, "exact": None},
    ]
    draw_baselines(rows, tmp_path / "three.png", delta=1e-5)
    assert (tmp_path / "three.png").stat().st_size > 10_000
    assert place_of({"epsilon": "inf"}) == place_of({"epsilon": 4000.0}) == np.inf
    assert place_of({"epsilon": 4.5}) == 4.5
