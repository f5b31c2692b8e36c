"""A clip applied to the per-sample gradients of all parameters: who is dropped, each sample's weight, the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bqsgd.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Scale
from bqsgd.persample.factors import Factor

SHRINK = 1 - 2.0**-20
"""Norms are rounded, so the clips aim this much inside their bound: the rounding then falls on the private side."""


@dataclass(frozen=True)
class Slot:
    """One parameter tensor: its per-sample gradients, its place in the flat sum and its own coordinate bound."""

    factor: Factor
    out: Tensor
    bound: float


def finite_samples(factors: Sequence[Factor]) -> Tensor:
    """(batch,) which samples have a finite gradient in every parameter.

    The cheap bounds settle almost all; only a sample whose bound overflows is looked at coordinate by coordinate.
    """
    finite = torch.stack([torch.isfinite(factor.bounds()) for factor in factors]).all(dim=0)
    for sample in (~finite).nonzero().flatten():
        index = sample.reshape(1)
        finite[sample] = all(bool(torch.isfinite(factor.materialise(index)).all()) for factor in factors)
    return finite


def clipped_sum(slots: Sequence[Slot], clip: Clip, *, batch_size: int) -> int:
    """Fill every slot's `out` with sum_b clip(g_b) / L and return how many samples were dropped as not finite."""
    if not slots:
        return 0
    finite = finite_samples([slot.factor for slot in slots])
    kept, dropped = int(finite.sum()), int((~finite).sum())
    if dropped:  # taken out, not weighted by zero: 0 * inf is NaN
        index = finite.nonzero().flatten()
        slots = [Slot(slot.factor.take(index), slot.out, slot.bound) for slot in slots]
    if not kept:
        for slot in slots:
            slot.out.zero_()
        return dropped
    weights = _weights([slot.factor for slot in slots], clip, finite.new_ones(kept, dtype=torch.float64)) / batch_size
    for slot in slots:
        if isinstance(clip, (Clamp, Dual)):
            slot.factor.clamped_sum(slot.bound, weights, slot.out)
        else:
            slot.factor.weighted_sum(weights, slot.out)
    return dropped


def _weights(factors: Sequence[Factor], clip: Clip, ones: Tensor) -> Tensor:
    """(batch,) float64 factor of each sample, at most 1."""
    match clip:
        case Clamp() | BatchMean():
            return ones
        case Scale(bound=reach):
            norms = torch.stack([factor.max_norms().double() for factor in factors]).amax(dim=0)
        case L2(norm=reach):
            norms = torch.stack([factor.squared_norms() for factor in factors]).sum(dim=0).sqrt()
        case Dual(norm=reach, bound=bound):
            norms = torch.stack([factor.squared_norms(bound) for factor in factors]).sum(dim=0).sqrt()
    return torch.where(norms <= reach * SHRINK, ones, reach * SHRINK / norms)
