"""Lets an optimizer step only on gradients that were released, on zeros, or on none."""

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
from bqsgd._src.private._first_step import FirstStep

_released: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> a copy of what was released into its `.grad`. Kept by parameter, so that private training of one model
with two data sets, each with a ledger of its own, may take turns."""


class Gradients:
    """Puts released gradients into a model, and lets its optimizer step on no others.

    It compares values with copies kept here: code can write a tensor without leaving a trace, so the tensor itself does
    not tell whether its content was released.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._guard = _Guard(model, optimizer)
        self.close = weakref.finalize(self, self._guard.leave)
        """Let the optimizer step on any gradient again."""

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
        """Make the flat vector `update` the gradient of these parameters, and clear all other gradients.

        onto: what `held` returned before the step, to which the update is added.
        """
        # Cleared, and put into new tensors below: code of the model or the data may have written gradients during the
        # step, and may still hold the old tensors.
        for parameter in _parameters(self._optimizer, self._model):
            parameter.grad = None
        start = 0
        for n, parameter in enumerate(parameters):
            stop = start + parameter.numel()
            part = torch.tensor(update[start:stop]).view_as(parameter).to(parameter.device, parameter.dtype)
            before = None if onto is None else onto[n]
            _released[parameter] = part if before is None else before + part
            # A copy, so that a change of `.grad` does not change what it is compared with.
            parameter.grad = _released[parameter].clone()
            start = stop
        self._guard.come_last(self._optimizer)


class _Guard:
    """A hook that an optimizer runs before each of its steps."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # A weak reference: the optimizer keeps this hook, and must not keep the model alive.
        self._model, self._on_guard = weakref.ref(model), True
        self._released_some = False
        """Whether something other than zeros was released since this was last set to False."""
        self._handle = optimizer.register_step_pre_hook(self)
        self._first = FirstStep()
        self._after = optimizer.register_step_post_hook(lambda *_: self._first.end())

    def come_last(self, optimizer: Optimizer) -> None:
        """Run after all other hooks of the optimizer: a later one could change gradients that were checked already."""
        self._handle.remove()
        if self._on_guard:
            self._handle = optimizer.register_step_pre_hook(self)
            self._released_some = _any_gradient(optimizer, self._model())

    def leave(self) -> None:
        """Remove the hook for good."""
        self._on_guard = False
        self._handle.remove()
        self._after.remove()

    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not isinstance(next(reversed(optimizer._optimizer_step_pre_hooks.values())), _Guard):
            raise InvalidParameter(
                "a step hook that was registered after private.backward(batch) could change the released gradients: "
                "register it before"
            )
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._pass(optimizer)
            return None

        # A closure computes gradients, so they are looked at when it has run. Frameworks pass one in every step.
        # The optimizer does not get what it returns: LBFGS would choose its step by the loss of the data.
        def checked() -> None:
            self._released_some = False
            closure()
            self._pass(optimizer)
            if self._released_some and not _any_gradient(optimizer, self._model()):
                raise InvalidParameter(
                    "a gradient was released within this step and then cleared, so the step would train nothing: call "
                    "optimizer.zero_grad() before private.backward(batch). In Lightning, use PrivateTraining of "
                    "bqsgd.integrations.lightning, or manual optimization"
                )

        return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": checked})

    def _pass(self, optimizer: Optimizer) -> None:
        _check(optimizer, self._model())
        self._first.begin(optimizer, self._model())


def _check(optimizer: Optimizer, model: nn.Module | None) -> None:
    for parameter in _parameters(optimizer, model):
        if not _may_be_stepped_on(parameter):
            raise InvalidParameter(
                "the model holds a gradient that was not released, or was changed after that, so the step would not be "
                "private: leave out loss.backward(), and change no .grad between private.backward(batch) and "
                "optimizer.step(); model.zero_grad() clears all gradients"
            )


def _any_gradient(optimizer: Optimizer, model: nn.Module | None) -> bool:
    """Whether some gradient is neither None nor zero."""
    return any(each.grad is not None and bool(each.grad.any()) for each in _parameters(optimizer, model))


def _parameters(optimizer: Optimizer, model: nn.Module | None) -> Iterator[Tensor]:
    yield from () if model is None else model.parameters()
    for group in optimizer.param_groups:
        yield from group["params"]


def _may_be_stepped_on(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is None, zero, or exactly what was released; none of them leaks data."""
    gradient = parameter.grad
    if gradient is None:
        return True
    # A sparse gradient is never a released one, and torch.equal does not take it.
    if gradient.layout is not torch.strided:
        return False
    if parameter.requires_grad and parameter in _released:
        released = _released[parameter]
        if gradient.dtype == released.dtype and torch.equal(gradient, released):
            return True
    return not bool(gradient.any())
