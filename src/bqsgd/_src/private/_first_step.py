"""Looks at the first step of an optimizer: what is trained must have moved, and what is frozen must not.

Training that spends and moves nothing looks like training that learns nothing, and costs days. What is looked at was
released, so it may be told.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from bqsgd._src.errors import InvalidParameter

_log = logging.getLogger("bqsgd.private")
_NAMED = 5
"""Parameters that a message names."""


@dataclass(frozen=True, eq=False)
class _Seen:
    name: str
    parameter: Tensor
    before: Tensor | None
    """A copy, of a parameter that must move; None for a frozen one."""
    version: int

    def has_moved(self) -> bool:
        if self.before is None:
            return bool(self.parameter._version != self.version)  # without a copy: frozen models are large
        return not bool(self.parameter.eq(self.before).all())


class FirstStep:
    """Compares the parameters before and after the first step that should move one of them."""

    def __init__(self) -> None:
        self._seen: list[_Seen] | None = None
        self._is_done = False

    def begin(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        """Remember what is there, if the step has a gradient and a learning rate."""
        if self._is_done or model is None:
            return
        rates = {id(each): float(group.get("lr", 1)) for group in optimizer.param_groups for each in group["params"]}
        seen = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                seen.append(_Seen(name, parameter, None, parameter._version))
            elif rates.get(id(parameter)) and parameter.grad is not None and bool(parameter.grad.any()):
                seen.append(_Seen(name, parameter, parameter.detach().clone(), parameter._version))
        self._seen = seen if any(each.before is not None for each in seen) else None

    def end(self) -> None:
        """Compare, once.

        Raises:
            InvalidParameter: nothing moved. The step is counted; those after it need not be wasted.
        """
        if self._seen is None:
            return
        seen, self._seen, self._is_done = self._seen, None, True
        stuck = [each.name for each in seen if each.before is not None and not each.has_moved()]
        changed = [each.name for each in seen if each.before is None and each.has_moved()]
        if len(stuck) == sum(each.before is not None for each in seen):
            raise InvalidParameter(
                "the first step with a gradient and a learning rate moved no trained parameter, so training would only "
                "spend: is the learning rate too small for the parameters' type, or are their values put back?"
            )
        if stuck:
            _log.warning("the first step did not move %s; too small a learning rate for their type?", _named(stuck))
        if changed:
            _log.warning(
                "the optimizer changed %s, which are frozen: give it the trained parameters alone", _named(changed)
            )


def _named(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
