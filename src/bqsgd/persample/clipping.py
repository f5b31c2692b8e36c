"""A clip applied to the per-sample gradients of all parameters: who is dropped, each sample's weight, the sum.

All of it sample by sample: what a sample adds to the sum is a function of its own gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bqsgd.persample.clips import L2, BatchMean, Clamp, Clip, Dual, Scale
from bqsgd.persample.factors import Factor
from bqsgd.persample.grid import SHRINK, Grid

LARGEST = 2.0**126
"""A gradient whose bound is beyond this may overflow float32 on the way: it is dropped whole."""


@dataclass(frozen=True)
class Place:
    """One parameter tensor: its place in the flat sum, and the grid of its coordinates."""

    span: slice
    grid: Grid


def places(clip: Clip, sizes: Sequence[int]) -> list[Place]:
    """Where each parameter tensor lies and what its coordinates are bounded by after the clip."""
    match clip:
        case Clamp():
            bounds = clip.bounds(len(sizes))
        case Dual(norm=norm, bound=bound):
            bounds = (min(norm, bound),) * len(sizes)
        case L2(norm=bound) | Scale(bound=bound) | BatchMean(bound=bound):
            bounds = (bound,) * len(sizes)
    found, start = [], 0
    for size, bound in zip(sizes, bounds, strict=True):
        found.append(Place(slice(start, start + size), Grid(bound)))
        start += size
    return found


def provably_finite(factors: Sequence[Factor]) -> Tensor:
    """(batch,) which samples have a gradient that cannot overflow in any parameter; NaN and infinity show as False."""
    return torch.stack([factor.bounds().cpu() <= LARGEST for factor in factors]).all(dim=0)


def clipped_steps(factors: Sequence[Factor | None], places: Sequence[Place], clip: Clip, steps: Tensor) -> int:
    """Fill `steps` with sum_b clip(g_b) in whole steps of each place's grid; return how many samples were dropped.

    A parameter without a factor gets zeros.
    """
    used = [(factor, place) for factor, place in zip(factors, places, strict=True) if factor is not None]
    if len(used) < len(places):
        steps.zero_()
    if not used:
        return 0
    finite = provably_finite([factor for factor, _ in used])
    dropped = int((~finite).sum())
    if dropped == len(finite):
        steps.zero_()
        return dropped
    if dropped:  # taken out, not weighted by zero: 0 * inf is NaN
        index = finite.nonzero().flatten()
        used = [(factor.take(index), place) for factor, place in used]
    coordinates = places[-1].span.stop
    weights = _weights([factor for factor, _ in used], clip, places[0].grid, coordinates, len(finite) - dropped)
    for factor, place in used:
        bound = clip.bound if isinstance(clip, Dual) else place.grid.bound if isinstance(clip, Clamp) else None
        factor.steps(place.grid, weights, steps[place.span], bound=bound)
    return dropped


def _weights(factors: Sequence[Factor], clip: Clip, grid: Grid, coordinates: int, batch: int) -> Tensor:
    """(batch,) float64 factor of each sample, at most 1; sums over parameters one after another, as IEEE has them."""
    ones = torch.ones(batch, dtype=torch.float64)
    match clip:
        case Clamp() | BatchMean():
            return ones
        case Scale(bound=bound):
            norms = torch.stack([factor.max_norms().cpu() for factor in factors]).amax(dim=0)
            reach = bound * (1 - SHRINK)
        case L2(norm=norm):
            norms = _norms(factors, None)
            reach = grid.norm_reach(norm, coordinates)
        case Dual(norm=norm, bound=bound):
            norms = _norms(factors, bound)
            reach = grid.norm_reach(norm, coordinates)
    return torch.where(norms <= reach, ones, reach / norms)


def _norms(factors: Sequence[Factor], bound: float | None) -> Tensor:
    total = factors[0].squared_norms(bound)
    for factor in factors[1:]:
        total = total + factor.squared_norms(bound)
    return total.sqrt()
