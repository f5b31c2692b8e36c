"""What the optimizer steps on: gradients that were released, zeros, or none."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from bqsgd.errors import InvalidParameter

_released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> a copy of what was released into its `.grad`. Kept by parameter, so that private training of one model
with two data sets, each with a ledger of its own, may take turns."""
_Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


class Gradients:
    """Puts released gradients into a model, and lets its optimizer step on no others.

    Contents are compared, with copies kept here: whether a gradient was released cannot be told from the tensor that
    holds it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        handle = optimizer.register_step_pre_hook(_refusing(weakref.ref(model)))
        # The optimizer keeps the hook, which therefore knows the model only as long as others do.
        self._removed = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Let the optimizer step on anything again."""
        self._removed()

    def held(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """What was released into each of these parameters and not cleared since.

        Raises:
            InvalidParameter: the model or the optimizer holds a gradient that was not released.
        """
        _check(self._optimizer, self._model)
        cleared = (parameter.grad is None or not bool(parameter.grad.any()) for parameter in parameters)
        return [
            None if is_cleared else _released[parameter]
            for parameter, is_cleared in zip(parameters, cleared, strict=True)
        ]

    def put(
        self,
        update: npt.NDArray[np.float32],
        parameters: Sequence[nn.Parameter],
        *,
        onto: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Make `update`, flat, the gradient of these parameters: in new tensors, whatever the old ones hold by now.

        Other gradients are cleared: only code that ran during the step can have made them.

        onto: what `held` gave before the step, to which the update is added.
        """
        for parameter in _parameters(self._optimizer, self._model):
            parameter.grad = None
        start = 0
        for n, parameter in enumerate(parameters):
            stop = start + parameter.numel()
            own = torch.tensor(update[start:stop], device=parameter.device).view_as(parameter)
            before = None if onto is None else onto[n]
            _released[parameter] = own if before is None else before + own
            parameter.grad = _released[parameter].clone()
            start = stop


def _refusing(model: weakref.ref[nn.Module]) -> _Hook:
    """What an optimizer runs before each of its steps."""

    def refuse(optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        closure = given[1] if len(given) > 1 else named.get("closure")
        if closure is not None:
            raise InvalidParameter(
                "optimizer.step(closure) computes gradients that nothing makes private: call private.backward(batch), "
                "then optimizer.step() without a closure"
            )
        _check(optimizer, model())

    return refuse


def _check(optimizer: Optimizer, model: nn.Module | None) -> None:
    for parameter in _parameters(optimizer, model):
        if not _may_be_stepped_on(parameter):
            raise InvalidParameter(
                "the model holds a gradient that was not released, or was changed after that, and would not be "
                "private: leave out loss.backward(), and change no .grad between private.backward(batch) and "
                "optimizer.step(); optimizer.zero_grad() clears what is there"
            )


def _parameters(optimizer: Optimizer, model: nn.Module | None) -> Iterator[Tensor]:
    yield from () if model is None else model.parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


def _may_be_stepped_on(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is what was released, or depends on no data: none, or zeros."""
    gradient = parameter.grad
    if gradient is None:
        return True
    if gradient.layout is not torch.strided:
        return False
    if parameter.requires_grad and parameter in _released:
        released = _released[parameter]
        if gradient.dtype == released.dtype and torch.equal(gradient, released):
            return True
    return not bool(gradient.any())
