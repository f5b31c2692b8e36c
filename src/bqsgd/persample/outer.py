"""Per-sample gradients of weight matrices: sums over positions of an outer product, g_b = sum_p e_bp a_bp^T.

Key: a inputs of the layer (patches of a convolution), e errors at its output, P positions, I and O their widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bqsgd.persample._kernels.loops import Windows, clamped_outer_squares, outer_steps, squared_norms, usable
from bqsgd.persample.factors import Built, Dense, Factor, max_norm, rows_of
from bqsgd.persample.grid import Grid

KEPT_SHARE = 4
"""Gradients are kept instead of what they are made of, unless they are more than so many times as large."""


class Outer(Built):
    """What a linear layer and a convolution share. Coordinates are ordered (group, output, input).

    Norms and sums read the same gradients, bit for bit: a norm of anything else would not bound what is summed where
    the positions cancel.
    """

    a: Tensor
    e: Tensor
    batch: int
    positions: int
    groups: int
    inputs: int
    outputs: int

    @property
    def coordinates(self) -> int:  # type: ignore[override]
        return self.groups * self.outputs * self.inputs

    @cached_property
    def windows(self) -> Windows | None:
        """The same for the CPU kernels, or None where they do not apply."""
        raise NotImplementedError

    def patches(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, inputs)."""
        raise NotImplementedError

    def errors(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, outputs)."""
        raise NotImplementedError

    def bounds(self) -> Tensor:
        return max_norm(self.a) * max_norm(self.e) * self.positions

    def materialise(self, index: slice | Tensor) -> Tensor:
        return (self.errors(index).transpose(2, 3) @ self.patches(index)).flatten(1)

    def kept(self, index: Tensor) -> Factor:
        chosen = self if len(index) == self.batch else self.take(index)  # a full pass is in order
        windows = None if self.positions == 1 else chosen.windows
        if windows is None or windows.size > KEPT_SHARE * (self.a[0].numel() + self.e[0].numel()):
            return self.take(index)
        return chosen._gradients(slice(0, chosen.batch))

    def take(self, index: Tensor) -> Outer:
        raise NotImplementedError

    def _gradients(self, part: slice) -> Dense:
        if self.windows is None:
            return super()._gradients(part)
        return Dense(self.windows.gradients(part), self.order(self.windows))

    def order(self, windows: Windows) -> Tensor:
        """Where each coordinate lies among those of `windows`."""
        raise NotImplementedError


class LinearWeight(Outer):
    """a (batch, positions, inputs) and e (batch, positions, outputs); one position unless it runs over sequences."""

    groups = 1

    def __init__(self, a: Tensor, e: Tensor) -> None:
        self.a, self.e = a, e
        self.batch, self.positions, self.inputs, self.outputs = *a.shape, e.shape[2]

    def take(self, index: Tensor) -> LinearWeight:
        return LinearWeight(rows_of(self.a, index), rows_of(self.e, index))

    def joined(self, others: Sequence[Any]) -> LinearWeight:
        every = [self, *others]
        return LinearWeight(torch.cat([part.a for part in every]), torch.cat([part.e for part in every]))

    def patches(self, index: slice | Tensor) -> Tensor:
        return self.a[index].unsqueeze(1)

    def errors(self, index: slice | Tensor) -> Tensor:
        return self.e[index].unsqueeze(1)

    @cached_property
    def windows(self) -> Windows | None:
        if not usable(self.a):
            return None
        base = np.arange(self.positions) * self.outputs
        return Windows(self.e.flatten(1), base, np.arange(self.outputs), self.a.unsqueeze(2))

    def order(self, windows: Windows) -> Tensor:
        return windows.places().flatten()

    def materialise(self, index: slice | Tensor) -> Tensor:
        if self.positions == 1:  # one product an entry
            return (self.e[index].transpose(1, 2) * self.a[index]).flatten(1)
        return super().materialise(index)

    def max_norms(self) -> Tensor:
        return max_norm(self.a) * max_norm(self.e) if self.positions == 1 else super().max_norms()

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if self.positions > 1:
            return super().squared_norms(bound)
        if bound is None:
            return squared_norms(self.a[:, 0]) * squared_norms(self.e[:, 0])
        return clamped_outer_squares(self.a[:, 0], self.e[:, 0], bound)

    def steps(self, grid: Grid, weights: Tensor, out: Tensor, *, bound: float | None) -> None:
        if self.positions == 1 and usable(self.a):
            matrix = out.view(self.outputs, self.inputs)
            outer_steps(self.a[:, 0], self.e[:, 0], grid, weights, matrix, bound=bound)
        else:
            super().steps(grid, weights, out, bound=bound)


class ConvWeight(Outer):
    """A convolution of padded inputs a (batch, channels, *space) with errors e (batch, outputs, *positions)."""

    def __init__(
        self,
        a: Tensor,
        e: Tensor,
        *,
        kernel: tuple[int, ...],
        stride: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> None:
        self.a, self.e = a.contiguous(), e.contiguous()
        self.kernel, self.stride, self.dilation, self.groups = kernel, stride, dilation, groups
        self.batch, self.positions = len(a), int(np.prod(e.shape[2:]))
        self.inputs, self.outputs = a.shape[1] // groups * int(np.prod(kernel)), e.shape[1] // groups

    def _of(self, a: Tensor, e: Tensor) -> ConvWeight:
        """Other samples of the same convolution."""
        geometry = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        return ConvWeight(a, e, **geometry)  # type: ignore[arg-type]

    def take(self, index: Tensor) -> ConvWeight:
        return self._of(rows_of(self.a, index), rows_of(self.e, index))

    def joined(self, others: Sequence[Any]) -> ConvWeight:
        every = [self, *others]
        return self._of(torch.cat([part.a for part in every]), torch.cat([part.e for part in every]))

    @cached_property
    def addresses(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Where a patch lies in a flat sample: base of each position, offset of each input, stride of a group."""
        space = self.a.shape[2:]
        steps = [int(np.prod(space[axis + 1 :])) for axis in range(len(space))]
        base, taps = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        for axis, step in enumerate(steps):
            base = (base[:, None] + np.arange(self.e.shape[2 + axis]) * (self.stride[axis] * step)).reshape(-1)
            taps = (taps[:, None] + np.arange(self.kernel[axis]) * (self.dilation[axis] * step)).reshape(-1)
        channels, area = self.a.shape[1] // self.groups, int(np.prod(space))
        offsets = (np.arange(channels)[:, None] * area + taps).reshape(-1)
        return base, offsets, channels * area

    def patches(self, index: slice | Tensor) -> Tensor:
        base, offsets, group_stride = self.addresses
        where = np.arange(self.groups)[:, None, None] * group_stride + base[:, None] + offsets
        return self.a[index].flatten(1)[:, torch.from_numpy(where).to(self.a.device)]

    def errors(self, index: slice | Tensor) -> Tensor:
        return self.e[index].reshape(-1, self.groups, self.outputs, self.positions).transpose(2, 3)

    @cached_property
    def windows(self) -> Windows | None:
        if not usable(self.a):
            return None
        base, offsets, group_stride = self.addresses
        lanes = self.e.view(self.batch, self.groups, self.outputs, self.positions).permute(0, 3, 1, 2)
        return Windows(self.a.flatten(1), base, offsets, lanes, group_stride)

    def order(self, windows: Windows) -> Tensor:
        return windows.places().transpose(1, 2).flatten()
