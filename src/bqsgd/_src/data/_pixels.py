"""What the fixed transforms of images share: the check of the pixels, and threads that work on chunks of images.

A transform takes one image at a time: its features depend on that image alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter, NonFiniteInput
from bqsgd._src.params import check_int
from bqsgd._src.runtime.modes import one_thread

_SLACK = 1e-4
"""Normalising the pixels and undoing it may round by this much."""
_CHUNK = 32
"""Images that a thread takes at a time."""
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What computes features of images. Both functions are called with the shape of an image.

    output_shape: returns the shape of its features, or raises InvalidParameter if it does not take such images.
    chunk_transform: returns the function from pixels in [0, 1], a few images at a time, to their features.
    """

    output_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    chunk_transform: Callable[[tuple[int, ...]], Callable[[_Floats], _Floats]]


def transformed(
    transform: Transform,
    images: _Floats,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    threads: int = 1,
    progress: Callable[[int], Any] = lambda done: None,
) -> _Floats:
    """The features of images (n, channels, height, width) whose pixels are mean + deviation * value, in [0, 1].

    threads: number of chunks worked on at once. Neither it nor the other images change a bit of an image's features.
    progress: called with the number of images that were just finished, from any thread.

    Raises:
        DataUnavailable: the weights of the network are unavailable.
        NonFiniteInput, InvalidParameter: the images or a setting are invalid; nothing has been computed.
    """
    check_int("threads", threads, 1, 1024)
    input_shape = images.shape[1:]
    features = np.empty((len(images), *transform.output_shape(input_shape)), dtype=np.float32)
    if len(images):
        _check_pixels(float(images.min()) * deviation + mean, float(images.max()) * deviation + mean)
    of_chunk = transform.chunk_transform(input_shape)

    def work(start: int) -> None:
        pixels = images[start : start + _CHUNK] * np.float32(deviation) + np.float32(mean)
        features[start : start + len(pixels)] = of_chunk(pixels)
        progress(len(pixels))

    # The number of torch's own threads decides the order in which it adds up. With one, a feature has the same bits
    # whatever `threads` is.
    with one_thread(), ThreadPoolExecutor(threads, thread_name_prefix="features") as pool:
        for _ in pool.map(work, range(0, len(images), _CHUNK)):
            pass  # an error of a thread is raised here
    return features


def _check_pixels(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteInput("images hold NaN or infinity; clean them before the transform")
    if low < -_SLACK or high > 1 + _SLACK:
        raise InvalidParameter(
            f"pixels must lie in [0, 1], these range from {low:.4g} to {high:.4g}; "
            "scale them, or give the mean and deviation they were normalised with"
        )
