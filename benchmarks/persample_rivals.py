"""One training step up to the summed gradient, by each rival: plain, ours with every clip, opacus, torch.func."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.persample_models import Case
from bqsgd._src.persample import L2, BatchMean, Clamp, Clip, Dual, Scale, clipped_gradients

NORM, BOUND = 0.5, 0.0015
CLIPS: dict[str, Clip] = {
    "L2": L2(NORM),
    "Scale": Scale(BOUND),
    "Clamp": Clamp(BOUND),
    "Dual": Dual(NORM, 0.005),
    "BatchMean": BatchMean(BOUND),
}
PACKED = "L2, packed rows"
MATERIALISING = ("opacus hooks", "opacus functorch", "opacus ew")
OPACUS = (*MATERIALISING, "opacus ghost")
VMAP = "torch.func.vmap"
RIVALS = ("plain", *CLIPS, PACKED, *OPACUS, VMAP)
EACH = nn.CrossEntropyLoss(reduction="none")
Step = Callable[[], dict[str, Tensor]]
"""Runs one step and returns the summed gradient (ours: the mean) of each trained parameter, by name."""


def rivals_of(case: Case) -> tuple[str, ...]:
    """The rivals that run on this model, in the order of RIVALS."""
    left_out = {name for name in CLIPS if name not in case.clips} | (set() if case.packed else {PACKED}) | {"BatchMean"}
    if case.large:
        left_out |= {"opacus functorch", VMAP}
    return tuple(name for name in RIVALS if name not in left_out)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; opacus' wrappers add a prefix of their own, which is removed."""
    return {name.removeprefix("_module."): p for name, p in model.named_parameters() if p.requires_grad}


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Forward and backward without clipping: the yardstick, 1.0."""
    parameters = trained(model)

    def step() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        EACH(model(x), y).sum().backward()
        return {name: p.grad for name, p in parameters.items() if p.grad is not None}

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor, clip: Clip, *, packed: bool = False) -> Step:
    """Our clipped mean, as flat parts: a step must not pay for turning it into a sum."""
    names, sizes = list(trained(model)), [p.numel() for p in trained(model).values()]

    def step() -> dict[str, Tensor]:
        mean = clipped_gradients(model, EACH, (x, y), clip=clip, batch_size=len(x), packed=packed).mean
        return dict(zip(names, mean.split(sizes), strict=True))

    return step


def torch_func(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """vmap(grad) over the whole batch, then the L2 clip and the sum."""
    parameters = {name: p.detach() for name, p in trained(model).items()}

    def loss(weights: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return EACH(functional_call(model, weights, (one.unsqueeze(0),)), target.unsqueeze(0))[0]

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def step() -> dict[str, Tensor]:
        gradients = each(parameters, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()], dim=1).norm(dim=1)
        factor = (NORM / (norms + 1e-6)).clamp(max=1)
        return {name: torch.einsum("i,i...", factor, g) for name, g in gradients.items()}

    return step


def opacus_materialising(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Step:
    """hooks, functorch or ew: per-sample gradients in memory, clipped and summed by opacus' own optimiser."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    if mode == "ew":
        wrapped = GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    parameters = trained(wrapped)
    optimiser = DPOptimizer(
        torch.optim.SGD(parameters.values(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )

    def step() -> dict[str, Tensor]:
        EACH(wrapped(x), y).sum().backward()
        optimiser.clip_and_accumulate()
        sums = {name: p.summed_grad for name, p in parameters.items()}
        optimiser.zero_grad(set_to_none=True)  # gigabytes that must not outlive the turn
        return sums

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """Ghost clipping: norms in a first backward, a reweighted second one. Layers that have no rule for norms (all but
    Linear and Embedding) build their gradients one layer at a time."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, loss_reduction="sum", max_grad_norm=NORM, use_ghost_clipping=True
    )
    parameters = trained(wrapped)
    optimiser = DPOptimizerFastGradientClipping(
        torch.optim.SGD(parameters.values(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
        loss_reduction="sum",
    )

    def step() -> dict[str, Tensor]:
        optimiser.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(wrapped, optimiser, EACH(wrapped(x), y), "sum").backward()
        return {name: p.grad for name, p in parameters.items()}

    return step


def make_step(rival: str, case: Case, model: nn.Module, batch_size: int) -> Step:
    """The step of one rival on its own copy of the model."""
    warnings.filterwarnings("ignore")  # opacus' full-backward-hook notices
    x, y = case.batch(batch_size)
    model = case.model_for(rival, model)
    if rival == "plain":
        return plain(model, x, y)
    if rival == PACKED:
        return ours(model, x, y, CLIPS["L2"], packed=True)
    if rival in CLIPS:
        return ours(model, x, y, CLIPS[rival])
    if rival == VMAP:
        return torch_func(model, x, y)
    mode = rival.removeprefix("opacus ")
    return opacus_ghost(model, x, y) if mode == "ghost" else opacus_materialising(model, x, y, mode)
