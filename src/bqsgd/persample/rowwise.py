"""A pass in which every row goes through the same operations: the mode under which a model's samples may be packed.

`RowWise` sits below autograd and sees every operation of a forward and a backward. Each is passed on if it moves or
selects values or is one IEEE operation an entry, and is run by a loop of our own (`_kernels.rowwise`) if it is a
product, a convolution, a pooling or tanh. So every row of its results is one fixed function of the same row of its
inputs, whatever its place and whatever stands in the others: claim 8 of `docs/accounting.md` with nothing taken from
torch's kernels. Everything else raises `NotRowWise`, among it whatever could let values decide what is computed.

Results have the samples last in memory, so that the next loop finds neighbouring samples beside each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bqsgd.persample._kernels import rowwise as kernels
from bqsgd.persample._kernels.loops import samples_last, usable

aten = torch.ops.aten


class NotRowWise(Exception):
    """An operation outside the list, by name."""


class Unseeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation inside is run as it is; one that hands values to the program raises `NotRowWise`.

    A program that looks (`if mask.all()`, `x[:, :int(lengths.max())]`, `x[:, mask.any(0)]`) lets one sample decide what
    is computed for all.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would otherwise load its compiler, two seconds, to switch it off."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags or _has_a_shape_of_values(func, args):
            raise NotRowWise(f"{func} looks at values of the whole batch")
        return func(*args, **(kwargs or {}))


def _has_a_shape_of_values(func: Any, args: Sequence[Any]) -> bool:
    """Whether values decide the shape of what comes out, as with a mask for an index; whole numbers for one do not."""
    if func is aten.index.Tensor:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    return torch.Tag.dynamic_output_shape in func.tags


@dataclass(frozen=True)
class Pass:
    """What is known of a pass: how many rows it has, in how many of them samples stand, and which memory is weights.

    Rows without a sample are not computed: what comes out for them is zeros, or what follows from zeros.
    """

    rows: int | None = None
    live: int | None = None
    weights: Collection[int] = ()

    def counted(self, samples: int) -> int:
        """How many of so many rows have to be computed."""
        return samples if self.live is None or samples != self.rows else self.live

    def is_weight(self, values: Tensor) -> bool:
        return values.untyped_storage().data_ptr() in self.weights


class RowWise(Unseeing):
    """Every operation inside is row-wise, or raises: none of the list looks at values."""

    def __init__(self, known: Pass | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pass = known or Pass()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in VIEWS:
            try:
                return func(*args, **named)
            except RuntimeError as error:  # of rows together with something else, which lie apart
                raise NotRowWise(f"{func}: {error}") from error
        if func in EXACT:
            return func(*args, **named)
        if func in SUMS and named.get("alpha", 1) == 1:
            return func(*args, **named)
        if func in COMPILED:
            return COMPILED[func](self._pass, *args, **named)
        raise NotRowWise(f"{func} is not a row-wise operation")


EXACT = {
    # move values
    aten.alias.default, aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten.detach.default,
    aten.expand.default, aten.permute.default, aten.select.int, aten.select_backward.default, aten.slice.Tensor,
    aten.slice_backward.default, aten.split.Tensor, aten.squeeze.dim, aten.t.default, aten.transpose.int,
    aten.unsqueeze.default, aten._unsafe_view.default, aten._reshape_alias.default,
    # select among values
    aten.relu.default, aten.relu_.default, aten.threshold_backward.default,
    # one IEEE operation an entry
    aten.mul.Tensor, aten.mul_.Tensor, aten.neg.default,
    # the mask of a dropout, drawn for every entry apart
    aten.empty_like.default, aten.bernoulli_.float, aten.div_.Scalar,
}  # fmt: skip
VIEWS = {aten.view.default}
SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}
"""One operation an entry unless a factor is given."""


def _check(*tensors: Tensor) -> None:
    if not all(usable(tensor) for tensor in tensors):
        raise NotRowWise("the compiled loops take float32 on the CPU")


def _samples_last(x: Tensor) -> np.ndarray:
    """(..., rows) of x (rows, ...), contiguous; a copy only where it does not lie so already."""
    _check(x)
    return x.detach().movedim(0, -1).contiguous().numpy()


def _rows_first(found: np.ndarray, rows: int) -> Tensor:
    """The tensor (rows, ...) of (..., rows and what fills up the last vector)."""
    return torch.from_numpy(found)[..., :rows].movedim(-1, 0)


def _samples(known: Pass, x: Tensor) -> kernels.Samples:
    """x (rows, ...) as (entries, rows)."""
    _check(x)
    flat, wide = samples_last(x)
    return kernels.Samples(flat, wide, known.counted(len(x)))


def _mm(known: Pass, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w by the loop for weights times samples. Autograd also multiplies weights by errors that are transposed."""
    if x.shape[1] != w.shape[0]:
        raise RuntimeError(f"matrices of {tuple(x.shape)} and {tuple(w.shape)} cannot be multiplied")
    _check(x, w)
    if known.is_weight(x) and not known.is_weight(w) and bias is None:
        return _mm(known, w.t(), x.t()).t()
    shift = None if bias is None else bias.detach().numpy()
    found = kernels.product(w.detach().t().numpy(), _samples(known, x), shift, samples=len(x))
    return _rows_first(found, len(x))


def _addmm(known: Pass, bias: Tensor, x: Tensor, w: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() != 1 or bias.numel() != w.shape[1] or beta != 1 or alpha != 1:
        raise NotRowWise("addmm with something else than a bias")
    _check(bias)
    return _mm(known, x, w, bias)


def _convolve(
    known: Pass, x: Tensor, read: kernels.Reading, weight: Tensor, bias: Tensor | None, size: Sequence[int]
) -> Tensor:
    """x (rows, channels, *space) and weight (groups, outputs, channels a group, *kernel)."""
    _check(x, weight, *([] if bias is None else [bias]))
    weights = weight.detach().flatten(2).contiguous().numpy()
    shift = None if bias is None else bias.detach().numpy()
    samples = _samples(known, x)
    found = kernels.convolution(samples, x[0].numel(), read, weights, shift, samples=len(x))
    return _rows_first(found.reshape(-1, *size, found.shape[1]), len(x))


def _on_each_axis(values: Sequence[int], axes: int) -> tuple[int, ...]:
    return tuple(values) * axes if len(values) == 1 else tuple(values)


def _convolution(
    known: Pass,
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
    kernel, space = tuple(weight.shape[2:]), tuple(x.shape[2:])
    stride, padding, dilation = (_on_each_axis(given, len(kernel)) for given in (stride, padding, dilation))
    size = tuple(
        (space[axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(len(kernel))
    )
    channels = weight.shape[1]
    read = kernels.reading(channels, space, kernel, size, stride, padding, dilation, False)
    return _convolve(known, x, read, weight.reshape(groups, -1, channels, *kernel), bias, size)


def _convolution_backward(
    known: Pass,
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
    """The error at the input: every point reads the errors of the positions that read it."""
    if transposed or any(output_mask[1:]):
        raise NotRowWise("a gradient of the weights, or a transposed convolution")
    if not output_mask[0]:
        return None, None, None
    kernel, size = tuple(weight.shape[2:]), tuple(x.shape[2:])
    stride, padding, dilation = (_on_each_axis(given, len(kernel)) for given in (stride, padding, dilation))
    read = kernels.reading(
        error.shape[1] // groups, tuple(error.shape[2:]), kernel, size, stride, padding, dilation, True
    )
    turned = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    return _convolve(known, error, read, turned, None, size), None, None


def _flat_alike(*tensors: Tensor) -> list[np.ndarray]:
    """The values of tensors of one shape, all in the order in which the last of them lies."""
    _check(*tensors)
    last = tensors[-1].detach()
    if last.is_contiguous():
        return [tensor.detach().contiguous().numpy() for tensor in tensors]
    return [_samples_last(tensor) for tensor in tensors]


def _unflattened(found: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(found) if like.is_contiguous() else torch.from_numpy(found).movedim(-1, 0)


def _tanh(known: Pass, x: Tensor) -> Tensor:
    return _unflattened(kernels.tanh(*_flat_alike(x)), x)


def _tanh_(known: Pass, x: Tensor) -> Tensor:
    return x.copy_(_tanh(known, x))


def _tanh_backward(known: Pass, error: Tensor, output: Tensor) -> Tensor:
    return _unflattened(kernels.tanh_backward(*_flat_alike(error, output)), output)


Pair = tuple[int, int]


def _pool_geometry(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool
) -> tuple[Pair, Pair] | None:
    """Windows and steps of a pooling whose windows lie inside the plane; None for any other."""
    if any(padding) or ceil_mode or x.dim() != 4:
        return None
    both = _on_each_axis(kernel, 2)
    steps = _on_each_axis(stride, 2) if stride else both
    return (both[0], both[1]), (steps[0], steps[1])


def _avg_pool2d(
    known: Pass,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    geometry = _pool_geometry(x, kernel, stride, padding, ceil_mode)
    if geometry is None or divisor_override is not None:
        raise NotRowWise("mean pooling beyond windows that lie inside")
    return _rows_first(kernels.mean_pool(_samples_last(x), *geometry), len(x))


def _avg_pool2d_backward(
    known: Pass,
    error: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    geometry = _pool_geometry(x, kernel, stride, padding, ceil_mode)
    if geometry is None or divisor_override is not None:
        raise NotRowWise("mean pooling beyond windows that lie inside")
    shape = (*x.shape[1:], len(x))
    return _rows_first(kernels.mean_pool_backward(_samples_last(error), shape, *geometry), len(x))


def _max_pool2d(
    known: Pass,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """With the place of each maximum in its window; torch, which selects values as well, has other kinds of windows."""
    geometry = _pool_geometry(x, kernel, stride, padding, ceil_mode) if set(dilation) == {1} else None
    if geometry is None:
        found: tuple[Tensor, Tensor] = aten.max_pool2d_with_indices.default(
            x, kernel, stride, padding, dilation, ceil_mode
        )
        return found
    out, chosen = kernels.max_pool(_samples_last(x), *geometry)
    return _rows_first(out, len(x)), _rows_first(chosen, len(x))


def _max_pool2d_backward(
    known: Pass,
    error: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    chosen: Tensor,
) -> Tensor:
    geometry = _pool_geometry(x, kernel, stride, padding, ceil_mode) if set(dilation) == {1} else None
    if geometry is None:  # adds in the order of the plane
        found: Tensor = aten.max_pool2d_with_indices_backward.default(
            error, x, kernel, stride, padding, dilation, ceil_mode, chosen
        )
        return found
    places = chosen.movedim(0, -1).contiguous().numpy()
    shape = (*x.shape[1:], len(x))
    return _rows_first(kernels.max_pool_backward(_samples_last(error), places, shape, *geometry), len(x))


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
    aten.max_pool2d_with_indices.default: _max_pool2d,
    aten.max_pool2d_with_indices_backward.default: _max_pool2d_backward,
}
