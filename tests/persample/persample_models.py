"""Small models, one for each fast rule and a few for the slow road, with random shapes drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

CLASSES = 3
Case = tuple[nn.Module, Tensor]
"""A model with three outputs, and the shape of its inputs as a batch of one."""


class Twice(nn.Module):
    """A layer used at two depths of one forward."""

    def __init__(self, layer: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.tanh(self.layer(x))))


class TiedLanguageModel(nn.Module):
    """One matrix as embedding table and as output layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, width)
        self.out = nn.Linear(width, CLASSES, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(x)).sum(dim=1))


class Bare(nn.Module):
    """A parameter of its own: no rule, so the slow road."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(width))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.gain)


class Borrowed(nn.Module):
    """A layer's weight used behind its back: the graph search must see it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)) @ self.inner.weight)


class Attention(nn.Module):
    """Layers whose weights a parent uses directly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 1, batch_first=True)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0].mean(dim=1))


def _headed(body: nn.Module, like: Tensor) -> Case:
    """The body, a smooth activation in place (hooks must survive it) and a linear head."""
    with torch.no_grad():
        width = body(like).flatten(1).shape[1]
    return nn.Sequential(body, nn.SELU(inplace=True), nn.Flatten(), nn.Linear(width, CLASSES)), like


def linear(draw: st.DrawFn) -> Case:
    inputs, width = draw(st.integers(1, 90)), draw(st.integers(1, 14))
    return _headed(nn.Linear(inputs, width, bias=draw(st.booleans())), torch.zeros(1, inputs))


def linear_sequence(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from([(3,), (9,), (2, 2)]))
    inputs, width = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    return _headed(nn.Linear(inputs, width, bias=draw(st.booleans())), torch.zeros(1, *shape, inputs))


def wide_sequence(draw: st.DrawFn) -> Case:
    """Wide enough for the Gram route."""
    return _headed(nn.Linear(110, 120 + draw(st.integers(0, 3))), torch.zeros(1, draw(st.integers(2, 3)), 110))


def _conv(draw: st.DrawFn, kind: type, dimensions: int, sizes: tuple[int, int]) -> Case:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, width = groups * draw(st.integers(1, 3)), groups * draw(st.sampled_from([1, 2, 5, 18, 34]))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dimensions))
    padding = draw(st.sampled_from(["valid", "same", 1, 0, 2]))
    stride = 1 if padding == "same" else tuple(draw(st.integers(1, 2)) for _ in range(dimensions))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "reflect", "replicate"])) if dimensions < 3 else "zeros"
    layer = kind(
        channels,
        width,
        kernel,
        stride=stride,
        padding=padding,
        dilation=draw(st.integers(1, 2)),
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    return _headed(layer, torch.zeros(1, channels, *(draw(st.integers(*sizes)) for _ in range(dimensions))))


def conv1d(draw: st.DrawFn) -> Case:
    return _conv(draw, nn.Conv1d, 1, (6, 20))


def conv2d(draw: st.DrawFn) -> Case:
    return _conv(draw, nn.Conv2d, 2, (6, 9))


def conv3d(draw: st.DrawFn) -> Case:
    return _conv(draw, nn.Conv3d, 3, (5, 6))


def depthwise(draw: st.DrawFn) -> Case:
    channels = draw(st.integers(2, 6))
    return _headed(nn.Conv2d(channels, channels, 3, padding=1, groups=channels), torch.zeros(1, channels, 5, 6))


def embedding(draw: st.DrawFn) -> Case:
    rows, padding = draw(st.integers(2, 8)), draw(st.sampled_from([None, 0, 1]))
    length = draw(st.integers(1, 7))
    layer = nn.Embedding(rows, draw(st.integers(1, 9)), padding_idx=padding)
    return _headed(layer, torch.zeros(1, length, dtype=torch.long))


def layer_norm(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(2, 5), min_size=1, max_size=3)))
    axes = draw(st.integers(1, len(shape)))
    return _headed(nn.LayerNorm(shape[-axes:], bias=draw(st.booleans())), torch.zeros(1, *shape))


def group_norm(draw: st.DrawFn) -> Case:
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    space = draw(st.sampled_from([(3,), (3, 4), (2, 2, 2)]))
    return _headed(nn.GroupNorm(groups, groups * each), torch.zeros(1, groups * each, *space))


def tied_linear(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 30))
    return Twice(nn.Linear(width, width), nn.Linear(width, CLASSES)), torch.zeros(1, width)


def tied_conv(draw: st.DrawFn) -> Case:
    channels = draw(st.integers(1, 3))
    head = nn.Sequential(nn.Flatten(), nn.Linear(channels * 4, CLASSES))
    return Twice(nn.Conv2d(channels, channels, 2), head), torch.zeros(1, channels, 4, 4)


def tied_table(draw: st.DrawFn) -> Case:
    return TiedLanguageModel(draw(st.integers(1, 6))), torch.zeros(1, 4, dtype=torch.long)


def frozen(draw: st.DrawFn) -> Case:
    model, like = linear(draw)
    model[0].weight.requires_grad_(False)
    return model, like


def bare_parameter(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 9))
    return Bare(width), torch.zeros(1, width)


def borrowed_weight(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 9))
    return Borrowed(width), torch.zeros(1, width)


def attention(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 6))
    return Attention(width), torch.zeros(1, 4, width)


def folded_batch(draw: st.DrawFn) -> Case:
    """The batch dimension folded away before a layer: its shape shows that, so the slow road."""
    width = draw(st.integers(1, 6))
    body = nn.Sequential(nn.Flatten(0, 1), nn.Linear(width, 2), nn.Unflatten(0, (-1, 3)))
    return _headed(body, torch.zeros(1, 3, width))


FAST: list[Callable[[st.DrawFn], Case]] = [
    linear,
    linear_sequence,
    wide_sequence,
    conv1d,
    conv2d,
    conv3d,
    depthwise,
    embedding,
    layer_norm,
    group_norm,
    tied_linear,
    tied_conv,
    tied_table,
    frozen,
]
SLOW: list[Callable[[st.DrawFn], Case]] = [bare_parameter, borrowed_weight, attention, folded_batch]
