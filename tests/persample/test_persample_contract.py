"""What `clipped_gradients` promises beside the right numbers: dropped samples, empty batches, nothing left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from persample_oracle import LOSS, Case, gradients_one_by_one, mean_of
from torch import Tensor, nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import (
    L2,
    BatchMean,
    Clamp,
    Clip,
    Dual,
    Scale,
    SlowGradientsWarning,
    clipped_gradients,
)
from bqsgd._src.persample.alone import AloneRoad
from bqsgd._src.persample.gradients import road_of
from bqsgd._src.persample.lanes import LanesRoad
from bqsgd._src.persample.passes import PassesRoad
from bqsgd._src.persample.program import Form, plain_operations
from bqsgd._src.persample.rows import RowsRoad
from persample_models import Centred

CLIPS: list[Clip] = [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01), BatchMean(0.01)]
each_clip = pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)


class OnRoad(nn.Module):
    """A small network; by its way of computing the same `half`, it goes over lanes, in rows or one sample at a time."""

    def __init__(self, road: type) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.inner, self.out, self.road = nn.Conv2d(1, 4, 3), nn.Linear(64, 8), nn.Linear(8, 3), road

    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor(0.5)
        if self.road is PassesRoad:
            half = torch.erfinv(torch.erf(half))
            x = x + torch.special.entr(torch.ones_like(x))  # zero, and no loop knows it
        if self.road is AloneRoad:
            half = half if float(x.sum()) > 0 else half.clone()
        return self.out(torch.tanh(self.inner(torch.tanh(self.conv(x)).flatten(1)) * half))


def small_net() -> nn.Module:
    return OnRoad(LanesRoad)


each_road = pytest.mark.parametrize("road", [LanesRoad, PassesRoad, AloneRoad])


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_a_model_for_every_road(road: type) -> None:
    model, batch = OnRoad(road), small_batch()
    assert type(road_of(model, LOSS, None, Form.of(batch), batch_size=64, packed=False)) is road
    mean = clipped_gradients(model, LOSS, batch, clip=L2(0.1), batch_size=64).mean
    same = clipped_gradients(small_net(), LOSS, batch, clip=L2(0.1), batch_size=64).mean
    assert torch.allclose(mean, same, rtol=1e-4, atol=1e-7)


def small_batch(size: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(size, 1, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_that_is_not_finite_counts_as_zero_and_is_counted(road: type, dtype: torch.dtype) -> None:
    model, (inputs, targets) = OnRoad(road).to(dtype), small_batch()
    inputs, good = inputs.to(dtype), torch.tensor([0, 1, 3, 4, 6])
    for poison in (float("nan"), float("inf"), -float("inf")):
        inputs[2, 0, 1, 1] = poison
        inputs[5] = poison
        for clip in CLIPS:
            asked: dict[str, Any] = {"clip": clip, "batch_size": 64}
            mean, dropped = clipped_gradients(model, LOSS, (inputs, targets), **asked)
            expected, none = clipped_gradients(model, LOSS, (inputs[good], targets[good]), **asked)
            assert (dropped, none) == (2, 0)
            if isinstance(clip, BatchMean):
                assert torch.allclose(mean, expected, rtol=1e-12)
            else:
                assert torch.equal(mean, expected)
            assert mean.abs().max() > 0


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_a_sample_that_raises_an_error_counts_as_zero_and_is_counted(road: type) -> None:
    """A label that the loss does not know makes torch's kernels raise in a pass with others."""
    model, (inputs, targets) = OnRoad(road), small_batch()
    targets[2], targets[5], good = 3, -1, torch.tensor([0, 1, 3, 4, 6])
    for batch_size in (8, 64):  # passes of one row and of four
        asked: dict[str, Any] = {"clip": L2(0.2), "batch_size": batch_size}
        mean, dropped = clipped_gradients(model, LOSS, (inputs, targets), **asked)
        expected, none = clipped_gradients(model, LOSS, (inputs[good], targets[good]), **asked)
        assert (dropped, none) == (2, 0)
        assert torch.equal(mean, expected)


class Picky(nn.Module):
    """Raises what it is given where a sample is negative."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.out, self.error = nn.Linear(4, 3), error

    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) < 0:
            raise self.error
        return self.out(x)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@pytest.mark.parametrize(
    "error", [ValueError("no"), InvalidParameter("no"), SystemExit(3), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_whatever_a_sample_raises_costs_that_sample_alone(error: BaseException) -> None:
    inputs, targets = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
    inputs[1] = -1
    model = Picky(error)
    found = clipped_gradients(model, LOSS, (inputs, targets), clip=L2(1.0), batch_size=5)
    kept = torch.tensor([0, 2, 3, 4])
    others = clipped_gradients(model, LOSS, (inputs[kept], targets[kept]), clip=L2(1.0), batch_size=5)
    assert (found.dropped, others.dropped) == (1, 0)
    assert torch.equal(found.mean, others.mean)


@pytest.mark.parametrize("clip", [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01)], ids=lambda c: type(c).__name__)
def test_a_finite_gradient_whose_square_overflows_is_clipped_not_dropped(clip: Clip) -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 2, bias=False), nn.Flatten(), nn.Linear(9, 3, bias=False))
    inputs, targets = torch.randn(3, 1, 4), torch.tensor([0, 1, 2])
    inputs[1] *= 1e22

    def linear_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.gather(1, labels[:, None])[:, 0]

    mean, dropped = clipped_gradients(model, linear_loss, (inputs, targets), clip=clip, batch_size=3)
    alone, _ = clipped_gradients(model, linear_loss, (inputs[1:2], targets[1:2]), clip=clip, batch_size=1)
    stated = clip.sensitivity(batch_size=1, range=1.0)
    assert dropped == 0
    assert torch.isfinite(mean).all()
    assert 0.5 * stated.linf < alone.abs().max() <= stated.linf * (1 + 1e-5) or isinstance(clip, (L2, Dual))
    if stated.l2 is not None:
        assert 0.9 * min(stated.l2, float(alone.norm())) < alone.norm() <= stated.l2 * (1 + 1e-5)


def test_a_batch_mean_that_overflows_is_clamped_and_gradients_that_could_overflow_count_as_zero() -> None:
    model, clip = nn.Linear(2, 1, bias=False), BatchMean(1.0)

    def linear_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs[:, 0]

    for value, dropped in ((8e37, 0), (3e38, 1)):
        inputs = torch.full((40, 2), 8e37)
        inputs[3] = value
        batch = inputs, torch.zeros(40)
        found = clipped_gradients(model, linear_loss, batch, clip=clip, batch_size=1)
        assert found.dropped == dropped
        assert found.mean.tolist() == [1.0, 1.0]


@each_clip
def test_an_empty_batch_gives_exact_zeros(clip: Clip) -> None:
    model = small_net()
    mean, dropped = clipped_gradients(
        model, LOSS, (torch.empty(0, 1, 6, 6), torch.empty(0, dtype=torch.long)), clip=clip, batch_size=32
    )
    assert mean.shape == (sum(p.numel() for p in model.parameters()),)
    assert mean.abs().max() == 0
    assert dropped == 0


def state_of(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, module.training, sorted(vars(module)), dict(module._forward_hooks), dict(module._backward_hooks))
        for name, module in model.named_modules()
    ] + [(name, p.grad, sorted(vars(p)), p.detach().clone().tolist()) for name, p in model.named_parameters()]


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_nothing_is_left_on_the_model(road: type) -> None:
    model = OnRoad(road)
    before = state_of(model)
    for clip in CLIPS:
        clipped_gradients(model, LOSS, small_batch(), clip=clip, batch_size=7)
    assert state_of(model) == before


def test_an_error_of_the_loss_on_a_made_up_sample_is_refused_with_its_cause() -> None:
    model = small_net()
    before = state_of(model)

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("no such output")

    for _ in range(2):  # it is found again after the first time
        with pytest.raises(InvalidParameter, match=r"fails on samples .*1, 6, 6.*no such output") as found:
            clipped_gradients(model, broken, small_batch(), clip=L2(1.0), batch_size=7)
        assert isinstance(found.value.__cause__, KeyError)
    assert state_of(model) == before


def test_samples_that_do_not_fit_the_model_are_refused_with_the_cause() -> None:
    batch = torch.randn(5, 1, 9, 9), torch.zeros(5, dtype=torch.long)
    with pytest.raises(InvalidParameter, match=r"fails on samples .*1, 9, 9.*shapes cannot be multiplied"):
        clipped_gradients(small_net(), LOSS, batch, clip=L2(1.0), batch_size=7)


def test_existing_gradients_and_no_grad_do_not_matter() -> None:
    model = small_net()
    expected, _ = clipped_gradients(model, LOSS, small_batch(), clip=L2(0.1), batch_size=7)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        mean, _ = clipped_gradients(model, LOSS, small_batch(), clip=L2(0.1), batch_size=7)
    assert torch.equal(mean, expected)
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_two_threads_of_torch_give_the_result_of_one(road: type) -> None:
    model, batch = OnRoad(road), small_batch(20)

    def means() -> list[Tensor]:
        asked: dict[str, Any] = {"batch_size": 64}
        return [clipped_gradients(model, LOSS, batch, clip=clip, **asked).mean for clip in (L2(0.1), BatchMean(0.01))]

    one = means()
    torch.set_num_threads(2)
    try:
        two = means()
    finally:
        torch.set_num_threads(1)
    for first, second in zip(one, two, strict=True):
        if road is LanesRoad:
            assert torch.equal(first, second)
        assert torch.allclose(first, second, rtol=1e-5, atol=1e-8)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_two_callers_at_once_get_what_each_gets_alone(road: type) -> None:
    """They find the same model not yet traced, and share its program."""
    model, batch = OnRoad(road), small_batch(20)
    expected = clipped_gradients(OnRoad(road), LOSS, batch, clip=L2(0.1), batch_size=64).mean
    found: list[Tensor] = []

    def caller() -> None:
        for _ in range(3):
            found.append(clipped_gradients(model, LOSS, batch, clip=L2(0.1), batch_size=64).mean)

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 6
    assert all(torch.equal(mean, expected) for mean in found)
    assert torch.backends.mkldnn.enabled
    assert torch.backends.mha.get_fastpath_enabled()


class Convolving(nn.Module):
    """Convolutions on torch's kernels, which has several for them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3), nn.Linear(576, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.special.entr(self.second(torch.tanh(self.first(x))).sigmoid()).flatten(1))


def test_a_thread_that_traces_changes_no_bit_of_another() -> None:
    torch.manual_seed(12)
    model, batch = Convolving(), (torch.randn(40, 3, 8, 8), torch.randint(0, 3, (40,)))
    tracing, done = threading.Event(), threading.Event()

    def traces() -> None:
        with plain_operations(nn.Sequential()):
            tracing.set()
            done.wait(timeout=60)

    def mean() -> Tensor:
        return clipped_gradients(model, LOSS, batch, clip=L2(0.1), batch_size=256).mean

    expected, thread = mean(), threading.Thread(target=traces)
    thread.start()
    tracing.wait(timeout=60)
    try:
        assert torch.equal(mean(), expected)
    finally:
        done.set()
        thread.join(timeout=60)


class ReadsItsBuffers(nn.Module):
    """Python numbers read from buffers, of which the program knows no value."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how = nn.Linear(4, 3), how
        self.register_buffer("factor", torch.tensor(2.0))
        self.register_buffer("count", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "number":
            return self.out(x * self.factor.item())
        if self.how == "length":
            return self.out(x[:, : 2 * self.count.item()])
        if self.how == "repeats":
            return self.out(x * torch.repeat_interleave(x.sum(1), self.count, dim=0).mean())
        return self.out(x * 2 if bool(self.factor > 1) else x)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@pytest.mark.parametrize("how", ["number", "length", "repeats", "branch"])
def test_a_model_may_read_numbers_from_its_buffers(how: str) -> None:
    case = Case(ReadsItsBuffers(how), (torch.randn(6, 4), torch.arange(6) % 3))
    found = clipped_gradients(case.model, LOSS, case.batch, clip=L2(0.1), batch_size=64)
    assert found.dropped == 0
    assert torch.allclose(found.mean, mean_of(gradients_one_by_one(case), L2(0.1), case.sizes, 64), atol=1e-7)


def test_a_loss_without_a_hash_is_taken() -> None:
    @dataclass
    class Weighted:
        weight: float

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return LOSS(outputs, targets) * self.weight

    clipped_gradients(small_net(), Weighted(2.0), small_batch(), clip=L2(0.1), batch_size=7)


def test_a_result_stays_as_it_is_while_others_are_computed() -> None:
    model, batch = small_net(), small_batch()
    first = clipped_gradients(model, LOSS, batch, clip=L2(0.1), batch_size=7).mean
    kept = first.clone()
    for _ in range(3):
        clipped_gradients(model, LOSS, (batch[0] * 2, batch[1]), clip=L2(0.1), batch_size=7)
    assert torch.equal(first, kept)


class Dropping(nn.Module):
    """The gradient of `out` is twice what the mask leaves of ones, whatever the sample."""

    def __init__(self, road: type) -> None:
        super().__init__()
        self.mask, self.out, self.road = nn.Dropout(0.5), nn.Linear(30, 1, bias=False), road

    def forward(self, x: Tensor) -> Tensor:
        if self.road is PassesRoad:
            x = x + torch.special.entr(torch.ones_like(x))
        if self.road is AloneRoad and float(x.sum()) < 0:
            raise ValueError("no sample is negative")
        return self.out(self.mask(x))


def linear_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] + targets


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
@pytest.mark.parametrize("packed", [False, True])
def test_every_sample_has_a_dropout_mask_of_its_own(road: type, packed: bool) -> None:
    torch.manual_seed(9)
    model, batch = Dropping(road), (torch.ones(64, 30), torch.zeros(64))
    taken = road_of(model, linear_loss, None, Form.of(batch), batch_size=64, packed=packed)
    rows = packed and road is PassesRoad  # if the kernels of this machine keep rows apart
    assert type(taken) in ((RowsRoad, PassesRoad) if rows else (road,))
    assert taken.draws
    asked: dict[str, Any] = {"clip": Clamp(2.0), "batch_size": 64, "packed": packed}
    means = torch.stack([clipped_gradients(model, linear_loss, batch, **asked).mean for _ in range(5)])
    kept = means * 32  # of 64 samples, each of which adds 0 or 2
    assert (kept - kept.round()).abs().max() < 1e-4
    kept = kept.round()
    assert len(kept.unique()) > 10
    # 150 sums of 64 independent bits: a mask for all samples would give 0 or 64, one a pass at most 16 values
    assert abs(float(kept.mean()) - 32) < 6 * 4 / 150**0.5
    assert 2.5 < float(kept.std()) < 5.5
    torch.manual_seed(10)
    first = clipped_gradients(model, linear_loss, batch, **asked).mean
    torch.manual_seed(10)
    assert torch.equal(clipped_gradients(model, linear_loss, batch, **asked).mean, first)


def test_a_mask_that_no_sample_shapes_is_drawn_for_each() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mask = nn.Parameter(torch.ones(1, 30)), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask(self.table)

    torch.manual_seed(11)
    batch = torch.ones(64, 30), torch.zeros(64)
    found = clipped_gradients(
        Positions(), lambda outputs, _: outputs.sum(1), batch, clip=Clamp(2.0), batch_size=64
    ).mean
    assert len(found.unique()) > 5
    assert found.max() < 2


def test_a_model_in_evaluation_mode_draws_nothing() -> None:
    batch = torch.ones(6, 30), torch.zeros(6)
    road = road_of(Dropping(LanesRoad).eval(), linear_loss, None, Form.of(batch), batch_size=64, packed=False)
    assert not road.draws


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.BatchNorm2d(4), "GroupNorm"),
        (nn.SyncBatchNorm(4), "GroupNorm"),
        (nn.BatchNorm2d(4, affine=False), "evaluation mode"),
        (nn.BatchNorm2d(4, track_running_stats=False).eval(), "GroupNorm"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "track_running_stats=False"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), "scale_grad_by_freq=False"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm=None"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_mix_samples_are_refused_with_the_replacement(layer: nn.Module, advice: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), layer)
    with pytest.raises(InvalidParameter, match=advice):
        clipped_gradients(model, LOSS, small_batch(), clip=L2(1.0), batch_size=7)


@pytest.mark.filterwarnings("ignore::bqsgd._src.persample.SlowGradientsWarning")
@each_road
def test_a_reduced_loss_is_refused(road: type) -> None:
    model = OnRoad(road)
    with pytest.raises(InvalidParameter, match="one loss per sample"):
        clipped_gradients(model, nn.CrossEntropyLoss(), small_batch(), clip=L2(1.0), batch_size=7)


def test_arguments_are_checked() -> None:
    model, (inputs, targets) = small_net(), small_batch()
    with pytest.raises(InvalidParameter, match="batch_size"):
        clipped_gradients(model, LOSS, (inputs, targets), clip=L2(1.0), batch_size=0)
    with pytest.raises(InvalidParameter, match="same sample dimension"):
        clipped_gradients(model, LOSS, (inputs, targets[1:]), clip=L2(1.0), batch_size=7)
    with pytest.raises(InvalidParameter, match=r"a batch is a \w*Tensor, not \(inputs..., targets\)"):
        clipped_gradients(model, LOSS, inputs, clip=L2(1.0), batch_size=7)
    for bad in ((inputs, 3), (), (torch.tensor(1.0), targets)):
        with pytest.raises(InvalidParameter, match="batch must be tensors with the sample dimension first"):
            clipped_gradients(model, LOSS, bad, clip=L2(1.0), batch_size=7)
    with pytest.raises(InvalidParameter, match="clip must be"):
        clipped_gradients(model, LOSS, (inputs, targets), clip=1.0, batch_size=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="no parameter that requires"):
        clipped_gradients(model.requires_grad_(False), LOSS, (inputs, targets), clip=L2(1.0), batch_size=7)


def test_an_unused_layer_keeps_zeros_in_its_place() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    case = Case(Partly(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
    mean, _ = clipped_gradients(case.model, LOSS, case.batch, clip=Clamp(0.01), batch_size=5)
    assert mean[:20].abs().max() == 0
    assert torch.allclose(mean, mean_of(gradients_one_by_one(case), Clamp(0.01), case.sizes, 5), atol=1e-7)


def test_a_forward_that_would_mix_samples_gives_the_gradients_of_each_alone() -> None:
    case = Case(Centred(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])))
    mean, _ = clipped_gradients(case.model, LOSS, case.batch, clip=Clamp(0.01), batch_size=5)
    assert torch.allclose(mean, mean_of(gradients_one_by_one(case), Clamp(0.01), case.sizes, 5), atol=1e-7)
    assert mean[:20].abs().max() == 0  # the mean of a batch of one is the sample itself


class Untraceable(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.out, self.function = nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(x))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x if x.sum() > 0 else -x, "x.sum.. > 0 else -x.*line .* of test_persample_contract.*torch.where"),
        (lambda x: x if x.max().item() > 0 else -x, "item.. > 0 else -x.*torch.where"),
        (lambda x: x * x.max().item(), "_local_scalar_dense.*reads a number.*torch.where"),
        (lambda x: torch.from_numpy(x.numpy()), "torch.from_numpy.*line .*numpy"),
        (lambda x: x + 0 * random.random(), "generators of Python or NumPy; draw with torch.rand"),
        (lambda x: x + 0 * float(np.random.rand()), "generators of Python or NumPy"),  # noqa: NPY002
        (lambda x: x + 0 * len(x[x > 0].tolist()), "tolist.*x.mask"),
    ],
    ids=["branch", "item", "product", "numpy", "random", "numpy.random", "list"],
)
def test_only_what_cannot_be_traced_is_slow_and_the_warning_says_why(
    function: Callable[[Tensor], Tensor], says: str
) -> None:
    model, batch = Untraceable(function), (torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    with pytest.warns(SlowGradientsWarning, match=f"one at a time.*because torch cannot.*({says})") as said:
        mean, _ = clipped_gradients(model, LOSS, batch, clip=L2(1.0), batch_size=5)
    assert said[0].filename == __file__
    plain = nn.Sequential(model.out)
    with warnings.catch_warnings():  # once, and never for what can be traced
        warnings.simplefilter("error")
        clipped_gradients(model, LOSS, batch, clip=L2(1.0), batch_size=5)
        expected, _ = clipped_gradients(plain, LOSS, batch, clip=L2(1.0), batch_size=5)
    assert says.startswith("_local") or torch.allclose(mean, expected, rtol=1e-5, atol=1e-7)


def test_a_thread_that_draws_while_a_model_is_traced_does_not_make_it_slow() -> None:
    """Flower's heartbeat draws from Python's generator, in the process in which an app trains."""
    drawn = []

    def forward(x: Tensor) -> Tensor:
        if not drawn:
            drawn.append(threading.Thread(target=random.random))
            drawn[0].start()
            drawn[0].join()
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])
        clipped_gradients(Untraceable(forward), LOSS, batch, clip=L2(1.0), batch_size=5)
    assert drawn


def test_the_clips_need_no_torch() -> None:
    code = "import sys; from bqsgd._src.persample import Clamp; Clamp(1.0); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
