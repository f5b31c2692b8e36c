"""One training step up to the summed gradient, by each rival: plain, ours with every clip, opacus, torch.func."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from bqsgd.models import MLP, AlexNet28, LeNet5
from bqsgd.persample import L2, BatchMean, Clamp, Clip, Dual, Scale, clipped_gradients

NORM, BOUND = 0.5, 0.0015
CLIPS: dict[str, Clip] = {
    "L2": L2(NORM),
    "Scale": Scale(BOUND),
    "Clamp": Clamp(BOUND),
    "Dual": Dual(NORM, 0.005),
    "BatchMean": BatchMean(BOUND),
}
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LeNet-5": (LeNet5, 256),
    "AlexNet28": (AlexNet28, 32),
    "MLP 784-2048-2048-10": (lambda: MLP(input_shape=(1, 28, 28), hidden=(2048, 2048), activation="relu"), 256),
}
EACH = nn.CrossEntropyLoss(reduction="none")
Step = Callable[[], list[Tensor]]
"""Runs one step and returns the summed gradient: a tensor a parameter, or one flat."""


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(size, 1, 28, 28, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Forward and backward without clipping: the yardstick, 1.0."""

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        EACH(model(x), y).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor, clip: Clip, indices: Tensor) -> Step:
    def step() -> list[Tensor]:
        return [clipped_gradients(model, EACH, (x, y), indices=indices, clip=clip, batch_size=len(x)).mean]

    return step


def torch_func(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """vmap(grad) over the whole batch, then the L2 clip and the sum."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return EACH(functional_call(model, weights, (one.unsqueeze(0),)), target.unsqueeze(0))[0]

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> list[Tensor]:
        found = list(each(parameters, x, y).values())
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in found], dim=1).norm(dim=1)
        factor = (NORM / (norms + 1e-6)).clamp(max=1)
        return [torch.einsum("i,i...", factor, g) for g in found]

    return step


def opacus_materialising(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Step:
    """hooks, functorch or ew: per-sample gradients in memory, clipped and summed by opacus' own optimiser."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    if mode == "ew":
        wrapped = GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    optimiser = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )

    def step() -> list[Tensor]:
        EACH(wrapped(x), y).sum().backward()
        optimiser.clip_and_accumulate()
        sums = [p.summed_grad for p in optimiser.params]
        optimiser.zero_grad(set_to_none=True)  # gigabytes that must not outlive the turn
        return sums

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Ghost clipping: norms in a first backward, a reweighted second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=NORM, use_ghost_clipping=True
    )
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )

    def step() -> list[Tensor]:
        optimiser.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(wrapped, optimiser, EACH(wrapped(x), y), "sum").backward()
        return [p.grad for p in wrapped.parameters()]

    return step


MATERIALISING = ("opacus hooks", "opacus functorch", "opacus ew")
OPACUS = (*MATERIALISING, "opacus ghost")
RIVALS = ("plain", *CLIPS, *OPACUS, "torch.func.vmap")


def make_step(name: str, model: nn.Module, batch_size: int) -> Step:
    """The step of one rival on its own copy of the model."""
    warnings.filterwarnings("ignore")  # opacus' full-backward-hook notices
    x, y = batch_of(batch_size)
    model = copy.deepcopy(model)
    if name == "plain":
        return plain(model, x, y)
    if name in CLIPS:
        indices = torch.randperm(60_000, generator=torch.Generator().manual_seed(2))[:batch_size]
        return ours(model, x, y, CLIPS[name], indices)
    if name == "torch.func.vmap":
        return torch_func(model, x, y)
    mode = name.removeprefix("opacus ")
    return opacus_ghost(model, x, y) if mode == "ghost" else opacus_materialising(model, x, y, mode)
