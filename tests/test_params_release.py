"""Values that everything else is built on: they check themselves, and they survive JSON."""

import hashlib
import json
import math
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bqsgd._src.errors import BqsgdError, InvalidParameter
from bqsgd._src.params import (
    MAX_LEVELS,
    MAX_TRIALS,
    Coarsening,
    Mechanism,
    check_int,
    check_positive,
    check_range,
    parameters_digest,
)
from bqsgd._src.release import Relation, Release, Sampling, Scheme, Sensitivity, Terms, Trust, Unit

mechanisms = st.builds(Mechanism, levels=st.integers(1, MAX_LEVELS), trials=st.integers(0, MAX_TRIALS))


@st.composite
def coarse_mechanisms(draw: st.DrawFn) -> Mechanism:
    fine = draw(mechanisms)
    last = fine.code_count - 1
    coarsening = Coarsening(points=draw(st.integers(2, last)), width=draw(st.integers(1, last)))
    return replace(fine, coarsening=coarsening)


@st.composite
def releases(draw: st.DrawFn) -> Release:
    scheme = draw(st.sampled_from(Scheme))
    relation = {Scheme.POISSON: Relation.ADD_REMOVE, Scheme.FIXED_SIZE: Relation.REPLACE}.get(
        scheme, draw(st.sampled_from(Relation))
    )
    trust = draw(st.sampled_from(Trust))
    return Release(
        mechanism=draw(mechanisms if trust is Trust.SUMS_ONLY else mechanisms | coarse_mechanisms()),
        terms=Terms(
            dimension=draw(st.integers(1, 2**53)),
            sensitivity=Sensitivity(
                linf=draw(st.floats(1e-9, 2)), l2=draw(st.none() | st.floats(1e-9, 1e6)), relation=relation
            ),
            sampling=Sampling(scheme=scheme, rate=1.0 if scheme is Scheme.NONE else draw(st.floats(1e-9, 1))),
            unit=draw(st.sampled_from(Unit)),
            trust=trust,
        ),
    )


@given(mechanisms)
def test_a_mechanism_counts_its_codes(mechanism: Mechanism) -> None:
    lowest, highest = -mechanism.levels, mechanism.levels + mechanism.trials
    assert mechanism.code_count == highest - lowest + 1
    assert 2**mechanism.bits_per_coordinate == pytest.approx(mechanism.code_count)


@given(coarse_mechanisms())
def test_a_coarsened_mechanism_counts_its_points_around_the_same_middle(mechanism: Mechanism) -> None:
    points, width = mechanism.coarsening.points, mechanism.coarsening.width
    assert (mechanism.code_count, mechanism.fine_code_count) == (points, mechanism.fine.code_count)
    assert mechanism.fine == Mechanism(levels=mechanism.levels, trials=mechanism.trials)
    assert mechanism.step * (points - 1) == pytest.approx(width)
    assert mechanism.reach * 2 * mechanism.levels == pytest.approx(width)
    assert mechanism.fine.reach * 2 * mechanism.levels == pytest.approx(mechanism.fine_code_count - 1)
    assert mechanism.fine.step == 1


@pytest.mark.parametrize(
    ("points", "width"), [(1, 5), (0, 0), (11, 5), (4, 11), (4, 0), (4, -1), (4.0, 5), (4, True), (2**40, 5)]
)
def test_a_coarsening_outside_its_range_is_refused(points: int, width: int) -> None:
    with pytest.raises(InvalidParameter, match=r"points|width"):
        Mechanism(levels=2, trials=6, coarsening=Coarsening(points=points, width=width))


def test_the_published_mechanisms_fit_their_bits() -> None:
    for levels, trials, bits in ((1, 251, 8), (2, 251, 8), (5, 245, 8), (8, 4079, 12), (52, 16279, 14)):
        assert Mechanism(levels=levels, trials=trials).bits_per_coordinate <= bits
    assert Mechanism(levels=4, trials=1050).bits_per_coordinate > 10  # the published pair does not fit


@pytest.mark.parametrize(
    ("levels", "trials"),
    [(0, 1), (-1, 1), (MAX_LEVELS + 1, 1), (1, -1), (1, MAX_TRIALS + 1), (1.0, 1), (1, 1.0), (True, 1), ("1", 1)],
)
def test_a_mechanism_outside_its_range_is_refused(levels: int, trials: int) -> None:
    with pytest.raises(InvalidParameter, match=r"levels|trials"):
        Mechanism(levels=levels, trials=trials)


def test_values_cannot_be_changed_or_given_by_position() -> None:
    mechanism = Mechanism(levels=1, trials=2)
    with pytest.raises(AttributeError):
        mechanism.levels = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Mechanism(1, 2)  # type: ignore[misc]


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, float("nan")])
def test_only_integers_are_integers(value: object) -> None:
    with pytest.raises(InvalidParameter, match="size must be an integer"):
        check_int("size", value, 0, 10)


def test_the_ends_of_an_integer_range_belong_to_it() -> None:
    assert [check_int("size", value, 0, 10) for value in (0, np.int8(10), np.uint64(3))] == [0, 10, 3]
    for value in (-1, 11):
        with pytest.raises(InvalidParameter, match="from 0 to 10"):
            check_int("size", value, 0, 10)


@pytest.mark.parametrize("value", [0, -1, 0.0, math.inf, math.nan, True, "1", None])
def test_only_positive_finite_numbers_are_positive(value: object) -> None:
    with pytest.raises(InvalidParameter, match="rate must be a positive finite number"):
        check_positive("rate", value)


def test_ranges_come_back_as_a_float_or_a_float64_vector() -> None:
    assert check_range(2) == 2.0
    vector = check_range(np.array([1, 2], np.float32), 2)
    assert isinstance(vector, np.ndarray)
    assert vector.dtype == np.float64
    for bad in (np.zeros((1, 2)), np.array([1.0, 0.0]), np.array([1.0, np.nan]), np.array([1.0, np.inf]), np.ones(3)):
        with pytest.raises(InvalidParameter, match="range"):
            check_range(bad, 2)


def test_the_digest_is_the_documented_bytes() -> None:
    mechanism = Mechanism(levels=2, trials=251)
    head = b"bqsgd.parameters.v1" + struct.pack("<IIQ", 2, 251, 3)
    one = hashlib.sha256(head + b"\x00" + struct.pack("<d", 0.5)).digest()[:16]
    each = hashlib.sha256(head + b"\x01" + struct.pack("<3d", 0.5, 1.0, 2.0)).digest()[:16]
    assert parameters_digest(mechanism, range=0.5, dimension=3) == one
    assert parameters_digest(mechanism, range=np.array([0.5, 1.0, 2.0]), dimension=3) == each
    coarse = replace(mechanism, coarsening=Coarsening(points=16, width=45))
    both = hashlib.sha256(head + b"\x00" + struct.pack("<dII", 0.5, 16, 45)).digest()[:16]
    assert parameters_digest(coarse, range=0.5, dimension=3) == both


def test_every_parameter_moves_the_digest() -> None:
    digests = {
        parameters_digest(Mechanism(levels=levels, trials=trials), range=limit, dimension=3)
        for levels in (1, 2)
        for trials in (1, 2)
        for limit in (0.5, 0.25, np.full(3, 0.5), np.array([0.5, 0.5, 0.25]))
    }
    digests.add(parameters_digest(Mechanism(levels=1, trials=1), range=0.5, dimension=4))
    for points, width in ((2, 2), (2, 3), (3, 2)):
        coarse = Mechanism(levels=1, trials=1, coarsening=Coarsening(points=points, width=width))
        digests.add(parameters_digest(coarse, range=0.5, dimension=3))
    assert len(digests) == 20


@given(releases())
def test_a_release_survives_json(release: Release) -> None:
    text = json.dumps(release.to_dict())
    assert Release.from_dict(json.loads(text)) == release


def test_releases_without_a_coarsening_are_written_as_before_there_was_one() -> None:
    fields = example()
    assert fields["mechanism"] == {"levels": 2, "trials": 251}
    fields["mechanism"]["coarsening"] = {"points": 16, "width": 45}
    assert Release.from_dict(fields).mechanism.coarsening == Coarsening(points=16, width=45)
    for damage in ({"points": 16}, {"points": 16, "width": 256}, {"points": 16, "width": 4, "more": 1}, 7, [16, 45]):
        fields["mechanism"]["coarsening"] = damage
        with pytest.raises(InvalidParameter):
            Release.from_dict(fields)


def test_coarse_codes_are_never_accounted_as_sums() -> None:
    """Two clients, coarse codes 0 + 2 and 1 + 1: the same sum, from fine codes of different sums."""
    release = Release.from_dict(example())
    assert release.summed(3).mechanism == Mechanism(levels=2, trials=753)
    coarse = replace(release, mechanism=replace(release.mechanism, coarsening=Coarsening(points=16, width=45)))
    with pytest.raises(InvalidParameter, match="sum of coarse codes"):
        coarse.summed(3)
    with pytest.raises(InvalidParameter, match="sum of coarse codes"):
        replace(coarse, terms=replace(coarse.terms, trust=Trust.SUMS_ONLY))


@given(releases())
def test_shifts_are_the_sensitivity_in_steps_and_consistent(release: Release) -> None:
    assert release.shift == release.mechanism.levels * release.terms.sensitivity.linf
    assert release.shift_l2 <= math.sqrt(release.terms.dimension) * release.shift
    if release.terms.sensitivity.l2 is not None:
        assert release.shift_l2 <= release.mechanism.levels * release.terms.sensitivity.l2


def example(**changes: object) -> dict:
    release = Release(
        mechanism=Mechanism(levels=2, trials=251),
        terms=Terms(
            dimension=61_706,
            sensitivity=Sensitivity(linf=1 / 32),
            sampling=Sampling.of_batch("poisson", batch_size=32, dataset_size=15_000),
        ),
    )
    return {**release.to_dict(), **changes}


def test_a_release_by_hand() -> None:
    release = Release.from_dict(example())
    assert release.shift == 1 / 16
    assert release.shift_l2 == pytest.approx(math.sqrt(61_706) / 16)
    assert release.terms.sampling.rate == 32 / 15_000
    assert (release.terms.unit, release.terms.trust) == (Unit.SAMPLE, Trust.EACH_CLIENT)


@pytest.mark.parametrize(
    "changes",
    [
        {"dimension": 0},
        {"dimension": 1.5},
        {"mechanism": {"levels": 0, "trials": 1}},
        {"mechanism": {"levels": 1}},
        {"mechanism": None},
        {"sensitivity": {"linf": 0.0}},
        {"sensitivity": {"linf": 0.1, "l2": float("nan")}},
        {"sensitivity": {"linf": 0.1, "relation": "replace one"}},  # Poisson needs add/remove
        {"sensitivity": {"linf": 0.1, "relation": "swap"}},
        {"sampling": {"scheme": "poisson", "rate": 1.5}},
        {"sampling": {"scheme": "poisson", "rate": 0.0}},
        {"sampling": {"scheme": "no sampling", "rate": 0.5}},
        {"sampling": {"scheme": "fixed-size without replacement", "rate": 0.5}},  # needs replace-one
        {"sampling": {"scheme": "sometimes"}},
        {"unit": "household"},
        {"trust": "nobody"},
        {"epsilon": 1.0},
    ],
)
def test_a_damaged_release_is_refused(changes: dict) -> None:
    with pytest.raises(InvalidParameter):
        Release.from_dict(example(**changes))
    for missing in ("mechanism", "sensitivity", "sampling", "dimension"):
        fields = example()
        del fields[missing]
        with pytest.raises(BqsgdError, match="not a release"):
            Release.from_dict(fields)


def test_batch_rates() -> None:
    assert Sampling.of_batch("no sampling", batch_size=10, dataset_size=10).rate == 1
    assert Sampling.of_batch(Scheme.FIXED_SIZE, batch_size=1, dataset_size=4).rate == 0.25
    for batch, data in ((0, 4), (5, 4), (1, 0)):
        with pytest.raises(InvalidParameter, match="size"):
            Sampling.of_batch("poisson", batch_size=batch, dataset_size=data)


@pytest.mark.parametrize("digits", [31, 400, 5000])
def test_an_integer_beyond_every_float_is_refused_like_any_other_bad_value(digits):
    huge = 10**digits
    for check in (lambda: check_int("rounds", huge, 0, 9), lambda: check_int("rounds", -huge, 0, 9)):
        with pytest.raises(InvalidParameter, match="more than 30 digits"):
            check()
    if digits > 308:
        for value in (huge, -huge):
            with pytest.raises(InvalidParameter, match="epsilon must be a positive finite number, got an integer of"):
                check_positive("epsilon", value)
    with pytest.raises(InvalidParameter):
        check_positive("epsilon", "x" * 10**6)
