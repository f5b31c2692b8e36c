"""Every rule x every clip x random shapes against the batch-of-one oracle, and the sensitivity on neighbours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from persample_models import CLASSES, FAST, SLOW, Case
from persample_oracle import LOSS, clip_each, expected_mean, gradients_one_by_one, make_clip

from bqsgd.persample import L2, BatchMean, Clamp, Dual, Scale, SlowGradientsWarning, clipped_gradients

CLIPS = [Scale, Clamp, L2, Dual, BatchMean]
EXAMPLES = 12
RELATIVE_ERROR = 1e-5

relaxed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


def draw_case(build: Callable[[st.DrawFn], Case], data: st.DataObject) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    model, like = build(data.draw)
    batch = data.draw(st.integers(1, 9), label="batch")
    shape = (batch, *like.shape[1:])
    inputs = torch.randn(shape) if like.is_floating_point() else torch.randint(0, 2, shape)
    if data.draw(st.booleans(), label="float64"):  # float64 takes the same road as CUDA: torch operations only
        model, inputs = model.double(), inputs.double() if like.is_floating_point() else inputs
    return model, inputs, torch.randint(0, CLASSES, (batch,))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch says so once a process
@pytest.mark.parametrize("kind", CLIPS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("build", FAST + SLOW, ids=lambda build: build.__name__)
def test_battery(
    build: Callable[[st.DrawFn], Case], kind: type, record_property: Callable[[str, object], None]
) -> None:
    cases = 0

    @relaxed
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal cases
        model, inputs, targets = draw_case(build, data)
        exact = gradients_one_by_one(model, inputs, targets)
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        clip = make_clip(kind, exact, data.draw(st.sampled_from([0.05, 0.7, 1.5])), sizes)
        size = data.draw(st.integers(1, 12))
        numbers = torch.randint(0, 1000, (len(inputs),))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if build in SLOW else "error", SlowGradientsWarning)
            mean, dropped = clipped_gradients(
                model, LOSS, (inputs, targets), indices=numbers, clip=clip, batch_size=size
            )
        expected = expected_mean(model, inputs, targets, clip, size)
        terms = clip_each(exact, clip, sizes).abs().sum(dim=0).max() / size
        scale = terms if kind is not BatchMean else torch.minimum(terms, torch.tensor(clip.bound))
        assert dropped == 0
        assert mean.dtype == torch.float64
        inside = math.sqrt(len(mean)) * 2**-22 if kind in (L2, Dual) else 0  # what those clips leave for the grid
        assert (mean - expected).abs().max() <= (RELATIVE_ERROR + inside) * scale + 1e-30
        cases += 1

    check()
    record_property("battery_cases", cases)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch says so once a process
@pytest.mark.parametrize("kind", CLIPS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("build", FAST, ids=lambda build: build.__name__)
def test_measured_sensitivity_never_exceeds_the_stated_one(build: Callable[[st.DrawFn], Case], kind: type) -> None:
    @settings(relaxed, max_examples=4)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        model, inputs, targets = draw_case(build, data)
        inputs = inputs * 5 if inputs.is_floating_point() else inputs  # so that every clip bites
        exact = gradients_one_by_one(model, inputs, targets)
        clip = make_clip(kind, exact, 0.05, [p.numel() for p in model.parameters() if p.requires_grad])
        size = data.draw(st.integers(1, 12))
        numbers = torch.randint(0, 1000, (len(inputs),))
        stated = clip.sensitivity(batch_size=size)
        with_it, _ = clipped_gradients(model, LOSS, (inputs, targets), indices=numbers, clip=clip, batch_size=size)
        without, _ = clipped_gradients(
            model, LOSS, (inputs[1:], targets[1:]), indices=numbers[1:], clip=clip, batch_size=size
        )
        reach = torch.from_numpy(clip.vector(model)) if isinstance(clip, Clamp) else getattr(clip, "bound", None)
        moved = (with_it.double() - without.double()) / (clip.norm if reach is None else reach)
        assert moved.clamp(-2, 2).abs().max() <= stated.linf
        if stated.l2 is not None:
            assert moved.norm() <= stated.l2

    check()
