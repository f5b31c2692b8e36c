"""Models: parameter counts, seeds, shapes, and no layer that mixes samples."""

import pytest
import torch

from bqsgd._src import models
from bqsgd._src.errors import InvalidParameter


def size(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "parameters"), [("lenet5", 61_706), ("cnn", 26_010), ("alexnet28", 1_158_010)])
def test_parameter_counts_for_28_by_28(name, parameters):
    model = models.build(name, input_shape=(1, 28, 28), classes=10, seed=0)
    assert size(model) == parameters
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_alexnet_has_five_convolutions_and_three_dense_layers():
    layers = list(models.build("alexnet28", input_shape=(1, 28, 28), classes=10, seed=0))
    assert sum(isinstance(layer, torch.nn.Conv2d) for layer in layers) == 5
    assert sum(isinstance(layer, torch.nn.Linear) for layer in layers) == 3


@pytest.mark.parametrize("name", ["lenet5", "cnn", "alexnet28", "mlp", "pooled"])
def test_a_sample_s_output_does_not_depend_on_its_batch(name):
    model = models.build(name, input_shape=(1, 28, 28), classes=10, seed=1)
    batch = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]))


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    a, b, c = (models.build("mlp", input_shape=(1, 8, 8), classes=10, seed=seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert torch.equal(a[1].weight, b[1].weight)
    assert not torch.equal(a[1].weight, c[1].weight)


def test_mlp_sizes_and_defaults():
    assert size(models.build("mlp", input_shape=(1, 8, 8), classes=3, seed=0)) == 64 * 64 + 64 + 64 * 3 + 3
    assert models.default_for((1, 28, 28)) == "cnn"
    assert models.default_for((1, 8, 8)) == "mlp"


def test_pooled_features_are_few_and_the_start_is_zero():
    model = models.build("pooled", input_shape=(81, 7, 7), classes=10, seed=0)
    assert size(model) == 81 * 9 * 10 + 10
    assert not any(parameter.any() for parameter in model.parameters())
    with torch.no_grad():
        model[2].weight[:] = 1.0
    assert torch.allclose(model(torch.ones(2, 81, 7, 7)), torch.full((2, 10), 81 * 9.0))


def test_misfits_are_refused_with_advice():
    with pytest.raises(InvalidParameter, match="pooled takes images"):
        models.build("pooled", input_shape=(1280,), classes=10, seed=0)
    with pytest.raises(InvalidParameter, match="try mlp"):
        models.build("lenet5", input_shape=(1, 8, 8), classes=10, seed=0)
    with pytest.raises(InvalidParameter, match="one of"):
        models.build("resnet", input_shape=(1, 8, 8), classes=10, seed=0)
    with pytest.raises(InvalidParameter, match="activation"):
        models.build("lenet5", input_shape=(1, 28, 28), classes=10, seed=0, activation="gelu")
