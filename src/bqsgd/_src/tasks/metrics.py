"""How good a model is on test data, by the kind of task that outputs and targets show: the default metrics.

| outputs | targets | kind | figure |
|---|---|---|---|
| (n, C, ...) with C > 1 | (n, ...), whole numbers | classes | accuracy: how often the largest score is right |
| (n) or (n, 1) | (n) or (n, 1), all 0 or 1 | binary | accuracy |
| (n, ...) | the same shape, all 0 or 1 | several labels | accuracy: share of labels that are right |
| (n, ...) | the same shape | regression | R2, or the mean absolute error |

Other shapes have no default: a figure that fits by chance would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bqsgd._src.errors import InvalidParameter

NAMES = ("accuracy", "R2", "MAE")
Figure = tuple[str, float]
"""Name of a metric, and its value."""


class Tally:
    """Adds up parts of the test data, so that not all outputs have to be in memory.

    name: one of NAMES, or None for what the kind of task decides.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any], name: str | None) -> None:
        self._loss_fn, self._name = loss_fn, name
        self._right, self._count, self._binary = 0, 0, True
        self._sums = torch.zeros(4, dtype=torch.float64)
        """Of y, y^2, |error| and error^2."""
        self._is_classes: bool | None = None

    def add(self, outputs: Any, targets: Any) -> None:
        """Count one part.

        Raises:
            InvalidParameter: the shapes are of no kind in the table above.
        """
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
            raise _unknown(type(outputs).__name__, type(targets).__name__)
        is_classes = _are_classes(outputs, targets)
        paired = outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs
        wanted = targets.squeeze(1) if targets.dim() == 2 and targets.shape[1] == 1 else targets
        if (not is_classes and paired.shape != wanted.shape) or self._is_classes not in (None, is_classes):
            raise _unknown(f"{tuple(outputs.shape)}", f"{tuple(targets.shape)}, {targets.dtype}")
        self._is_classes = is_classes
        self._count += targets.numel()
        if is_classes:
            self._right += int((outputs.argmax(dim=1) == targets).sum())
            return
        self._binary &= bool(((wanted == 0) | (wanted == 1)).all())
        if self._binary:
            self._right += int(((paired > self._threshold(outputs, targets)) == (wanted == 1)).sum())
        y = wanted.cpu().double()  # a device may have no float64
        error = paired.cpu().double() - y
        self._sums += torch.stack([y.sum(), (y * y).sum(), error.abs().sum(), (error * error).sum()])

    def _threshold(self, outputs: Tensor, targets: Tensor) -> float:
        """The output from which on a label counts as 1: 0 for scores (logits), 1/2 for probabilities.

        The loss tells which: at an output of 1/4, a loss over scores is lower for the label 1, and one over
        probabilities for the label 0.
        """
        quarter = torch.full_like(outputs[:1], 0.25)
        one, zero = (
            float(self._loss_fn(quarter, make(targets[:1])).sum()) for make in (torch.ones_like, torch.zeros_like)
        )
        return 0.5 if one > zero else 0.0

    def figure(self) -> Figure:
        """The metric over everything that was added.

        Raises:
            InvalidParameter: the metric that was asked for is not one of this kind of task.
        """
        labels = bool(self._is_classes) or self._binary
        name = self._name or ("accuracy" if labels else "R2")
        if (name == "accuracy") != labels and not (self._binary and not self._is_classes):
            raise InvalidParameter(
                f"metric={name!r} does not fit these targets, which are {'classes' if labels else 'numbers'}; leave "
                "out the metric, or give a function of (outputs, targets)"
            )
        if name == "accuracy":
            return name, self._right / self._count
        total, squares, absolute, squared = self._sums.tolist()
        if name == "MAE":
            return name, absolute / self._count
        around_mean = squares - total * total / self._count
        # Targets that are all alike have nothing to be explained.
        return name, 1 - squared / around_mean if around_mean > 0 else 0.0


def _are_classes(outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs are one score per class and targets one class per sample or position."""
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    shapes_fit = outputs.dim() == targets.dim() + 1 and outputs.dim() > 1 and outputs.shape[2:] == targets.shape[1:]
    return bool(whole and shapes_fit and len(outputs) == len(targets) and outputs.shape[1] > 1)


def _unknown(outputs: str, targets: str) -> InvalidParameter:
    return InvalidParameter(
        f"no metric is known for outputs of the shape {outputs} and targets of the shape {targets}: scores per class "
        "are (n, classes) with whole-number targets (n), one score is (n) or (n, 1), several labels and regression "
        "have the same shape twice. Give Task(metric=...), a function of (all outputs, all targets)"
    )
