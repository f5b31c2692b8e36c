"""The mean of clipped second moments and class sums: all that least squares needs of the data, in one message.

A sample with the features x and the class c adds the products x_i x_j, i <= j, and v |x| x_i in the sums of class c,
scaled to the norm of the clip whatever they were: a sample counts by its direction. All of them are entries of one
outer product, of x with (x, v |x| in place c), so they go through the loops that the gradient of a linear layer goes
through: whole steps of the clip's grid, added exactly (docs/accounting.md, Claim 13).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bqsgd._src.params import check_int
from bqsgd._src.persample._kernels.grid import MOST_SAMPLES, SHRINK, Grid
from bqsgd._src.persample._kernels.loops import largest, outer_steps, squared_norms, triangle_squares
from bqsgd._src.persample.clips import L2
from bqsgd._src.persample.gradients import ClippedGradients

CLASS_WEIGHT = math.sqrt(2)
"""v: the class sums then have about twice the norm of the moments; chosen on held-out samples (docs/training.md)."""
GROUP_SAMPLES = 1024
"""Samples whose factors are held at once."""
MOST_FEATURES = 8192
"""More have second moments of half a gigabyte."""


def moments_dimension(features: int, classes: int) -> int:
    """Coordinates of the message: the products of two features, then the sums of each class.

    >>> moments_dimension(1280, 10)
    832640
    """
    check_int("features", features, 1, MOST_FEATURES)
    return features * (features + 1) // 2 + features * check_int("classes", classes, 2, 2**20)


def clipped_moments(batch: tuple[Tensor, Tensor], *, classes: int, clip: L2, batch_size: int) -> ClippedGradients:
    """(1/L) sum over the batch of each sample's second moments and class sums, scaled to the clip's norm and then, by
    `Dual`, clamped to its bound.

    `clip.sensitivity(batch_size=L)` belongs to the mean, as to that of gradients. A sample that holds NaN or infinity,
    whose features are all zero or whose class is none of `classes` counts as zero.

    >>> found = clipped_moments((torch.tensor([[3.0, 4.0]]), torch.tensor([1])), classes=2, clip=L2(1.0), batch_size=1)
    >>> [round(value, 3) for value in found.mean.tolist()]
    [0.216, 0.288, 0.385, 0.0, 0.0, 0.51, 0.68]
    """
    inputs, labels = batch[0].detach().flatten(1), batch[1].detach()
    features = inputs.shape[1]
    dimension = moments_dimension(features, classes)
    check_int("samples in the batch", len(inputs), 0, MOST_SAMPLES)
    grid = Grid(clip.largest)
    reach = clip.norm * (1 - SHRINK) - grid.rounding(dimension)
    total, dropped = torch.zeros(features + classes, features, dtype=torch.float64), 0
    for start in range(0, len(inputs), GROUP_SAMPLES):
        group = slice(start, start + GROUP_SAMPLES)
        x, scaled = _factors(inputs[group].to("cpu", torch.float32), labels[group].cpu(), classes=classes, reach=reach)
        dropped += len(inputs[group]) - len(x)
        if len(x):
            ones = torch.ones(len(x), dtype=torch.float64)
            outer_steps(x, scaled, grid, ones, total, bound=clip.clamp, most=largest(x))
    mean = torch.empty(dimension, dtype=torch.float64)
    rows, columns = triangle(features)
    mean[: len(rows)] = total[torch.from_numpy(rows), torch.from_numpy(columns)]
    mean[len(rows) :] = total[features:].reshape(-1)
    return ClippedGradients(mean.div_(batch_size / grid.step), dropped)  # the divisor is exact


def _factors(inputs: Tensor, labels: Tensor, *, classes: int, reach: float) -> tuple[Tensor, Tensor]:
    """x and w (x, v |x| in the place of its class) of the samples that count, w such that what is kept of their outer
    product has the norm `reach`.

    Every figure is a function of one sample: copies, single IEEE operations, or loops over one sample. First x is
    brought to about 1 by a power of two, so that nothing overflows.
    """
    most = largest(inputs)
    usable = ((labels >= 0) & (labels < classes) & (most > 0) & most.isfinite()).nonzero().flatten()
    powers = torch.from_numpy(np.ldexp(1.0, -np.frexp(most[usable].numpy())[1]))
    x = (inputs[usable].double() * powers[:, None]).float()
    lengths = (squared_norms(x).sqrt() * CLASS_WEIGHT).float()
    factors = torch.zeros(len(x), inputs.shape[1] + classes, dtype=torch.float64)
    factors[:, : inputs.shape[1]] = x
    factors[torch.arange(len(x)), inputs.shape[1] + labels[usable].long()] = lengths.double()
    norms = (triangle_squares(x) + lengths.double().square() * squared_norms(x)).sqrt()
    return x, (factors * (reach / norms)[:, None]).float()


@lru_cache(maxsize=4)
def triangle(features: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the products in the order of the message."""
    return np.triu_indices(features)
