"""What the fixed transforms of images share: the check of their pixels, and threads that work on chunks of images."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from bqsgd._src.errors import InvalidParameter, NonFiniteInput

_SLACK = 1e-4
"""Normalising the pixels and undoing it may round by this much."""


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


def in_chunks(work: Callable[[int], None], images: int, *, chunk: int, threads: int) -> None:
    """Call `work` with the first image of every chunk, in so many threads; torch itself has one thread meanwhile.

    The number of torch's threads decides the order in which it adds up. With one, a feature has the same bits
    whatever `threads` is.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="features") as pool:
            for _ in pool.map(work, range(0, images, chunk)):
                pass  # an error of a thread is raised here
    finally:
        torch.set_num_threads(before)
