"""Per-sample gradients of one parameter tensor, in whatever form is cheapest, and the reductions the clips need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Factor(Protocol):
    """The gradients g_b of one parameter tensor for a batch of samples b.

    Every reduction assumes finite gradients: `clipping` first drops the samples whose `bounds` are not finite.
    """

    def bounds(self) -> Tensor:
        """(batch,) upper bounds of max|g_b|: a finite bound proves the gradient finite, NaN and infinity show."""

    def take(self, index: Tensor) -> Factor:
        """The same for the samples `index` alone."""

    def materialise(self, index: slice | Tensor) -> Tensor:
        """(samples, coordinates) gradients of a few samples."""

    def max_norms(self) -> Tensor:
        """(batch,) max|g_b|."""

    def squared_norms(self, bound: float | None = None) -> Tensor:
        """(batch,) float64 sums of squares, of g_b clamped to +-bound where one is given."""

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        """out = sum_b weights_b g_b, flat."""

    def clamped_sum(self, bound: float, weights: Tensor, out: Tensor) -> None:
        """out = sum_b weights_b clamp(g_b, -bound, bound), flat."""


@dataclass(frozen=True)
class Dense:
    """Gradients as they are: `values` is (batch, coordinates). For biases and other small tensors."""

    values: Tensor

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> Dense:
        return Dense(self.values[index])

    def materialise(self, index: slice | Tensor) -> Tensor:
        return self.values[index]

    def max_norms(self) -> Tensor:
        return torch.linalg.vector_norm(self.values, ord=torch.inf, dim=1)  # NaN stays NaN

    def squared_norms(self, bound: float | None = None) -> Tensor:
        values = self.values if bound is None else self.values.clamp(-bound, bound)
        return torch.linalg.vector_norm(values, dim=1, dtype=torch.float64).square()

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        torch.mv(self.values.t(), weights.to(self.values.dtype), out=out)

    def clamped_sum(self, bound: float, weights: Tensor, out: Tensor) -> None:
        torch.mv(self.values.clamp(-bound, bound).t(), weights.to(self.values.dtype), out=out)
