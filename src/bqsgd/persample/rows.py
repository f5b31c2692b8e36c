"""Per-sample gradients of an embedding table: only the rows a sample looked up."""

from __future__ import annotations

import torch
from torch import Tensor

from bqsgd.persample.factors import Built, max_norm, squared_norm


class Rows(Built):
    """Row `row[n]` of the table of sample `sample[n]` has the gradient `values[n]`; each (sample, row) occurs once."""

    def __init__(self, sample: Tensor, row: Tensor, values: Tensor, *, batch: int, rows: int) -> None:
        self.sample, self.row, self.values = sample, row, values
        self.batch, self.rows, self.coordinates = batch, rows, rows * values.shape[1]

    @classmethod
    def of_lookups(cls, index: Tensor, errors: Tensor, *, rows: int, padding: int | None) -> Rows:
        """From (batch, positions) indices and (batch, positions, width) errors; repeated look-ups are added up."""
        batch = len(index)
        key = torch.arange(batch, device=index.device)[:, None] * rows + index
        chosen = torch.ones_like(index, dtype=torch.bool) if padding is None else index != padding
        unique, position = torch.unique(key[chosen], return_inverse=True)
        values = errors.new_zeros(len(unique), errors.shape[2]).index_add_(0, position, errors[chosen])
        return cls(unique // rows, unique % rows, values, batch=batch, rows=rows)

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> Rows:
        place = torch.full((self.batch,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        sample = place[self.sample]
        kept = sample >= 0
        return Rows(sample[kept], self.row[kept], self.values[kept], batch=len(index), rows=self.rows)

    def materialise(self, index: slice | Tensor) -> Tensor:
        wanted = torch.arange(self.batch, device=self.sample.device)[index]
        part = self.take(wanted)
        dense = self.values.new_zeros(len(wanted), self.rows, self.values.shape[1])
        dense[part.sample, part.row] = part.values
        return dense.flatten(1)

    def max_norms(self) -> Tensor:
        each = max_norm(self.values)
        return each.new_zeros(self.batch).scatter_reduce_(0, self.sample, each, "amax")

    def squared_norms(self, bound: float | None = None) -> Tensor:
        values = self.values if bound is None else self.values.clamp(-bound, bound)
        each = squared_norm(values)
        return each.new_zeros(self.batch).index_add_(0, self.sample, each)

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        self._add(self.values, weights, out)

    def clamped_sum(self, bound: float, weights: Tensor, out: Tensor) -> None:
        self._add(self.values.clamp(-bound, bound), weights, out)

    def _add(self, values: Tensor, weights: Tensor, out: Tensor) -> None:
        out.zero_()
        weighted = values * weights[self.sample, None].to(values.dtype)
        out.view(self.rows, -1).index_add_(0, self.row, weighted)
