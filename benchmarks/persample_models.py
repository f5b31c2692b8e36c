"""The models of the per-sample benchmark, with their batches and the variants that opacus needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from benchmarks.persample_language import Bert, Gpt, LowRank, Pooled, bert_lora, gpt_lora, with_positions_of_each
from bqsgd._src.models import build

EVERY_CLIP = ("L2", "Scale", "Clamp", "Dual", "BatchMean")
TWO_CLIPS = ("L2", "Dual")


class Positions(nn.Module):
    """Adds a learnt vector to every position."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width) * 0.02)

    def forward(self, z: Tensor) -> Tensor:
        return z + self.weight


class LookedUpPositions(nn.Embedding):
    """`Positions` as an embedding: expanded weights can differentiate a look-up but not a sum with a parameter."""

    def forward(self, z: Tensor) -> Tensor:
        return z + super().forward(torch.arange(self.num_embeddings).expand(len(z), -1))


class Block(nn.Module):
    """Attention and a two-layer network, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, z: Tensor) -> Tensor:
        batch, tokens, width = z.shape
        parts = self.qkv(self.norm1(z)).chunk(3, -1)
        q, k, v = (part.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        weights = ((q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5).softmax(-1)
        z = z + self.o((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        return z + self.narrow(functional.gelu(self.wide(self.norm2(z))))


class Transformer(nn.Module):
    """Two blocks over 64 tokens of 1,000 kinds, averaged and classified into two."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(1000, width), Positions(64, width)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks(self.positions(self.tokens(x))).mean(1))


def low_rank_transformer() -> nn.Module:
    """The transformer frozen, with trained rank-8 updates of its attention projections and a trained head."""
    model = Transformer().requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.o = LowRank(block.qkv, 8), LowRank(block.o, 8)
    model.out.requires_grad_(True)
    return model


class Residual(nn.Module):
    """Two convolutions around a shortcut, as in ResNet-18, with GroupNorm in place of BatchNorm."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        return functional.relu(inner + self.shortcut(x))


def resnet18() -> nn.Module:
    """ResNet-18 with GroupNorm for images of 32 x 32: a 3 x 3 stem and no pooling before the blocks."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    inputs = 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Residual(inputs, outputs, stride), Residual(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Recurrent(nn.Module):
    """An LSTM over embedded tokens; its last output is classified."""

    def __init__(self, hidden: int = 64, classes: int = 2) -> None:
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.tokens(x))[0][:, -1])


def floats(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda size, generator: torch.rand(size, *shape, generator=generator)


def tokens(length: int, kinds: int) -> Callable[[int, Generator], Tensor]:
    return lambda size, generator: torch.randint(0, kinds, (size, length), generator=generator)


def padded(length: int, kinds: int) -> Callable[[int, Generator], Tensor]:
    """Token ids from 1 on; after half of the length or more come zeros."""

    def draw(size: int, generator: Generator) -> Tensor:
        ids = torch.randint(1, kinds, (size, length), generator=generator)
        ends = torch.randint(length // 2, length + 1, (size, 1), generator=generator)
        return ids * (torch.arange(length) < ends)

    return draw


def as_it_is(model: nn.Module, rival: str) -> nn.Module:
    return model


def with_looked_up_positions(model: Any, rival: str) -> nn.Module:
    """Positions as an embedding for opacus' expanded weights, which cannot differentiate a sum with a parameter."""
    if rival == "opacus ew":
        positions = LookedUpPositions(*model.positions.weight.shape)
        positions.weight = model.positions.weight
        model.positions = positions
    return model


def with_dp_lstm(model: Any, rival: str) -> nn.Module:
    """opacus' DPLSTM with the same weights under the same names, for the rivals that cannot take nn.LSTM. vmap can, by
    calling it sample by sample, but is twice as fast with DPLSTM."""
    if rival in ("opacus hooks", "opacus functorch", "opacus ghost", "torch.func.vmap"):
        from opacus.layers import DPLSTM

        state = model.lstm.state_dict()
        model.lstm = DPLSTM(model.lstm.input_size, model.lstm.hidden_size, batch_first=True)
        model.lstm.load_state_dict(state)
    return model


@dataclass(frozen=True)
class Case:
    """A model of the benchmark, its batch, and which of our steps run on it."""

    build: Callable[[], nn.Module]
    batch_size: int
    inputs: Callable[[int, Generator], Tensor]
    classes: int = 10
    clips: tuple[str, ...] = EVERY_CLIP
    packed: bool = False
    """Also time L2 with rows packed as they come: the model does not run on compiled loops."""
    variant: Callable[[nn.Module, str], nn.Module] = as_it_is
    """The model as a rival can take it: same weights under the same names, same outputs."""
    about: str = ""
    large: bool = False
    """A step takes seconds: leave out the rivals that are slowest everywhere."""

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = self.inputs(size, generator)
        return inputs, torch.randint(0, self.classes, (size,), generator=generator)

    def model_for(self, rival: str, model: nn.Module) -> nn.Module:
        """A copy of the model in the form that the rival takes; what is frozen is shared."""
        frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
        return self.variant(copy.deepcopy(model, frozen), rival)


MODELS: dict[str, Case] = {
    "Linear 3969-10": Case(lambda: nn.Linear(3969, 10), 2048, floats(3969)),
    "Linear 1280-10": Case(lambda: nn.Linear(1280, 10), 2048, floats(1280)),
    "LeNet-5": Case(partial(build, "lenet5", input_shape=(1, 28, 28), classes=10, seed=0), 256, floats(1, 28, 28)),
    "AlexNet28": Case(partial(build, "alexnet28", input_shape=(1, 28, 28), classes=10, seed=0), 32, floats(1, 28, 28)),
    "MLP 784-2048-2048-10": Case(
        lambda: nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 2048),
            nn.ReLU(),
            nn.Linear(2048, 2048),
            nn.ReLU(),
            nn.Linear(2048, 10),
        ),
        256,
        floats(1, 28, 28),
    ),
    "Transformer": Case(
        Transformer,
        64,
        tokens(64, 1000),
        classes=2,
        clips=TWO_CLIPS,
        packed=True,
        variant=with_looked_up_positions,
        about="two layers of width 128, 4 heads, 64 tokens; opacus ew gets the positions as an embedding",
    ),
    "LoRA": Case(
        low_rank_transformer,
        64,
        tokens(64, 1000),
        classes=2,
        clips=TWO_CLIPS,
        packed=True,
        about="the same frozen, with trained rank-8 updates of the attention projections and a trained head",
    ),
    "ResNet-18": Case(
        resnet18,
        64,
        floats(3, 32, 32),
        clips=TWO_CLIPS,
        packed=True,
        large=True,
        about="GroupNorm, images of 3 x 32 x 32",
    ),
    "ResNet-18, few images": Case(
        resnet18, 32, floats(3, 32, 32), clips=TWO_CLIPS, packed=True, large=True, about="the same with 32 images"
    ),
    "LSTM": Case(
        Recurrent,
        64,
        tokens(32, 100),
        classes=2,
        clips=TWO_CLIPS,
        packed=True,
        variant=with_dp_lstm,
        about="32 tokens, embedded in 64 numbers, 64 hidden; hooks, functorch, ghost and vmap get opacus' DPLSTM with "
        "the same weights",
    ),
    "Embedding, mean": Case(
        Pooled,
        256,
        tokens(64, 2000),
        classes=2,
        about="2,000 kinds of tokens in 64 numbers, 64 tokens a sample",
    ),
    "char-LSTM": Case(
        partial(Recurrent, 128, 18),
        64,
        tokens(15, 100),
        classes=18,
        clips=TWO_CLIPS,
        variant=with_dp_lstm,
        about="15 characters, 128 hidden, 18 classes",
    ),
    "BERT 2x128": Case(
        Bert,
        32,
        padded(64, 2000),
        classes=2,
        clips=TWO_CLIPS,
        variant=with_positions_of_each,
        about="with a padding mask; position ids of every sample for opacus, as in the four rows below",
    ),
    "BERT 2x128 LoRA": Case(
        bert_lora, 32, padded(64, 2000), classes=2, clips=TWO_CLIPS, variant=with_positions_of_each
    ),
    "GPT-2 2x128": Case(Gpt, 32, tokens(64, 2000), classes=2, clips=TWO_CLIPS, variant=with_positions_of_each),
    "GPT-2 2x128 LoRA": Case(
        gpt_lora, 32, tokens(64, 2000), classes=2, clips=TWO_CLIPS, variant=with_positions_of_each
    ),
    "GPT-2 small LoRA": Case(
        partial(gpt_lora, width=768, heads=12, layers=12, kinds=50257, tokens=1024),
        4,
        tokens(128, 50257),
        classes=2,
        clips=("L2",),
        variant=with_positions_of_each,
        large=True,
        about="128 tokens",
    ),
}
