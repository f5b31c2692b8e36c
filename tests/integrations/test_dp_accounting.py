"""Google's dp_accounting, both ways: our messages in its accountant, its events in our ledger."""

from __future__ import annotations

import math

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant as Googles
from dp_accounting.pld import privacy_loss_distribution as google
from dp_accounting.privacy_accountant import NeighboringRelation, UnsupportedEventError

from bqsgd import Accountant, Guarantee, InvalidParameter, Ledger, Mechanism, Release, Terms
from bqsgd._src.errors import BudgetExhausted
from bqsgd._src.events import OutsideEvent
from bqsgd._src.laws import DiscreteGaussian, Geometric
from bqsgd._src.release import Relation, Trust
from bqsgd.integrations.dp_accounting import (
    PLDAccountant,
    ReleaseDpEvent,
    outside_release,
    privacy_loss_distribution,
)

DELTA = 1e-5
GAUSSIAN = dp_event.GaussianDpEvent(2.0)
TERMS = Terms.of_batch(dimension=1, batch_size=10, dataset_size=10, scheme="no sampling", linf=1.0)


def release_of(law, terms=TERMS):
    return Release(mechanism=Mechanism.of(levels=1, noise=law), terms=terms)


def test_a_message_and_a_gaussian_event_compose_to_one_figure_both_ways():
    """A discrete Gaussian of deviation 2 beside a Gaussian of 2: next to the figure of two Gaussians."""
    what = release_of(DiscreteGaussian(2.0))
    theirs = PLDAccountant().compose(ReleaseDpEvent(what)).compose(GAUSSIAN).get_epsilon(DELTA)
    ours = Accountant().compose(what).compose(outside_release(GAUSSIAN)).epsilon(DELTA)
    both = Googles().compose(GAUSSIAN, 2).get_epsilon(DELTA)
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours == pytest.approx(both, rel=0.01)
    alone = Accountant().compose(what).epsilon(DELTA)
    assert alone < ours
    # And as Google composes the same two mechanisms itself.
    direct = google.from_discrete_gaussian_mechanism(2.0, sensitivity=1).compose(google.from_gaussian_mechanism(2.0))
    assert ours == pytest.approx(direct.get_epsilon_for_delta(DELTA), abs=2e-4)


def test_messages_inside_composed_events_and_sampled_messages():
    terms = Terms.of_batch(dimension=50, batch_size=20, dataset_size=1000)
    what = Release(mechanism=Mechanism(levels=1, trials=40), terms=terms)
    event = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(ReleaseDpEvent(what), 30), GAUSSIAN])
    theirs = PLDAccountant().compose(event).get_epsilon(DELTA)
    ours = Accountant().compose(what, 30).compose(outside_release(GAUSSIAN)).epsilon(DELTA)
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert privacy_loss_distribution(what).self_compose(30).get_epsilon_for_delta(DELTA) == pytest.approx(
        Accountant().compose(what, 30).epsilon(DELTA), rel=0.02
    )


EVENTS = [
    GAUSSIAN,
    dp_event.NoOpDpEvent(),
    dp_event.LaplaceDpEvent(3.0),
    dp_event.DiscreteLaplaceDpEvent(noise_parameter=0.2, sensitivity=2),
    dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(8.0), 20),
    dp_event.ComposedDpEvent([dp_event.LaplaceDpEvent(5.0), dp_event.NoOpDpEvent()]),
    dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.02, dp_event.GaussianDpEvent(1.0)), 100),
    dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.1, 130, 2.0),
    pytest.param(dp_event.MixtureOfGaussiansDpEvent(1.5, [0.0, 1.0], [0.5, 0.5]), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_any_event_of_googles_accountant_is_counted_as_it_counts_it(event):
    what = outside_release(event)
    assert Release.from_dict(what.to_dict()) == what
    expected = Googles(value_discretization_interval=1e-3).compose(event, 2).get_epsilon(DELTA)
    # The grids are not the same: either may be above the truth by its own step.
    assert Accountant().compose(what, 2).epsilon(DELTA) == pytest.approx(expected, rel=2e-3, abs=2e-3)


def test_a_replace_one_event_and_its_relation():
    what = outside_release(dp_event.RandomizedResponseDpEvent(0.5, 2), relation="replace")
    expected = Googles(NeighboringRelation.REPLACE_ONE).compose(dp_event.RandomizedResponseDpEvent(0.5, 2))
    stated = Accountant().compose(what).guarantee(delta=DELTA)
    assert stated.epsilon == pytest.approx(expected.get_epsilon(DELTA), abs=1e-3)
    assert stated.relation is Relation.REPLACE
    assert "outside events" in stated.assumption
    # Together with add/remove messages the weaker relation is stated.
    mixed = Accountant().compose(what).compose(release_of(Geometric(0.9))).guarantee(delta=DELTA)
    assert mixed.relation is Relation.ADD_REMOVE
    with pytest.raises(InvalidParameter, match="cannot account"):
        outside_release(dp_event.RandomizedResponseDpEvent(0.5, 2))
    with pytest.raises(InvalidParameter, match="replace-one"):
        outside_release(GAUSSIAN, unit="client")
    with pytest.raises(UnsupportedEventError):
        PLDAccountant(NeighboringRelation.REPLACE_ONE).compose(ReleaseDpEvent(release_of(Geometric(0.9))))


def test_a_randomised_response_is_counted_as_often_as_it_happens():
    """Google's accountant counts it once, whatever the count: each answer costs log 3 at a tiny delta."""
    answer, relation = dp_event.RandomizedResponseDpEvent(0.5, 2), NeighboringRelation.REPLACE_ONE
    nested = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(answer, 5), answer])
    for event, times, expected in ((answer, 6, 6), (nested, 1, 6), (nested, 2, 12)):
        what = outside_release(event, relation="replace")
        assert Accountant().compose(what, times).epsilon(1e-9) == pytest.approx(expected * math.log(3), rel=1e-3)
        theirs = PLDAccountant(relation, 1e-3).compose(event, times).get_epsilon(1e-9)
        assert theirs == pytest.approx(expected * math.log(3), rel=2e-3)


def test_a_histogram_released_elsewhere_counts_against_the_ledgers_budget(tmp_path):
    message, histogram = release_of(DiscreteGaussian(20.0)), outside_release(dp_event.LaplaceDpEvent(2.0))
    with Ledger.open(tmp_path / "me.ledger", client=1, budget_epsilon=1.0, budget_delta=DELTA) as ledger:
        before = ledger.headroom(message)
        ledger.spend(histogram, run="histogram of ages", round=0, seeded=False)
        assert 0 < ledger.headroom(message) < before
        ledger.spend(message, run="training", round=0, seeded=False)
        stated = ledger.guarantee()
        assert 0.5 < stated.epsilon <= 1.0
        with pytest.raises(BudgetExhausted):
            ledger.spend(outside_release(GAUSSIAN), run="another", round=0, seeded=False)
    with Ledger(tmp_path / "me.ledger") as again:
        assert again.guarantee() == stated
        assert again.released == {histogram: 1, message: 1}


def test_what_was_made_elsewhere_is_never_sent_and_gives_no_lower_bound():
    what = outside_release(GAUSSIAN)
    assert Accountant().compose(what).attained_epsilon(DELTA) == 0
    assert Accountant().compose(what).delta(0.5) > DELTA
    with pytest.raises(InvalidParameter, match="made elsewhere"):
        privacy_loss_distribution(what)
    with pytest.raises(InvalidParameter, match="no other terms"):
        Release(mechanism=Mechanism(levels=1, trials=99), terms=what.terms, event=what.event)
    summed = Release(mechanism=Mechanism(levels=1, trials=40), terms=TERMS).summed(3)
    assert summed.terms.trust is Trust.SUMS_ONLY
    with pytest.raises(InvalidParameter, match="sum"):
        privacy_loss_distribution(summed)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"event": "NonPrivateDpEvent"},
        {"event": "os.system"},
        {"event": ["GaussianDpEvent"]},
        {"event": "GaussianDpEvent"},
        {"event": "GaussianDpEvent", "noise_multiplier": 0.0},
        {"event": "GaussianDpEvent", "noise_multiplier": 1e-6},
        {"event": "GaussianDpEvent", "noise_multiplier": 1e-200},
        {
            "event": "MixtureOfGaussiansDpEvent",
            "sensitivities": [1e308],
            "sampling_probs": [1],
            "standard_deviation": 5e-324,
        },
        {"event": "GaussianDpEvent", "noise_multiplier": "1"},
        {"event": "GaussianDpEvent", "noise_multiplier": 1.0, "more": 1},
        {"event": "LaplaceDpEvent", "noise_multiplier": True},
        {"event": "RandomizedResponseDpEvent", "noise_parameter": 1.5, "num_buckets": 2},
        {"event": "SelfComposedDpEvent", "count": 10**9, "event_of": {"event": "NoOpDpEvent"}},
        {
            "event": "SelfComposedDpEvent",
            "count": 9,
            "event_of": {"event": "LaplaceDpEvent", "noise_multiplier": 0.002},
        },
        {"event": "ComposedDpEvent", "events": []},
        {"event": "PoissonSampledDpEvent", "sampling_probability": 2.0, "event_of": {"event": "NoOpDpEvent"}},
        {
            "event": "MixtureOfGaussiansDpEvent",
            "standard_deviation": 1.0,
            "sensitivities": [1.0],
            "sampling_probs": [2.0],
        },
        {"event": "GaussianDpEvent", "noise_multiplier": math.nan},
    ],
)
def test_fields_that_are_no_event_are_refused(fields):
    with pytest.raises(InvalidParameter):
        OutsideEvent.of(fields)


def test_a_deeply_nested_event_is_refused():
    fields = {"event": "GaussianDpEvent", "noise_multiplier": 4.0}
    for _ in range(7):
        fields = {"event": "ComposedDpEvent", "events": [fields]}
    with pytest.raises(InvalidParameter, match="not an event"):
        OutsideEvent.of(fields)
    with pytest.raises(InvalidParameter):
        OutsideEvent("[" * 10_000)


def test_a_guarantee_travels_as_json_with_everything_it_states():
    stated = Accountant().compose(outside_release(GAUSSIAN)).guarantee(delta=DELTA, seeded=True)
    assert Guarantee.from_json(stated.to_json()) == stated
    assert Guarantee.from_json(stated.to_json().encode()) == stated
    for wrong in (
        "",
        "[]",
        "[" * 50_000,
        "x" * (1 << 17),
        b"\xff\xfe",
        stated.to_json().replace("{", '{"epsilon": 0.1,', 1),  # twice
        stated.to_json().replace('"delta_floor": ', '"delta_floor": -'),
        stated.to_json().replace(repr(stated.epsilon), "NaN"),
        stated.to_json().replace(repr(stated.epsilon), "-1"),
        stated.to_json().replace('"sample"', '"nobody"'),
        7,
    ):
        with pytest.raises(InvalidParameter):
            Guarantee.from_json(wrong)
