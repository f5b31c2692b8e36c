"""The filters against the real NVFlare, which has an environment of its own (`make test` makes it)."""

import os
import subprocess
from pathlib import Path

import pytest

import bqsgd

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-nvflare" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="needs NVFlare's environment: `make test` makes it")


def run(*words, folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    # A file, not a pipe: the simulator leaves processes behind for a moment, and they would keep a pipe open.
    with (folder / "printed.txt").open("w+") as printed:
        done = subprocess.run(
            [PYTHON, *words], cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT, check=False
        )
        printed.seek(0)
        return done.returncode, printed.read()


def test_what_jobs_sites_and_servers_may_do(tmp_path):
    cases = ROOT / "tests" / "integrations" / "nvflare_cases.py"
    code, printed = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-W", "ignore", cases, folder=tmp_path
    )
    assert code == 0, printed[-4000:]
    assert " passed" in printed


@pytest.mark.slow
def test_the_example_counts_each_round_and_stops_when_the_study_ends(tmp_path):
    job = ROOT / "examples" / "nvflare_gate" / "job.py"
    _, printed = run(
        job,
        "--private",
        "updates",
        "--epsilon",
        "50",
        "--planned",
        "1",
        "--rounds",
        "2",
        "--folder",
        tmp_path / "run",
        folder=tmp_path,
    )
    for site in ("site-1", "site-2"):
        with bqsgd.Ledger(tmp_path / "run" / "ledgers" / f"{site}.ledger") as ledger:
            assert ledger.spent_rounds == 1, printed[-4000:]
            assert ledger.guarantee().unit == "client"
            assert ledger.guarantee().epsilon <= 50
    assert "update 1 of 1; epsilon" in printed
    assert "was planned for 1 steps; all are taken" in printed
