"""The mean of clipped second moments and class sums: all that least squares needs of the data, in one message.

A sample with the features x and the class c adds the products x_i x_j, i <= j, and |x| x_i in the sums of class c,
scaled to the norm of the clip whatever they were: a sample counts by its direction. All of them are entries of one
outer product, of x with (x, |x| in place c), so they go through the loops that the gradient of a linear layer goes
through: whole steps of the clip's grid, added exactly (docs/accounting.md, Claim 13).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bqsgd.params import check_int
from bqsgd.persample._kernels.grid import MOST_SAMPLES, Grid
from bqsgd.persample._kernels.loops import outer_steps, squared_norms, triangle_squares
from bqsgd.persample.clips import L2
from bqsgd.persample.factors import max_norm
from bqsgd.persample.gradients import GROUP_SAMPLES, LARGEST, ClippedGradients

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
    """(1/L) sum over the batch of each sample's second moments and class sums, scaled to the clip's norm.

    `clip.sensitivity(batch_size=L)` belongs to the mean, as to that of gradients. A sample that holds NaN, infinity or
    what may overflow, whose features are all zero or whose class is none of `classes` counts as zero.

    >>> found = clipped_moments((torch.tensor([[3.0, 4.0]]), torch.tensor([1])), classes=2, clip=L2(1.0), batch_size=1)
    >>> [round(value, 3) for value in found.mean.tolist()]
    [0.272, 0.363, 0.484, 0.0, 0.0, 0.454, 0.605]
    """
    inputs, labels = batch[0].detach().flatten(1), batch[1].detach()
    features = inputs.shape[1]
    dimension = moments_dimension(features, classes)
    check_int("samples in the batch", len(inputs), 0, MOST_SAMPLES)
    grid = Grid(clip.norm)
    reach = grid.norm_reach(clip.norm, dimension)
    total, dropped = torch.zeros(features + classes, features, dtype=torch.float64), 0
    part = torch.empty_like(total)
    for start in range(0, len(inputs), GROUP_SAMPLES):
        group = slice(start, start + GROUP_SAMPLES)
        x, errors, norms = _factors(inputs[group].to("cpu", torch.float32), labels[group].cpu(), classes=classes)
        dropped += len(inputs[group]) - len(x)
        if len(x):
            outer_steps(x, errors, grid, reach / norms, part, bound=None)
            total += part  # whole numbers: exact
    mean = torch.empty(dimension, dtype=torch.float64)
    rows, columns = triangle(features)
    mean[: len(rows)] = total[torch.from_numpy(rows), torch.from_numpy(columns)]
    mean[len(rows) :] = total[features:].reshape(-1)
    return ClippedGradients(mean.div_(batch_size / grid.step), dropped)  # the divisor is exact


def _factors(inputs: Tensor, labels: Tensor, *, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x, (x, |x| in the place of its class), the norm of what is kept of their outer product) of the samples that
    count. Every figure is a function of one sample: copies, single IEEE operations, or loops over one sample."""
    known = (labels >= 0) & (labels < classes)
    lengths = squared_norms(inputs).sqrt().float()
    bounds = max_norm(inputs) * lengths.double()
    usable = (known & (bounds > 0) & (bounds <= LARGEST)).nonzero().flatten()  # NaN is neither
    x, lengths = inputs[usable].contiguous(), lengths[usable]
    errors = torch.zeros(len(x), inputs.shape[1] + classes)
    errors[:, : inputs.shape[1]] = x
    errors[torch.arange(len(x)), inputs.shape[1] + labels[usable].long()] = lengths
    norms = triangle_squares(x) + lengths.double().square() * squared_norms(x)
    return x, errors, norms.sqrt()


@lru_cache(maxsize=4)
def triangle(features: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows and columns of the products in the order of the message."""
    return np.triu_indices(features)
