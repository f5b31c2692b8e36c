"""`bqsgd ledger` and `bqsgd audit` as a shell sees them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from bqsgd._src.ledger import Ledger
from bqsgd._src.params import Mechanism
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

RELEASE = Release(
    mechanism=Mechanism(levels=1, trials=60),
    terms=Terms(dimension=4, sensitivity=Sensitivity(linf=0.125), sampling=Sampling(scheme=Scheme.POISSON, rate=0.1)),
)
STATED = {"epsilon", "delta", "relation", "unit", "trust", "sampling", "method", "delta_floor", "seeded"}


@pytest.fixture
def spent(tmp_path: Path) -> Path:
    path = tmp_path / "client"
    with Ledger.open(path, client=5, budget_epsilon=2.0, budget_delta=1e-5) as ledger:
        ledger.reserve(RELEASE, run="a", first_round=0, rounds=3, seeded=False)
        for number in range(3):
            ledger.spend(RELEASE, run="a", round=number, seeded=False)
    return path


def test_show_states_everything_beside_epsilon(bqsgd, spent: Path) -> None:
    fields = bqsgd("ledger", "show", spent, "--json").json
    assert fields["client"] == 5
    assert fields["spent_rounds"] == 3
    assert fields["guarantee"].keys() >= STATED
    assert fields["guarantee"]["delta"] == 1e-5
    other = bqsgd("ledger", "show", spent, "--json", "--delta", 1e-3).json
    assert other["guarantee"]["delta"] == 1e-3
    assert other["guarantee"]["epsilon"] < fields["guarantee"]["epsilon"]
    shown = bqsgd("ledger", "show", spent)
    assert shown.code == 0
    assert "add/remove one sample" in " ".join(shown.out.split())


def test_show_of_an_unused_ledger_and_of_none(bqsgd, tmp_path: Path) -> None:
    Ledger.open(tmp_path / "new", client=1, budget_epsilon=1.0, budget_delta=1e-5).close()
    assert bqsgd("ledger", "show", tmp_path / "new", "--json").json["guarantee"] is None
    assert "nothing was sent" in bqsgd("ledger", "show", tmp_path / "new").out
    missing = bqsgd("ledger", "show", tmp_path / "missing")
    assert missing.code == 2
    assert "no ledger at" in missing.err
    assert not (tmp_path / "missing").exists()


def test_export_json_and_csv(bqsgd, spent: Path, tmp_path: Path) -> None:
    assert bqsgd("ledger", "export", spent, "--out", tmp_path / "all.json").code == 0
    fields = json.loads((tmp_path / "all.json").read_text())
    assert Release.from_dict(fields["entries"][1]["release"]) == RELEASE
    assert bqsgd("ledger", "export", spent, "--out", tmp_path / "all.csv").code == 0
    with (tmp_path / "all.csv").open() as stream:
        budget, spend = csv.DictReader(stream)
    assert (budget["kind"], budget["budget_epsilon"], budget["reason"]) == ("budget", "2.0", "ledger made")
    assert (spend["kind"], spend["rounds"], spend["trials"], spend["linf"]) == ("spend", "3", "60", "0.125")
    assert (spend["sampling"], spend["rate"]) == ("poisson", "0.1")


@pytest.mark.parametrize("name", ["all.txt", "there.json"])
def test_export_refuses_other_formats_and_existing_files(bqsgd, spent: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "there.json").write_text("precious")
    assert bqsgd("ledger", "export", spent, "--out", tmp_path / name).code == 2
    assert (tmp_path / "there.json").read_text() == "precious"


AUDIT = ["audit", "--levels", 2, "--trials", 60, "--dimension", 64, "--batch-size", 8, "--dataset-size", 80]
AUDIT += ["--delta", 1e-3, "--samples", 20_000]


def test_audit_prints_both_bounds_and_that_passing_proves_nothing(bqsgd) -> None:
    result = bqsgd(*AUDIT, "--sampling", "none", "--confidence", "0.9999", "--json")
    assert result.code == 0
    fields = result.json
    assert 0 < fields["epsilon_lower"] < fields["claimed"]["epsilon"]
    assert fields["claimed"].keys() >= STATED
    assert (fields["verdict"], fields["confidence"], fields["seeded"]) == ("no violation found", 0.9999, False)
    assert "proves nothing" in fields["note"]
    assert "proves nothing" in " ".join(bqsgd(*AUDIT, "--confidence", "0.9999").out.split())


def test_audit_says_when_it_audits_fewer_coordinates(bqsgd) -> None:
    fields = bqsgd(*AUDIT, "--audit-dimension", 8, "--confidence", "0.9999", "--json").json
    assert (fields["audited_dimension"], fields["dimension"]) == (8, 64)
    assert fields["claimed"]["epsilon"] < fields["claimed_whole"]["epsilon"]
    refused = bqsgd(*AUDIT, "--audit-dimension", 65)
    assert refused.code == 2
    assert "--audit-dimension" in refused.err


END_TO_END = [
    "audit",
    "--end-to-end",
    "--levels",
    8,
    "--trials",
    60,
    "--dimension",
    16,
    "--batch-size",
    4,
    "--dataset-size",
    8,
]
END_TO_END += ["--delta", 1e-3, "--samples", 200, "--confidence", "0.9999"]


@pytest.mark.parametrize(
    "sampling", ["poisson", *(pytest.param(how, marks=pytest.mark.slow) for how in ("fixed", "none"))]
)
def test_audit_runs_clients_from_end_to_end(bqsgd, sampling: str) -> None:
    pytest.importorskip("torch")
    result = bqsgd(*END_TO_END, "--sampling", sampling, "--json")
    assert result.code == 0
    fields = result.json
    assert (fields["path"], fields["verdict"], fields["samples"]) == ("data to frame", "no violation found", 200)
    assert fields["epsilon_lower"] <= fields["claimed"]["epsilon"]
    same = bqsgd(*[word for word in END_TO_END if word != "--end-to-end"], "--sampling", sampling, "--json").json
    assert same["path"] == "encoder"
    assert same["claimed"]["epsilon"] == pytest.approx(fields["claimed"]["epsilon"])


def test_audit_from_end_to_end_takes_the_sensitivity_from_the_client(bqsgd) -> None:
    refused = bqsgd(*END_TO_END, "--linf", 0.5)
    assert refused.code == 2
    assert "--linf" in refused.err
    fewer = bqsgd(*END_TO_END, "--audit-dimension", 4, "--json").json
    assert (fewer["audited_dimension"], fewer["dimension"]) == (4, 16)
    assert fewer["claimed"]["epsilon"] < fewer["claimed_whole"]["epsilon"]
