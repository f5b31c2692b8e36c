"""Checks, on this machine and this model, of what no layer list can prove: that a sample's gradient is its own."""

from __future__ import annotations

import copy
import math
import random
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.persample.capture import NoRule, capture, capture_row_wise
from bqsgd.persample.factors import Factor, Outer, Summed, micro_batch
from bqsgd.persample.functional import LossFunction, per_sample_gradients
from bqsgd.persample.generators import alone, generators_kept
from bqsgd.persample.gradients import errors_of_losses
from bqsgd.persample.rows import aligned_zeros, packed_rows_for, pass_rows_for
from bqsgd.persample.rowwise import NotRowWise

TOLERANCE = 1e-3


def check_samples_apart(
    model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, Tensor], *, batch_size: int, packed: bool = False
) -> None:
    """Raise unless samples are kept apart: run this once, on a few samples, before training with `batch_size`.

    First, every sample of the batch must have the gradient norm that it has alone: a forward that mixes samples in code
    of its own (`x - x.mean(0)`), or that moves the batch dimension away from the front, would have the wrong gradients
    clipped. Second, a row of a full pass must come out the same to the last bit whatever stands in the other rows; in a
    model of row-wise operations, or with `packed` (no indices given to `clipped_gradients`), also whichever row it is.
    Both are tried on a copy of the model with random weights, so that weights which hide a difference do not pass: in
    evaluation mode, and the second in the model's own mode too, every pass with the same random draws, so that a layer
    which mixes samples, or remembers them, in training alone is found.

    Args:
        batch: inputs and targets of a few samples; floating-point values only lend their shape to the second check.

    Raises:
        InvalidParameter: the check failed, so that no sensitivity can be stated for this model on this machine.
    """
    with alone, generators_kept():
        generator = torch.Generator().manual_seed(0)
        probe = _randomised(model, generator)
        _check_norms(probe, loss_fn, *batch)
        rows = packed_rows_for(batch_size)
        own, any_row, seen = copy.deepcopy(model), True, _seen_row_wise
        try:
            seen(own, loss_fn, _company(batch, rows, generator), False)
        except (NotRowWise, NoRule):
            rows, any_row, seen = pass_rows_for(batch_size, packed=packed), packed, _seen
        _check_rows(partial(seen, probe, loss_fn), batch, rows, generator, any_row=any_row)
        if any(layer.training for layer in own.modules()):
            with torch.no_grad():
                for parameter, value in zip(own.parameters(), probe.parameters(), strict=True):
                    parameter.copy_(value)
            # Rows that are alike meet different random draws there, so whether a row matters is a question to `probe`.
            _check_rows(partial(seen, own, loss_fn), batch, rows, generator, any_row=False)


def _check_rows(
    seen: Callable[[list[Tensor], bool], list[Tensor]],
    batch: tuple[Tensor, Tensor],
    rows: int,
    generator: torch.Generator,
    *,
    any_row: bool,
) -> None:
    """Of full passes of so many rows; seen(pass, whether all its rows are alike) is all that gradients are made of."""
    first, second = (_company(batch, rows, generator) for _ in range(2))
    seed = secrets.randbits(32)  # of all threads: what another one draws meanwhile must not be known
    with _same_draws(seed):
        before = seen(first, False)
    for parity in (0, 1):
        kept = torch.arange(rows) % 2 == parity
        mixed = [torch.where(kept.view(-1, *[1] * (a.dim() - 1)), a, b) for a, b in zip(first, second, strict=True)]
        with _same_draws(seed):
            after = seen(mixed, False)
        for old, new in zip(before, after, strict=True):
            if not _same_bits(old[kept], new[kept]):
                raise InvalidParameter(
                    "the gradient of a sample changes in its last bits with the other samples of its batch on this "
                    "machine: no sensitivity can be stated; run it on another device or replace the layer that does it"
                )
    if any_row:
        alike = [values[:1].expand_as(values).contiguous() for values in first]
        for values in seen(alike, True):
            if not _same_bits(values, values[:1].expand_as(values)):
                raise InvalidParameter(
                    "the gradient of a sample changes in its last bits with its row in the batch on this machine: "
                    "no sensitivity can be stated for rows as they come"
                )


@contextmanager
def _same_draws(seed: int) -> Iterator[None]:
    """What is drawn at random is the same every time."""
    with generators_kept():
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        yield


def samples_like(values: Tensor, *, samples: int = 4, classes: int = 2) -> Tensor:
    """Made-up samples of the same shape and type: a check must not depend on data. Whole numbers are below `classes`,
    and as many of them are tried as there are samples."""
    shape = (samples, *values.shape[1:])
    if values.is_floating_point():
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(values.dtype)
    tried = torch.arange(samples) * max(1, classes // samples) % classes
    return tried.view(-1, *[1] * (values.dim() - 1)).expand(shape).to(values.dtype)


def _randomised(model: nn.Module, generator: torch.Generator) -> nn.Module:
    probe = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in probe.parameters():
            fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))
    return probe


def _check_norms(model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor) -> None:
    parameters = _trainable(model)
    try:
        factors = capture(model, loss_fn, inputs, targets, parameters)
    except NoRule:
        return  # such a model is taken sample by sample
    with torch.no_grad():
        together = _norms([factor for factor in factors if factor is not None])
        alone = torch.stack(
            [_norm_alone(model, loss_fn, inputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs))]
        )
    if not bool(((together - alone).abs() <= TOLERANCE * alone.abs().max()).all()):
        worst = int((together - alone).abs().argmax())
        raise InvalidParameter(
            f"sample {worst} has gradient norm {float(alone[worst]):.6g} alone, {float(together[worst]):.6g} in batch: "
            "the model mixes samples or moves the batch dimension; keep samples apart and the batch dimension first"
        )


def _norm_alone(model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor) -> Tensor:
    parameters = _trainable(model)
    with torch.enable_grad():
        found = torch.autograd.grad(loss_fn(model(inputs), targets).sum(), parameters, allow_unused=True)
    norm: Tensor = torch.stack([gradient.double().norm() for gradient in found if gradient is not None]).norm()
    return norm.cpu()


def _norms(factors: list[Factor]) -> Tensor:
    return torch.stack([factor.squared_norms() for factor in factors]).sum(dim=0).sqrt()


def _company(batch: tuple[Tensor, Tensor], rows: int, generator: torch.Generator) -> list[Tensor]:
    """A full pass of random samples over four orders of magnitude; integers are those of the batch, drawn anew."""
    made = []
    for values in batch:
        filled = aligned_zeros(rows, values)
        if values.is_floating_point():
            scale = 10 ** (4 * torch.rand(rows, *[1] * (values.dim() - 1), generator=generator) - 2)
            filled.copy_(torch.randn(filled.shape, generator=generator) * scale)
        else:
            filled.copy_(values[torch.randint(0, len(values), (rows,), generator=generator)])
        made.append(filled)
    return made


def _seen_row_wise(model: nn.Module, loss_fn: LossFunction, batch: list[Tensor], alike: bool) -> list[Tensor]:
    """All that a sample's gradient is made of, a row per sample, after a pass of row-wise operations.

    Losses are computed in rows of the samples' own, so samples that are all alike are given the errors of one.
    """
    inputs, targets = batch
    found: list[Tensor] = []

    def errors_at(outputs: Tensor) -> Tensor:
        found.append(outputs.clone())
        if alike:
            errors = errors_of_losses(loss_fn, targets[:1], np.zeros(1, np.int64), outputs)
            return errors[:1].expand_as(errors).contiguous()
        return errors_of_losses(loss_fn, targets, np.arange(len(targets)), outputs)

    factors = capture_row_wise(model, inputs, _trainable(model), errors_at)
    with torch.no_grad():
        return found + [values for factor in factors if factor is not None for values in _parts(factor, len(inputs))]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _seen(model: nn.Module, loss_fn: LossFunction, batch: list[Tensor], alike: bool) -> list[Tensor]:
    """The same after an ordinary pass."""
    inputs, targets = batch
    parameters = _trainable(model)
    try:
        factors = capture(model, loss_fn, inputs, targets, parameters)
    except NoRule:
        part = min(len(inputs), micro_batch(sum(parameter.numel() for parameter in parameters)))
        batches = [
            (inputs[at : at + part].clone(), targets[at : at + part].clone())
            for at in range(0, len(inputs) // part * part, part)
        ]
        found = list(per_sample_gradients(model, loss_fn, batches))
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)]
    with torch.no_grad():
        return [values for factor in factors if factor is not None for values in _parts(factor, len(inputs))]


def _parts(factor: Factor, rows: int) -> list[Tensor]:
    match factor:
        case Outer():
            return [factor.a.clone(), factor.e.clone()]
        case Summed():
            return [values for use in factor.uses for values in _parts(use, rows)]
        case _:
            return [factor.materialise(slice(0, rows)).clone()]


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.contiguous().cpu().numpy().tobytes() == right.contiguous().cpu().numpy().tobytes()
