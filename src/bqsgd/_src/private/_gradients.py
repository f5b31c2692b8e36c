"""What the optimizer steps on: gradients that were released, zeros, or none."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from bqsgd._src.errors import InvalidParameter

_released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> a copy of what was released into its `.grad`. Kept by parameter, so that private training of one model
with two data sets, each with a ledger of its own, may take turns."""


class Gradients:
    """Puts released gradients into a model, and lets its optimizer step on no others.

    Contents are compared, with copies kept here: whether a gradient was released cannot be told from the tensor that
    holds it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._guard = _Guard(model, optimizer)
        self.close = weakref.finalize(self, self._guard.leave)
        """Let the optimizer step on anything again."""

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

        Other gradients are cleared: only code that ran during the step can have made them. The optimizer looks at the
        gradients after all hooks that it has by now.

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
        self._guard.come_last(self._optimizer)


class _Guard:
    """What an optimizer runs before each of its steps.

    The optimizer keeps it, so it knows the model only as long as others do.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._on_guard = weakref.ref(model), True
        self._handle = optimizer.register_step_pre_hook(self)

    def come_last(self, optimizer: Optimizer) -> None:
        """Run after all other hooks of the optimizer: one that ran later could change what was looked at."""
        self._handle.remove()
        if self._on_guard:
            self._handle = optimizer.register_step_pre_hook(self)

    def leave(self) -> None:
        """Run no more."""
        self._on_guard = False
        self._handle.remove()

    def __call__(self, optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        closure = given[1] if len(given) > 1 else named.get("closure")
        if closure is not None:
            raise InvalidParameter(
                "optimizer.step(closure) computes gradients that nothing makes private: call private.backward(batch), "
                "then optimizer.step() without a closure"
            )
        if not isinstance(next(reversed(optimizer._optimizer_step_pre_hooks.values())), _Guard):
            raise InvalidParameter(
                "a step hook was registered after the gradients were released, and could change them: register it "
                "before private.backward(batch)"
            )
        _check(optimizer, self._model())


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
