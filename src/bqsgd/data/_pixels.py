"""What a fixed transform of images asks of its input: finite pixels in [0, 1]."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput

_SLACK = 1e-4
"""What normalising and undoing it may have rounded."""


def check_pixels(images: npt.NDArray[np.float32], *, mean: float, deviation: float) -> None:
    """Refuse images whose pixels, mean + deviation * value, are not finite or leave [0, 1].

    >>> check_pixels(np.zeros((1, 4, 4), np.float32), mean=0.5, deviation=0.25)
    """
    if not len(images):
        return
    low, high = float(images.min()) * deviation + mean, float(images.max()) * deviation + mean
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteInput("images hold NaN or infinity; clean them before the transform")
    if low < -_SLACK or high > 1 + _SLACK:
        raise InvalidParameter(
            f"pixels must lie in [0, 1], these reach from {low:.4g} to {high:.4g}; "
            "scale them, or give the mean and deviation they were normalised with"
        )
