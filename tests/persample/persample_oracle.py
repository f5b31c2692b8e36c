"""The batch-of-one oracle: autograd on one sample at a time in float64, every clip written out in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bqsgd._src.persample import L2, BatchMean, Clamp, Clip, Dual, Normalize, PerLayer, Scale
from bqsgd._src.persample.program import inputs_then_target

LOSS = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True)
class Case:
    """A model, its loss and samples of it: (inputs..., targets), or what `forward` takes."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] = LOSS
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None

    @property
    def samples(self) -> int:
        return len(tree_leaves(self.batch)[0])

    @property
    def sizes(self) -> list[int]:
        return [p.numel() for p in self.model.parameters() if p.requires_grad]

    def taken(self, index: Any) -> Any:
        """Some of the samples."""
        return tree_map(lambda leaf: leaf[index], self.batch)

    def double(self) -> Case:
        """A copy in float64."""
        return replace(
            self,
            model=copy.deepcopy(self.model).double(),
            loss=copy.deepcopy(self.loss).double() if isinstance(self.loss, nn.Module) else self.loss,
            batch=tree_map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, self.batch),
        )


def gradients_one_by_one(case: Case) -> Tensor:
    """(samples, coordinates) float64."""
    exact = case.double()
    parameters = [p for p in exact.model.parameters() if p.requires_grad]
    rows = []
    for number in range(case.samples):
        one = exact.taken(slice(number, number + 1))
        losses = exact.loss(*(case.forward or inputs_then_target)(exact.model, one))
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows)


def clip_each(gradients: Tensor, clip: Clip, sizes: list[int]) -> Tensor:
    """(samples, coordinates) clipped gradients; those of `BatchMean` are unclipped."""
    match clip:
        case PerLayer():
            parts, clips = gradients.split(sizes, dim=1), clip.layers(len(sizes))
            return torch.cat([clip_each(part, own, sizes) for part, own in zip(parts, clips, strict=True)], dim=1)
        case Scale(bound=bound):
            return gradients / (gradients.abs().amax(dim=1, keepdim=True) / bound).clamp(min=1)
        case Clamp(bound=bound):
            return gradients.clamp(-bound, bound)
        case Normalize(norm=norm, gamma=gamma):
            return gradients * norm / (gradients.norm(dim=1, keepdim=True) + gamma)
        case Dual(norm=norm, bound=bound):
            held = gradients.clamp(-bound, bound)
            return held / (held.norm(dim=1, keepdim=True) / norm).clamp(min=1)
        case L2(norm=norm):
            return gradients / (gradients.norm(dim=1, keepdim=True) / norm).clamp(min=1)
    return gradients


def mean_of(gradients: Tensor, clip: Clip, sizes: list[int], batch_size: int) -> Tensor:
    """What `clipped_gradients` is to give for samples of these gradients."""
    mean = clip_each(gradients, clip, sizes).sum(dim=0) / batch_size
    return mean.clamp(-clip.bound, clip.bound) if isinstance(clip, BatchMean) else mean


def clips_for(gradients: Tensor, strength: float, sizes: list[int]) -> list[Clip]:
    """A clip of every kind that bites as hard as `strength` says, measured against these gradients."""
    peak = max(float(gradients.abs().amax(dim=1).median()), 1e-6) * strength
    norm = max(float(gradients.norm(dim=1).median()), 1e-6) * strength
    each = [Dual(norm, peak), Clamp(3 * peak), L2(norm / 3), Normalize(norm / 100, norm / 4), Scale(peak / 10)]
    return [
        Scale(peak), Clamp(peak), L2(norm), Dual(norm / 2, peak / 2), Normalize(norm, norm / 8), PerLayer(L2(norm)),
        PerLayer([each[n % len(each)] for n in range(len(sizes))]), BatchMean(peak),
    ]  # fmt: skip
