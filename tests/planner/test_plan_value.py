"""Plan and the release it describes: defaults, round trip, hostile dictionaries."""

import json
from dataclasses import replace

import pytest

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.mechanism.properties import noise_variance
from bqsgd._src.params import Mechanism
from bqsgd._src.planner.plan import Budget, Plan
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.release import Relation, Release, Scheme, Terms, Trust, Unit


def terms(**changes):
    return Terms.of_batch(**{"dimension": 3000, "batch_size": 32, "dataset_size": 15000, **changes})


MECHANISM = Mechanism(levels=2, trials=251)
GUARANTEE = Guarantee(
    epsilon=2.5,
    delta=1e-5,
    relation=Relation.ADD_REMOVE,
    unit=Unit.SAMPLE,
    trust=Trust.EACH_CLIENT,
    sampling="poisson",
    method="test",
    delta_floor=0.0,
)


def a_plan(**changes):
    return Plan(
        budget=Budget(bits=8, epsilon=3.0, delta=1e-5),
        release=Release(mechanism=MECHANISM, terms=terms(**changes)),
        rounds=1000,
        variance=noise_variance(MECHANISM),
        guarantee=GUARANTEE,
    )


def test_round_trip_through_json():
    plan = a_plan(scheme="fixed-size without replacement", l2=0.5)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_round_trip_with_an_infinite_epsilon():
    plan = replace(a_plan(), guarantee=replace(GUARANTEE, epsilon=float("inf")))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False))) == plan


@pytest.mark.parametrize("name", ["budget", "release", "rounds", "variance", "guarantee"])
def test_missing_or_wrong_fields_are_refused(name):
    fields = a_plan().to_dict()
    with pytest.raises(InvalidParameter):
        Plan.from_dict({key: value for key, value in fields.items() if key != name})
    with pytest.raises(InvalidParameter):
        Plan.from_dict({**fields, name: "nonsense"})


@pytest.mark.parametrize(
    "wrong", [{"bits": 1}, {"bits": 21}, {"bits": 8.0}, {"epsilon": 0}, {"epsilon": float("inf")}, {"delta": 1}]
)
def test_budgets_are_checked(wrong):
    with pytest.raises(InvalidParameter):
        Budget(**{"bits": 8, "epsilon": 1.0, "delta": 1e-5, **wrong})


@pytest.mark.parametrize(
    ("scheme", "relation", "linf", "rate"),
    [
        (Scheme.POISSON, Relation.ADD_REMOVE, 1 / 32, 32 / 15000),
        (Scheme.FIXED_SIZE, Relation.REPLACE, 2 / 32, 32 / 15000),
        (Scheme.NONE, Relation.ADD_REMOVE, 1 / 32, 1.0),
    ],
)
def test_default_sensitivity_follows_the_sampling(scheme, relation, linf, rate):
    drawn = terms(scheme=scheme)
    assert (drawn.sensitivity.relation, drawn.sensitivity.linf, drawn.sampling.rate) == (relation, linf, rate)


def test_given_sensitivities_win():
    release = Release(mechanism=MECHANISM, terms=terms(linf=0.5, l2=0.7))
    assert (release.terms.sensitivity.linf, release.terms.sensitivity.l2, release.shift) == (0.5, 0.7, 1.0)
    full = Release(mechanism=MECHANISM, terms=terms(scheme=Scheme.NONE, relation="replace one"))
    assert full.terms.sensitivity.linf == 2 / 32
