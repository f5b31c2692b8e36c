"""Per-sample gradients of any model through `torch.func`, a micro-batch at a time: the slow road that always works."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

SCRATCH_BYTES = 64 << 20
"""Per-sample gradients held at once."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss_fn(outputs, targets) -> one loss a sample, shape (batch,)."""


def micro_batch(dimension: int, scratch_bytes: int = SCRATCH_BYTES) -> int:
    """Samples whose gradients of `dimension` float32 coordinates fit in the scratch; at least one."""
    return max(1, scratch_bytes // (4 * max(1, dimension)))


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor
) -> Iterator[list[Tensor]]:
    """Yield, for one micro-batch after another, a (samples, coordinates) gradient for each trainable parameter."""
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad} | dict(
        model.named_buffers()
    )

    def loss_of_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**rest, **parameters}, (x.unsqueeze(0),))
        return loss_fn(outputs, y.unsqueeze(0)).sum()

    gradients_of = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness="different")
    size = micro_batch(sum(p.numel() for p in trainable.values()))
    for x, y in zip(inputs.split(size), targets.split(size), strict=True):
        gradients = gradients_of(trainable, x, y)
        yield [gradients[name].detach().flatten(1) for name in trainable]
