"""Chosen data whose float32 sum moves by far more than one term when one record is taken out.

`PLATEAU` samples of the largest gradient bring a running sum exactly to a power of two. The record lifts it above,
where float32 is so coarse that each of many small negative gradients is rounded away; without it each of them is
rounded to a whole step of the finer floats below.
"""

import torch
from torch import nn

PLATEAU = 2**16


def chosen_sums(count):
    """(model, inputs, targets) of `count` samples; the record is sample PLATEAU. Clip with Clamp(1.0).

    At zero weights the gradient of a sample is half its input, with one sign for one class and the other for the other.
    """
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    inputs = torch.full((count, 1), -2 * 0.6 * PLATEAU * 2.0**-24)
    inputs[: PLATEAU + 1] = 4.0
    return model, inputs, torch.zeros(count, dtype=torch.long)
