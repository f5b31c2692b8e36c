"""The sensitivity each clip states, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, BatchMean, Clamp, Clip, Dual, Scale
from bqsgd._src.release import Relation, Sensitivity


@pytest.mark.parametrize(
    ("clip", "options", "linf", "l2"),
    [
        (Scale(0.5), {}, 1 / 32, None),
        (Scale(0.5), {"range": 0.25}, 2 / 32, None),
        (Clamp(0.5), {}, 1 / 32, None),
        (Clamp((0.5, 2.0)), {}, 1 / 32, None),
        (Clamp((0.5, 2.0)), {"range": (0.25, 2.0)}, 2 / 32, None),
        (Clamp((0.5, 2.0)), {"range": 1.0}, 2 / 32, None),
        (Clamp((0.5, 2.0)), {"range": np.array([1.0, 2.0, 4.0])}, 2 / 32, None),
        (L2(0.5), {}, 1 / 32, 1 / 32),
        (L2(0.5), {"range": 0.125}, 4 / 32, 4 / 32),
        (Dual(0.5, 0.125), {}, 1 / 32, 4 / 32),
        (Dual(0.5, 1.0), {}, 0.5 / 32, 0.5 / 32),
        (Scale(0.5), {"range": 1e-6}, 2.0, None),
    ],
)
def test_sensitivity_by_hand(clip: Clip, options: dict, linf: float, l2: float | None) -> None:
    assert clip.sensitivity(batch_size=32, **options) == Sensitivity(linf=linf, l2=l2)
    doubled = clip.sensitivity(batch_size=32, relation=Relation.REPLACE, **options)
    expected = Sensitivity(linf=min(2.0, 2 * linf), l2=None if l2 is None else 2 * l2, relation=Relation.REPLACE)
    assert doubled == expected


@pytest.mark.parametrize("batch_size", [1, 32, 10**6])
@pytest.mark.parametrize("relation", list(Relation))
def test_the_batch_mean_moves_by_twice_its_range_whatever_the_batch_size(batch_size: int, relation: Relation) -> None:
    stated = BatchMean(0.5).sensitivity(batch_size=batch_size, relation=relation)
    assert stated == Sensitivity(linf=2.0, relation=relation)
    assert BatchMean(0.5).sensitivity(batch_size=batch_size, range=2.0).linf == 0.5


def test_one_bound_a_parameter_becomes_one_a_coordinate() -> None:
    vector = Clamp((0.5, 2.0)).vector(nn.Linear(2, 3))
    assert vector.tolist() == [0.5] * 6 + [2.0] * 3
    assert Clamp(0.25).vector(nn.Linear(1, 1)).tolist() == [0.25, 0.25]
    with pytest.raises(InvalidParameter, match="has 2 entries, the model 1"):
        Clamp((0.5, 2.0)).vector(nn.Linear(2, 3, bias=False))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-13, True, "1"])
@pytest.mark.parametrize("make", [Scale, Clamp, L2, BatchMean, lambda c: Dual(c, 1.0), lambda c: Dual(1.0, c)])
def test_bounds_out_of_place_are_refused(make: type, bad: object) -> None:
    with pytest.raises(InvalidParameter):
        make(bad)


def test_ranges_and_batch_sizes_out_of_place_are_refused() -> None:
    for clip in (Scale(1.0), Clamp(1.0), L2(1.0), Dual(1.0, 1.0), BatchMean(1.0)):
        for options in ({"batch_size": 0}, {"batch_size": 8, "range": 0.0}, {"batch_size": 8, "range": ()}):
            with pytest.raises(InvalidParameter):
                clip.sensitivity(**options)
    with pytest.raises(InvalidParameter):
        Clamp(())
