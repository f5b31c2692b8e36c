"""Planning by client and by round: least error within the budget, on top of what came before."""

import pytest

from bqsgd._src.errors import Infeasible
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.search import make_plan
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Relation, Release, Scheme, Terms, Unit
from bqsgd._src.settings import client_plan
from bqsgd._src.settings.client_plan import client_terms, plans_kept_in, release_in
from bqsgd._src.settings.groups import BudgetChange


@pytest.fixture
def setting(settings):
    def make(**changes):
        config = settings(levels=None, trials=None, **changes)
        return config, client_terms(config, dimension=6, dataset_size=60)

    return make


def test_one_budget_is_the_planner_s_own_plan(setting):
    config, where = setting(epsilon=10.0, rounds=6)
    own = Terms.of_batch(dimension=6, batch_size=20, dataset_size=60, linf=1 / 20)
    plan = make_plan(config.privacy.budget(client=0, round=0), own, rounds=6)
    assert release_in(config, where, client=0, round=5) == plan.release


def test_a_later_process_uses_the_plans_that_an_earlier_one_kept(setting, monkeypatch):
    config, where = setting(epsilon=10.0, rounds=6)
    kept = {}
    monkeypatch.setattr(client_plan, "_answers", {})
    with plans_kept_in(kept):
        first = release_in(config, where, client=0, round=0)
    monkeypatch.setattr(client_plan, "_answers", {})
    monkeypatch.setattr(client_plan, "_planned", lambda *_: pytest.fail("planned twice"))
    with plans_kept_in(kept):
        assert release_in(config, where, client=0, round=5) == first
    assert len(kept) == 1


def test_changed_budgets_compose_within_the_new_budget(setting):
    changes = (BudgetChange(client=1, from_round=3, epsilon=14.0),)
    config, where = setting(epsilon=10.0, rounds=6, budgets=changes)
    first, then = (release_in(config, where, client=1, round=round_) for round_ in (2, 3))
    assert first == release_in(config, where, client=0, round=5)  # as a client whose budget never changes
    assert first != then
    total = Accountant().compose(first, 3).compose(then, 3).epsilon(1e-5)
    assert 0.8 * 14.0 < total <= 14.0


def test_a_lowered_budget_below_what_is_spent_is_infeasible(setting):
    config, where = setting(epsilon=10.0, rounds=6, budgets=(BudgetChange(client=0, from_round=5, epsilon=2.0),))
    with pytest.raises(Infeasible, match="earlier rounds have spent"):
        release_in(config, where, client=0, round=5)
    release_in(config, where, client=0, round=4)


def test_relation_and_sampling_follow_the_scheme_and_the_unit(setting):
    relation = {"poisson": Relation.ADD_REMOVE, "none": Relation.ADD_REMOVE, "fixed": Relation.REPLACE}
    for sampling, expected in relation.items():
        release = Release(mechanism=Mechanism(levels=3, trials=9), terms=setting(sampling=sampling)[1])
        assert release.terms.sensitivity.relation is expected
        assert release.terms.sensitivity.linf == (2 if sampling == "fixed" else 1) / 20
        assert release.terms.sampling.rate == (1.0 if sampling == "none" else 20 / 60)
    whole = setting(unit="client", local_steps=4)[1]
    assert (whole.unit, whole.sensitivity.linf, whole.sampling.scheme) == (Unit.CLIENT, 2.0, Scheme.NONE)
