"""Clipped gradients with one defence taken away, as faults to plant: each has the signature of `clipped_gradients`."""

import torch

from bqsgd._src.persample import ClippedGradients, clipped_gradients


def rows_as_they_come(model, loss_fn, batch, *, clip, batch_size):
    """All samples of a linear model without a bias in one pass, in the order of the batch: a sample's row and the shape
    of the pass follow from the others. The clip is a `Clamp`."""
    inputs, targets = batch
    outputs = model(inputs)
    (errors,) = torch.autograd.grad(loss_fn(outputs, targets).sum(), outputs)
    gradients = errors[:, :, None] * inputs[:, None]
    clamped = gradients.clamp(-clip.bound, clip.bound).double()
    return ClippedGradients(clamped.sum(dim=0).flatten() / batch_size, 0)


def float32_sums(model, loss_fn, batch, *, clip, batch_size):
    """The right clipped gradients, added in float32 one after another."""
    total = None
    inputs, targets = batch
    kept = {}
    for at in range(len(inputs)):
        key = (inputs[at].numpy().tobytes(), targets[at].numpy().tobytes())
        if key not in kept:  # a sample's gradient is its own, so it is computed once
            one = (inputs[at : at + 1], targets[at : at + 1])
            alone = clipped_gradients(model, loss_fn, one, clip=clip, batch_size=1)
            kept[key] = (alone.mean / batch_size).float().numpy()
        total = kept[key].copy() if total is None else total + kept[key]
    return ClippedGradients(torch.from_numpy(total).double(), 0)
