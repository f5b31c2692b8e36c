"""A check that a model treats the samples of a batch apart, which no layer list can prove."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bqsgd.errors import InvalidParameter
from bqsgd.persample.capture import NoRule, capture
from bqsgd.persample.factors import Dense, Factor
from bqsgd.persample.functional import LossFunction, per_sample_gradients

TOLERANCE = 1e-3


def check_samples_apart(model: nn.Module, loss_fn: LossFunction, batch: tuple[Tensor, Tensor]) -> None:
    """Raise unless the batch gives every sample the gradient norm that it has alone.

    A forward that mixes samples in code of its own (`x - x.mean(0)`), or that moves the batch dimension away from the
    front, would have the wrong gradients clipped. Run this once on a few samples before training; layers that draw
    random numbers must be switched off (`model.eval()`), or the two roads see different masks. A model without fast
    rules is taken sample by sample anyway and passes.
    """
    inputs, targets = batch
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        factors = capture(model, loss_fn, inputs, targets, parameters)
    except NoRule:
        return
    with torch.no_grad():
        together = _norms([factor for factor in factors if factor is not None])
        parts = per_sample_gradients(model, loss_fn, inputs, targets)
        alone = torch.cat([_norms([Dense(gradient) for gradient in part]) for part in parts])
    if not bool(((together - alone).abs() <= TOLERANCE * alone.abs().max()).all()):
        worst = int((together - alone).abs().argmax())
        raise InvalidParameter(
            f"sample {worst} has gradient norm {float(alone[worst]):.6g} alone, {float(together[worst]):.6g} in batch: "
            "the model mixes samples or moves the batch dimension; keep samples apart and the batch dimension first"
        )


def _norms(factors: list[Factor]) -> Tensor:
    return torch.stack([factor.squared_norms() for factor in factors]).sum(dim=0).sqrt()
