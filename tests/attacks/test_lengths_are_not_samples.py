"""A length that happens to be the number of rows of a pass does not make its tensor a batch of samples.

Frozen tables and sequences of 16 or 32 were taken for samples, as passes had so many rows. What was then computed
depended on how many samples there were, or was the gradient of something else.
"""

import pytest
import torch
from neighbours import assert_apart, gradients_one_by_one, mean_of_clipped
from torch import nn
from torch.nn import functional as F

from long_suite import others_slow

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class LowRank(nn.Module):
    """A frozen layer of rank 3 whose weights are the product of two tables; the first has a row per output."""

    def __init__(self, outputs):
        super().__init__()
        self.left = nn.Parameter(torch.randn(outputs, 3), requires_grad=False)
        self.right = nn.Parameter(torch.randn(3, 4), requires_grad=False)
        self.head = nn.Linear(outputs, 2)

    def forward(self, x):
        return self.head(F.linear(x, self.left @ self.right))


class Prototypes(nn.Module):
    """Compares samples with a frozen table of prototypes, each of which goes through a frozen layer first."""

    def __init__(self, prototypes):
        super().__init__()
        self.table = nn.Parameter(torch.randn(prototypes, 4), requires_grad=False)
        self.embed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(prototypes, 2)

    def forward(self, x):
        return self.head(F.linear(x, self.embed(self.table)))


def points(samples):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator)
    return x, (x[:, 0] > 0).long()


@pytest.mark.parametrize("frozen", [LowRank, Prototypes])
@pytest.mark.parametrize(("length", "samples", "batch_size"), [(32, 31, 31), (32, 17, 16), (32, 2, 16), (80, 60, 64)])
def test_a_frozen_table_is_not_a_batch_of_samples(private, frozen, length, samples, batch_size):
    torch.manual_seed(0)
    model, (x, y) = frozen(length), points(samples)
    with torch.no_grad():  # one row outweighs all others, the one that goes when the last sample does
        next(model.parameters())[min(samples, length) - 1] *= 1000
    private(model, points(96), batch_size=batch_size)
    found = assert_apart(model, x, y, record=samples - 1, batch_size=batch_size)
    expected = mean_of_clipped(gradients_one_by_one(model, x, y), batch_size=batch_size)
    assert (found.both.mean - expected).norm() <= 1e-4 * expected.norm()


ROWS = 16
"""The length of the sequences, and the number of rows that a pass had where samples have rows of their own."""
SEQUENCES = {
    "Linear": lambda: nn.Linear(4, 6),
    "Linear without bias": lambda: nn.Linear(4, 6, bias=False),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "PReLU": lambda: nn.PReLU(),
    "RNN": lambda: nn.RNN(4, 6),
    "GRU": lambda: nn.GRU(4, 6),
    "LSTM": lambda: nn.LSTM(4, 6),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0),
    "Embedding": lambda: nn.Embedding(7, 6),
}


class BatchSecond(nn.Module):
    """Takes samples first and works on (time, samples, features), as torch's recurrent layers do by default."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        two = isinstance(layer, (nn.MultiheadAttention, nn.TransformerDecoderLayer))
        self.times = 3 if isinstance(layer, nn.MultiheadAttention) else 2 if two else 1
        self.head = nn.LazyLinear(3)

    def forward(self, x):
        out = self.layer(*[x.transpose(0, 1)] * self.times)
        out = out[0] if isinstance(out, tuple) else out
        return self.head(out.mean(dim=0))


def sequences(layer):
    torch.manual_seed(0)
    model = BatchSecond(SEQUENCES[layer]())
    x = torch.randn(9, ROWS, 4) * torch.linspace(0.1, 3, 9).view(-1, 1, 1)
    if layer == "Embedding":
        x = torch.randint(0, 7, (9, ROWS))
    model(x)  # gives the lazy layer its shape
    return model, x, torch.arange(9) % 3


@pytest.mark.parametrize("layer", others_slow(SEQUENCES, SEQUENCES.keys() - {"RNN", "LSTM", "TransformerDecoderLayer"}))
def test_layers_that_take_the_batch_second_are_accepted_with_their_own_gradients(private, layer):
    model, x, y = sequences(layer)
    expected = mean_of_clipped(gradients_one_by_one(model, x, y), batch_size=ROWS)
    found = assert_apart(model, x, y, record=0, batch_size=ROWS).both
    error = float((found.mean - expected).norm() / expected.norm())
    assert error <= 1e-4, f"the mean is wrong by {error:.3g} of its norm"
    assert found.dropped == 0
    made = private(model, (x, y))
    made.step(next(iter(made.loader)))
    assert (made.steps, made.dropped) == (1, 0)
