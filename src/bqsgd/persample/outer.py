"""Per-sample gradients of weight matrices: sums over positions of an outer product, g_b = sum_p e_bp a_bp^T.

Key: a inputs of the layer (patches of a convolution), e errors at its output, P positions, I and O their widths.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from bqsgd.persample.factors import Built, max_norm, micro_batch, squared_norm
from bqsgd.persample.kernels import Windows, clamped_outer_squares, clamped_outer_sum, usable


class Outer(Built):
    """What a linear layer and a convolution share. Coordinates are ordered (group, output, input)."""

    batch: int
    positions: int
    groups: int
    inputs: int
    outputs: int
    gather_cost: float
    """Multiplications that fetching one entry of a patch as float64 is worth (measured)."""

    @property
    def coordinates(self) -> int:  # type: ignore[override]
        return self.groups * self.outputs * self.inputs

    def patches(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, inputs)."""
        raise NotImplementedError

    def errors(self, index: slice | Tensor) -> Tensor:
        """(samples, groups, positions, outputs)."""
        raise NotImplementedError

    def windows(self) -> Windows | None:
        """The same for the CPU kernels, or None where they do not apply."""
        raise NotImplementedError

    def place(self, sums: Tensor, out: Tensor) -> None:
        """Copy what `windows` summed into the flat `out`."""
        raise NotImplementedError

    def materialise(self, index: slice | Tensor) -> Tensor:
        return (self.errors(index).transpose(2, 3) @ self.patches(index)).flatten(1)

    def max_norms(self) -> Tensor:
        windows = self.windows()
        return super().max_norms() if windows is None else windows.norms(squared=False)

    def squared_norms(self, bound: float | None = None) -> Tensor:
        gram = self.inputs * self.gather_cost + 3 * self.positions * (self.inputs + self.outputs)
        if bound is None and gram < self.inputs * self.outputs:
            return self._gram_norms()
        windows = self.windows()
        if windows is None:
            return super().squared_norms(bound)
        norms = windows.norms(squared=True, bound=float("inf") if bound is None else bound)
        for sample in (~torch.isfinite(norms)).nonzero().flatten():  # the float32 squares overflowed
            norms[sample] = squared_norm(self.materialise(sample.reshape(1)))[0]
        return norms

    def _gram_norms(self) -> Tensor:
        """||sum_p e_p a_p^T||^2 = sum over p, q of (a_p . a_q)(e_p . e_q); float64, because the terms cancel."""
        size = micro_batch(2 * self.groups * self.positions * (self.inputs + self.outputs + self.positions))
        norms = []
        for start in range(0, self.batch, size):
            a, e = (part(slice(start, start + size)).double() for part in (self.patches, self.errors))
            norms.append(((a @ a.transpose(2, 3)) * (e @ e.transpose(2, 3))).sum(dim=(1, 2, 3)).clamp_(min=0))
        return torch.cat(norms)

    def clamped_sum(self, bound: float, weights: Tensor, out: Tensor) -> None:
        windows = self.windows()
        if windows is None:
            super().clamped_sum(bound, weights, out)
        else:
            self.place(windows.clamped_sum(bound, weights), out)


class LinearWeight(Outer):
    """a (batch, positions, inputs) and e (batch, positions, outputs); one position unless it runs over sequences."""

    groups, gather_cost = 1, 50.0

    def __init__(self, a: Tensor, e: Tensor) -> None:
        self.a, self.e = a, e
        self.batch, self.positions, self.inputs, self.outputs = *a.shape, e.shape[2]

    def bounds(self) -> Tensor:
        return max_norm(self.a) * max_norm(self.e) * self.positions

    def take(self, index: Tensor) -> LinearWeight:
        return LinearWeight(self.a[index], self.e[index])

    def patches(self, index: slice | Tensor) -> Tensor:
        return self.a[index].unsqueeze(1)

    def errors(self, index: slice | Tensor) -> Tensor:
        return self.e[index].unsqueeze(1)

    def windows(self) -> Windows | None:
        if not usable(self.a):
            return None
        base = np.arange(self.positions) * self.outputs
        return Windows(self.e.flatten(1), base, np.arange(self.outputs), self.a.unsqueeze(2))

    def place(self, sums: Tensor, out: Tensor) -> None:
        out.view(self.outputs, self.inputs).copy_(sums[0])

    def max_norms(self) -> Tensor:
        return max_norm(self.a) * max_norm(self.e) if self.positions == 1 else super().max_norms()

    def squared_norms(self, bound: float | None = None) -> Tensor:
        if self.positions == 1 and bound is None:
            return squared_norm(self.a) * squared_norm(self.e)
        if self.positions == 1 and bound is not None and usable(self.a):
            return clamped_outer_squares(self.a[:, 0], self.e[:, 0], bound)
        return super().squared_norms(bound)

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        e = (self.e * weights.to(self.e.dtype)[:, None, None]).flatten(0, 1)
        torch.mm(e.t(), self.a.flatten(0, 1), out=out.view(self.outputs, self.inputs))

    def clamped_sum(self, bound: float, weights: Tensor, out: Tensor) -> None:
        if self.positions == 1 and usable(self.a):
            matrix = out.view(self.outputs, self.inputs)
            clamped_outer_sum(self.a[:, 0], self.e[:, 0], bound, weights.to(self.a.dtype), matrix)
        else:
            super().clamped_sum(bound, weights, out)


class ConvWeight(Outer):
    """A convolution of padded inputs a (batch, channels, *space) with errors e (batch, outputs, *positions)."""

    gather_cost = 340.0

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

    def bounds(self) -> Tensor:
        return max_norm(self.a) * max_norm(self.e) * self.positions

    def take(self, index: Tensor) -> ConvWeight:
        geometry = {"kernel": self.kernel, "stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        return ConvWeight(self.a[index], self.e[index], **geometry)  # type: ignore[arg-type]

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

    def windows(self) -> Windows | None:
        if not usable(self.a):
            return None
        base, offsets, group_stride = self.addresses
        lanes = self.e.view(self.batch, self.groups, self.outputs, self.positions).permute(0, 3, 1, 2)
        return Windows(self.a.flatten(1), base, offsets, lanes, group_stride)

    def place(self, sums: Tensor, out: Tensor) -> None:
        out.view(self.groups, self.outputs, self.inputs).copy_(sums.transpose(1, 2))

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        if usable(self.a):  # twice as fast as torch's own weight gradient at these sizes
            self.clamped_sum(float("inf"), weights, out)
            return
        space, shape = len(self.kernel), (self.e.shape[1], self.a.shape[1] // self.groups, *self.kernel)
        e = self.e * weights.to(self.e.dtype).view(-1, *[1] * (1 + space))
        gradients = torch.ops.aten.convolution_backward(
            e,
            self.a,
            self.a.new_empty(1).expand(shape),
            None,
            self.stride,
            [0] * space,
            self.dilation,
            False,
            [0] * space,
            self.groups,
            [False, True, False],
        )
        out.copy_(gradients[1].flatten())
