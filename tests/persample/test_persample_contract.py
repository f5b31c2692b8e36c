"""What `clipped_gradients` promises beside the right numbers: dropped samples, empty batches, nothing left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from persample_oracle import LOSS, expected_mean
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.persample import (
    L2,
    BatchMean,
    Clamp,
    Clip,
    Dual,
    Scale,
    SlowGradientsWarning,
    check_samples_apart,
    clipped_gradients,
)

CLIPS: list[Clip] = [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01), BatchMean(0.01)]
each_clip = pytest.mark.parametrize("clip", CLIPS, ids=lambda clip: type(clip).__name__)


def small_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def small_batch(size: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(size, 1, 6, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


@each_clip
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_that_is_not_finite_counts_as_zero_and_is_counted(
    clip: Clip, poison: float, dtype: torch.dtype
) -> None:
    model, (inputs, targets) = small_net().to(dtype), small_batch()
    inputs = inputs.to(dtype)
    inputs[2, 0, 1, 1] = poison
    inputs[5] = poison
    mean, dropped = clipped_gradients(model, LOSS, (inputs, targets), indices=None, clip=clip, batch_size=7)
    good = torch.tensor([0, 1, 3, 4, 6])
    expected, none = clipped_gradients(
        model, LOSS, (inputs[good], targets[good]), indices=None, clip=clip, batch_size=7
    )
    assert (dropped, none) == (2, 0)
    assert torch.allclose(mean, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert mean.abs().max() > 0


@each_clip
def test_a_poisoned_sample_is_dropped_on_the_slow_road_too(clip: Clip) -> None:
    model = nn.Sequential(nn.PReLU(4), nn.Linear(4, 3))
    inputs, targets = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    inputs[1] = float("nan")
    with pytest.warns(SlowGradientsWarning, match="PReLU has no fast rule"):
        mean, dropped = clipped_gradients(model, LOSS, (inputs, targets), indices=None, clip=clip, batch_size=5)
    assert dropped == 1
    assert torch.isfinite(mean).all()
    assert mean.abs().max() > 0


@pytest.mark.parametrize("clip", [Scale(0.01), Clamp(0.003), L2(0.2), Dual(0.1, 0.01)], ids=lambda c: type(c).__name__)
def test_a_finite_gradient_whose_square_overflows_is_clipped_not_dropped(clip: Clip) -> None:
    model = nn.Sequential(nn.Conv1d(1, 3, 2, bias=False), nn.Flatten(), nn.Linear(9, 3, bias=False))
    inputs, targets = torch.randn(3, 1, 4), torch.tensor([0, 1, 2])
    inputs[1] *= 1e22

    def linear_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.gather(1, labels[:, None])[:, 0]

    mean, dropped = clipped_gradients(model, linear_loss, (inputs, targets), indices=None, clip=clip, batch_size=3)
    alone, _ = clipped_gradients(model, linear_loss, (inputs[1:2], targets[1:2]), indices=None, clip=clip, batch_size=1)
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
        found = clipped_gradients(model, linear_loss, batch, indices=None, clip=clip, batch_size=1)
        assert found.dropped == dropped
        assert found.mean.tolist() == [1.0, 1.0]


@each_clip
def test_an_empty_batch_gives_exact_zeros(clip: Clip) -> None:
    model = small_net()
    mean, dropped = clipped_gradients(
        model, LOSS, (torch.empty(0, 1, 6, 6), torch.empty(0, dtype=torch.long)), indices=None, clip=clip, batch_size=32
    )
    assert mean.shape == (sum(p.numel() for p in model.parameters()),)
    assert mean.abs().max() == 0
    assert dropped == 0


def state_of(model: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, module.training, sorted(vars(module)), dict(module._forward_hooks), dict(module._backward_hooks))
        for name, module in model.named_modules()
    ] + [(name, p.grad, sorted(vars(p)), p.detach().clone().tolist()) for name, p in model.named_parameters()]


@each_clip
def test_nothing_is_left_on_the_model(clip: Clip) -> None:
    model = small_net()
    before = state_of(model)
    clipped_gradients(model, LOSS, small_batch(), indices=None, clip=clip, batch_size=7)
    assert state_of(model) == before


def test_an_exception_takes_its_hooks_along() -> None:
    model = small_net()
    before = state_of(model)

    def broken(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("loss")

    with pytest.raises(KeyError):
        clipped_gradients(model, broken, small_batch(), indices=None, clip=L2(1.0), batch_size=7)
    assert state_of(model) == before


def test_existing_gradients_and_no_grad_do_not_matter() -> None:
    model = small_net()
    expected, _ = clipped_gradients(model, LOSS, small_batch(), indices=None, clip=L2(0.1), batch_size=7)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        mean, _ = clipped_gradients(model, LOSS, small_batch(), indices=None, clip=L2(0.1), batch_size=7)
    assert torch.equal(mean, expected)
    assert all(bool((p.grad == 1).all()) for p in model.parameters() if p.grad is not None)


@each_clip
def test_two_threads_give_the_result_of_one(clip: Clip) -> None:
    model, batch = small_net(), small_batch(9)
    one, _ = clipped_gradients(model, LOSS, batch, indices=None, clip=clip, batch_size=9)
    torch.set_num_threads(2)
    try:
        two, _ = clipped_gradients(model, LOSS, batch, indices=None, clip=clip, batch_size=9)
    finally:
        torch.set_num_threads(1)
    assert torch.allclose(one, two, rtol=1e-5, atol=1e-8)


def test_dropout_masks_are_those_of_the_one_forward() -> None:
    model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
    inputs, targets = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    torch.manual_seed(9)
    mean, _ = clipped_gradients(model, LOSS, (inputs, targets), indices=None, clip=BatchMean(1e6), batch_size=5)
    torch.manual_seed(9)
    found = torch.autograd.grad(LOSS(model(inputs), targets).sum() / 5, list(model.parameters()))
    assert torch.allclose(mean.float(), torch.cat([g.flatten() for g in found]), rtol=1e-5, atol=1e-7)


def test_dropout_works_on_the_slow_road() -> None:
    model = nn.Sequential(nn.PReLU(6), nn.Dropout(0.5), nn.Linear(6, 3))
    with pytest.warns(SlowGradientsWarning):
        mean, _ = clipped_gradients(
            model, LOSS, (torch.randn(5, 6), torch.zeros(5, dtype=torch.long)), indices=None, clip=L2(1.0), batch_size=5
        )
    assert mean.abs().max() > 0


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
        clipped_gradients(model, LOSS, small_batch(), indices=None, clip=L2(1.0), batch_size=7)


@pytest.mark.parametrize("model", [small_net(), nn.Sequential(nn.PReLU(), nn.Flatten(), nn.Linear(36, 3))])
@pytest.mark.filterwarnings("ignore::bqsgd.persample.SlowGradientsWarning")
def test_a_reduced_loss_is_refused(model: nn.Module) -> None:
    with pytest.raises(InvalidParameter, match="one loss per sample"):
        clipped_gradients(model, nn.CrossEntropyLoss(), small_batch(), indices=None, clip=L2(1.0), batch_size=7)


def test_arguments_are_checked() -> None:
    model, (inputs, targets) = small_net(), small_batch()
    with pytest.raises(InvalidParameter, match="batch_size"):
        clipped_gradients(model, LOSS, (inputs, targets), indices=None, clip=L2(1.0), batch_size=0)
    with pytest.raises(InvalidParameter, match="same batch dimension"):
        clipped_gradients(model, LOSS, (inputs, targets[1:]), indices=None, clip=L2(1.0), batch_size=7)
    with pytest.raises(InvalidParameter, match="pair of tensors"):
        clipped_gradients(model, LOSS, inputs, indices=None, clip=L2(1.0), batch_size=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="clip must be"):
        clipped_gradients(model, LOSS, (inputs, targets), indices=None, clip=1.0, batch_size=7)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="no parameter that requires"):
        clipped_gradients(
            model.requires_grad_(False), LOSS, (inputs, targets), indices=None, clip=L2(1.0), batch_size=7
        )


def test_an_unused_layer_keeps_zeros_in_its_place() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    model, batch = Partly(), (torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))
    mean, _ = clipped_gradients(model, LOSS, batch, indices=None, clip=Clamp(0.01), batch_size=5)
    assert mean[:20].abs().max() == 0
    assert torch.allclose(mean.double(), expected_mean(model, *batch, Clamp(0.01), 5), atol=1e-7)


def test_a_forward_that_mixes_samples_is_found() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.inner(x)
            return self.out(torch.tanh(hidden - hidden.mean(dim=0)))

    batch = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    with pytest.raises(InvalidParameter, match="mixes samples"):
        check_samples_apart(Mixing(), LOSS, batch, batch_size=64)
    check_samples_apart(small_net(), LOSS, small_batch(), batch_size=64, packed=True)


def test_the_clips_need_no_torch() -> None:
    code = "import sys; from bqsgd.persample import Clamp; Clamp(1.0); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
