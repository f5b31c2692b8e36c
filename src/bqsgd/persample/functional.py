"""Per-sample gradients of any model through `torch.func`, a small batch at a time: the slow road that always works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bqsgd.errors import InvalidParameter

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss_fn(outputs, targets) -> one loss a sample, shape (batch,)."""


def check_losses(losses: Tensor, batch: int) -> Tensor:
    """The losses, if there is exactly one a sample."""
    if not isinstance(losses, Tensor) or losses.shape != (batch,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidParameter(
            f"loss_fn must return one loss a sample, shape ({batch},), got {got}; use reduction='none' and sum or "
            "average what is left of each sample"
        )
    return losses


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[list[Tensor]]:
    """Yield, for one batch of inputs and targets after another, a (samples, coordinates) gradient for each trainable
    parameter."""
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    rest |= {name: buffer.clone() for name, buffer in model.named_buffers()}

    def loss_of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**rest, **parameters}, (x.unsqueeze(0),))
        return check_losses(loss_fn(outputs, y.unsqueeze(0)), 1)[0]

    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    for inputs, targets in batches:
        with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels cannot be vmapped
            gradients = gradients_of(trainable, inputs.detach(), targets)
        with torch.no_grad():
            yield [gradients[name].detach().flatten(1) for name in trainable]
