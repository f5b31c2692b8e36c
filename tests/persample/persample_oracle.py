"""The batch-of-one oracle: autograd on one sample at a time in float64, every clip written out in float64."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bqsgd.persample import L2, BatchMean, Clamp, Clip, Dual, Scale

LOSS = nn.CrossEntropyLoss(reduction="none")


def gradients_one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """(batch, coordinates) float64."""
    exact = copy.deepcopy(model).double()
    parameters = [p for p in exact.parameters() if p.requires_grad]
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        outputs = exact((x.double() if x.is_floating_point() else x).unsqueeze(0))
        found = torch.autograd.grad(LOSS(outputs, y.unsqueeze(0)).sum(), parameters, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows)


def clip_each(gradients: Tensor, clip: Clip, sizes: list[int]) -> Tensor:
    """(batch, coordinates) clipped gradients; those of `BatchMean` are unclipped."""
    match clip:
        case Scale(bound=bound):
            return gradients / (gradients.abs().amax(dim=1, keepdim=True) / bound).clamp(min=1)
        case Clamp():
            limit = torch.cat([torch.full((n,), c) for n, c in zip(sizes, clip.bounds(len(sizes)), strict=True)])
            return torch.minimum(torch.maximum(gradients, -limit.double()), limit.double())
        case L2(norm=norm):
            return gradients / (gradients.norm(dim=1, keepdim=True) / norm).clamp(min=1)
        case Dual(norm=norm, bound=bound):
            held = gradients.clamp(-bound, bound)
            return held / (held.norm(dim=1, keepdim=True) / norm).clamp(min=1)
    return gradients


def expected_mean(model: nn.Module, inputs: Tensor, targets: Tensor, clip: Clip, batch_size: int) -> Tensor:
    sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    mean = clip_each(gradients_one_by_one(model, inputs, targets), clip, sizes).sum(dim=0) / batch_size
    return mean.clamp(-clip.bound, clip.bound) if isinstance(clip, BatchMean) else mean


def make_clip(kind: type, gradients: Tensor, strength: float, sizes: list[int]) -> Clip:
    """A clip that bites as hard as `strength` says, measured against these gradients."""
    peak = max(float(gradients.abs().amax(dim=1).median()), 1e-6) * strength
    norm = max(float(gradients.norm(dim=1).median()), 1e-6) * strength
    if kind is L2:
        return L2(norm)
    if kind is Dual:
        return Dual(norm / 2, peak / 2)
    if kind is Clamp and strength < 0.5:
        return Clamp(tuple(peak * (1 + index % 3) for index in range(len(sizes))))
    return kind(peak)
