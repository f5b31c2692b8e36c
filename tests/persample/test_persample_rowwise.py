"""Row-wise operations: the values of torch's own, the same bits in every row, and nothing outside the list."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from persample_oracle import LOSS
from torch import Tensor, nn

from attacks.cancelling_weights import cancelling_weights
from bqsgd.errors import InvalidParameter
from bqsgd.models import AlexNet28, LeNet5
from bqsgd.persample import Clamp, check_samples_apart, clipped_gradients
from bqsgd.persample.rows import loss_rows_for, packed_rows_for, rows_for
from bqsgd.persample.rowwise import NotRowWise, RowWise
from bqsgd.training.objective import Objective
from bqsgd.training.samples import Part


def output_and_error(model: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """What a model returns for each row, and the errors at its inputs where they are the outputs at its outputs."""
    leaf = inputs.detach().requires_grad_()
    found = model(leaf)
    return found.detach(), torch.autograd.grad(found, leaf, found.detach())[0]


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    axes = draw(st.integers(1, 3))
    one = st.integers(1, 3)
    groups = draw(st.integers(1, 2))
    kernel, stride, dilation = (tuple(draw(one) for _ in range(axes)) for _ in range(3))
    padding = tuple(draw(st.integers(0, 2)) for _ in range(axes))
    space = [d * (k - 1) + 1 + draw(st.integers(0, 6)) for k, d in zip(kernel, dilation, strict=True)]
    channels, outputs = (groups * draw(one) for _ in range(2))
    made = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](
        channels, outputs, kernel, stride, padding, dilation, groups, bias=draw(st.booleans())
    )
    return made, (channels, *space)


@given(case=convolutions(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_convolutions_have_the_values_of_torch(case: tuple[nn.Module, tuple[int, ...]], seed: int) -> None:
    torch.manual_seed(seed)
    layer, shape = case
    inputs = torch.randn(3, *shape)
    expected = output_and_error(copy.deepcopy(layer).double(), inputs.double())
    with RowWise():
        found = output_and_error(layer, inputs)
    for values, right in zip(found, expected, strict=True):
        assert torch.allclose(values.double(), right, rtol=1e-4, atol=1e-4)


def test_tanh_is_within_four_units_in_the_last_place() -> None:
    inputs = torch.cat([torch.linspace(-12, 12, 100_001), torch.logspace(-38, 38, 1000)])
    ends = torch.tensor([float("nan"), float("inf"), -float("inf")])
    with RowWise():
        found, odd = torch.tanh(inputs), torch.tanh(ends)
    right = torch.tanh(inputs.double())
    assert bool(((found.double() - right).abs() <= 4 * 2**-23 * right.abs()).all())
    assert odd[0].isnan()
    assert odd[1:].tolist() == [1.0, -1.0]


LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(3969, 10), (3969,)),
    (lambda: nn.Linear(37, 131), (37,)),
    (lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh()), (3, 7)),
    (lambda: nn.Sequential(nn.Conv2d(3, 7, 3, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(2, stride=1)), (3, 11, 9)),
    (lambda: nn.AvgPool2d(3, stride=2), (2, 9, 8)),
    (LeNet5, (1, 28, 28)),
    (AlexNet28, (1, 28, 28)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS, ids=range(len(LAYERS)))
@pytest.mark.parametrize("scale", [1.0, 1e12])
def test_own_gradients_need_no_row_of_their_own(
    make: Callable[[], nn.Module], shape: tuple[int, ...], scale: float
) -> None:
    """One sample in any row of batches of several sizes, among others of any scale."""
    torch.manual_seed(3)
    model, one = make(), torch.randn(1, *shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= scale
    with RowWise():
        expected = output_and_error(model, one)
    for size in (2, 7, 13):
        for row in (0, size // 2, size - 1):
            inputs = torch.randn(size, *shape) * 10 ** torch.randn(size, *[1] * len(shape))
            inputs[row] = one[0]
            with RowWise():
                found = output_and_error(model, inputs)
            for values, right in zip(found, expected, strict=True):
                assert values[row].numpy().tobytes() == right[0].numpy().tobytes()


def test_own_gradients_need_no_index_where_operations_are_row_wise() -> None:
    """The attack that tells rows apart: a sample's own gradient is the same under every index."""
    attack = cancelling_weights(sizes=(15,))
    batch = attack.inputs, attack.targets
    found = [
        clipped_gradients(attack.model, LOSS, batch, indices=indices, clip=Clamp(0.01), batch_size=16).mean
        for indices in (None, torch.arange(16), torch.randperm(1000)[:16])
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.mean(dim=0),
        lambda x: x.sum(dim=1),
        lambda x: torch.sigmoid(x),
        lambda x: x @ x.t() if float(x.sum()) > 0 else x,
        lambda x: torch.add(x, x, alpha=3),
        lambda x: x.double().tanh(),
        lambda x: x / 3,
    ],
)
def test_other_operations_are_refused(operation: Callable[[Tensor], Tensor]) -> None:
    with RowWise(), pytest.raises(NotRowWise):
        operation(torch.ones(4, 4))


class Moody(nn.Module):
    """A forward that takes other operations after its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(x if self.calls == 1 else torch.sigmoid(x))


def test_a_model_that_changes_its_operations_between_passes_is_refused() -> None:
    batch = torch.randn(40, 4), torch.zeros(40, dtype=torch.long)
    with pytest.raises(InvalidParameter, match="the same operations in every pass"):
        clipped_gradients(Moody(), LOSS, batch, indices=torch.arange(40), clip=Clamp(0.01), batch_size=1)


class RowTable(nn.Module):
    """A table with a line for each row of a pass: row-wise operations, and yet the row matters."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("table", torch.randn(rows, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + (self.table if len(x) == len(self.table) else self.table[0]))


def test_a_model_that_knows_its_rows_is_found() -> None:
    batch = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with pytest.raises(InvalidParameter, match="with its row in the batch"):
        check_samples_apart(RowTable(packed_rows_for(256)), LOSS, batch, batch_size=256)


def test_rows_follow_from_public_sizes_alone() -> None:
    assert [packed_rows_for(size) for size in (1, 32, 64, 128, 256, 512, 1024)] == [16, 48, 80, 160, 288, 288, 272]
    assert [loss_rows_for(size) for size in (1, 10, 1000, 10**6)] == [1024, 1024, 64, 16]
    for size in range(1, 3000):
        power = 1 << (size.bit_length() - 1)
        assert packed_rows_for(size) == packed_rows_for(power)
        assert rows_for(size) == rows_for(power)


class Counting(nn.Module):
    """Remembers how many rows it was given; with `sigmoid` it is not made of row-wise operations."""

    def __init__(self, *, sigmoid: bool) -> None:
        super().__init__()
        self.out, self.sigmoid = nn.Linear(4, 3), sigmoid

    def forward(self, x: Tensor) -> Tensor:
        ROWS_SEEN.append(len(x))
        return self.out(torch.sigmoid(x) if self.sigmoid else x)


ROWS_SEEN: list[int] = []


@pytest.mark.parametrize("batch_size", [100, 256, 300, 1000])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_training_has_the_rows_that_were_checked(batch_size: int, sigmoid: bool, packed: bool) -> None:
    """Also where the batch size is no power of two, which sums over several parts divide by."""
    objective = Objective(Counting(sigmoid=sigmoid), LOSS)
    data, clip = (torch.randn(40, 4), torch.arange(40) % 3), Clamp(0.01)
    ROWS_SEEN.clear()
    objective.check(data, clip=clip, batch_size=batch_size, packed=packed)
    checked = set(ROWS_SEEN)
    ROWS_SEEN.clear()
    mean, _ = objective.mean([Part(numbers=np.arange(40), data=data)], clip=clip, batch_size=batch_size, packed=packed)
    trained = set(ROWS_SEEN)
    ROWS_SEEN.clear()
    alone = clipped_gradients(
        objective.model, LOSS, data, indices=None if packed else torch.arange(40), clip=clip, batch_size=batch_size
    )
    assert trained == set(ROWS_SEEN) <= checked
    assert np.allclose(mean, alone.mean.numpy(), rtol=1e-15)


@pytest.mark.parametrize("samples", [1, 5, 17, 32])
def test_rows_without_a_sample_are_left_out(samples: int) -> None:
    """Layers as wide as a pass has rows: what is left out must be rows, not coordinates."""
    torch.manual_seed(4)
    rows = packed_rows_for(16)
    model = nn.Sequential(
        nn.Linear(rows, rows), nn.ReLU(), nn.Unflatten(1, (1, rows)), nn.Linear(rows, rows), nn.Conv1d(1, rows, 3),
        nn.Flatten(), nn.Linear(rows * (rows - 2), 3),
    )  # fmt: skip
    inputs, targets = torch.randn(samples, rows), torch.randint(0, 3, (samples,))
    found = clipped_gradients(
        model, LOSS, (inputs, targets), indices=torch.arange(samples), clip=Clamp(10.0), batch_size=16
    ).mean
    exact = torch.autograd.grad(LOSS(model(inputs), targets).sum() / 16, list(model.parameters()))
    assert torch.allclose(found, torch.cat([part.flatten() for part in exact]).double(), rtol=1e-3, atol=1e-4)


class Merging(nn.Module):
    """Views its rows together with another dimension, as code for sequences does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(6, 5), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x)).view(len(x), 4, 5).transpose(1, 2).reshape(len(x), 20))


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 2, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x)).view(-1, 4).tanh().view(len(x), 8))


@pytest.mark.parametrize("make", [Merging, Flattening])
def test_views_of_any_kind_are_taken(make: Callable[[], nn.Module]) -> None:
    """Memory has the samples last where a model may expect them first."""
    torch.manual_seed(5)
    model, inputs, targets = make(), torch.randn(21, 4, 6), torch.randint(0, 3, (21,))
    found = clipped_gradients(
        model, LOSS, (inputs, targets), indices=torch.arange(21), clip=Clamp(10.0), batch_size=16
    ).mean
    exact = torch.autograd.grad(LOSS(model(inputs), targets).sum() / 16, list(model.parameters()))
    assert torch.allclose(found, torch.cat([part.flatten() for part in exact]).double(), rtol=1e-3, atol=1e-4)
