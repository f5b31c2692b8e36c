"""Models of every kind x every clip x random shapes against the batch-of-one oracle, and the sensitivity."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from persample_oracle import clip_each, clips_for, gradients_one_by_one, mean_of
from torch import Tensor

from bqsgd._src.persample import L2, BatchMean, Clip, PerLayer, SlowGradientsWarning, clipped_gradients
from bqsgd._src.persample.alone import AloneRoad
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.lanes import LanesRoad
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form
from long_suite import others_slow
from persample_models import ALONE, EVERY, LANES, ROWS, Build, case_of

RELATIVE_ERROR = 1e-5
SETTINGS = {
    0: (torch.float32, 67, 0.7),
    1: (torch.float32, 7, 0.05),
    2: (torch.float64, 67, 1.5),
}
"""For each seed: the type, the public batch size, of which 67 gives passes of four rows and 7 of one, and how hard the
clips bite. A case is traced once and goes through all clips."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same'"),  # torch says so once a process
    pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning"),
]
CASES = [
    pytest.param(
        build, seed, id=f"{seed}-{build.__name__}", marks=[pytest.mark.slow] if seed and place % 4 != seed else []
    )
    for seed in SETTINGS
    for place, build in enumerate(EVERY)
]
"""Every model with the first seed, a quarter of them with each of the others; all with all three in the long suite."""


@functools.cache
def exact_gradients(build: Build, seed: int) -> Tensor:
    return gradients_one_by_one(case_of(build, seed, SETTINGS[seed][0]))


@pytest.mark.parametrize(("build", "seed"), CASES)
def test_every_clip_agrees_with_the_oracle(
    build: Build, seed: int, record_property: Callable[[str, object], None]
) -> None:
    dtype, batch_size, strength = SETTINGS[seed]
    case, exact = case_of(build, seed, dtype), exact_gradients(build, seed)
    clips = clips_for(exact, strength, case.sizes)
    for clip in clips:
        mean, dropped = clipped_gradients(
            case.model,
            case.loss,
            case.batch,
            clip=clip,
            batch_size=batch_size,
            forward=case.forward,
        )
        terms = clip_each(exact, clip, case.sizes).abs().sum(dim=0).max() / batch_size
        scale = terms if not isinstance(clip, BatchMean) else torch.minimum(terms, torch.tensor(clip.bound))
        assert dropped == 0
        assert mean.dtype == torch.float64
        scales = isinstance(clip, (L2, PerLayer))
        inside = math.sqrt(len(mean)) * 2**-22 if scales else 0  # what those leave for the grid
        error = (mean - mean_of(exact, clip, case.sizes, batch_size)).abs().max()
        assert error <= (RELATIVE_ERROR + inside) * scale + 1e-30, clip
    record_property("battery_cases", len(clips))


@pytest.mark.parametrize("build", others_slow(EVERY, EVERY[::3]), ids=lambda build: build.__name__)
def test_measured_sensitivity_never_exceeds_the_stated_one(build: Build) -> None:
    case, seed = case_of(build, 0), 0
    batch_size = SETTINGS[seed][1]

    def mean(first: int, clip: Clip) -> Tensor:
        index = slice(first, None)
        return clipped_gradients(
            case.model,
            case.loss,
            case.taken(index),
            clip=clip,
            batch_size=batch_size,
            forward=case.forward,
        ).mean

    for clip in clips_for(exact_gradients(build, seed), 0.02, case.sizes):  # so that every clip bites
        stated = clip.sensitivity(batch_size=batch_size)
        by_tensor = isinstance(clip, PerLayer) and isinstance(clip.clip, tuple)
        reach = torch.from_numpy(clip.ranges(case.model)) if by_tensor else clip.usual_range
        moved = (mean(0, clip) - mean(1, clip)) / reach
        assert moved.clamp(-2, 2).abs().max() <= stated.linf
        assert stated.l2 is None or moved.norm() <= stated.l2


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (build, kind)
        for builds, kind in ((LANES, LanesRoad), (ROWS, PassesRoad), (ALONE, AloneRoad))
        for build in builds
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_model_takes_the_road_it_is_listed_under(build: Build, kind: type) -> None:
    case = case_of(build, 0)
    form = Form.of(case.batch)
    road = road_of(case.model, case.loss, case.forward, form, batch_size=67, packed=False)
    assert type(road) is kind
    if kind is PassesRoad:
        packed = road_of(case.model, case.loss, case.forward, form, batch_size=67, packed=True)
        # A sample's whole numbers that are places in a table go through a pass by themselves; others do so where the
        # kernels of this machine tell rows apart.
        assert type(packed) is PassesRoad or packed.rows == 64
        assert type(packed) is PassesRoad or build.__name__ not in ("tied_table", "loss_of_positions")


@pytest.mark.parametrize("build", [*LANES[:3], *ROWS[:3]], ids=lambda build: build.__name__)
def test_no_traced_model_warns_of_slow_gradients_and_float64_goes_in_passes(build: Build) -> None:
    torch.manual_seed(0)
    case = case_of(build, 1, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowGradientsWarning)
        road = road_of(case.model, case.loss, case.forward, Form.of(case.batch), batch_size=67, packed=False)
    assert isinstance(road, PassesRoad)
