"""A record that float32 products of whole matrices let move everybody's moments, though it has none itself there.

The record's features are zero but for the last. The other samples are of very different sizes: what a plain x^T x makes
of their products depends on how many rows there are and on the order in which they are added.
"""

import torch


def front_record(samples, features, *, seed=0):
    """(inputs, labels) whose sample 0 is the record: its moments are zero in all but the last feature."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=generator)
    inputs *= 10.0 ** torch.randint(-3, 4, (samples, 1), generator=generator)
    inputs[0] = 0
    inputs[0, -1] = 1.0
    return inputs, torch.randint(0, 3, (samples,), generator=generator)


def whole_products(inputs, labels, *, classes, batch_size):
    """The moments as one product of float32 matrices, of normalised samples."""
    unit = inputs / inputs.norm(dim=1, keepdim=True)
    both = torch.cat([unit, torch.nn.functional.one_hot(labels, classes).float()], dim=1)
    return (both.T @ unit).double() / batch_size
