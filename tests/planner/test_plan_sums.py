"""The plan of a secure sum: within the budget, in as few bits as it says, decoded to what went in."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from bqsgd import plan_secure
from bqsgd._src.errors import Infeasible, InvalidParameter
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.sums import SumPlan, in_sums, width_of
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Terms, Trust
from bqsgd._src.secure.graph import thresholds
from bqsgd._src.settings.client_plan import client_terms
from bqsgd._src.settings.config import Config

ASKED = {
    "clients": 100, "dropouts": 10, "colluders": 0, "epsilon": 3.0, "delta": 1e-5, "dimension": 39_700,
    "batch_size": 41, "dataset_size": 600, "rounds": 300, "linf": 1.0, "l2": 1.0,
}  # fmt: skip

QUICK = {
    "clients": 100, "dropouts": 10, "colluders": 0, "epsilon": 4.0, "delta": 1e-3, "dimension": 5, "batch_size": 32,
    "dataset_size": 1000, "rounds": 1, "sampling": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def hundred():
    return plan_secure(**ASKED)


def test_a_hundred_clients_share_the_noise_of_one(hundred):
    plan = hundred.plan
    assert hundred.guarantee.epsilon <= 3.0
    assert plan.wrap_probability == 0.0
    assert plan.trials >= 10 * 100  # rounding adds at most a tenth to the variance
    assert plan.rounding <= 0.1 * plan.variance() * 1.001
    assert 2 * 100 * plan.levels + plan.trials < 2**plan.width
    assert plan.noise.drawn == math.ceil(plan.trials / 90)
    assert "never wraps" in hundred.lines["modulus"]
    assert "server sees only sums over clients; no client colludes with it" in hundred.lines["trust"]
    fields = hundred.to_dict()
    assert (fields["levels"], fields["trials"], fields["bits_per_coordinate"]) == (
        plan.levels, plan.trials, plan.width,
    )  # fmt: skip


def test_a_sum_of_few_clients_has_trials_enough_to_cost_no_more_than_many_do():
    few = plan_secure(**QUICK | {"clients": 4, "dropouts": 0, "linf": 1 / 32})
    assert few.plan.trials >= 400
    narrow = plan_secure(**QUICK | {"clients": 4, "dropouts": 0}, bits=few.plan.width - 3)
    assert narrow.plan.trials < 100
    assert narrow.plan.variance() > 1.03 * few.plan.variance()  # a coarser grid of the same epsilon is noisier


def test_more_levels_would_not_fit_and_fewer_trials_would_not_do(hundred):
    plan = hundred.plan
    per_square = plan.trials / plan.levels**2
    more = plan.levels + 1
    with pytest.raises(InvalidParameter, match="too few for"):
        SumPlan(rule=plan.rule, levels=more, trials=math.ceil(per_square * more**2), width=plan.width)
    fewer = Release(
        mechanism=Mechanism(levels=plan.levels, trials=round(plan.trials * 0.99)), terms=hundred.release.terms
    )
    assert Accountant().compose(fewer, 300).epsilon(1e-5) > 3.0


def test_the_chance_that_a_sparse_graph_fails_is_part_of_delta():
    rule, rounds = thresholds(clients=250, dropouts=12, colluders=12), 1000
    terms = Terms.of_batch(dimension=5, batch_size=32, dataset_size=1000, scheme="no sampling")
    sparse, full = in_sums(terms, rule), in_sums(terms, thresholds(clients=100, dropouts=10, colluders=12))
    assert 0 < rule.failure <= 2.0**-40
    assert full.failure == 0
    released = Release(mechanism=Mechanism(levels=1, trials=64), terms=sparse)
    assert Release.from_dict(released.to_dict()) == released
    with_it, without = (
        Accountant().compose(Release(mechanism=Mechanism(levels=1, trials=64), terms=each), rounds)
        for each in (sparse, full)
    )
    assert with_it.delta(20.0) >= without.delta(20.0) + rounds * rule.failure * 0.999
    delta = 4 * rounds * rule.failure
    assert with_it.epsilon(delta) > without.epsilon(delta)
    assert with_it.epsilon(rounds * rule.failure) == math.inf
    with pytest.raises(InvalidParameter, match="failure"):
        replace(released, terms=replace(released.terms, trust=Trust.EACH_CLIENT, colluders=0))
    with pytest.raises(InvalidParameter):
        replace(released, terms=replace(released.terms, failure=math.nan))


def test_a_run_over_a_sparse_graph_counts_its_chance_of_failure():
    config = Config.of(clients=250, secure=True, dropouts=12, colluders=12, rate=0.1)
    terms = client_terms(config, dimension=5, dataset_size=100)
    assert terms.failure == config.secure.rule(250).failure > 0


def test_a_window_takes_fewer_bits_and_states_how_often_it_wraps():
    whole, narrow = plan_secure(**QUICK), plan_secure(**QUICK, window=0.05)
    assert narrow.plan.width < whole.plan.width
    assert 0 < narrow.plan.wrap_probability <= 1e-9
    assert "costs accuracy, never privacy" in narrow.lines["modulus"]
    assert narrow.guarantee.epsilon <= 4.0


def test_the_plan_says_where_the_width_starts_and_where_it_leads(hundred):
    plan = hundred.plan
    assert f"{plan.width} bits per coordinate: never wraps" in hundred.lines["modulus"]
    assert f"down to {plan.least_width} bits" in hundred.lines["modulus"]
    assert plan.least_width == width_of(plan.rule, plan.levels, plan.trials, window=0.0) == 9
    assert hundred.to_dict()["bits_least"] == plan.least_width
    windowed = plan_secure(**QUICK, window=0.05)
    assert windowed.plan.least_width == windowed.plan.width
    assert "follows" not in windowed.lines["modulus"]


def test_without_a_range_the_levels_are_what_the_noise_needs_and_not_what_the_modulus_holds():
    free, filled = plan_secure(**QUICK), plan_secure(**QUICK, linf=1 / 32)
    assert free.plan.levels < filled.plan.levels
    assert free.plan.rounding <= 0.2 * free.plan.variance()
    assert free.guarantee.epsilon <= 4.0
    assert free.plan.variance() <= 1.05 * filled.plan.variance()


def test_the_stated_probability_is_an_upper_bound():
    rule = thresholds(clients=4, dropouts=0, colluders=0)
    for width in (7, 8):
        plan = SumPlan(rule=rule, levels=20, trials=400, width=width, window=0.2) if width > 7 else None
        if plan is None:
            with pytest.raises(InvalidParameter, match="too few"):
                SumPlan(rule=rule, levels=20, trials=400, width=width, window=0.2)
            continue
        room = 2 ** (width - 1) - 1 - 0.2 * 4 * 20
        exact = 2 * stats.binom(400, 0.5).sf(200 + room)  # values on the grid: no rounding
        assert exact <= plan.wrap_probability


@pytest.mark.parametrize("window", [None, 0.5])
@pytest.mark.parametrize(("n", "f", "t"), [(4, 1, 0), (5, 1, 1), (10, 2, 2)])
def test_the_mean_is_read_back_for_every_number_of_survivors(n, f, t, window):
    rule = thresholds(clients=n, dropouts=f, colluders=t)
    plan = SumPlan(rule=rule, levels=9, trials=101, width=width_of(rule, 9, 101, window=window), window=window)
    rng = np.random.default_rng(0)
    for survivors in range(n - f, n + 1):
        most = 9 if window is None else 4
        values = rng.integers(-most, most + 1, size=(survivors, 50))
        inside = plan.noise.in_sum(survivors)
        for noise in (0, inside // 2, inside) if window is None else (inside // 2,):
            codes = (values + 9).sum(axis=0) + noise
            lanes = (codes % 2**plan.width).astype(np.uint32)
            expected = values.sum(axis=0) + noise - inside / 2
            np.testing.assert_allclose(plan.mean(lanes, survivors=survivors), expected / (survivors * 9))


def test_what_cannot_be_met_is_answered_with_what_can():
    with pytest.raises(Infeasible, match=r"reaches no less than epsilon [\d.]+; epsilon 3 needs \d+ bits"):
        plan_secure(**QUICK | {"linf": 5.0, "epsilon": 3.0}, bits=9)
    with pytest.raises(Infeasible, match="at most 49 dropouts are possible"):
        plan_secure(**ASKED | {"dropouts": 60})
    with pytest.raises(Infeasible, match="colluders are possible"):
        plan_secure(**ASKED | {"clients": 3, "dropouts": 0, "colluders": 2})
    with pytest.raises(InvalidParameter, match="window must be a fraction"):
        plan_secure(**ASKED, window=1.5)


def test_the_command(capsys):
    from bqsgd._src.cli.app import main

    asked = "plan --secure --clients 10 --dropouts 1 --epsilon 4 --delta 1e-3 --dimension 5 --batch-size 32"
    rest = "--dataset-size 1000 --rounds 1 --sampling none"
    assert main([*asked.split(), *rest.split()]) == 0
    shown = capsys.readouterr().out
    assert "Plan for sums over 10 clients" in shown
    assert "no client colludes" in shown
    assert main(["plan", "--clients", "4", *asked.split()[4:], *rest.split()]) == 2
    assert main(["plan", "--secure", *asked.split()[6:], *rest.split()]) == 2
