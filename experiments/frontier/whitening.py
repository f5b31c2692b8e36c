"""The matrix of `--features whitened`: from images that no person's data went into.

python -m experiments.frontier.whitening  # writes src/bqsgd/_src/data/whitening.npy

Half of the images are one to three white strokes on black, the other half blobs on black, filled with dead leaves
(opaque discs of random grey over one another). M are the second moments of the 81 channels of their scattering
features over all positions; the matrix is (M + l)^(-1/4), l being a hundredth of the mean eigenvalue of M. The exponent
-1/2 would make all variances equal; on held-out samples -1/4 did better.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bqsgd._src.data.features import transformed
from bqsgd._src.data.scattering import CHANNELS, MATRIX, SCATTERING

SIDE, EACH, SEED = 28, 2500, 5
EXPONENT, RIDGE = -0.25, 0.01
Images = npt.NDArray[np.float32]
_ROWS, _COLUMNS = np.mgrid[:SIDE, :SIDE].astype(np.float32)


def leaves(count: int, rng: np.random.Generator) -> Images:
    """Discs of random grey over one another, their radii between 3 and 30 with density r^-3."""
    found = np.empty((count, SIDE, SIDE), dtype=np.float32)
    for image in found:
        image[:] = rng.random()
        radii = (3.0**-2 + rng.random(200) * (30.0**-2 - 3.0**-2)) ** -0.5
        centres = rng.random((200, 2)) * (SIDE + 40) - 20
        for radius, (row, column), grey in zip(radii, centres, rng.random(200), strict=True):
            image[(_ROWS - row) ** 2 + (_COLUMNS - column) ** 2 <= radius**2] = grey
    return found


def blobs(count: int, rng: np.random.Generator) -> Images:
    """Dead leaves inside one to four rounded rectangles, black outside."""
    found = leaves(count, rng)
    for image in found:
        inside = np.zeros(image.shape, dtype=bool)
        for _ in range(rng.integers(1, 5)):
            row, column = rng.uniform(0.25, 0.75, 2) * SIDE
            high, wide = rng.uniform(0.08, 0.45, 2) * SIDE
            turn = rng.uniform(0, math.pi)
            down, right = _ROWS - row, _COLUMNS - column
            along = (down * math.cos(turn) + right * math.sin(turn)) / high
            across = (right * math.cos(turn) - down * math.sin(turn)) / wide
            inside |= np.abs(along) ** 3 + np.abs(across) ** 3 <= 1
        image *= inside
    return found


def strokes(count: int, rng: np.random.Generator) -> Images:
    """One to three white curves of one width on black: Bezier curves of three points."""
    found = np.zeros((count, SIDE, SIDE), dtype=np.float32)
    t = np.linspace(0, 1, 24)[:, None]
    for image in found:
        width = rng.uniform(0.8, 1.6)
        for _ in range(rng.integers(1, 4)):
            first, second, third = rng.uniform(0.18, 0.82, (3, 2)) * SIDE
            curve = ((1 - t) ** 2 * first + 2 * t * (1 - t) * second + t**2 * third).astype(np.float32)
            distance = np.hypot(_ROWS[None] - curve[:, :1, None], _COLUMNS[None] - curve[:, 1:, None]).min(0)
            np.maximum(image, np.clip(width + 0.5 - distance, 0, 1), out=image)
    return found


def matrix(each: int, *, seed: int) -> npt.NDArray[np.float64]:
    """From so many images of either kind."""
    rng = np.random.default_rng(seed)
    images = np.concatenate([strokes(each, rng), blobs(each, rng)])
    found = transformed(SCATTERING, images[:, None]).transpose(0, 2, 3, 1).reshape(-1, CHANNELS).astype(np.float64)
    variances, directions = np.linalg.eigh(found.T @ found / len(found))
    scales = (variances + RIDGE * variances.mean()) ** EXPONENT
    return np.asarray((directions * scales) @ directions.T)


if __name__ == "__main__":
    np.save(str(MATRIX), matrix(EACH, seed=SEED).astype(np.float32), allow_pickle=False)
