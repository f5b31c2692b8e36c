"""`bqsgd plan` and `bqsgd account`: the guarantee in a few lines, and the paper's figures only when asked for."""

import pytest

from bqsgd._src.planner.plan import Plan
from bqsgd._src.release import Release

CLIENT = ["--dimension", 3000, "--batch-size", 32, "--dataset-size", 15000]
SMALL = ["--dimension", 5, "--batch-size", 32, "--dataset-size", 1000, "--rounds", 1, "--sampling", "none"]
CAVEAT = "as published; not a guarantee"
BESIDE = ("guarantee", "neighbours", "trust", "sampling", "method", "message", "error")
"""The lines without which an epsilon must not be read, and what a message costs."""


def labels(shown: str) -> list[str]:
    """The labels of the aligned lines, in their order."""
    return [line[2:].split("  ")[0] for line in shown.splitlines() if line.startswith("  ") and line[2] != " "]


def test_account_states_what_belongs_beside_epsilon(bqsgd):
    """The bounds are the single-order figure that any truth must reach, and 3 % above it."""
    run = ["--levels", 1, "--trials", 251, "--rounds", 1000, "--delta", 1e-5]
    fields = bqsgd("account", *run, "--dimension", 61706, *CLIENT[2:], "--json").json
    guarantee = fields["guarantee"]
    assert 0.3304 <= guarantee["epsilon"] <= 0.3304 * 1.03
    assert 0.3304 * 0.998 <= fields["attained_epsilon"] <= 0.3304
    assert guarantee["delta"] == 1e-5
    assert (guarantee["relation"], guarantee["unit"]) == ("add/remove one", "sample")
    assert 0 <= guarantee["delta_floor"] < 1e-5
    assert fields["variance"] == pytest.approx(251 / 4 + 1 / 6)
    assert fields["code_count"] == 254
    assert Release.from_dict(fields["release"]).terms.dimension == 61706
    assert "nominal" not in fields


def test_people_see_a_few_lines_and_the_paper_s_figure_only_from_its_own_command(bqsgd):
    run = ["account", "--levels", 2, "--trials", 251, "--rounds", 10, "--delta", 1e-4, *CLIENT]
    shown = bqsgd(*run).out
    assert labels(shown) == ["guarantee", "attained", *BESIDE[1:]]
    assert "nominal" not in shown.lower()
    assert "3.97 times the range (standard deviation per coordinate)" in shown
    asked = bqsgd("paper", *run).out
    assert "per round epsilon 3.448 at delta 0.0001" in " ".join(asked.split())
    assert CAVEAT in " ".join(asked.split())
    nominal = bqsgd("paper", *run, "--json").json["nominal"]
    assert nominal["epsilon_per_round"] == pytest.approx(3.447, abs=1e-3)
    assert nominal["caveat"] == CAVEAT


def test_account_of_no_noise_is_infinite_and_still_strict_json(bqsgd):
    run = ["account", "--levels", 1, "--trials", 0, "--rounds", 1, "--delta", 1e-5, *CLIENT]
    assert bqsgd(*run, "--json").json["guarantee"]["epsilon"] == "inf"
    assert "no meaningful guarantee" in bqsgd(*run).out


def test_account_with_an_l2_bound_shows_how_tight_it_is(bqsgd):
    run = ["--levels", 3, "--trials", 141, "--rounds", 300, "--delta", 1e-5, "--linf", 1, "--l2", 1]
    fields = bqsgd("account", *run, "--dimension", 26010, "--batch-size", 1024, "--dataset-size", 15000, "--json").json
    assert fields["attained_epsilon"] <= fields["guarantee"]["epsilon"] <= 1.03 * fields["attained_epsilon"]
    assert "exact" not in fields["guarantee"]["method"]


@pytest.mark.parametrize("sampling", ["poisson", "fixed", "none"])
def test_account_by_sampling(bqsgd, sampling):
    run = ["--levels", 1, "--trials", 251, "--rounds", 2, "--delta", 1e-5, "--dimension", 50, "--batch-size", 32]
    fields = bqsgd("account", *run, "--dataset-size", 100, "--sampling", sampling, "--json").json["guarantee"]
    assert fields["relation"] == ("replace one" if sampling == "fixed" else "add/remove one")
    assert 0 < fields["epsilon"] < 10


def test_a_plan_ends_on_the_private_side(bqsgd):
    asked = ["plan", "--bits", 6, "--epsilon", 1, "--delta", 1e-3, *SMALL]
    fields = bqsgd(*asked, "--json").json
    plan = Plan.from_dict(fields)
    assert 0 < plan.guarantee.epsilon <= 1
    assert fields["code_count"] <= 64
    run = ["--levels", plan.mechanism.levels, "--trials", plan.mechanism.trials, "--delta", 1e-3]
    accounted = bqsgd("account", *run, *SMALL, "--json").json["guarantee"]
    assert accounted["epsilon"] == pytest.approx(plan.guarantee.epsilon, rel=1e-6)
    shown = bqsgd(*asked).out
    assert set(labels(shown)) >= {"mechanism", *BESIDE}
    assert f"levels {plan.mechanism.levels}, trials {plan.mechanism.trials}" in shown
    assert "nominal" not in shown


def test_few_bits_say_what_they_cost_in_error(bqsgd):
    asked = ["plan", "--bits", 4, "--epsilon", 1, "--delta", 1e-3, *SMALL]
    fields = bqsgd(*asked, "--json").json
    cost, mechanism = fields["coarsening_cost"], Plan.from_dict(fields).mechanism
    assert (fields["code_count"], mechanism.coarsening.points, fields["bits_per_coordinate"]) == (16, 16, 4)
    assert cost["noise_cost"] > 1
    assert 0 < cost["bias_worst"] < 1
    assert cost["variance_worst"] >= fields["variance"]
    shown = " ".join(bqsgd(*asked).out.split())
    assert "coarsened to 16 points after the noise" in shown
    assert f"costs no privacy; {cost['noise_cost']:.3g} times as many messages" in shown


def test_plan_proposes_batch_rounds_and_clip_when_none_are_given(bqsgd):
    asked = ["plan", "--bits", 8, "--epsilon", 3, "--delta", 1e-5, "--dimension", 39700, "--dataset-size", 15000]
    fields = bqsgd(*asked, "--json").json
    plan, proposal = Plan.from_dict(fields), fields["proposal"]
    assert 2.9 < plan.guarantee.epsilon <= 3
    # A message carries 3,054 of 39,700 coordinates, and the clip bounds what is kept of each sample.
    assert proposal["one_in"] == 13
    share = 13**0.5 * proposal["batch_size"] * proposal["range"]
    l2, linf = (proposal[clip] / share for clip in ("clip_norm", "clip_bound"))
    run = ["--levels", plan.mechanism.levels, "--trials", plan.mechanism.trials, "--rounds", proposal["rounds"]]
    setup = ["--batch-size", proposal["batch_size"], "--linf", linf, "--l2", l2, *asked[5:]]
    setup[setup.index("--dimension") + 1] = 3054
    accounted = bqsgd("account", *run, *setup, "--json").json["guarantee"]
    assert accounted["epsilon"] == pytest.approx(plan.guarantee.epsilon, rel=1e-6)
    shown = " ".join(bqsgd(*asked).out.split())
    assert f"train with bqsgd train --epsilon 3 --delta 1e-05 --bits 8 --rounds {proposal['rounds']}" in shown
    assert f"--clients 4 --batch-size {proposal['batch_size']} --range {proposal['range']} --one-in 13" in shown
    assert "a message carries one in 13 coordinates, 0.61 bits per coordinate of the model" in shown


@pytest.mark.parametrize("option", [["--secure"], ["--bits", 8], ["--dimension", 3], ["--figure", "x.png"]])
def test_a_query_takes_no_option_of_messages(bqsgd, option):
    refused = bqsgd("plan", "--query", "count", "--epsilon", 1, "--delta", 1e-6, *option)
    assert refused.code == 2
    assert f"{option[0]} cannot be used with --query" in refused.err
