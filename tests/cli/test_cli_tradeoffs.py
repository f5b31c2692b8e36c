"""`bqsgd tradeoffs` writes PNG, CSV and JSON that agree with each other."""

import csv
import json

from bqsgd.planner.tradeoffs import Point


def test_files_and_their_contents(bqsgd, tmp_path):
    out = tmp_path / "curves"
    result = bqsgd(
        "tradeoffs", "--out", out, "--epsilons", "3.44,8.72", "--bits-range", "7-9", "--fixed-bits", 8, "--json"
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
        result = bqsgd("tradeoffs", "--out", tmp_path / "x", *arguments)
        assert result.code == 2
        assert arguments[0] in result.err
        assert result.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_directory_that_cannot_be_made_is_one_line(bqsgd, tmp_path):
    (tmp_path / "file").write_text("in the way")
    result = bqsgd("tradeoffs", "--out", tmp_path / "file" / "below")
    assert result.code == 2
    assert result.err.count("\n") == 1
