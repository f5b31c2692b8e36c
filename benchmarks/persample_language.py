"""Models that people fine-tune, as plain modules in the form of Hugging Face's: BERT, GPT-2 and LoRA of both.

Position ids are made inside the model, attention takes a padding mask or a causal one, and GPT-2's layers are `Conv1D`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as GPT-2 has it."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.02), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], self.out_features)


class LowRank(nn.Module):
    """A frozen linear layer and a trained update of low rank, W x + B A x."""

    def __init__(self, frozen: nn.Linear | Conv1D, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.view(len(x), x.shape[1], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(len(x), x.shape[2], -1)


class Positions(nn.Embedding):
    """One row for each position; ids are made here, once for the batch as in Hugging Face's models."""

    each = False
    """Ids of every sample, for opacus, whose rules want a sample's rows in every layer's input."""

    def of(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        return self(ids.expand(len(x), -1) if self.each else ids)


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (heads_of(layer(z), self.heads) for layer in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        z = self.norm1(z + self.output(joined(seen)))
        return self.norm2(z + self.narrow(functional.gelu(self.wide(z))))


class Bert(nn.Module):
    """A classifier of token ids, of which those that are 0 pad."""

    def __init__(self, width: int = 128, heads: int = 2, layers: int = 2, kinds: int = 2000, tokens: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(kinds, width), Positions(tokens, width)
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler, self.out = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        mask = (1 - (x != 0)[:, None, None, :].float()) * torch.finfo(torch.float32).min
        z = self.norm(self.words(x) + self.types(torch.zeros_like(x)) + self.positions.of(x))
        for layer in self.layers:
            z = layer(z, mask)
        return self.out(torch.tanh(self.pooler(z[:, 0])))


class GptLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = Conv1D(3 * width, width), Conv1D(width, width)
        self.wide, self.narrow = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(self.norm1(z)).split(z.shape[-1], dim=-1))
        z = z + self.output(joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return z + self.narrow(functional.gelu(self.wide(self.norm2(z)), approximate="tanh"))


class Gpt(nn.Module):
    """A classifier of token ids by the last token."""

    def __init__(self, width: int = 128, heads: int = 2, layers: int = 2, kinds: int = 2000, tokens: int = 64) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(kinds, width), Positions(tokens, width)
        self.layers = nn.ModuleList(GptLayer(width, heads) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z = self.words(x) + self.positions.of(x)
        for layer in self.layers:
            z = layer(z)
        return self.out(self.norm(z)[:, -1])


def bert_lora() -> Bert:
    """BERT with trained rank-8 updates of queries and values and a trained head, all else frozen."""
    model = Bert().requires_grad_(False)
    for layer in model.layers:
        layer.query, layer.value = LowRank(layer.query, 8), LowRank(layer.value, 8)
    model.out.requires_grad_(True)
    return model


def gpt_lora(**size: int) -> Gpt:
    """GPT-2 with trained rank-8 updates of the attention's first layer and a trained head, all else frozen."""
    model = Gpt(**size).requires_grad_(False)
    for layer in model.layers:
        layer.qkv = LowRank(layer.qkv, 8)
    model.out.requires_grad_(True)
    return model


def with_positions_of_each(model: nn.Module, rival: str) -> nn.Module:
    """Position ids of every sample for opacus, which takes them for a batch of one."""
    if rival.startswith("opacus"):
        for layer in model.modules():
            if isinstance(layer, Positions):
                layer.each = True
    return model


class Pooled(nn.Module):
    """The mean of embedded tokens, classified into two."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(2000, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tokens(x).mean(1))
