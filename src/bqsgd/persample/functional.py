"""Per-sample gradients of any model through `torch.func`, a small batch at a time: the slow road that always works."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bqsgd.errors import InvalidParameter
from bqsgd.persample.generators import generators_kept

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""loss_fn(outputs, targets) -> one loss per sample, shape (batch,)."""


def check_losses(losses: Tensor, batch: int) -> Tensor:
    """The losses, if there is exactly one per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (batch,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidParameter(
            f"loss_fn must return one loss per sample, shape ({batch},), got {got}; use reduction='none' and sum or "
            "average what is left of each sample"
        )
    return losses


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, batches: Iterable[tuple[Tensor, Tensor]]
) -> Iterator[list[Tensor]]:
    """Yield, for one batch of inputs and targets after another, a (samples, coordinates) gradient for each trainable
    parameter.

    Models that `vmap` cannot take (a GRU, control flow that looks at values) are differentiated one sample at a time.
    Which of the two is a matter of model and shapes, found out on zeros: it must not depend on the data.
    """
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for inputs, targets in batches:
        compute = _vmapped if _takes_vmap(model, loss_fn, inputs, targets) else _one_by_one
        gradients = compute(model, loss_fn, inputs.detach(), targets)
        with torch.no_grad():
            yield [gradients[name].detach().flatten(1) for name in names]


_taken: WeakKeyDictionary[nn.Module, dict[object, bool]] = WeakKeyDictionary()


def _takes_vmap(model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor) -> bool:
    found = _taken.setdefault(model, {})
    question = (loss_fn, model.training, inputs.shape, inputs.dtype, targets.shape, targets.dtype)
    if question not in found:
        zeros = torch.zeros_like(inputs), torch.zeros_like(targets)
        with generators_kept():
            try:
                _vmapped(model, loss_fn, *zeros)
                found[question] = True
            except Exception:
                _one_by_one(model, loss_fn, zeros[0][:1], zeros[1][:1])  # what fails here too is the model's own error
                found[question] = False
    return found[question]


def _loss_of_one(model: nn.Module, loss_fn: LossFunction, values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    outputs = functional_call(model, values, (x.unsqueeze(0),))
    return check_losses(loss_fn(outputs, y.unsqueeze(0)), 1)[0]


def _split(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable parameters, and everything else, which a forward must not change."""
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return trainable, rest | {name: buffer.clone() for name, buffer in model.named_buffers()}


def _vmapped(model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    trainable, rest = _split(model)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return _loss_of_one(model, loss_fn, {**rest, **parameters}, x, y)

    gradients_of = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # the fused attention kernels cannot be vmapped
        warnings.filterwarnings("ignore", message="There is a performance drop")
        found: dict[str, Tensor] = gradients_of(trainable, inputs, targets)
    return found


def _one_by_one(model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    trainable, rest = _split(model)
    parameters = {name: p.clone().requires_grad_() for name, p in trainable.items()}
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for x, y in zip(inputs, targets, strict=True):
        with torch.enable_grad():
            loss = _loss_of_one(model, loss_fn, {**rest, **parameters}, x.clone(), y.clone())
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for (name, parameter), gradient in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(parameter) if gradient is None else gradient)
    return {name: torch.stack(gradients) for name, gradients in rows.items()}
