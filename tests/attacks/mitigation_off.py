"""Clipped gradients with one defence taken away, as faults to plant: each has the signature of `clipped_gradients`."""

import torch

from bqsgd.persample.capture import capture
from bqsgd.persample.gradients import ClippedGradients, clipped_gradients, clipped_steps, places


def rows_as_they_come(model, loss_fn, batch, *, indices, clip, batch_size):
    """All samples in one pass, in the order of the batch: a sample's row and the shape follow from the others."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = places(clip, [parameter.numel() for parameter in parameters])
    mean = torch.zeros(found[-1].span.stop, dtype=torch.float64)
    dropped = clipped_steps(capture(model, loss_fn, *batch, parameters), found, clip, mean)
    for place in found:
        mean[place.span] *= place.grid.step / batch_size
    return ClippedGradients(mean, dropped)


def float32_sums(model, loss_fn, batch, *, indices, clip, batch_size):
    """The right clipped gradients, added in float32 one after another."""
    total = None
    inputs, targets = batch
    kept = {}
    for at in range(len(inputs)):
        key = (inputs[at].numpy().tobytes(), targets[at].numpy().tobytes())
        if key not in kept:  # a sample's gradient is its own, so it is computed once
            one = (inputs[at : at + 1], targets[at : at + 1])
            alone = clipped_gradients(model, loss_fn, one, indices=[0], clip=clip, batch_size=1)
            kept[key] = (alone.mean / batch_size).float().numpy()
        total = kept[key].copy() if total is None else total + kept[key]
    return ClippedGradients(torch.from_numpy(total).double(), 0)
