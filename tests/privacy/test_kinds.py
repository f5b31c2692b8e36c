"""Messages of different kinds in one tally: never below what an adversary sees of real data sets, every outcome listed.

Claim 11 of docs/accounting.md. The data sets are three records in [-1, 1] with C = 1; a null record is 0.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from enumeration import hockey_stick, product, value_law

from bqsgd._src.params import Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Sensitivity, Terms, Trust

TRIALS, BATCH, RECORDS = 5, 2, 3
MECHANISM = Mechanism(levels=1, trials=TRIALS)
RATE = BATCH / RECORDS
POISSON = Release(
    mechanism=MECHANISM,
    terms=Terms(dimension=1, sensitivity=Sensitivity(linf=1 / BATCH), sampling=Sampling(scheme="poisson", rate=RATE)),
)
FIXED = replace(
    POISSON,
    terms=replace(
        POISSON.terms,
        sensitivity=Sensitivity(linf=2 / BATCH, relation="replace one"),
        sampling=Sampling(scheme="fixed-size without replacement", rate=RATE),
    ),
)
CLIENT = replace(
    POISSON,
    terms=replace(
        POISSON.terms,
        sensitivity=Sensitivity(linf=2.0, relation="replace one"),
        sampling=Sampling(scheme="no sampling"),
        unit="client",
    ),
)
WHOLE_CLIENT = replace(CLIENT, terms=replace(CLIENT.terms, sensitivity=Sensitivity(linf=1.0)))
SUMMED = replace(POISSON, terms=replace(POISSON.terms, trust=Trust.SUMS_ONLY))
SUPPORT = range(-2, TRIALS + 3)


@cache
def sent(total: float) -> np.ndarray:
    return value_law(TRIALS, float(np.clip(total, -1, 1)), SUPPORT)


@cache
def poisson_round(data: tuple[float, ...]) -> np.ndarray:
    laws = np.zeros(len(SUPPORT))
    for drawn in itertools.product((0, 1), repeat=len(data)):
        taken = sum(drawn)
        laws += RATE**taken * (1 - RATE) ** (len(data) - taken) * sent(np.dot(drawn, data) / BATCH)
    return laws


@cache
def fixed_round(data: tuple[float, ...]) -> np.ndarray:
    batches = list(itertools.combinations(data, BATCH))
    return sum((sent(sum(batch) / BATCH) for batch in batches), np.zeros(len(SUPPORT))) / len(batches)


@cache
def client_round(data: tuple[float, ...]) -> np.ndarray:
    """An update that one record can turn round, as any number of local steps can."""
    return sent(1.0 if sum(data) > 0.5 else -1.0)


ROUNDS = {POISSON: poisson_round, SUMMED: poisson_round, FIXED: fixed_round, CLIENT: client_round}
ROUNDS[WHOLE_CLIENT] = client_round
VALUES = (-1.0, 0.0, 0.7, 1.0)


def neighbours(relation: str):
    others = [0.0] if relation == "add/remove one" else VALUES
    for data in itertools.combinations_with_replacement(VALUES, RECORDS):
        for place in range(RECORDS):
            for other in others:
                yield data, (*data[:place], other, *data[place + 1 :])


def attained(content: list[Release], relation: str, epsilon: float) -> float:
    """The largest divergence that neighbours have, over everything sent, in either direction."""
    worst = 0.0
    for data, other in neighbours(relation):
        pair = product(*((ROUNDS[release](data), ROUNDS[release](other)) for release in content))
        worst = max(worst, hockey_stick(pair, epsilon), hockey_stick(pair[::-1], epsilon))
    return worst


@pytest.mark.parametrize(
    ("content", "relation", "unit"),
    [
        ([POISSON, FIXED], "add/remove one", "sample"),
        ([POISSON, CLIENT], "add/remove one", "sample"),
        ([FIXED, CLIENT], "replace one", "sample"),
        ([POISSON, WHOLE_CLIENT], "add/remove one", "sample"),
        ([FIXED, WHOLE_CLIENT], "replace one", "sample"),
        ([CLIENT, WHOLE_CLIENT], "replace one", "client"),
        ([POISSON, FIXED, CLIENT], "add/remove one", "sample"),
    ],
)
def test_what_mixed_messages_reveal_of_real_data_is_never_above_the_figure(content, relation, unit):
    accountant = Accountant()
    for release in content:
        accountant = accountant.compose(release)
    stated = accountant.guarantee(delta=0.2)
    assert (stated.relation, stated.unit) == (relation, unit)
    for epsilon in (0.0, 1.0, 2.5):
        truth = attained(content, relation, epsilon)
        assert accountant.delta(epsilon) >= truth - 1e-12
        if unit == "sample":
            assert truth > 0.01, "the test has something to see"


def test_a_whole_client_under_add_remove_says_nothing_of_a_sample_without_the_way_back():
    """The figure of the unconverted release lies below what data attain: the conversion is needed."""
    alone = Accountant().compose(WHOLE_CLIENT)
    assert alone.delta(1.0) < attained([WHOLE_CLIENT], "add/remove one", 1.0)


def test_each_kind_has_its_own_guarantee_and_the_weakest_trust_is_stated():
    accountant = Accountant().compose(POISSON, 3).compose(CLIENT).compose(FIXED).compose(SUMMED)
    kinds = [part.guarantee(delta=0.3) for part in accountant.kinds]
    assert {(kind.unit, kind.relation, kind.trust) for kind in kinds} == {
        (release.terms.unit, release.terms.sensitivity.relation, release.terms.trust)
        for release in (POISSON, CLIENT, FIXED, SUMMED)
    }
    total = accountant.guarantee(delta=0.3)
    assert total.epsilon >= max(kind.epsilon for kind in kinds)
    assert total.trust is Trust.SUMS_ONLY
    assert accountant.attained_epsilon(0.3) == 0.0
    assert Accountant().compose(POISSON).kinds == (Accountant().compose(POISSON),)
