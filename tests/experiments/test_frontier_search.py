"""The search of the frontier clips the gradient of each sample as the library would: against autograd, one by one."""

from __future__ import annotations

import pytest
import torch
from experiments.frontier.search import Convolutions, Linear
from torch import Tensor
from torch.nn.functional import cross_entropy

ROWS = slice(1, 6)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(7) % 4


@pytest.mark.parametrize("views", [1, 2])
def test_a_linear_model_clips_the_mean_gradient_of_a_sample_s_views(labels: Tensor, views: int) -> None:
    inputs = [drawn(7, 12, seed=view) for view in range(views)]
    model = Linear(inputs, labels)
    weights = drawn(13, 10, seed=9)
    expected = torch.zeros_like(weights)
    for row in range(ROWS.start, ROWS.stop):
        at = weights.clone().requires_grad_()
        losses = [cross_entropy(view[row] @ at[:-1] + at[-1], labels[row]) for view in inputs]
        (gradient,) = torch.autograd.grad(torch.stack(losses).mean(), at)
        assert gradient.norm() > 1
        expected += gradient / gradient.norm()
    assert torch.allclose(model.clipped_sum(weights, ROWS, 1.0), expected, atol=1e-6)


def test_a_centred_model_clips_the_gradient_on_features_less_their_centre(labels: Tensor) -> None:
    inputs, weights = drawn(7, 12, seed=0), drawn(13, 10, seed=9)
    model = Linear([inputs], labels)
    model.centre(ROWS, noise=0.0, rng=torch.Generator())
    assert model.offset.norm() > 0.1
    moved = Linear([inputs - model.offset], labels)
    assert torch.allclose(model.outputs(weights, ROWS), moved.outputs(weights, ROWS), atol=1e-5)
    assert torch.allclose(model.clipped_sum(weights, ROWS, 1.0), moved.clipped_sum(weights, ROWS, 1.0), atol=1e-5)


def test_a_cnn_clips_the_gradient_of_each_sample(labels: Tensor) -> None:
    inputs = drawn(7, 5 * 64, seed=0)
    model = Convolutions(inputs, labels, rng=torch.Generator().manual_seed(1))
    weights, alone = model.initial, []
    for row in range(ROWS.start, ROWS.stop):
        at = weights.clone().requires_grad_()
        one = Convolutions(inputs[row : row + 1], labels[row : row + 1], rng=torch.Generator())
        outputs = one._passed(at, one.inputs)[-1]  # outputs() keeps no graph
        (gradient,) = torch.autograd.grad(cross_entropy(outputs, one.labels), at)
        alone.append(gradient)
    clip = float(torch.stack([gradient.norm() for gradient in alone]).median())  # some are clipped, some are not
    expected = sum(gradient * min(1.0, clip / float(gradient.norm())) for gradient in alone)
    assert torch.allclose(model.clipped_sum(weights, ROWS, clip), expected, atol=1e-5)
