"""Coarsening is post-processing: every divergence of the coarse law is at most that of the fine one, by enumeration."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from enumeration import hockey_stick, product, subsampled
from hypothesis import given, settings
from hypothesis import strategies as st

from bqsgd._src.audit.encoder import code_laws
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.privacy.accountant import Accountant
from bqsgd._src.release import Release, Sampling, Sensitivity, Terms

EPSILONS = [0.0, 0.01, 0.1, 0.3, 1.0, 2.0, 5.0]

coarse_mechanisms = st.builds(
    lambda s, m, k, w: Mechanism(
        levels=s, trials=m, coarsening=Coarsening(points=2 + k % (2 * s + m - 1), width=1 + w % (2 * s + m))
    ),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(0, 200),
    st.integers(0, 200),
)
values = st.floats(-1, 1)


@given(coarse_mechanisms, values, values)
def test_one_coordinate_is_never_easier_to_tell_apart(mechanism: Mechanism, x: float, y: float) -> None:
    fine, coarse = (code_laws(one, [x, y]) for one in (mechanism.fine, mechanism))
    for epsilon in EPSILONS:
        assert hockey_stick(coarse, epsilon) <= hockey_stick(fine, epsilon) + 1e-12
        assert hockey_stick(coarse[::-1], epsilon) <= hockey_stick(fine[::-1], epsilon) + 1e-12


@settings(max_examples=20)
@given(coarse_mechanisms.filter(lambda m: m.fine_code_count <= 12), st.tuples(*[values] * 4), st.floats(0.05, 1))
def test_nor_two_coordinates_sampled_over_two_rounds(mechanism: Mechanism, x: tuple[float, ...], rate: float) -> None:
    def two_rounds(used: Mechanism) -> tuple[np.ndarray, np.ndarray]:
        first, second = (code_laws(used, [x[i], x[i + 2]]) for i in (0, 1))
        message = subsampled(product(first, second), rate)
        return product(message, message)

    fine, coarse = two_rounds(mechanism.fine), two_rounds(mechanism)
    for epsilon in EPSILONS:
        assert hockey_stick(coarse, epsilon) <= hockey_stick(fine, epsilon) + 1e-12


def test_few_points_give_what_so_few_codes_never_could() -> None:
    """Of four codes, the ends of a pair that fits weigh too much for any epsilon; four points have a small one."""
    direct, coarse = (
        Mechanism(levels=1, trials=1),
        Mechanism(levels=1, trials=100, coarsening=Coarsening(points=4, width=14)),
    )
    pairs = [code_laws(one, [0.5, 0.0]) for one in (direct, coarse)]
    assert hockey_stick(pairs[0], 3.0) > 0.2
    assert hockey_stick(pairs[1], 0.2) < 1e-3
    assert hockey_stick(pairs[1], 0.0) > 0.01  # it still says something about the value


@pytest.mark.parametrize("l2", [None, 0.3])
def test_the_accountant_s_figure_is_that_of_levels_and_trials(l2: float | None) -> None:
    release = Release(
        mechanism=Mechanism(levels=3, trials=120),
        terms=Terms(
            dimension=50, sensitivity=Sensitivity(linf=0.1, l2=l2), sampling=Sampling(scheme="poisson", rate=0.1)
        ),
    )
    coarse = replace(release, mechanism=replace(release.mechanism, coarsening=Coarsening(points=16, width=40)))
    fine_tally, tally = Accountant().compose(release, 40), Accountant().compose(coarse, 30).compose(release, 10)
    assert math.isfinite(tally.epsilon(1e-5))
    assert tally == fine_tally
    assert tally.guarantee(delta=1e-5) == fine_tally.guarantee(delta=1e-5)
