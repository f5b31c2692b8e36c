"""Small models of every kind, by the road that they take, with shapes drawn at random."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from persample_oracle import LOSS, Case
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CLASSES, SAMPLES = 3, 9
Build = Callable[[random.Random], Case]
"""A case with random shapes; weights and samples come from torch's generator."""


@functools.cache
def case_of(build: Build, seed: int, dtype: torch.dtype = torch.float32) -> Case:
    """One case, made once: its program is traced once for all tests that use it. Leave the model as it was."""
    torch.manual_seed(seed)
    made = build(random.Random(seed))
    return made.double() if dtype == torch.float64 else made


def labels() -> Tensor:
    return torch.randint(0, CLASSES, (SAMPLES,))


def words(most: int, length: int) -> Tensor:
    return torch.randint(0, most, (SAMPLES, length))


class Centred(nn.Module):
    """The mean of the batch is taken away, which leaves nothing of a batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.out(torch.tanh(hidden - hidden.mean(dim=0)) + x)


class Calls(nn.Module):
    """A forward given as a function of the layers and the inputs."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(layers), (function,)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function[0](self.layers, *inputs)


def headed(body: nn.Module, *shape: int) -> Case:
    """The body on random inputs, a smooth activation, and a linear head."""
    inputs = torch.randn(SAMPLES, *shape)
    with torch.no_grad():
        width = body(inputs[:1]).flatten(1).shape[1]
    model = nn.Sequential(body, nn.SiLU(), nn.Flatten(), nn.Linear(width, CLASSES))
    return Case(model, (inputs, labels()))


def linear(draw: random.Random) -> Case:
    inputs, width = draw.randint(1, 90), draw.randint(1, 14)
    return headed(nn.Linear(inputs, width, bias=draw.random() < 0.5), inputs)


def linear_sequence(draw: random.Random) -> Case:
    inputs, width = draw.randint(1, 40), draw.randint(1, 40)
    return headed(nn.Linear(inputs, width, bias=draw.random() < 0.5), *draw.choice([(3,), (9,), (2, 2)]), inputs)


def wide_linear(draw: random.Random) -> Case:
    """Too wide for gradients that are built, and for inputs that are read as they lie."""
    return headed(nn.Linear(700, 66 + draw.randint(0, 3)), 700)


def wide_sequence(draw: random.Random) -> Case:
    return headed(nn.Linear(110, 120 + draw.randint(0, 3)), draw.randint(2, 3), 110)


def _conv(draw: random.Random, kind: type, axes: int, sizes: tuple[int, int]) -> Case:
    groups = draw.choice([1, 1, 2, 3])
    channels, width = groups * draw.randint(1, 3), groups * draw.choice([1, 2, 5, 18])
    kernel = tuple(draw.randint(1, 3) for _ in range(axes))
    padding = draw.choice(["valid", "same", 1, 0, 2])
    stride = 1 if padding == "same" else tuple(draw.randint(1, 2) for _ in range(axes))
    layer = kind(
        channels, width, kernel, stride=stride, padding=padding, dilation=draw.randint(1, 2), groups=groups,
        bias=draw.random() < 0.5,
    )  # fmt: skip
    return headed(layer, channels, *(draw.randint(*sizes) for _ in range(axes)))


def conv1d(draw: random.Random) -> Case:
    return _conv(draw, nn.Conv1d, 1, (6, 20))


def conv2d(draw: random.Random) -> Case:
    return _conv(draw, nn.Conv2d, 2, (6, 9))


def conv3d(draw: random.Random) -> Case:
    return _conv(draw, nn.Conv3d, 3, (5, 6))


def depthwise(draw: random.Random) -> Case:
    channels = draw.randint(2, 6)
    return headed(nn.Conv2d(channels, channels, 3, padding=1, groups=channels), channels, 5, 6)


def conv_around(draw: random.Random) -> Case:
    """Padding with something else than zeros."""
    mode = draw.choice(["circular", "reflect", "replicate"])
    return headed(nn.Conv2d(2, 5, 3, padding=draw.randint(1, 2), padding_mode=mode), 2, 5, 6)


def transposed_conv(draw: random.Random) -> Case:
    return headed(nn.ConvTranspose2d(2, draw.randint(1, 4), 2, stride=draw.randint(1, 2)), 2, 4, 3)


def pooling(draw: random.Random) -> Case:
    window, step = draw.randint(1, 3), draw.randint(1, 2)
    body = [nn.Conv2d(1, 3, 2), nn.MaxPool2d(window, step), nn.AvgPool2d(draw.randint(1, 2))]
    return headed(nn.Sequential(*body), 1, 9, 8)


def padded_pooling(draw: random.Random) -> Case:
    size, odd = draw.randint(2, 3), draw.random() < 0.5
    largest = nn.MaxPool2d(size, padding=1, ceil_mode=odd, dilation=draw.randint(1, 2))
    means = nn.AvgPool2d(size, padding=1, count_include_pad=odd)
    return headed(nn.Sequential(nn.Conv2d(1, 3, 2), largest, means, nn.AdaptiveAvgPool2d(2)), 1, 9, 8)


def embedding(draw: random.Random) -> Case:
    rows, length, width = draw.randint(2, 8), draw.randint(1, 7), draw.randint(1, 9)
    table = nn.Embedding(rows, width, padding_idx=draw.choice([None, 0, 1]))
    model = nn.Sequential(table, nn.Tanh(), nn.Flatten(), nn.Linear(length * width, CLASSES))
    return Case(model, (words(rows, length), labels()))


def embedding_mean(draw: random.Random) -> Case:
    """Repeated words, and the mean of what was looked up."""
    rows, width = draw.randint(2, 4), draw.randint(2, 9)
    model = Calls(lambda m, x: m[1](m[0](x).mean(1)), nn.Embedding(rows, width), nn.Linear(width, CLASSES))
    return Case(model, (words(rows, 8), labels()))


def wide_table(draw: random.Random) -> Case:
    """A table of which a sample touches few rows."""
    model = Calls(lambda m, x: m[1](m[0](x).mean(1)), nn.Embedding(3000, 11), nn.Linear(11, CLASSES))
    return Case(model, (words(3000, draw.randint(2, 5)), labels()))


def layer_norm(draw: random.Random) -> Case:
    shape = [draw.randint(2, 5) for _ in range(draw.randint(1, 3))]
    return headed(nn.LayerNorm(shape[-draw.randint(1, len(shape)) :], bias=draw.random() < 0.5), *shape)


def group_norm(draw: random.Random) -> Case:
    groups, each = draw.randint(1, 3), draw.randint(2, 3)
    return headed(nn.GroupNorm(groups, groups * each), groups * each, *draw.choice([(3,), (3, 4), (2, 2, 2)]))


def instance_norm(draw: random.Random) -> Case:
    return headed(nn.InstanceNorm2d(3, affine=True), 3, draw.randint(2, 5), 4)


def frozen_batch_norm(draw: random.Random) -> Case:
    layer = nn.BatchNorm2d(3).eval()
    layer.running_mean.normal_()
    return headed(nn.Sequential(nn.Conv2d(1, 3, 2), layer), 1, draw.randint(3, 6), 4)


def _activated(draw: random.Random, *layers: nn.Module) -> Case:
    width = draw.randint(2, 20)
    inner = nn.Sequential(nn.Linear(width, width), *layers)
    return Case(nn.Sequential(inner, nn.Linear(width, CLASSES)), (torch.randn(SAMPLES, width), labels()))


def gelu(draw: random.Random) -> Case:
    return _activated(draw, nn.GELU())


def gelu_tanh(draw: random.Random) -> Case:
    return _activated(draw, nn.GELU(approximate="tanh"))


def silu(draw: random.Random) -> Case:
    return _activated(draw, nn.SiLU())


def sigmoid(draw: random.Random) -> Case:
    return _activated(draw, nn.Sigmoid())


def softplus(draw: random.Random) -> Case:
    return _activated(draw, nn.Softplus())


def elu(draw: random.Random) -> Case:
    return _activated(draw, draw.choice([nn.ELU(), nn.SELU(inplace=True)]), nn.LeakyReLU(), nn.Hardtanh())


def softmax(draw: random.Random) -> Case:
    return _activated(draw, nn.Softmax(dim=1))


def prelu(draw: random.Random) -> Case:
    return _activated(draw, nn.PReLU())


def activation_in_place(draw: random.Random) -> Case:
    return _activated(draw, nn.SiLU(inplace=True))


def in_place(draw: random.Random) -> Case:
    """Operations in place on what other layers still need."""

    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        hidden = m[0](x)
        hidden[:, 0] *= 0.5
        return m[1](F.silu(hidden).mul_(2).add_(x.tanh()))

    width = draw.randint(2, 9)
    model = Calls(function, nn.Linear(width, width), nn.Linear(width, CLASSES))
    return Case(model, (torch.randn(SAMPLES, width), labels()))


def tied_linear(draw: random.Random) -> Case:
    width = draw.randint(1, 30)
    model = Calls(lambda m, x: m[1](m[0](m[0](x).tanh())), nn.Linear(width, width), nn.Linear(width, CLASSES))
    return Case(model, (torch.randn(SAMPLES, width), labels()))


def tied_conv(draw: random.Random) -> Case:
    channels = draw.randint(1, 3)
    layers = nn.Conv2d(channels, channels, 2), nn.Linear(channels * 4, CLASSES)
    model = Calls(lambda m, x: m[1](m[0](m[0](x).tanh()).flatten(1)), *layers)
    return Case(model, (torch.randn(SAMPLES, channels, 4, 4), labels()))


def tied_table(draw: random.Random) -> Case:
    """One matrix as embedding table and as output layer."""
    table = nn.Embedding(CLASSES, draw.randint(1, 6))
    model = Calls(lambda m, x: m[0](x).tanh().sum(1) @ m[0].weight.t(), table)
    return Case(model, (words(CLASSES, 4), labels()))


def frozen(draw: random.Random) -> Case:
    made = linear(draw)
    made.model[0].weight.requires_grad_(False)
    return made


def low_rank(draw: random.Random) -> Case:
    """A frozen layer with a trained correction of low rank."""
    width = draw.randint(2, 9)
    layers = nn.Linear(width, 8), nn.Linear(width, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, CLASSES)
    layers[0].requires_grad_(False)
    model = Calls(lambda m, x: m[3]((m[0](x) + m[2](m[1](x))).relu()), *layers)
    return Case(model, (torch.randn(SAMPLES, width), labels()))


class Bare(nn.Module):
    """A parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.out = nn.Parameter(torch.randn(width)), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.gain)


def bare_parameter(draw: random.Random) -> Case:
    width = draw.randint(1, 9)
    return Case(Bare(width), (torch.randn(SAMPLES, width), labels()))


class Tempered(nn.Module):
    """A parameter without a dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.temperature, self.out = nn.Parameter(torch.tensor(0.3)), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * self.temperature.exp()


def temperature(draw: random.Random) -> Case:
    width = draw.randint(1, 9)
    return Case(Tempered(width), (torch.randn(SAMPLES, width), labels()))


def borrowed_weight(draw: random.Random) -> Case:
    """A layer's weight used behind its back."""
    width = draw.randint(1, 9)
    model = Calls(lambda m, x: m[1](m[0](x).tanh() @ m[0].weight), nn.Linear(width, width), nn.Linear(width, CLASSES))
    return Case(model, (torch.randn(SAMPLES, width), labels()))


def folded_batch(draw: random.Random) -> Case:
    width = draw.randint(1, 6)
    return headed(nn.Sequential(nn.Flatten(0, 1), nn.Linear(width, 2), nn.Unflatten(0, (-1, 3))), 3, width)


def batch_second(draw: random.Random) -> Case:
    """Code that has the positions first, with as many positions as a pass may have rows."""
    width = draw.randint(1, 6)
    layers = nn.Linear(width, 5), nn.Linear(5, CLASSES)
    model = Calls(lambda m, x: m[1](m[0](x.transpose(0, 1)).tanh().transpose(0, 1).sum(1)), *layers)
    return Case(model, (torch.randn(SAMPLES, 4, width), labels()))


def weight_normed(draw: random.Random) -> Case:
    width = draw.randint(2, 9)
    return Case(
        nn.Sequential(weight_norm(nn.Linear(width, 5)), nn.Tanh(), nn.Linear(5, CLASSES)),
        (torch.randn(SAMPLES, width), labels()),
    )


def weight_normed_conv(draw: random.Random) -> Case:
    return headed(weight_norm(nn.Conv1d(2, draw.randint(1, 5), 2)), 2, 6)


class Recurrent(nn.Module):
    """A recurrent layer, and a head on its last output."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


def _recurrent(draw: random.Random, kind: type, **settings: Any) -> Case:
    inputs, width = draw.randint(1, 5), draw.randint(2, 6)
    outputs = width * (2 if settings.get("bidirectional") else 1)
    model = Recurrent(kind(inputs, width, batch_first=True, **settings), outputs)
    return Case(model, (torch.randn(SAMPLES, draw.randint(1, 3), inputs), labels()))


def lstm(draw: random.Random) -> Case:
    return _recurrent(draw, nn.LSTM, num_layers=draw.randint(1, 2))


def gru(draw: random.Random) -> Case:
    return _recurrent(draw, nn.GRU, bidirectional=draw.random() < 0.5)


def rnn(draw: random.Random) -> Case:
    return _recurrent(draw, nn.RNN)


def _padding(length: int) -> Tensor:
    """True where a sequence is over; every sequence has a first position."""
    return torch.arange(length) >= torch.randint(1, length + 1, (SAMPLES, 1))


def attention(draw: random.Random) -> Case:
    width = 2 * draw.randint(1, 4)

    def function(m: nn.ModuleList, x: Tensor, padding: Tensor) -> Tensor:
        return m[1](m[0](x, x, x, key_padding_mask=padding, need_weights=False)[0].mean(1))

    layers = nn.MultiheadAttention(width, 2, batch_first=draw.random() < 0.5), nn.Linear(width, CLASSES)
    if not layers[0].batch_first:
        return Case(
            Calls(lambda m, x: m[1](m[0](*[x.transpose(0, 1)] * 3)[0].mean(0)), *layers),
            (torch.randn(SAMPLES, 4, width), labels()),
        )
    return Case(Calls(function, *layers), (torch.randn(SAMPLES, 5, width), _padding(5), labels()))


def wide_attention(draw: random.Random) -> Case:
    """Products of matrices that are large enough for another library than the one behind `mm`."""

    def function(m: nn.ModuleList, x: Tensor) -> Tensor:
        q, k, v = m[0](x).split([128, 128, 256], -1)
        return m[1](((q @ k.transpose(1, 2)).softmax(-1) @ v).mean(1))

    model = Calls(function, nn.Linear(128, 512, bias=draw.random() < 0.5), nn.Linear(256, CLASSES))
    return Case(model, (torch.randn(SAMPLES, 32, 128), labels()))


def wide_convolutions(draw: random.Random) -> Case:
    """Convolutions that are large enough for weights that are laid out once for all samples."""
    first = nn.Conv2d(24, 128, 3, padding=1, bias=draw.random() < 0.5)
    second = nn.Conv2d(128, 160, 3, stride=2, bias=draw.random() < 0.5)
    return headed(nn.Sequential(first, nn.GroupNorm(4, 128), second, nn.PReLU()), 24, 13, 13)


def encoder(draw: random.Random) -> Case:
    width = 2 * draw.randint(1, 4)
    first = draw.random() < 0.5
    layer = nn.TransformerEncoderLayer(width, 2, 8, dropout=0.0, batch_first=True, norm_first=first)
    model = Calls(
        lambda m, x, padding: m[1](m[0](x, src_key_padding_mask=padding)[:, 0]), layer, nn.Linear(width, CLASSES)
    )
    return Case(model, (torch.randn(SAMPLES, 5, width), _padding(5), labels()))


def dictionary(draw: random.Random) -> Case:
    """A batch that is a dictionary, with a mask and a number for each sample."""
    model = Calls(
        lambda m, words, mask: m[1]((m[0](words) * mask[..., None]).sum(1)), nn.Embedding(6, 4), nn.Linear(4, CLASSES)
    )
    batch = {"words": words(6, 5), "mask": ~_padding(5), "weight": torch.rand(SAMPLES), "label": labels()}

    def forward(model: nn.Module, batch: Any) -> tuple[Any, Any]:
        return model(batch["words"], batch["mask"].to(model.layers[1].weight.dtype)), (batch["label"], batch["weight"])

    return Case(model, batch, lambda outputs, targets: LOSS(outputs, targets[0]) * targets[1], forward)


def several_outputs(draw: random.Random) -> Case:
    """Two inputs, two outputs, and a loss of both."""
    model = Calls(lambda m, x, y: {"one": m[0](x), "two": m[1](x * y)}, nn.Linear(4, CLASSES), nn.Linear(4, 2))
    batch = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 4), labels()
    return Case(model, batch, lambda outputs, targets: LOSS(outputs["one"], targets) + outputs["two"].pow(2).mean(1))


# Losses.


def _with_loss(loss: Callable[[Any, Any], Tensor], targets: Tensor) -> Case:
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    return Case(model, (torch.randn(SAMPLES, 5), targets), loss)


def _regression(function: Callable[..., Tensor], targets: Tensor, **settings: Any) -> Case:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return function(outputs, targets, reduction="none", **settings).mean(1)

    return _with_loss(loss, targets)


def mse_loss(draw: random.Random) -> Case:
    return _regression(F.mse_loss, torch.randn(SAMPLES, CLASSES))


def l1_loss(draw: random.Random) -> Case:
    return _regression(F.l1_loss, torch.randn(SAMPLES, CLASSES))


def smooth_l1_loss(draw: random.Random) -> Case:
    return _regression(F.smooth_l1_loss, torch.randn(SAMPLES, CLASSES), beta=draw.choice([0.5, 1.0]))


def huber_loss(draw: random.Random) -> Case:
    return _regression(F.huber_loss, torch.randn(SAMPLES, CLASSES), delta=0.5)


def binary_loss(draw: random.Random) -> Case:
    return _regression(F.binary_cross_entropy_with_logits, torch.rand(SAMPLES, CLASSES).round())


def smoothed_labels(draw: random.Random) -> Case:
    return _with_loss(nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1), labels())


def class_weights(draw: random.Random) -> Case:
    return _with_loss(nn.CrossEntropyLoss(torch.rand(CLASSES), reduction="none"), labels())


def ignored_label(draw: random.Random) -> Case:
    return _with_loss(nn.CrossEntropyLoss(reduction="none", ignore_index=1), labels())


def soft_labels(draw: random.Random) -> Case:
    return _with_loss(LOSS, torch.rand(SAMPLES, CLASSES).softmax(1))


def linear_loss(draw: random.Random) -> Case:
    """The errors at the outputs are the same for all samples."""
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Conv1d(2, 2, 2), nn.Flatten(), nn.Linear(6, CLASSES))
    batch = torch.randn(SAMPLES, 1, 5), torch.randn(SAMPLES)
    return Case(model, batch, lambda outputs, targets: outputs[:, 0] - targets)


def loss_of_positions(draw: random.Random) -> Case:
    """One loss for each position, as language models have."""
    batch = torch.randn(SAMPLES, 5, 4), torch.randint(0, CLASSES, (SAMPLES, 5))
    return Case(nn.Linear(4, CLASSES), batch, lambda outputs, targets: LOSS(outputs.transpose(1, 2), targets).mean(1))


# What torch cannot trace.


def branches_on_values(draw: random.Random) -> Case:
    layers = nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)
    return Case(Calls(lambda m, x: m[int(x.sum() > 0)](x), *layers), (torch.randn(SAMPLES, 4), labels()))


def reads_a_number(draw: random.Random) -> Case:
    model = Calls(lambda m, x: m[0](x * min(1.0, abs(x[0, 0].item()))), nn.Linear(4, CLASSES))
    return Case(model, (torch.randn(SAMPLES, 4), labels()))


def as_many_steps_as_words(draw: random.Random) -> Case:
    """A loop as long as the sequence."""

    def function(m: nn.ModuleList, x: Tensor, length: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(int(length[0])):
            state = torch.tanh(m[0](state) + x[:, step])
        return m[1](state)

    batch = torch.randn(SAMPLES, 4, 3), torch.randint(1, 5, (SAMPLES,)), labels()
    return Case(Calls(function, nn.Linear(3, 3), nn.Linear(3, CLASSES)), batch)


def through_numpy(draw: random.Random) -> Case:
    model = Calls(lambda m, x: m[0](torch.from_numpy(x.numpy() * 2)), nn.Linear(4, CLASSES))
    return Case(model, (torch.randn(SAMPLES, 4), labels()))


LANES: list[Build] = [
    linear, linear_sequence, wide_linear, wide_sequence, conv1d, conv2d, conv3d, depthwise, pooling, embedding,
    embedding_mean, wide_table, layer_norm, instance_norm, frozen_batch_norm, gelu, gelu_tanh, silu, sigmoid, softplus,
    softmax, activation_in_place, tied_linear, lstm, gru, rnn, frozen, low_rank, bare_parameter, temperature,
    borrowed_weight, folded_batch, batch_second, dictionary, several_outputs, mse_loss, l1_loss, smooth_l1_loss,
    huber_loss, class_weights, ignored_label, soft_labels, linear_loss,
]  # fmt: skip
"""What our own loops take, in float32."""
ROWS: list[Build] = [
    conv_around, transposed_conv, padded_pooling, group_norm, elu, prelu, in_place, tied_conv,
    tied_table, weight_normed, weight_normed_conv, attention, wide_attention, wide_convolutions, encoder, binary_loss,
    smoothed_labels, loss_of_positions,
]  # fmt: skip
"""What goes through torch's kernels in rows."""
ALONE: list[Build] = [branches_on_values, reads_a_number, as_many_steps_as_words, through_numpy]
"""What torch cannot trace, so that samples are run one at a time."""
EVERY = [*LANES, *ROWS, *ALONE]
