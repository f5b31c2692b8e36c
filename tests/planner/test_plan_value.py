"""Plan and the release it describes: defaults, round trip, hostile dictionaries."""

import json

import pytest

from bqsgd.errors import InvalidParameter
from bqsgd.params import Mechanism
from bqsgd.planner.paper import plan_paper
from bqsgd.planner.plan import Budget, Plan, release_of
from bqsgd.privacy.guarantee import Guarantee
from bqsgd.release import Relation, Scheme, Trust, Unit

SETUP = {"dimension": 3000, "batch_size": 32, "dataset_size": 15000}


def a_plan(**changes):
    return plan_paper(Budget(bits=8, epsilon=3.45, delta=1e-4), rounds=1000, **SETUP, **changes)


def test_round_trip_through_json():
    plan = a_plan(scheme="fixed-size without replacement", l2=0.5)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_round_trip_with_a_guarantee_and_an_infinite_figure():
    plan = plan_paper(
        Budget(bits=8, epsilon=1e9, delta=1e-9), rounds=10, dimension=10**6, batch_size=32, dataset_size=15000
    )
    guarantee = Guarantee(
        epsilon=float("inf"),
        delta=1e-5,
        relation=Relation.ADD_REMOVE,
        unit=Unit.SAMPLE,
        trust=Trust.EACH_CLIENT,
        sampling="poisson",
        method="test",
        delta_floor=0.0,
    )
    fields = {**plan.to_dict(), "guarantee": guarantee.to_dict()}
    again = Plan.from_dict(json.loads(json.dumps(fields)))
    assert again.guarantee == guarantee
    assert again.nominal == plan.nominal


def test_stored_nominal_figures_are_not_believed():
    fields = a_plan().to_dict()
    fields["nominal"]["epsilon_per_round"] = 0.001
    assert Plan.from_dict(fields).nominal.epsilon_per_round == pytest.approx(3.447, abs=1e-3)


@pytest.mark.parametrize("name", ["method", "budget", "release", "rounds", "variance", "nominal", "guarantee"])
def test_missing_or_wrong_fields_are_refused(name):
    fields = a_plan().to_dict()
    with pytest.raises(InvalidParameter):
        Plan.from_dict({key: value for key, value in fields.items() if key != name})
    with pytest.raises(InvalidParameter):
        Plan.from_dict({**fields, name: "nonsense"})


@pytest.mark.parametrize(
    ("scheme", "relation", "linf", "rate"),
    [
        (Scheme.POISSON, Relation.ADD_REMOVE, 1 / 32, 32 / 15000),
        (Scheme.FIXED_SIZE, Relation.REPLACE, 2 / 32, 32 / 15000),
        (Scheme.FULL, Relation.ADD_REMOVE, 1 / 32, 1.0),
    ],
)
def test_default_sensitivity_follows_the_sampling(scheme, relation, linf, rate):
    release = release_of(Mechanism(levels=2, trials=251), scheme=scheme, **SETUP)
    assert (release.sensitivity.relation, release.sensitivity.linf, release.sampling.rate) == (relation, linf, rate)


def test_given_sensitivities_win():
    release = release_of(Mechanism(levels=2, trials=251), linf=0.5, l2=0.7, **SETUP)
    assert (release.sensitivity.linf, release.sensitivity.l2, release.shift) == (0.5, 0.7, 1.0)
    full = release_of(Mechanism(levels=2, trials=251), scheme=Scheme.FULL, relation="replace one", **SETUP)
    assert full.sensitivity.linf == 2 / 32
