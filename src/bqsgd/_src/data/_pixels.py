"""What the fixed transforms of images share: the check of the pixels, and threads that work on chunks of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def check_pixels(images: npt.NDArray[np.float32], *, mean: float, deviation: float) -> None:
    """Raise unless every pixel, mean + deviation * value, is finite and lies in [0, 1].

    >>> check_pixels(np.zeros((1, 4, 4), np.float32), mean=0.5, deviation=0.25)
    """
    if not len(images):
        return
    low, high = float(images.min()) * deviation + mean, float(images.max()) * deviation + mean
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteInput("images hold NaN or infinity; clean them before the transform")
    if low < -_SLACK or high > 1 + _SLACK:
        raise InvalidParameter(
            f"pixels must lie in [0, 1], these range from {low:.4g} to {high:.4g}; "
            "scale them, or give the mean and deviation they were normalised with"
        )


def transformed(
    images: _Floats,
    transform: Callable[[_Floats], _Floats],
    *,
    shape: tuple[int, ...],
    mean: float,
    deviation: float,
    threads: int,
    progress: Callable[[int], Any],
) -> _Floats:
    """Features of this shape for each image. Threads call `transform` with chunks of pixels, mean + deviation * value.

    progress: called with the number of images that were just finished, from any thread.
    """
    check_int("threads", threads, 1, 1024)
    features = np.empty((len(images), *shape), dtype=np.float32)

    def work(start: int) -> None:
        pixels = images[start : start + _CHUNK] * np.float32(deviation) + np.float32(mean)
        features[start : start + len(pixels)] = transform(pixels)
        progress(len(pixels))

    # The number of torch's own threads decides the order in which it adds up. With one, a feature has the same bits
    # whatever `threads` is.
    with one_thread(), ThreadPoolExecutor(threads, thread_name_prefix="features") as pool:
        for _ in pool.map(work, range(0, len(images), _CHUNK)):
            pass  # an error of a thread is raised here
    return features
