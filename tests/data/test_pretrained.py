"""ImageNet features depend on one image alone. The network here has random weights: the real ones are a download."""

import numpy as np
import pytest
import torch

from bqsgd._src.data import pretrained
from bqsgd._src.data.features import transformed
from bqsgd._src.errors import InvalidParameter, NonFiniteInput

WIDTHS = ((32, 16, 3), (16, 24, 3), (24, 24, 3), (24, 40, 5), (40, 40, 5), (40, 80, 3), (80, 80, 3), (80, 80, 3),
          (80, 112, 5), (112, 112, 5), (112, 112, 5), (112, 192, 5), (192, 192, 5), (192, 192, 5), (192, 192, 5),
          (192, 320, 3))  # fmt: skip


@pytest.fixture
def network(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weights = {}

    def add(name, norm, *shape):
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / (shape[1] * shape[2] ** 2) ** 0.5
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{norm}.{part}"] = torch.rand(shape[0], generator=generator) + 0.5

    add("_conv_stem", "_bn0", 32, 3, 3, 3)
    for number, (width, out, side) in enumerate(WIDTHS):
        place, inner = f"_blocks.{number}.", width * (6 if number else 1)
        if number:
            add(f"{place}_expand_conv", f"{place}_bn0", inner, width, 1, 1)
        add(f"{place}_depthwise_conv", f"{place}_bn1", inner, 1, side, side)
        add(f"{place}_project_conv", f"{place}_bn2", out, inner, 1, 1)
    add("_conv_head", "_bn1", 1280, 320, 1, 1)
    model = pretrained.EfficientNetLite0(weights).eval()
    monkeypatch.setattr(pretrained, "network", lambda: model)
    monkeypatch.setattr(pretrained, "SIDE", 64)
    return model


def images(count, seed=0):
    return np.random.default_rng(seed).random((count, 3, 32, 32), dtype=np.float32)


def test_an_image_has_the_same_features_wherever_it_stands(network):
    pixels = images(19)
    found = transformed(pretrained.IMAGENET, pixels)
    assert found.shape == (19, 1280)
    np.testing.assert_array_equal(found, transformed(pretrained.IMAGENET, pixels, threads=2))
    np.testing.assert_array_equal(found[17:], transformed(pretrained.IMAGENET, pixels[17:]))
    normalised = (pixels - np.float32(0.5)) / np.float32(0.25)
    np.testing.assert_allclose(found, transformed(pretrained.IMAGENET, normalised, mean=0.5, deviation=0.25), atol=1e-3)
    np.testing.assert_allclose(found.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(found.std(axis=1), 1, atol=1e-3)


def test_layers_are_those_of_the_published_network(network):
    assert [block[-2].stride for block in network.blocks] == list(pretrained._STRIDES)
    assert network.stem(torch.zeros(1, 3, 64, 64)).shape == (1, 32, 32, 32)
    assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 1280)


def test_padding_is_that_of_tensorflow():
    weights = {"c.weight": torch.ones(1, 1, 3, 3), **{f"n.{part}": torch.zeros(1) for part in ("bias", "running_mean")}}
    weights |= {"n.weight": torch.ones(1), "n.running_var": torch.full((1,), 1 - 1e-3)}
    rows = torch.arange(16.0).reshape(1, 1, 4, 4)
    strided = pretrained._Convolution(weights, "c", "n", stride=2)(rows)
    torch.testing.assert_close(strided[0, 0, 0, 0], rows[0, 0, :3, :3].sum())  # no margin above and to the left
    torch.testing.assert_close(strided[0, 0, 1, 1], rows[0, 0, 2:, 2:].sum())
    plain = pretrained._Convolution(weights, "c", "n")(rows)
    torch.testing.assert_close(plain[0, 0, 0, 0], rows[0, 0, :2, :2].sum())


@pytest.mark.parametrize(
    ("pixels", "error", "message"),
    [
        (images(2)[:, :1], InvalidParameter, "colour images"),
        (images(2) * 2, InvalidParameter, r"pixels must lie in \[0, 1\]"),
        (np.full((1, 3, 32, 32), np.nan, np.float32), NonFiniteInput, "NaN"),
    ],
)
def test_what_is_refused_before_anything_is_fetched(pixels, error, message):
    with pytest.raises(error, match=message):
        transformed(pretrained.IMAGENET, pixels)
