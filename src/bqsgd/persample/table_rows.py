"""Per-sample gradients of an embedding table: only the rows a sample looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bqsgd.persample._kernels import loops as kernels
from bqsgd.persample.factors import Built, max_norm
from bqsgd.persample.grid import Grid


class TableRows(Built):
    """Row `row[n]` of the table of sample `sample[n]` has the gradient `values[n]`; each (sample, row) occurs once."""

    def __init__(self, sample: Tensor, row: Tensor, values: Tensor, *, batch: int, rows: int) -> None:
        self.sample, self.row, self.values = sample, row, values
        self.batch, self.rows, self.coordinates = batch, rows, rows * values.shape[1]

    @classmethod
    def of_lookups(cls, index: Tensor, errors: Tensor, *, rows: int, padding: int | None) -> TableRows:
        """From (batch, positions) indices and (batch, positions, width) errors; repeated look-ups are added up, one
        position after another."""
        batch = len(index)
        key = torch.arange(batch, device=index.device)[:, None] * rows + index
        chosen = torch.ones_like(index, dtype=torch.bool) if padding is None else index != padding
        unique, place = torch.unique(key[chosen], return_inverse=True)
        values = np.zeros((len(unique), errors.shape[2]), errors.cpu().numpy().dtype)
        np.add.at(values, place.cpu().numpy(), errors[chosen].cpu().numpy())  # in order, whatever else is added
        summed = torch.from_numpy(values).to(errors.device)
        return cls(unique // rows, unique % rows, summed, batch=batch, rows=rows)

    def bounds(self) -> Tensor:
        return self.max_norms()

    def take(self, index: Tensor) -> TableRows:
        place = torch.full((self.batch,), -1, device=index.device)
        place[index] = torch.arange(len(index), device=index.device)
        sample = place[self.sample]
        kept = sample >= 0
        return TableRows(sample[kept], self.row[kept], self.values[kept], batch=len(index), rows=self.rows)

    def joined(self, others: Sequence[Any]) -> TableRows:
        every = [self, *others]
        before = np.cumsum([0, *(part.batch for part in every)])
        sample = torch.cat([part.sample + int(n) for part, n in zip(every, before, strict=False)])
        row, values = torch.cat([part.row for part in every]), torch.cat([part.values for part in every])
        return TableRows(sample, row, values, batch=int(before[-1]), rows=self.rows)

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
        total = np.zeros(self.batch)
        np.add.at(total, self.sample.cpu().numpy(), kernels.squared_norms(self.values, bound).numpy())
        return torch.from_numpy(total)

    def steps(self, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
        out.zero_()
        rounded = kernels.in_steps(self.values, grid, weights[self.sample.cpu()], bound=bound)
        out.view(self.rows, -1).index_add_(0, self.row.cpu(), rounded)  # whole numbers: exact in any order
