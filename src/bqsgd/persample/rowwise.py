"""Operations that treat a row of a batch alike wherever it stands: inside `RowWise` a model has no others.

torch's own kernels may round a row of a product otherwise in another place of the batch. `RowWise` runs below autograd,
sees every operation of a forward and of its backward, and lets pass only
- those that move values, select them, or are one IEEE operation an entry, as torch has them;
- products, convolutions, tanh and mean pooling, by the compiled loops of `_kernels.rowwise`.
Anything else raises `NotRowWise`, among it whatever could let values decide what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bqsgd.persample._kernels import rowwise as kernels
from bqsgd.persample._kernels.loops import usable

aten = torch.ops.aten


class NotRowWise(Exception):
    """An operation outside the list, by name."""


class RowWise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation inside is row-wise, or raises."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would otherwise load its compiler, two seconds, to switch it off."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in EXACT:
            return func(*args, **named)
        if func in SUMS and named.get("alpha", 1) == 1:
            return func(*args, **named)
        if func in COMPILED:
            return COMPILED[func](*args, **named)
        raise NotRowWise(f"{func} is not a row-wise operation")


EXACT = {
    # move values
    aten.alias.default, aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten.detach.default,
    aten.expand.default, aten.permute.default, aten.select.int, aten.select_backward.default, aten.slice.Tensor,
    aten.slice_backward.default, aten.split.Tensor, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default,
    # select among values
    aten.relu.default, aten.relu_.default, aten.threshold_backward.default,
    aten.max_pool2d_with_indices.default,
    # one IEEE operation an entry; the backward of pooling adds in the order of the plane
    aten.mul.Tensor, aten.mul_.Tensor, aten.neg.default, aten.max_pool2d_with_indices_backward.default,
    # the mask of a dropout, drawn for every entry apart
    aten.empty_like.default, aten.bernoulli_.float, aten.div_.Scalar,
}  # fmt: skip
SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}
"""One operation an entry unless a factor is given."""


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    if not all(usable(tensor) for tensor in tensors):
        raise NotRowWise("the compiled loops take float32 on the CPU")
    return [tensor.detach().contiguous().numpy() for tensor in tensors]


def _mm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.shape[1] != w.shape[0]:
        raise RuntimeError(f"matrices of {tuple(x.shape)} and {tuple(w.shape)} cannot be multiplied")
    across = w.stride(0) == 1 and w.stride(1) != 1
    left, right = _arrays(x, w.t() if across else w)
    return torch.from_numpy(
        kernels.product(left, right, across=across, bias=None if bias is None else _arrays(bias)[0])
    )


def _addmm(bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() != 1 or bias.numel() != w.shape[1] or beta != 1 or alpha != 1:
        raise NotRowWise("addmm with something else than a bias")
    return _mm(x, w, bias)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: Sequence[int],
    before: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Output o of place p is the sum over taps i of x[p * stride + i * dilation - before] weight[o, i].

    x (batch, groups * channels, *space) is zero outside, weight (groups, outputs, channels, *kernel). The points of x
    that are `stride` apart become planes of their own, so that neighbouring places read neighbouring points.
    """
    groups, outputs, channels, *kernel = weight.shape
    axes = range(len(kernel))
    planes = [size[axis] + (kernel[axis] - 1) * dilation[axis] // stride[axis] for axis in axes]
    batch, count, area = len(x), int(np.prod(stride)), int(np.prod(planes))
    sample = x.shape[1] * count * area
    values = x.new_zeros(batch * sample + kernels.WIDTH)
    spread = values[: batch * sample].view(batch, x.shape[1], *stride, *planes)
    order = [0, 1, *(place for axis in axes for place in (2 + len(kernel) + axis, 2 + axis))]
    inside: list[Any] = [...]
    taken: list[Any] = [...]
    for axis in axes:
        reach = planes[axis] * stride[axis]
        inside.append(slice(max(0, before[axis]), max(0, min(reach, before[axis] + x.shape[2 + axis]))))
        taken.append(slice(max(0, -before[axis]), max(0, reach - before[axis])))
    if count == 1:
        spread.view(batch, x.shape[1], *planes)[tuple(inside)] = x[tuple(taken)]
    else:
        padded = x.new_zeros(batch, x.shape[1], *(planes[axis] * stride[axis] for axis in axes))
        padded[tuple(inside)] = x[tuple(taken)]
        split = [side for axis in axes for side in (planes[axis], stride[axis])]
        spread.permute(order).copy_(padded.view(batch, x.shape[1], *split))
    steps = [int(np.prod(planes[axis + 1 :])) for axis in axes]
    taps = np.arange(channels) * (count * area)
    for axis in axes:
        away = np.arange(kernel[axis]) * dilation[axis]
        own = away % stride[axis] * (int(np.prod(stride[axis + 1 :])) * area) + away // stride[axis] * steps[axis]
        taps = (taps[:, None] + own).reshape(-1)
    lines = np.zeros(1, dtype=np.int64)
    for axis in axes[:-1]:
        lines = (lines[:, None] + np.arange(size[axis]) * steps[axis]).reshape(-1)
    flat, weights = _arrays(values, weight.reshape(groups, outputs, -1))
    shift = None if bias is None else _arrays(bias)[0]
    found = kernels.convolution(flat, batch, channels * count * area, taps, weights, shift, lines, size[-1])
    return torch.from_numpy(found).view(batch, groups * outputs, *size)


def _on_each_axis(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * axes if len(values) == 1 else list(values)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    if transposed:
        raise NotRowWise("a transposed convolution")
    kernel = weight.shape[2:]
    stride, padding, dilation = (_on_each_axis(given, len(kernel)) for given in (stride, padding, dilation))
    size = [
        (x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(len(kernel))
    ]
    return _convolve(x, weight.reshape(groups, -1, *weight.shape[1:]), bias, size, padding, stride, dilation)


def _convolution_backward(
    error: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, None, None]:
    """The error at the input: a convolution of the errors, spread out by the stride, with the mirrored kernel."""
    if transposed or any(output_mask[1:]):
        raise NotRowWise("a gradient of the weights, or a transposed convolution")
    if not output_mask[0]:
        return None, None, None
    kernel, axes = weight.shape[2:], range(weight.dim() - 2)
    stride, padding, dilation = (_on_each_axis(given, len(kernel)) for given in (stride, padding, dilation))
    if any(step > 1 for step in stride):
        shape = [(error.shape[2 + axis] - 1) * stride[axis] + 1 for axis in axes]
        sparse = error.new_zeros(*error.shape[:2], *shape)
        spread: list[Any] = [..., *(slice(None, None, step) for step in stride)]
        sparse[tuple(spread)] = error
        error = sparse
    before = [dilation[axis] * (kernel[axis] - 1) - padding[axis] for axis in axes]
    mirrored = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flip([3 + axis for axis in axes])
    return _convolve(error, mirrored, None, x.shape[2:], before, [1 for _ in axes], dilation), None, None


def _tanh(x: Tensor) -> Tensor:
    return torch.from_numpy(kernels.tanh(_arrays(x)[0]))


def _tanh_(x: Tensor) -> Tensor:
    return x.copy_(_tanh(x))


def _tanh_backward(error: Tensor, output: Tensor) -> Tensor:
    return torch.from_numpy(kernels.tanh_backward(*_arrays(error, output)))


def _pool_geometry(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    divisor: int | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    if any(padding) or ceil_mode or divisor is not None or x.dim() != 4:
        raise NotRowWise("mean pooling beyond windows that lie inside")
    both = _on_each_axis(kernel, 2)
    steps = _on_each_axis(stride, 2) if stride else both
    return (both[0], both[1]), (steps[0], steps[1])


def _avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    both, steps = _pool_geometry(x, kernel, stride, padding, ceil_mode, divisor_override)
    (planes,) = _arrays(x.flatten(0, 1))
    found = torch.from_numpy(kernels.mean_pool(planes, both, steps))
    return found.view(*x.shape[:2], *found.shape[1:])


def _avg_pool2d_backward(
    error: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    both, steps = _pool_geometry(x, kernel, stride, padding, ceil_mode, divisor_override)
    (errors,) = _arrays(error.flatten(0, 1))
    found = kernels.mean_pool_backward(errors, (len(errors), *x.shape[2:]), both, steps)
    return torch.from_numpy(found).view(x.shape)


COMPILED: dict[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.tanh.default: _tanh,
    aten.tanh_.default: _tanh_,
    aten.tanh_backward.default: _tanh_backward,
    aten.avg_pool2d.default: _avg_pool2d,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
}
