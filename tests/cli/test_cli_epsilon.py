"""Each command shows every epsilon rounded up, beside the full figure in the JSON of the same command."""

import re
from types import SimpleNamespace

import pytest

from bqsgd._src.audit.bound import audit
from bqsgd._src.audit.encoder import EncoderRuns
from bqsgd._src.cli.audit import audit_lines
from bqsgd._src.cli.output import shown
from bqsgd._src.ledger import Ledger
from bqsgd._src.noise import seeded_rng
from bqsgd._src.params import Mechanism
from bqsgd._src.records.record import RoundRecord
from bqsgd._src.release import Release, Sampling, Scheme, Sensitivity, Terms

# Few coordinates: how a figure is rounded does not depend on their number, and the accountant is quick.
CLIENT = ["--dimension", 5, "--batch-size", 32, "--dataset-size", 15000, "--delta", 1e-5]
MECHANISM = ["--levels", 1, "--trials", 251]
RELEASE = Release(
    mechanism=Mechanism(levels=2, trials=60),
    terms=Terms(dimension=50, sensitivity=Sensitivity(linf=0.5), sampling=Sampling(scheme=Scheme.NONE)),
)


def read(shown: str, words: str) -> float:
    """The number after these words."""
    found = re.search(rf"{re.escape(words)} ([0-9.e+-]*[0-9])", " ".join(shown.split()))
    assert found, (words, shown)
    return float(found[1])


def is_rounded_up(figure: float, exact: float) -> bool:
    return exact <= figure <= exact * 1.0011


def some_would_fall_below(exact: list[float], digits: int) -> bool:
    """Whether rounding to the nearest would show one of these too small; without it the test above shows nothing."""
    return any(float(f"{figure:.{digits}g}") < figure for figure in exact)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_account(bqsgd):
    seen = []
    for rounds in range(40, 44):
        command = ["account", *MECHANISM, "--rounds", rounds, *CLIENT]
        seen.append(bqsgd(*command, "--json").json["guarantee"]["epsilon"])
        assert is_rounded_up(read(bqsgd(*command).out, "guarantee epsilon"), seen[-1])
    assert some_would_fall_below(seen, 4)


def test_nominal(bqsgd):
    seen = []
    for levels in range(1, 5):
        words = ["paper", "account", "--levels", levels, "--trials", 251, "--rounds", 7, *CLIENT]
        exact = bqsgd(*words, "--json").json["nominal"]
        text = bqsgd(*words).out
        assert is_rounded_up(read(text, "per round epsilon"), exact["epsilon_per_round"])
        assert is_rounded_up(read(text, "in total epsilon"), exact["epsilon_total"])
        assert is_rounded_up(read(text, "Lemma 2 epsilon"), exact["strong_epsilon"])
        seen.append(exact["epsilon_per_round"])
    assert some_would_fall_below(seen, 4)


def test_plan(bqsgd):
    command = ["plan", "--bits", 6, "--epsilon", 3.1234567, "--rounds", 5, "--sampling", "none", *CLIENT]
    text, exact = bqsgd(*command).out, bqsgd(*command, "--json").json["guarantee"]["epsilon"]
    assert is_rounded_up(read(text, "guarantee epsilon"), exact)
    assert "Plan for 6 bits, epsilon 3.1234567, delta 1e-05, 5 rounds" in text  # the budget is shown as given


def test_a_proposed_command_repeats_the_budget_as_given(bqsgd):
    command = "plan --bits 6 --epsilon 3.1234567 --delta 1.2345678e-5 --dimension 5 --dataset-size 1500"
    assert "bqsgd train --epsilon 3.1234567 --delta 1.2345678e-05 " in " ".join(bqsgd(*command.split()).out.split())


def test_paper_plan(bqsgd):
    command = ["paper", "plan", "--bits", 8, "--epsilon", 3.4512345, *CLIENT[:-1], 1e-4]
    text, exact = bqsgd(*command).out, bqsgd(*command, "--json").json["nominal"]
    assert "nominal epsilon 3.4512345, delta 0.0001" in text
    assert is_rounded_up(read(text, "per round epsilon"), exact["epsilon_per_round"])


def test_what_too_few_bits_can_reach_is_rounded_up(bqsgd):
    command = ["paper", "plan", "--bits", 4, *CLIENT]
    refused = bqsgd(*command, "--epsilon", 0.10000049)
    assert refused.code == 2
    reach = read(refused.err, "bits reach epsilon >=")
    assert "epsilon 0.10000049 needs" in " ".join(refused.err.split())
    assert bqsgd(*command, "--epsilon", reach).code == 0  # the figure named is feasible


def test_ledger_show(bqsgd, tmp_path):
    path = tmp_path / "one.ledger"
    seen = []
    with Ledger.open(path, client=1, budget_epsilon=1e4 + 0.00000049, budget_delta=1e-5) as ledger:
        for round in range(8):
            ledger.spend(RELEASE, run="a", round=round, seeded=False)
            seen.append(ledger.guarantee().epsilon)
            text = bqsgd("ledger", "show", path).out
            assert is_rounded_up(read(text, "guarantee epsilon"), seen[-1]) or "> 1000" in text
        assert f"budget epsilon {ledger.budget.epsilon!r} at delta" in " ".join(text.split())
    assert some_would_fall_below(seen, 4)


def test_audit():
    seen = []
    for seed in range(6):
        source = EncoderRuns(RELEASE, rng=seeded_rng(seed=seed), rounds=1)
        result = audit(source, claim=RELEASE, samples=400, delta=1e-5)
        text = " ".join(" ".join(line) for line in audit_lines(result).items())
        exact = result.lower.epsilon
        assert exact * (1 - 1e-3) <= read(text, "epsilon at least") <= exact
        assert is_rounded_up(read(text, "claimed epsilon"), result.claimed.epsilon)
        seen.append(exact)
    assert any(float(f"{figure:.4g}") > figure > 0 for figure in seen), "to the nearest would show one too large"


def test_audit_as_a_command(bqsgd):
    command = ["audit", "--levels", 2, "--trials", 60, *CLIENT, "--samples", 40, "--sampling", "none"]
    text = bqsgd(*command).out
    exact = bqsgd(*command, "--json").json["claimed"]["epsilon"]  # the runs differ, the claim does not
    assert is_rounded_up(read(text, "claimed epsilon"), exact)


def test_the_line_of_a_round_in_progress(capsys):
    record = RoundRecord(round=0, time=1.0, bytes_up=10, test_accuracy=0.5, test_loss=1.0, epsilon_max=0.18181637)
    config = SimpleNamespace(run=SimpleNamespace(rounds=2), privacy=SimpleNamespace(delta=1e-5, seed=None))
    assert list(shown([record], config=config, first_round=0)) == [record]
    assert "epsilon 0.1819 at delta 1e-05" in capsys.readouterr().err


def test_train(bqsgd, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    told = bqsgd("train", "--dataset", "digits", "--levels", 17, "--trials", 220, "--epsilon", 30,
                 "--rounds", 3, "--evaluate-every", 1, "--clip", "clamp", "--clip-bound", 0.02,
                 "--out", "one")  # fmt: skip
    assert told.code == 0
    from bqsgd._src.records.folder import read_history

    history = read_history(tmp_path / "one")
    assert is_rounded_up(read(told.out, "guarantee epsilon"), history.summary.guarantee.epsilon)
    lines = told.err.splitlines()
    for record in history.rounds:
        (line,) = (line for line in lines if line.startswith(f"round {record.round + 1}/3"))
        assert is_rounded_up(read(line, "epsilon"), record.epsilon_max)
