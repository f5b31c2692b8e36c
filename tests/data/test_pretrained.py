"""ImageNet features depend on one image alone. Networks here have random weights: the real ones are a download."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bqsgd._src.data import pretrained
from bqsgd._src.data.features import transformed
from bqsgd._src.errors import InvalidParameter, NonFiniteInput

WIDTHS = (32, 16, 24, 40, 80, 112, 192, 320)
"""Of the stem and of each stage; a block of a published network has six times as many in its middle."""
SIDES = (3, 3, 5, 3, 5, 5, 3)


def random_weights(repeats):
    generator = torch.Generator().manual_seed(0)
    weights = {}

    def add(name, norm, *shape):
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / (shape[1] * shape[2] ** 2) ** 0.5
        for part in ("weight", "bias", "running_mean", "running_var"):
            weights[f"{norm}.{part}"] = torch.rand(shape[0], generator=generator) + 0.5

    add("_conv_stem", "_bn0", WIDTHS[0], 3, 3, 3)
    sizes = [
        (WIDTHS[stage] if first else WIDTHS[stage + 1], WIDTHS[stage + 1], SIDES[stage])
        for stage, count in enumerate(repeats)
        for first in [True] + [False] * (count - 1)
    ]
    for number, (width, out, side) in enumerate(sizes):
        place, inner = f"_blocks.{number}.", width * (6 if number else 1)
        if number:
            add(f"{place}_expand_conv", f"{place}_bn0", inner, width, 1, 1)
        add(f"{place}_depthwise_conv", f"{place}_bn1", inner, 1, side, side)
        add(f"{place}_project_conv", f"{place}_bn2", out, inner, 1, 1)
    add("_conv_head", "_bn1", 1280, WIDTHS[-1], 1, 1)
    return weights


@pytest.fixture(params=pretrained.NETWORKS)
def transform(request, monkeypatch):
    """Of the networks of one name, on small images."""
    variants = tuple(replace(variant, side=64) for variant in pretrained.NETWORKS[request.param])
    models = {one: pretrained.EfficientNetLite(random_weights(one.repeats), one.repeats).eval() for one in variants}
    monkeypatch.setattr(pretrained, "network", models.__getitem__)
    return pretrained.transform_of(variants)


def images(count, seed=0):
    return np.random.default_rng(seed).random((count, 3, 32, 32), dtype=np.float32)


def test_an_image_has_the_same_features_wherever_it_stands(transform):
    pixels = images(19)
    found = transformed(transform, pixels)
    assert found.shape == (19, *transform.output_shape((3, 32, 32)))
    np.testing.assert_array_equal(found, transformed(transform, pixels, threads=2))
    np.testing.assert_array_equal(found[17:], transformed(transform, pixels[17:]))
    normalised = (pixels - np.float32(0.5)) / np.float32(0.25)
    np.testing.assert_allclose(found, transformed(transform, normalised, mean=0.5, deviation=0.25), atol=1e-3)
    for of_network in np.split(found, found.shape[1] // 1280, axis=1):
        np.testing.assert_allclose(of_network.mean(axis=1), 0, atol=1e-5)
        np.testing.assert_allclose(of_network.std(axis=1), 1, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "strides"),
    [
        ("imagenet", [[1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1]]),
        (
            "imagenet-pair",
            [
                [1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1],
                [1, 2, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1],
            ],
        ),
    ],
)
def test_layers_are_those_of_the_published_networks(name, strides):
    for variant, expected in zip(pretrained.NETWORKS[name], strides, strict=True):
        network = pretrained.EfficientNetLite(random_weights(variant.repeats), variant.repeats)
        assert [block[-2].stride for block in network.blocks] == expected
        assert network.stem(torch.zeros(1, 3, 64, 64)).shape == (1, 32, 32, 32)
        assert network(torch.zeros(2, 3, 64, 64)).shape == (2, 1280)


def test_the_pair_has_the_features_of_both_networks(monkeypatch):
    variants = tuple(replace(variant, side=64) for variant in pretrained.NETWORKS["imagenet-pair"])
    models = {one: pretrained.EfficientNetLite(random_weights(one.repeats), one.repeats).eval() for one in variants}
    monkeypatch.setattr(pretrained, "network", models.__getitem__)
    pixels = images(2)
    alone = [transformed(pretrained.transform_of((one,)), pixels) for one in variants]
    assert not np.array_equal(*alone)
    both = transformed(pretrained.transform_of(variants), pixels)
    np.testing.assert_array_equal(both, np.concatenate(alone, axis=1))


def test_what_the_networks_see_of_an_image():
    pixels = torch.from_numpy(images(1))
    first, second = pretrained.NETWORKS["imagenet-pair"]
    assert pretrained.NETWORKS["imagenet"] == (first,)
    both = pretrained.enlarged(pixels, first)
    assert both.shape == (2, 3, 192, 192)
    torch.testing.assert_close(both[1], both[0].flip(2))
    one = pretrained.enlarged((pixels > 0.5).float(), second)
    assert one.shape == (1, 3, 224, 224)
    # Bicubic enlargement alone overshoots at such edges.
    assert float(one.min()) == pytest.approx(-127 / 128)
    assert float(one.max()) == pytest.approx(1)


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
@pytest.mark.parametrize("name", pretrained.NETWORKS)
def test_what_is_refused_before_anything_is_fetched(name, pixels, error, message):
    with pytest.raises(error, match=message):
        transformed(pretrained.TRANSFORMS[name], pixels)
