"""The rules of lanes: what each operation of one sample's program does to all lanes alike.

A value of the program with the shape S is an array of the shape S + (lanes,): entry i of sample b is at [i, b]; a value
that is the same for all samples has one lane and is broadcast. A rule moves values, is one IEEE operation an entry, or
is a loop of `_kernels.lanes`, in which the result of a lane is a fixed sequence of operations on that lane: claim 8 (5)
of `docs/accounting.md` is a statement about this file. What a rule cannot take it refuses by shape and type alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bqsgd._src.persample._kernels import lanes as kernels
from bqsgd._src.persample._kernels.contiguous import rows_product
from bqsgd._src.persample._kernels.pairs import in_lanes
from bqsgd._src.runtime.vectors import LANES

aten = torch.ops.aten
Array = Any
"""An array of numpy with the lanes last; numpy's own types know nothing of what its operators return."""
FEW_OUTPUTS = 64
"""A layer with at most so many outputs reads contiguous inputs as they lie; with more, the transposed ones pay."""
ONE = np.float32(1)


class NotLanes(Exception):
    """An operation without a rule here, by name."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """A sample's tensor as it was given, (samples, entries), for loops that read contiguous rows."""

    rows: Tensor
    shape: tuple[int, ...]
    lanes: int

    def array(self) -> Array:
        """The same in lanes; lanes without a sample hold zeros."""
        if self.rows.dtype == torch.float32:
            spread = in_lanes(self.rows, self.lanes).movedim(0, -1).numpy()
        else:
            spread = np.zeros((self.rows.shape[1], self.lanes), self.rows.numpy().dtype)
            spread[:, : len(self.rows)] = self.rows.numpy().T
        return spread.reshape(*self.shape, self.lanes)


def array_of(value: Any) -> Any:
    """The array of a leaf; anything else as it is."""
    if isinstance(value, Leaf):
        return value.array()
    return [array_of(each) for each in value] if isinstance(value, list) else value


def _dtype(dtype: torch.dtype) -> Any:
    if dtype not in (torch.float32, torch.int64, torch.int32, torch.bool):
        raise NotLanes(f"the loops take float32, not {dtype}")
    return torch.empty(0, dtype=dtype).numpy().dtype


# Moving values.


def _axis(x: Array, dim: int) -> int:
    return dim if dim >= 0 else dim + x.ndim - 1


def _at(x: Array, dim: int, index: Any) -> Any:
    return (slice(None),) * _axis(x, dim) + (index,)


def _view(x: Any, shape: Sequence[int]) -> Any:
    return Leaf(x.rows, tuple(shape), x.lanes) if isinstance(x, Leaf) else x.reshape(*shape, x.shape[-1])


def _squeeze(x: Array, dims: int | Sequence[int]) -> Array:
    axes = [_axis(x, dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    return x.squeeze(tuple(axis for axis in axes if x.shape[axis] == 1))


def _unsqueeze(x: Array, dim: int) -> Array:
    return np.expand_dims(x, dim if dim >= 0 else dim + x.ndim)


def _expand(x: Array, sizes: Sequence[int], implicit: bool = False) -> Array:
    ahead = len(sizes) - (x.ndim - 1)
    own = [x.shape[n - ahead] if size == -1 else size for n, size in enumerate(sizes)]
    return np.broadcast_to(x, (*own, x.shape[-1]))


def _placed(error: Array, sizes: Sequence[int], dim: int, index: Any) -> Array:
    """Zeros of these sizes with `error` at an index."""
    out = np.zeros((*sizes, error.shape[-1]), error.dtype)
    out[_at(out, dim, index)] = error
    return out


def _cat(parts: list[Array], dim: int = 0) -> Array:
    lanes = max(part.shape[-1] for part in parts)
    spread = [part if part.shape[-1] == lanes else np.broadcast_to(part, (*part.shape[:-1], lanes)) for part in parts]
    return np.concatenate(spread, _axis(parts[0], dim))


def _pad(x: Array, sides: Sequence[int], value: float = 0) -> Array:
    if min(sides) < 0:
        raise NotLanes("padding with negative sides")
    each = [(0, 0)] * (x.ndim - 1 - len(sides) // 2) + list(zip(sides[::2], sides[1::2], strict=True))[::-1]
    return np.pad(x, [*each, (0, 0)], constant_values=value)


def _full(x: Array, sizes: Sequence[int] | None, value: float, dtype: Any = None, **_: Any) -> Array:
    """As many lanes as `x` has where it has the shape of `x`: what is drawn in its place is drawn for every lane."""
    kind = x.dtype if dtype is None else _dtype(dtype)
    if sizes is None:
        return np.broadcast_to(np.asarray(value, kind), x.shape)
    return np.full((*sizes, 1), value, kind)


# One IEEE operation an entry.


def _ranked(*values: Array) -> Sequence[Array]:
    """Arrays with the same number of dimensions of a sample, so that broadcasting lines up; numbers stay numbers."""
    ranks = [value.ndim for value in values if isinstance(value, np.ndarray)]
    most = max(ranks)
    if most == min(ranks):
        return values
    return [v.reshape((1,) * (most - v.ndim) + v.shape) if isinstance(v, np.ndarray) else v for v in values]


def _binary(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(x: Any, y: Any, *, alpha: float = 1, rounding_mode: str | None = None) -> Any:
        if alpha != 1 or rounding_mode is not None:
            raise NotLanes("a sum with a factor, or a division that rounds")
        found = function(*_ranked(x, y))
        # float64 comes of whole numbers and a fraction, never of float32
        return found.astype(np.float32) if found.dtype == np.float64 else found

    return apply


def _pow(x: Array, exponent: float) -> Array:
    match exponent:
        case 1:
            return x
        case 2:
            return x * x
        case 3:
            return x * x * x
        case 0.5:
            return np.sqrt(x)
        case -0.5:
            return ONE / np.sqrt(x)
        case -1:
            return ONE / x
    raise NotLanes(f"the power {exponent}")


def _clamp(x: Array, low: float | None = None, high: float | None = None) -> Array:
    held = x if low is None else np.maximum(x, x.dtype.type(low))
    return held if high is None else np.minimum(held, x.dtype.type(high))


def _sigmoid(x: Array) -> Array:
    found = kernels.exp(-x)
    found += ONE
    return np.divide(ONE, found, out=found)


# Reductions, one term after another.


def _reduced(x: Array, dims: Any, keep: bool) -> tuple[Array, tuple[int, ...]]:
    """(kept entries, entries to be reduced, lanes), and the shape of the result."""
    sizes, given = x.shape[:-1], [dims] if isinstance(dims, int) else dims
    axes = sorted(_axis(x, dim) for dim in given) if given else list(range(len(sizes)))
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    moved = x.transpose(*rest, *axes, x.ndim - 1)
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(sizes) if keep or axis not in axes)
    count = int(np.prod([sizes[axis] for axis in axes], dtype=np.int64))
    return moved.reshape(-1, count, x.shape[-1]), (*shape, x.shape[-1])


def _sum(x: Array, dims: Any = None, keep: bool = False, *, dtype: Any = None) -> Array:
    if x.dtype != np.float32:
        raise NotLanes("a sum of whole numbers")
    flat, shape = _reduced(x, dims, keep)
    return kernels.sums(flat).reshape(shape)


def _mean(x: Array, dims: Any = None, keep: bool = False, *, dtype: Any = None) -> Array:
    found = _sum(x, dims, keep)
    return found / np.float32(x[..., 0].size // max(1, found[..., 0].size))


def _amax(x: Array, dims: Any = None, keep: bool = False) -> Array:
    flat, shape = _reduced(x, dims, keep)
    return flat.max(axis=1).reshape(shape)


def _var_mean(x: Array, dims: Any = None, *, correction: float = 1, keepdim: bool = False) -> tuple[Array, Array]:
    mean = _mean(x, dims, True)
    total = _sum((x - mean) * (x - mean), dims, keepdim)
    count = x[..., 0].size // max(1, total[..., 0].size)
    return total / np.float32(count - correction), mean.reshape(total.shape)


def _log_softmax(x: Array, dim: int, half: bool) -> Array:
    apart = x - _amax(x, [dim], True)
    return apart - kernels.log(_sum(kernels.exp(apart), [dim], True))


def _softmax(x: Array, dim: int, half: bool) -> Array:
    found = kernels.exp(x - _amax(x, [dim], True))
    return found / _sum(found, [dim], True)


# Look-ups. An entry that is not there is NaN, so that the sample counts as zero.


def _chosen(x: Array, index: Array, axis: int) -> Array:
    if x.dtype != np.float32:
        raise NotLanes("a choice among whole numbers")
    lanes = max(x.shape[-1], index.shape[-1])
    x, index = (np.broadcast_to(each, (*each.shape[:-1], lanes)) for each in (x, index))
    inside = (index >= 0) & (index < x.shape[axis])
    return np.where(inside, np.take_along_axis(x, np.where(inside, index, 0), axis), np.float32(np.nan))


def _gather(x: Array, dim: int, index: Array, **_: Any) -> Array:
    """The index may leave out the end of the other axes, where numpy would broadcast it."""
    axis, sizes = _axis(x, dim), index.shape[:-1]
    if any(size > x.shape[n] for n, size in enumerate(sizes) if n != axis):
        raise NotLanes("a gather beyond the values")
    return _chosen(x[tuple(slice(None) if n == axis else slice(size) for n, size in enumerate(sizes))], index, axis)


def _likelihood(x: Array, target: Array, weight: Array | None, reduction: int, ignored: int) -> Array:
    """What each class counts in the loss: minus its weight for the target, zero for the others."""
    if reduction != 0 or x.ndim != 3:
        raise NotLanes("a likelihood that is reduced or has more than one position")
    each = -ONE if weight is None else -_chosen(weight, target, 0)
    outside = (target < 0) | (target >= x.shape[1])
    each = np.where(target == ignored, np.float32(0), np.where(outside, np.float32(np.nan), each))
    own = (np.arange(x.shape[1])[None, :, None] == target[:, None]) | outside[:, None]
    return np.where(own, each[:, None], np.float32(0))


def _nll_loss(x: Array, target: Array, weight: Array | None, reduction: int, ignored: int) -> tuple[Array, Array]:
    counts = _likelihood(x, target, weight, reduction, ignored)
    found = np.where(counts == 0, np.float32(0), counts * x)  # 0 times infinity is not meant
    return _sum(found, [1]), np.zeros((1,), np.float32)


def _embedding(weight: Array, index: Array, padding: int = -1, scaled: bool = False, sparse: bool = False) -> Array:
    if weight.shape[-1] != 1 or scaled or sparse:
        raise NotLanes("a table that differs by sample")
    inside = (index >= 0) & (index < len(weight))
    found = np.moveaxis(weight[np.where(inside, index, 0), :, 0], -1, -2)
    return found if inside.all() else np.where(inside[..., None, :], found, np.float32(np.nan))


# Random numbers, drawn for every entry of every lane apart.


def _kept(x: Array, share: float) -> Array:
    if x.shape[-1] == 1:
        raise NotLanes("a draw that is shaped by no sample")
    return torch.empty(x.shape).bernoulli_(share).numpy()


def _dropout(x: Array, p: float, train: bool | None) -> tuple[Array, Array]:
    if train is False or p in (0, 1):
        raise NotLanes("a dropout of nothing or of everything")
    kept = _kept(x, 1 - p)
    return x * kept * np.float32(1 / (1 - p)), kept.astype(np.bool_)


# Products of weights and samples.


def _mm(x: Any, y: Any, bias: Array | None = None) -> Array:
    """Of weights and samples, on either side; a product of two samples' matrices has no loop."""
    shift = None if bias is None else bias[:, 0]
    few = isinstance(y, np.ndarray) and y.shape[-1] == 1 and y.shape[1] <= FEW_OUTPUTS
    if few and isinstance(x, Leaf) and x.shape[0] == 1:
        return rows_product(y[:, :, 0].T, x.rows, shift, x.lanes)[None]
    x, y = array_of(x), array_of(y)
    if x.shape[-1] == y.shape[-1] == 1:  # as an error that is the same for all samples: the loops fill whole vectors
        return _mm(np.repeat(x, LANES, -1), y, bias)[..., :1]
    if y.shape[-1] == 1:
        (positions, terms, lanes), outputs = x.shape, y.shape[1]
        turned = np.ascontiguousarray(x.swapaxes(0, 1)).reshape(terms, positions * lanes)
        products = kernels.product(y[:, :, 0].T, turned, shift)
        return products.reshape(outputs, positions, lanes).swapaxes(0, 1)
    if x.shape[-1] == 1 and bias is None:
        terms, positions, lanes = y.shape
        flat = np.ascontiguousarray(y).reshape(terms, positions * lanes)
        products = kernels.product(x[:, :, 0], flat, None)
        return products.reshape(len(x), positions, lanes)
    raise NotLanes("a product of two matrices of each sample")


def _addmm(bias: Array, x: Any, y: Any, *, beta: float = 1, alpha: float = 1) -> Array:
    if bias.ndim != 2 or bias.shape[-1] != 1 or beta != 1 or alpha != 1:
        raise NotLanes("addmm with something else than a bias")
    return _mm(x, y, bias)


def _each(values: Sequence[int], axes: int) -> tuple[int, ...]:
    return tuple(values) * axes if len(values) == 1 else tuple(values)


def _convolved(x: Array, read: kernels.Reading, weight: Array, bias: Array | None, size: Sequence[int]) -> Array:
    """x (1, channels, *space, lanes) and weight (groups, outputs, channels a group, *kernel)."""
    if x.shape[-1] == 1:  # the same for all samples: the loops fill whole vectors
        return _convolved(np.repeat(x, LANES, -1), read, weight, bias, size)[..., :1]
    lanes = x.shape[-1]
    weights = np.ascontiguousarray(weight.reshape(*weight.shape[:2], -1))
    found = kernels.convolution(np.ascontiguousarray(x).reshape(-1, lanes), read, weights, bias)
    return found.reshape(1, -1, *size, lanes)


def _check_convolution(x: Array, weight: Array, transposed: bool) -> None:
    if transposed or weight.shape[-1] != 1 or len(x) != 1:
        raise NotLanes("a transposed convolution, or weights that differ by sample")


def _convolution(
    x: Array,
    weight: Array,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    more: Any,
    groups: int,
) -> Array:
    _check_convolution(x, weight, transposed)
    channels, kernel, space = weight.shape[1], weight.shape[2:-1], x.shape[2:-1]
    stride, padding, dilation = (_each(given, len(kernel)) for given in (stride, padding, dilation))
    sides = zip(space, kernel, stride, padding, dilation, strict=True)
    size = tuple((points + 2 * around - gap * (taps - 1) - 1) // step + 1 for points, taps, step, around, gap in sides)
    read = kernels.reading(channels, space, kernel, size, stride, padding, dilation, False)
    own = weight[..., 0].reshape(groups, -1, channels, *kernel)
    return _convolved(x, read, own, None if bias is None else bias[:, 0], size)


def _convolution_backward(
    error: Array, x: Array, weight: Array, sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    more: Any, groups: int, mask: Sequence[bool],
) -> tuple[Array | None, None, Array | None]:  # fmt: skip
    """The error at the input, of which every point reads the errors of the positions that read it, and the bias."""
    _check_convolution(x, weight, transposed)
    bias = _sum(error, [0, *range(2, error.ndim - 1)]) if mask[2] else None
    if not mask[0]:
        return None, None, bias
    kernel, size = weight.shape[2:-1], x.shape[2:-1]
    stride, padding, dilation = (_each(given, len(kernel)) for given in (stride, padding, dilation))
    inputs = error.shape[1] // groups
    read = kernels.reading(inputs, error.shape[2:-1], kernel, size, stride, padding, dilation, True)
    turned = weight[..., 0].reshape(groups, -1, *weight.shape[1:-1]).swapaxes(1, 2)
    return _convolved(error, read, turned, None, size), None, bias


def _windows(x: Array, kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> tuple[Any, Any]:
    """Windows and steps of a pooling whose windows lie inside the plane."""
    if any(padding) or ceil_mode or x.ndim != 5:
        raise NotLanes("pooling beyond windows that lie inside the plane")
    return _each(kernel, 2), _each(stride or kernel, 2)


def _max_windows(
    x: Array, kernel: Any, stride: Any = (), padding: Any = (0,), gaps: Any = (1,), ceil: bool = False
) -> Any:
    if set(gaps) != {1}:
        raise NotLanes("maximum pooling with gaps")
    return _windows(x, kernel, stride, padding, ceil)


def _planes(x: Array) -> Array:
    """(images of a sample * channels, height, width, lanes)."""
    return np.ascontiguousarray(x.reshape(-1, *x.shape[2:]))


def _max_pool(x: Array, *how: Any) -> tuple[Array, Array]:
    """With the place of each maximum in its window."""
    out, chosen = kernels.max_pool(_planes(x), *_max_windows(x, *how))
    shape = *x.shape[:2], *out.shape[1:]
    return out.reshape(shape), chosen.reshape(shape)


def _max_pool_backward(error: Array, x: Array, *how: Any) -> Array:
    windows, chosen = _max_windows(x, *how[:-1]), how[-1]
    planes, places = (_planes(each) for each in np.broadcast_arrays(error, chosen))
    shape = *x.shape[2:-1], planes.shape[-1]
    return kernels.max_pool_backward(planes, places, (len(planes), *shape), *windows).reshape(*x.shape[:2], *shape)


def _mean_windows(
    x: Array,
    kernel: Any,
    stride: Any = (),
    padding: Any = (0,),
    ceil: bool = False,
    inside: bool = True,
    own: Any = None,
) -> Any:
    if own is not None:
        raise NotLanes("mean pooling with a divisor of its own")
    return _windows(x, kernel, stride, padding, ceil)


def _mean_pool(x: Array, *how: Any) -> Array:
    found = kernels.mean_pool(_planes(x), *_mean_windows(x, *how))
    return found.reshape(*x.shape[:2], *found.shape[1:])


def _mean_pool_backward(error: Array, x: Array, *how: Any) -> Array:
    planes, shape = _planes(error), (*x.shape[2:-1], error.shape[-1])
    found = kernels.mean_pool_backward(planes, (len(planes), *shape), *_mean_windows(x, *how))
    return found.reshape(*x.shape[:2], *shape)


READ_LEAVES: dict[Any, Callable[..., Any]] = {
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.clone.default: lambda x, **_: x,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
}
"""Rules that take a sample's tensor as it was given."""
KEEP_LEAVES = (aten.view.default, aten._unsafe_view.default, aten.clone.default)
"""Those that return it as it was given, too."""

RULES: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: lambda x, *, dtype=None, **_: x if dtype is None else x.astype(_dtype(dtype)),
    aten.t.default: lambda x: x.swapaxes(0, 1) if x.ndim == 3 else x,
    aten.transpose.int: lambda x, first, second: x.swapaxes(_axis(x, first), _axis(x, second)),
    aten.permute.default: lambda x, dims: x.transpose(*(_axis(x, dim) for dim in dims), x.ndim - 1),
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.select.int: lambda x, dim, index: x[_at(x, dim, index)],
    aten.slice.Tensor: lambda x, dim=0, low=None, high=None, step=1: x[_at(x, dim, slice(low, high, step))],
    aten.select_backward.default: _placed,
    aten.slice_backward.default: lambda x, sizes, dim, *edges: _placed(x, sizes, dim, slice(*edges)),
    aten.split.Tensor: lambda x, size, dim=0: np.split(x, range(size, x.shape[_axis(x, dim)], size), _axis(x, dim)),
    aten.unsafe_split.Tensor: lambda x, size, dim=0: RULES[aten.split.Tensor](x, size, dim),
    aten.split_with_sizes.default: lambda x, sizes, dim=0: np.split(x, np.cumsum(sizes)[:-1], _axis(x, dim)),
    aten.unbind.int: lambda x, dim=0: list(np.moveaxis(x, _axis(x, dim), 0)),
    aten.cat.default: _cat,
    aten.stack.default: lambda parts, dim=0: _cat([_unsqueeze(part, dim) for part in parts], dim),
    aten.constant_pad_nd.default: _pad,
    aten.full_like.default: lambda x, value, **how: _full(x, None, value, **how),
    aten.ones_like.default: lambda x, **how: _full(x, None, 1, **how),
    aten.zeros_like.default: lambda x, **how: _full(x, None, 0, **how),
    # In all lanes of x, because it is filled with draws next.
    aten.empty_like.default: lambda x, **how: np.repeat(_full(x, None, 0, **how), x.shape[-1], -1),
    aten.new_zeros.default: lambda x, sizes, **how: _full(x, sizes, 0, **how),
    aten.new_full.default: _full,
    aten.maximum.default: _binary(np.maximum),
    aten.minimum.default: _binary(np.minimum),
    aten.logical_and.default: _binary(np.logical_and),
    aten.logical_or.default: _binary(np.logical_or),
    aten.logical_not.default: np.logical_not,
    aten.rsub.Scalar: lambda x, y, alpha=1: _binary(np.subtract)(np.asarray(y, x.dtype), x, alpha=alpha),
    aten.neg.default: np.negative,
    aten.abs.default: np.abs,
    aten.sqrt.default: np.sqrt,
    aten.sign.default: np.sign,
    aten.sgn.default: np.sign,
    aten.reciprocal.default: lambda x: ONE / x,
    aten.rsqrt.default: lambda x: ONE / np.sqrt(x),
    aten.relu.default: lambda x: np.maximum(x, np.float32(0)),
    aten.pow.Tensor_Scalar: _pow,
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.where.self: lambda *values: np.where(*_ranked(*values)),
    aten.threshold_backward.default: lambda error, x, edge: np.where(x <= np.float32(edge), np.float32(0), error),
    aten.tanh.default: kernels.tanh,
    aten.exp.default: kernels.exp,
    aten.log.default: kernels.log,
    aten.log1p.default: kernels.log1p,
    aten.erf.default: kernels.erf,
    aten.sigmoid.default: _sigmoid,
    aten.sigmoid_backward.default: lambda error, output: error * ((ONE - output) * output),
    aten.tanh_backward.default: lambda error, output: error * (ONE - output * output),
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.amax.default: _amax,
    aten.var_mean.correction: _var_mean,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: lambda error, output, dim, dtype: (
        error - kernels.exp(output) * _sum(error, [dim], True)
    ),
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: lambda error, output, dim, dtype: (
        (error - _sum(error * output, [dim], True)) * output
    ),
    aten.gather.default: _gather,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: lambda error, *how: error[:, None] * _likelihood(*how[:-1]),
    aten.embedding.default: _embedding,
    aten.native_dropout.default: _dropout,
    aten.native_dropout_backward.default: lambda error, mask, scale: error * mask * np.float32(scale),
    aten.bernoulli.p: _kept,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.avg_pool2d.default: _mean_pool,
    aten.avg_pool2d_backward.default: _mean_pool_backward,
    aten.max_pool2d_with_indices.default: _max_pool,
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
}
"""Rules that take arrays."""

for _name, _function in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}.items():  # fmt: skip
    RULES |= dict.fromkeys((getattr(getattr(aten, _name), kind) for kind in ("Tensor", "Scalar")), _binary(_function))


for _target, _rule in (READ_LEAVES | RULES).items():
    if _rule.__name__ == "<lambda>":
        _rule.__name__ = str(_target)  # the function that torch writes of a program calls its rules by their names


def rule_of(target: Any) -> Callable[..., Any] | None:
    """What an operation does to lanes; None where there is no rule."""
    return READ_LEAVES.get(target) or RULES.get(target)
