"""A client's side of a centred run: features in the first round, then gradients on features less their centre."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.client.values import Values
from bqsgd._src.descent.centre import Centre
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import load_vector, only_layer
from bqsgd._src.persample.program import Forward, LossFunction
from bqsgd._src.settings.config import Config
from bqsgd._src.subset import Subset


class _LessCentre(nn.Module):
    """A linear layer on features less a centre."""

    centre: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("centre", torch.zeros_like(layer.weight[0]).detach())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs.flatten(1) - self.centre)
        return outputs


def _scaled(outputs: Tensor, targets: Any, *, scale: float) -> Tensor:
    """In the place of a loss: its gradient by the weights is the features times `scale`."""
    return scale * outputs.squeeze(1)


class Centred(Objective):
    """What a sample adds in a centred run. `load` says which kind of message follows.

    Raises:
        InvalidParameter: the model is not one linear layer with an offset, or the samples have a form of their own.
    """

    centre: Centre

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, *, config: Config, forward: Forward | None, **settings: Any
    ) -> None:
        layer = only_layer(model)
        if forward is not None or layer is None or layer.bias is None or layer.weight.dtype != torch.float32:
            raise InvalidParameter(
                "method = 'centred' is for a linear model on features: the model must be one nn.Linear in float32 with "
                f"a bias and an output per class, after nn.Flatten if need be, got {type(model).__name__}"
                f"{' with a forward of its own' if forward is not None else ''}; set method = 'sgd'"
            )
        self._less = _LessCentre(layer)
        super().__init__(self._less, loss_fn, **settings)
        self.centre = Centre.of(config, classes=layer.out_features, features=layer.in_features)
        # Made without values, so that nothing is drawn: torch's generator belongs to the user.
        features = nn.Linear(layer.in_features, 1, bias=False, device="meta").to_empty(device=layer.weight.device)
        nn.init.zeros_(features.weight)
        self._features = Objective(
            nn.Sequential(nn.Flatten(), features),
            partial(_scaled, scale=self.centre.scale),
            **settings | {"subsets": None},
        )
        self._measures = True

    def check(self, data: Any) -> None:
        """As `Objective.check`, for both kinds of messages.

        Raises:
            InvalidParameter: also where the loss depends on more than the differences of the outputs, because the
                mean of the outputs is not learnt.
        """
        super().check(data)
        self._features.check(data)
        targets = tree_map(lambda leaf: leaf.new_zeros((1, *leaf.shape[1:])), data[-1])
        outputs = torch.linspace(-1, 1, self.centre.classes, device=self._less.centre.device)[None]
        if not torch.allclose(self.loss_fn(outputs, targets), self.loss_fn(outputs + 1, targets), atol=1e-4):
            raise InvalidParameter(
                "method = 'centred' needs a loss that depends on the differences of a sample's outputs alone, as "
                "cross-entropy does; set method = 'sgd'"
            )

    def load(self, model: npt.NDArray[np.float32], *, round: int) -> None:
        """Take over the model of `round`, on features less the centre that it holds."""
        load_vector(self.model, model)
        self._measures = self.centre.measured_in(round)
        if not self._measures:
            centre, relative = self.centre.relative(model)
            load_vector(self.model, relative)
            self._less.centre.copy_(torch.from_numpy(centre))

    def mean(self, parts: Iterable[Part], subset: Subset | None = None) -> tuple[Values, int]:
        """As `Objective.mean`; in the first round a message with the clipped mean of the features."""
        if not self._measures:
            return super().mean(parts, subset)
        mean, lost = self._features.mean(parts)
        return self.centre.message(mean), lost
