"""`bqsgd paper`: the published figures under their own name, and curves whose files agree with each other."""

import csv
import json

import pytest
from experiments.paper.published import ROWS

from bqsgd._src.paper.tradeoffs import Point

CLIENT = ["--dimension", 3000, "--batch-size", 32, "--dataset-size", 15000]
CAVEAT = "as published; not a guarantee"
PLAN = ["paper", "plan", "--bits", 8, "--delta", 1e-4, *CLIENT]
ACCOUNT = ["paper", "account", "--levels", 2, "--trials", 251, "--rounds", 1000, "--delta", 1e-4, *CLIENT]


def test_plan(bqsgd):
    fields = bqsgd(*PLAN, "--epsilon", 3.45, "--json").json
    assert (fields["mechanism"], fields["bits_per_coordinate"]) == ({"levels": 2, "trials": 251}, 8.0)
    assert fields["nominal"]["epsilon_per_round"] == pytest.approx(3.447, abs=1e-3)
    assert fields["nominal"]["setting"]["delta"] == 1e-4
    assert fields["variance"] == pytest.approx(251 / 16 + 1 / 24)
    assert fields["nominal"]["caveat"] == CAVEAT
    assert "guarantee" not in fields


def test_account(bqsgd):
    fields = bqsgd(*ACCOUNT, "--json").json["nominal"]
    assert fields["epsilon_per_round"] == pytest.approx(3.447, abs=1e-3)
    assert fields["epsilon_total"] == pytest.approx(467.86, abs=0.01)
    assert fields["epsilon_total_in_text"] == pytest.approx(330.83, abs=0.01)
    assert fields["delta_total"] == pytest.approx(0.1)
    assert fields["strong_epsilon"] == pytest.approx(105_300, rel=1e-3)
    assert fields["caveat"] == CAVEAT


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.setting.dataset}-{row.bits}-{row.epsilon}")
def test_every_table_row_through_plan_and_account(bqsgd, row):
    setting = row.setting
    client = ["--dimension", setting.nominal_dimension, "--batch-size", setting.batch_size]
    client += ["--dataset-size", setting.dataset_size, "--delta", setting.delta]
    budget = ["--bits", row.bits, "--epsilon", row.epsilon]
    planned = bqsgd("paper", "plan", "--rounding", "nearest", *budget, *client, "--json").json["mechanism"]
    levels, trials = planned["levels"], planned["trials"]
    assert (levels, trials) == (row.corrected.levels, row.corrected.trials) or f"({levels}, {trials})" in row.note
    run = ["--levels", row.printed.levels, "--trials", row.printed.trials, "--rounds", setting.rounds]
    accounted = bqsgd("paper", "account", *run, *client, "--json").json
    wrong_epsilon = abs(accounted["nominal"]["epsilon_per_round"] / row.epsilon - 1) > 0.011
    too_wide = accounted["code_count"] > 2**row.bits
    assert row.misprint == (wrong_epsilon or too_wide)


def test_lines_for_people_carry_the_caveat(bqsgd):
    planned = " ".join(bqsgd(*PLAN, "--epsilon", 3.44, "--rounding", "nearest").out.split())
    accounted = " ".join(bqsgd(*ACCOUNT).out.split())
    for shown in (planned, accounted):
        assert f"nominal epsilon for dimension 3000: {CAVEAT}" in shown
    assert "exceeds the nominal epsilon 3.44" in planned
    assert "epsilon 467.9 at delta 0.1 after 1000 rounds (Theorem 1)" in accounted


def test_an_infeasible_budget_names_the_nearest_feasible_ones(bqsgd):
    result = bqsgd(*PLAN, "--epsilon", 1.0, "--json")
    assert result.code == 2
    assert "8 bits reach epsilon >= 1.72; epsilon 1.0 needs 10 bits" in result.err


def test_tradeoffs_write_files_that_agree(bqsgd, tmp_path):
    out = tmp_path / "curves"
    result = bqsgd(
        "paper",
        "tradeoffs",
        "--out",
        out,
        "--epsilons",
        "3.44,8.72",
        "--bits-range",
        "7-9",
        "--fixed-bits",
        8,
        "--json",
    )
    assert result.code == 0, result.err
    assert sorted(path.name for path in out.iterdir()) == [
        "fixed_bits.csv",
        "fixed_bits.png",
        "fixed_epsilon.csv",
        "fixed_epsilon.png",
        "tradeoffs.json",
    ]
    for name in ("fixed_bits", "fixed_epsilon"):
        image = (out / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        assert len(image) > 20_000
    record = json.loads((out / "tradeoffs.json").read_text())
    assert record["caveat"] == "nominal epsilon: as published; not a guarantee"
    with (out / "fixed_epsilon.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    points = [point for curve in record["fixed_epsilon"] for point in curve["points"]]
    assert len(rows) == len(points) == 6
    for row, point in zip(rows, points, strict=True):
        assert Point(**point).bits == int(row["bits"])
        assert row["levels"] == ("" if point["levels"] is None else str(point["levels"]))
        assert (row["variance"] == "") == (point["variance"] is None)
    assert result.json["points"] == 6 + 41
    assert result.json["infeasible_points"] > 0


def test_bad_ranges_are_one_line(bqsgd, tmp_path):
    for arguments in (
        ["--bits-range", "16"],
        ["--epsilons", "a,b"],
        ["--fixed-bits", "8.5"],
        ["--epsilon-range", "5-1"],
    ):
        result = bqsgd("paper", "tradeoffs", "--out", tmp_path / "x", *arguments)
        assert result.code == 2
        assert arguments[0] in result.err
        assert result.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_directory_that_cannot_be_made_is_one_line(bqsgd, tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = bqsgd("paper", "tradeoffs", "--out", tmp_path / "file" / "below")
    assert result.code == 2
    assert result.err.count("\n") == 1
