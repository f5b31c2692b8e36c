"""A server that sends weights whose products cancel to pure rounding error, to see who stands in which row.

Weights of 1e12 at right angles to every sample of a data set give outputs that are nothing but rounding. Their sign,
and with it the whole softmax, follows the order in which a kernel adds, which may depend on a sample's row and on the
size of its batch. Samples are chosen whose sign flips when one record is put in front of them: the record then moves
the gradients of all others.
"""

from dataclasses import dataclass

import torch
from torch import nn

FEATURES, SCALE, CANDIDATES = 3969, 1e12, 40
SIZES = (15, 63, 255)


@dataclass(frozen=True)
class CancellingWeights:
    """Without the record: `inputs[1:]`; with it in front: `inputs`. `flipped` samples change sides on this machine if
    the whole batch goes through the model at once."""

    model: nn.Linear
    inputs: torch.Tensor
    targets: torch.Tensor
    flipped: int


def cancelling_weights(*, sizes=SIZES, seed=0):
    """The strongest of the attacks on batches of these sizes on this machine."""
    made = [_attack(size, seed) for size in sizes]
    return max(made, key=lambda attack: attack.flipped)


def _attack(size, seed):
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.rand(CANDIDATES, FEATURES, generator=generator)
    basis, _ = torch.linalg.qr(candidates.double().T)
    direction = torch.randn(FEATURES, generator=generator, dtype=torch.float64)
    for _ in range(2):
        direction -= basis @ (basis.T @ direction)
    model = nn.Linear(FEATURES, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[1] = (direction * SCALE).float()
        sides = [
            (model(x.repeat(size, 1))[:, 1] > 0, model(x.repeat(size + 1, 1))[1:, 1] < 0) for x in candidates
        ]  # what stands in the other rows does not matter to a row, only how many there are
    chosen, flipped = [], 0
    for row in range(size):
        found = [x for x, (alone, shifted) in zip(candidates, sides, strict=True) if alone[row] and shifted[row]]
        chosen.append(found[row % len(found)] if found else candidates[row % CANDIDATES])
        flipped += bool(found)
    record = torch.rand(1, FEATURES, generator=generator)
    inputs = torch.cat([record, torch.stack(chosen)])
    return CancellingWeights(model, inputs, torch.zeros(size + 1, dtype=torch.long), flipped)
