"""The layers with a fast rule: from what a layer saw and the errors at its output to per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.persample._kernels.loops import row_sums
from bqsgd.persample.factors import ConvWeight, Dense, Factor, Geometry, LinearWeight, Summed, TableRows

Gradients = Iterator[tuple[Tensor | None, Callable[[], Factor]]]
Rule = Callable[[nn.Module, Tensor, Tensor], Gradients]
"""(layer, its input, errors at its output) -> each parameter and how to make its factor."""


def _linear(layer: nn.Linear, a: Tensor, e: Tensor) -> Gradients:
    positions = (len(a), -1)
    yield layer.weight, lambda: LinearWeight(a.reshape(*positions, a.shape[-1]), e.reshape(*positions, e.shape[-1]))
    yield layer.bias, lambda: Dense(row_sums(e.reshape(*positions, e.shape[-1]).transpose(1, 2)))


def _conv(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor, e: Tensor) -> Gradients:
    def weight() -> Factor:
        padding, seen = tuple(_padding(layer)), a
        if layer.padding_mode != "zeros" and any(padding):
            padding, seen = (0,) * len(padding), F.pad(a, padding, mode=layer.padding_mode)
        return ConvWeight(seen, e, Geometry(layer.kernel_size, layer.stride, layer.dilation, padding, layer.groups))

    yield layer.weight, weight
    yield layer.bias, lambda: Dense(row_sums(e.flatten(2)))


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """Both sides of every axis, last axis first, as `F.pad` wants them."""
    sides: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if isinstance(layer.padding, str):
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1) if layer.padding == "same" else 0
            sides += [total // 2, total - total // 2]
        else:
            sides += [layer.padding[axis]] * 2
    return sides


def _embedding(layer: nn.Embedding, index: Tensor, e: Tensor) -> Gradients:
    flat, errors = index.reshape(len(index), -1), e.reshape(len(index), -1, e.shape[-1])
    rows, padding = layer.num_embeddings, layer.padding_idx
    yield layer.weight, lambda: TableRows.of_lookups(flat, errors, rows=rows, padding=padding)


def _layer_norm(layer: nn.LayerNorm, a: Tensor, e: Tensor) -> Gradients:
    shape = layer.normalized_shape
    size = layer.weight.numel()
    yield layer.weight, lambda: _rows_sum(F.layer_norm(a, shape, eps=layer.eps) * e, size)
    yield layer.bias, lambda: _rows_sum(e, size)


def _rows_sum(values: Tensor, size: int) -> Dense:
    return Dense(values.reshape(len(values), -1, size).sum(dim=1))


def _group_norm(layer: nn.GroupNorm, a: Tensor, e: Tensor) -> Gradients:
    groups, eps = layer.num_groups, layer.eps
    yield layer.weight, lambda: Dense((F.group_norm(a, groups, eps=eps) * e).reshape(*a.shape[:2], -1).sum(dim=2))
    yield layer.bias, lambda: Dense(e.reshape(*e.shape[:2], -1).sum(dim=2))


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,  # type: ignore[dict-item]
    nn.Conv1d: _conv,  # type: ignore[dict-item]
    nn.Conv2d: _conv,  # type: ignore[dict-item]
    nn.Conv3d: _conv,  # type: ignore[dict-item]
    nn.Embedding: _embedding,  # type: ignore[dict-item]
    nn.LayerNorm: _layer_norm,  # type: ignore[dict-item]
    nn.GroupNorm: _group_norm,  # type: ignore[dict-item]
}


def has_batch_first(layer: nn.Module, a: Tensor, batch: int) -> bool:
    """Whether the input of a layer is a batch of `batch` samples as far as its shape can tell."""
    if a.dim() == 0 or len(a) != batch:
        return False
    match layer:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return a.dim() == len(layer.kernel_size) + 2
        case nn.LayerNorm():
            return a.dim() > len(layer.normalized_shape)
        case nn.Embedding():
            return True
        case _:
            return a.dim() >= 2


def merge(uses: list[Factor], *, batch: int, coordinates: int) -> Factor:
    """One factor for a parameter used several times in a forward; linear uses are only more positions."""
    if len(uses) == 1:
        return uses[0]
    linear = [use for use in uses if isinstance(use, LinearWeight)]
    if len(linear) == len(uses):
        return LinearWeight(torch.cat([use.a for use in linear], 1), torch.cat([use.e for use in linear], 1))
    return Summed(uses, batch=batch, coordinates=coordinates)


def refuse_mixing(model: nn.Module) -> None:
    """Raise for a layer whose output for one sample depends on the others: no per-sample clip can bound that."""
    for name, layer in model.named_modules():
        reason = None
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            reason = (
                f"use nn.GroupNorm(num_groups, {layer.num_features}) instead; in a frozen backbone keep it in "
                "evaluation mode, with .eval() after every model.train()"
            )
        elif isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats:
            reason = "set track_running_stats=False or use nn.GroupNorm"
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.scale_grad_by_freq:
            reason = "set scale_grad_by_freq=False: it counts over the whole batch"
        elif isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            reason = "set max_norm=None: it rewrites the rows that the batch looks up"
        if reason:
            raise InvalidParameter(f"layer {name or 'model'!r} ({type(layer).__name__}) mixes samples; {reason}")
