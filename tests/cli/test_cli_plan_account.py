"""`bqsgd plan` and `bqsgd account`: the published figures, the proven ones beside them, and what is said of each."""

import pytest

from bqsgd.planner.plan import Plan
from bqsgd.planner.published import ROWS

CLIENT = ["--dim", 3000, "--batch", 32, "--dataset-size", 15000]
CAVEAT = "as published; not a guarantee"


def test_plan_by_the_paper(bqsgd):
    result = bqsgd("plan", "--method", "paper", "--bits", 8, "--epsilon", 3.45, "--delta", 1e-4, *CLIENT, "--json")
    fields = result.json
    assert (fields["levels"], fields["trials"], fields["bits_per_coordinate"]) == (2, 251, 8.0)
    assert fields["nominal_epsilon"] == pytest.approx(3.447, abs=1e-3)
    assert fields["nominal_delta"] == 1e-4
    assert fields["variance"] == pytest.approx(251 / 16 + 1 / 24)
    assert fields["nominal_caveat"] == CAVEAT
    assert "epsilon" not in fields
    assert Plan.from_dict(fields["plan"]).mechanism.trials == 251


def test_account_by_the_paper(bqsgd):
    result = bqsgd(
        "account",
        "--method",
        "paper",
        "--levels",
        2,
        "--trials",
        251,
        "--rounds",
        1000,
        "--delta",
        1e-4,
        *CLIENT,
        "--json",
    )
    fields = result.json
    assert fields["nominal_epsilon_per_round"] == pytest.approx(3.447, abs=1e-3)
    assert fields["nominal_epsilon_total"] == pytest.approx(467.86, abs=0.01)
    assert fields["nominal_epsilon_total_in_text"] == pytest.approx(330.83, abs=0.01)
    assert fields["nominal_delta_total"] == pytest.approx(0.1)
    assert fields["nominal_strong_composition_epsilon"] == pytest.approx(105_300, rel=1e-3)
    assert fields["nominal_caveat"] == CAVEAT
    assert "epsilon" not in fields


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.setting.dataset}-{row.bits}-{row.epsilon}")
def test_every_table_row_through_plan_and_account(bqsgd, row):
    setting = row.setting
    client = ["--dim", setting.nominal_dimension, "--batch", setting.batch_size, "--dataset-size", setting.dataset_size]
    budget = ["--bits", row.bits, "--epsilon", row.epsilon, "--delta", setting.delta]
    planned = bqsgd("plan", "--method", "paper", "--rounding", "nearest", *budget, *client, "--json").json
    pair = (planned["levels"], planned["trials"])
    assert pair == (row.corrected.levels, row.corrected.trials) or f"({pair[0]}, {pair[1]})" in row.note
    run = ["--levels", row.printed.levels, "--trials", row.printed.trials, "--rounds", setting.rounds]
    accounted = bqsgd("account", "--method", "paper", *run, "--delta", setting.delta, *client, "--json").json
    wrong_epsilon = abs(accounted["nominal_epsilon_per_round"] / row.epsilon - 1) > 0.011
    too_wide = accounted["code_count"] > 2**row.bits
    assert row.misprint == (wrong_epsilon or too_wide)


@pytest.mark.parametrize("command", ["plan", "account"])
def test_tables_for_people_say_what_the_figures_are(bqsgd, command):
    own = {
        "plan": ["--bits", 8, "--epsilon", 3.44, "--rounding", "nearest"],
        "account": ["--levels", 2, "--trials", 251, "--rounds", 1000],
    }
    result = bqsgd(command, "--method", "paper", *own[command], "--delta", 1e-4, *CLIENT)
    assert result.code == 0
    assert f"Nominal figures: {CAVEAT}." in result.out
    if command == "plan":
        assert "passes the asked nominal epsilon 3.44" in result.out


def test_account_exact_is_the_default_with_the_nominal_figure_beside_it(bqsgd):
    """The bounds are the single-order figure that any truth must reach, and 3 % above it."""
    run = ["--levels", 1, "--trials", 251, "--rounds", 1000, "--delta", 1e-5]
    fields = bqsgd("account", *run, "--dim", 61706, "--batch", 32, "--dataset-size", 15000, "--json").json
    assert 0.3304 <= fields["epsilon"] <= 0.3304 * 1.03
    assert fields["delta"] == 1e-5
    assert (fields["relation"], fields["unit"]) == ("add/remove one", "sample")
    assert fields["method"].startswith("exact")
    assert 0 <= fields["delta_floor"] < 1e-5
    assert fields["nominal_epsilon_per_round"] == pytest.approx(354.518, abs=1e-3)
    assert fields["nominal_caveat"] == CAVEAT


def test_account_of_no_noise_is_infinite_and_still_strict_json(bqsgd):
    fields = bqsgd("account", "--levels", 1, "--trials", 0, "--rounds", 1, "--delta", 1e-5, *CLIENT, "--json").json
    assert fields["epsilon"] == "inf"
    assert "nominal_epsilon_per_round" not in fields


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "none"])
def test_account_by_sampling(bqsgd, sampling):
    run = ["--levels", 1, "--trials", 251, "--rounds", 2, "--delta", 1e-5, "--dim", 50, "--batch", 32]
    fields = bqsgd("account", *run, "--dataset-size", 100, "--sampling", sampling, "--json").json
    assert fields["relation"] == ("replace one" if sampling == "fixed" else "add/remove one")
    assert 0 < fields["epsilon"] < 10


def test_plan_exact_is_the_default_and_ends_on_the_private_side(bqsgd):
    setup = ["--dim", 5, "--batch", 32, "--dataset-size", 1000, "--rounds", 1, "--sampling", "none"]
    fields = bqsgd("plan", "--bits", 6, "--epsilon", 1, "--delta", 1e-3, *setup, "--json").json
    assert fields["planned_by"] == "exact"
    assert 0 < fields["epsilon"] <= 1
    assert fields["code_count"] <= 64
    plan = Plan.from_dict(fields["plan"])
    assert plan.guarantee.epsilon == fields["epsilon"]
    run = ["--levels", fields["levels"], "--trials", fields["trials"], "--delta", 1e-3]
    assert bqsgd("account", *run, *setup, "--json").json["epsilon"] == pytest.approx(fields["epsilon"], rel=1e-6)


def test_few_bits_say_what_they_cost_in_error(bqsgd):
    setup = ["--dim", 5, "--batch", 32, "--dataset-size", 1000, "--rounds", 1, "--sampling", "none"]
    asked = ["plan", "--bits", 4, "--epsilon", 1, "--delta", 1e-3, *setup]
    fields = bqsgd(*asked, "--json").json
    assert (fields["code_count"], fields["points"], fields["bits_per_coordinate"]) == (16, 16, 4)
    assert fields["noise_cost"] > 1
    assert 0 < fields["bias_worst"] < 1
    assert fields["variance_worst"] >= fields["variance"]
    assert Plan.from_dict(fields["plan"]).mechanism.coarsening.width == fields["width"]
    shown = bqsgd(*asked).out
    assert "noise_cost" in shown
    assert "Coarsened after the noise" in shown


def test_infeasible_budget_names_the_trades(bqsgd):
    result = bqsgd("plan", "--method", "paper", "--bits", 8, "--epsilon", 1.0, "--delta", 1e-4, *CLIENT, "--json")
    assert result.code == 2
    assert "8 bits reach epsilon >= 1.72; epsilon 1.0 needs 10 bits" in result.err


def test_plan_proposes_batch_rounds_and_clip_when_none_are_given(bqsgd):
    asked = ["plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-5, "--dim", 39700, "--dataset-size", 15000]
    fields = bqsgd(*asked, "--json").json
    assert 2.9 < fields["epsilon"] <= 3
    moved = fields["clip_norm"] / (fields["batch_size"] * fields["range"])
    run = ["--levels", fields["levels"], "--trials", fields["trials"], "--rounds", fields["rounds"], "--l2", moved]
    setup = ["--batch", fields["batch_size"], "--linf", moved, *asked[5:]]
    assert bqsgd("account", *run, *setup, "--json").json["epsilon"] == pytest.approx(fields["epsilon"], rel=1e-6)
    assert f"--batch-size {fields['batch_size']} --clip l2" in " ".join(bqsgd(*asked).out.split())
