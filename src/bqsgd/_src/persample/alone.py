"""One sample at a time by the user's own code: for programs that torch cannot trace.

Every sample runs on a copy of the model, and of its parameters and buffers, that nobody uses afterwards. What the
forward writes there is gone with the copy, and no sample finds what another has left. State outside of the module (a
global, a closure) cannot be copied: that the model keeps none is assumed of this road alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample.factors import Dense, Piece, working
from bqsgd._src.persample.program import Form, Whole, fails_on_made_up
from bqsgd._src.runtime.generators import generators_kept
from bqsgd._src.runtime.interrupts import StopNow
from bqsgd._src.runtime.modes import repeatable


@contextmanager
def _kept(model: nn.Module) -> Iterator[None]:
    """Put the model itself back: functions are not copied, so a hook that holds it writes to it and not to the copy."""
    tensors = [(t, t.detach().clone(), t.grad) for t in (*model.parameters(), *model.buffers())]
    layers = [(m, dict(vars(m)), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, attributes, parameters, buffers in layers:
                vars(module).clear()
                vars(module).update(attributes)
                module._parameters.clear()
                module._parameters.update(parameters)
                module._buffers.clear()
                module._buffers.update(buffers)
            for tensor, values, grad in tensors:
                tensor.data.copy_(values)
                tensor.grad = grad


class AloneRoad:
    """Runs model and loss once for every sample.

    Raises:
        InvalidParameter: they raise an error on a made-up sample too, so it is not the data's doing.
    """

    draws = True
    """Whatever the code does cannot be seen, so it is taken to draw random numbers."""

    assumes = "the code of the model keeps no state outside of its module"

    def __init__(self, whole: Whole, form: Form) -> None:
        self._structure = form.structure
        with generators_kept():
            try:
                self._gradients(whole, form.zeros(1))
            except InvalidParameter:
                raise
            except Exception as error:
                raise fails_on_made_up(error, form.shapes) from error

    def _gradients(self, whole: Whole, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of one sample, a row for each trained tensor."""
        own = whole.copied()
        values = [parameter for parameter in own.parameters() if parameter.requires_grad]
        copies = [leaf.clone() for leaf in leaves]
        with _kept(whole.model), repeatable, torch.enable_grad():
            gradients = own(*copies, structure=self._structure, trained=values)
        return [
            torch.zeros_like(value).reshape(1, -1) if gradient is None else gradient.detach().reshape(1, -1)
            for value, gradient in zip(values, gradients, strict=True)
        ]

    def passes(self, whole: Whole, leaves: Sequence[Tensor]) -> Iterator[tuple[int, int, list[Piece]]]:
        """(1, whether it was lost, its gradient) for each sample.

        Whatever a sample makes the code raise costs that sample alone, a SystemExit or a KeyboardInterrupt too: the
        user's own interrupts are held back while a batch runs.
        """
        for sample in range(len(leaves[0])):
            try:
                gradients = self._gradients(whole, [leaf[sample : sample + 1] for leaf in leaves])
                flat = torch.cat([working(values) for values in gradients], dim=1)
                pieces = [Piece(slice(0, len(gradients)), Dense(flat))]
            except StopNow:
                raise
            except BaseException:
                pieces = []
            yield 1, int(not pieces), pieces
