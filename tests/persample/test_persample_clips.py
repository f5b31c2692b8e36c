"""The sensitivity each clip states, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from torch import nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, BatchMean, Clamp, Clip, Dual, Normalize, PerLayer, Scale
from bqsgd._src.release import Relation, Sensitivity


@pytest.mark.parametrize(
    ("clip", "options", "linf", "l2"),
    [
        (Scale(0.5), {}, 1 / 32, None),
        (Scale(0.5), {"range": 0.25}, 2 / 32, None),
        (Clamp(0.5), {}, 1 / 32, None),
        (PerLayer((Clamp(0.5), Clamp(2.0))), {}, 1 / 32, None),
        (PerLayer((Clamp(0.5), Clamp(2.0))), {"range": (0.25, 2.0)}, 2 / 32, None),
        (PerLayer((Clamp(0.5), L2(2.0))), {"range": 1.0}, 2 / 32, None),
        (PerLayer((Clamp(0.5), Scale(2.0))), {"range": np.array([1.0, 2.0, 4.0])}, 2 / 32, None),
        (PerLayer((L2(3.0), Dual(4.0, 2.0))), {"range": 0.5}, 6 / 32, 10 / 32),
        (PerLayer((L2(3.0), L2(4.0))), {"range": (0.75, 0.8)}, 5 / 32, math.hypot(4, 5) / 32),
        (PerLayer((L2(3.0), L2(4.0))), {}, 1 / 32, math.sqrt(2) / 32),
        (PerLayer((L2(3.0), L2(4.0))), {"range": np.array([0.5, 0.8])}, 8 / 32, 10 / 32),
        (PerLayer(L2(0.5)), {"range": 0.125}, 4 / 32, 4 / 32),
        (PerLayer(Dual(0.5, 0.125)), {}, 1 / 32, 4 / 32),
        (Normalize(0.5), {"range": 0.125}, 4 / 32, 4 / 32),
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


def test_one_clip_a_parameter_gives_one_range_a_coordinate() -> None:
    clip = PerLayer([Clamp(0.5), L2(2.0)])
    assert clip.ranges(nn.Linear(2, 3)).tolist() == [0.5] * 6 + [2.0] * 3
    assert PerLayer(L2(1.0)).ranges(nn.Linear(1, 1)).tolist() == [1.0] * 2
    with pytest.raises(InvalidParameter, match="has 2 clips, the model 1"):
        clip.ranges(nn.Linear(2, 3, bias=False))


@pytest.mark.parametrize("make", [L2, Clamp, Scale, Normalize, lambda bound: PerLayer(Dual(bound, bound))])
def test_a_bound_is_an_ordinary_number_whatever_type_it_has(make: Callable[[object], Clip]) -> None:
    """In half precision a bound less 2^-20 of it is the bound itself, which leaves no room for rounding."""
    for kind in (np.float16, np.float32, np.float64, np.longdouble, np.int8, int):
        assert make(kind(1)) == make(1.0)
        assert type(make(kind(1)).largest) is float


@pytest.mark.parametrize("bad", [(), (L2(1.0), PerLayer(L2(1.0))), BatchMean(1.0), (L2(1.0), 1.0), 1.0, "l2", None])
def test_layers_take_clips_of_one_sample(bad: object) -> None:
    with pytest.raises(InvalidParameter, match="PerLayer takes one of"):
        PerLayer(bad)


@pytest.mark.parametrize("clip", [L2(2.0), Normalize(2.0), Dual(2.0, 0.5)])
@pytest.mark.parametrize("count", [1, 3, 16, 1000])
def test_layers_share_a_norm_evenly_and_never_exceed_it(clip: L2, count: int) -> None:
    layers = PerLayer(clip).layers(count)
    assert len(layers) == count
    assert math.hypot(*(own.norm for own in layers)) == pytest.approx(2.0, rel=1e-12)
    assert {type(own) for own in layers} == {type(clip)}
    assert PerLayer(clip).sensitivity(batch_size=8) == clip.sensitivity(batch_size=8)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-13, True, "1"])
@pytest.mark.parametrize(
    "make",
    [Scale, Clamp, L2, BatchMean, Normalize, lambda c: Normalize(1, c), lambda c: Dual(c, 1), lambda c: Dual(1, c)],
)
def test_bounds_out_of_place_are_refused(make: type, bad: object) -> None:
    with pytest.raises(InvalidParameter):
        make(bad)


def test_ranges_and_batch_sizes_out_of_place_are_refused() -> None:
    for clip in (Scale(1.0), Clamp(1.0), L2(1.0), Dual(1.0, 1.0), PerLayer(L2(1.0)), BatchMean(1.0)):
        for options in ({"batch_size": 0}, {"batch_size": 8, "range": 0.0}, {"batch_size": 8, "range": ()}):
            with pytest.raises(InvalidParameter):
                clip.sensitivity(**options)
