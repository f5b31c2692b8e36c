"""The entry point of the benchmarks: every name is listed, has the options of all, and unknown names are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.__main__ import benchmarks, run

ROOT = Path(__file__).parents[2]


def test_every_result_has_its_benchmark_and_every_benchmark_a_line(capsys):
    names = benchmarks()
    recorded = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert recorded == set(names) - {"device"}, "no machine with another device has recorded one yet"
    assert run([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(names)
    assert all(line.endswith(".") and len(line) > 30 for line in lines)


def test_an_unknown_name_is_refused_with_those_there_are(capsys):
    assert run(["nothing"]) == 2
    assert "no benchmark is called 'nothing'; choose one of accountant, " in capsys.readouterr().err


def test_a_case_runs_and_prints_its_options(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)  # `run` writes it
    with pytest.raises(SystemExit) as asked:
        run(["accountant", "--help"])
    assert asked.value.code == 0
    assert "--output" in capsys.readouterr().out
    assert run(["accountant", "--case", "LeNet-5, s=1 m=251"]) == 0
    assert '"case": "LeNet-5, s=1 m=251"' in capsys.readouterr().out


def test_the_make_target_takes_the_name():
    shown = subprocess.run(
        ["make", "-n", "-o", "install", "bench", "NAME=secure"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "-m benchmarks secure" in shown.stdout
