"""A client's side of least squares: one message with moments instead of rounds of gradients.

Every client sends the mean of its samples' second moments and class sums (`persample.moments`) once, through the same
encoder, ledger and secure sums as a gradient. The server solves for the model: `server.least_squares`.

A sample counts by the direction of its features, and the model has no offset: which class comes out on top does not
depend on the length of the features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bqsgd._src.client.objective import Objective
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import only_layer
from bqsgd._src.persample.clips import L2, Clip
from bqsgd._src.persample.gradients import ClippedGradients
from bqsgd._src.persample.moments import MOST_FEATURES, clipped_moments, moments_dimension
from bqsgd._src.persample.program import LossFunction
from bqsgd._src.release import Unit
from bqsgd._src.runtime.modes import Autocast


@dataclass(frozen=True, kw_only=True)
class LeastSquares:
    """The linear model that is solved for: its sizes, and whether its layer has an offset, which becomes zero."""

    features: int
    classes: int
    offset: bool

    @classmethod
    def of(cls, model: nn.Module) -> LeastSquares:
        """The sizes of a model that is one linear layer over flattened inputs.

        Raises:
            InvalidParameter: the model is not one linear layer, or it has too many inputs.
        """
        layer = only_layer(model)
        if layer is None:
            raise InvalidParameter(
                "least squares fits a linear model of the inputs to the classes: the model must be one nn.Linear with "
                "an output per class and all parameters trainable, after nn.Flatten if need be, got "
                f"{type(model).__name__}; fixed features (--features) go into the inputs"
            )
        if layer.in_features > MOST_FEATURES:
            raise InvalidParameter(
                f"{layer.in_features} features have {layer.in_features * (layer.in_features + 1) // 2} second moments; "
                f"least squares takes at most {MOST_FEATURES} features"
            )
        return cls(features=layer.in_features, classes=layer.out_features, offset=layer.bias is not None)

    @property
    def dimension(self) -> int:
        """Coordinates of a client's message."""
        return moments_dimension(self.features, self.classes)


class Moments(Objective):
    """A client's side of least squares: a sample adds its moments, which do not depend on the model's parameters."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, clip: Clip, **settings: Any) -> None:
        super().__init__(model, loss_fn, clip=clip, **settings)
        if not isinstance(clip, L2) or self.unit is not Unit.SAMPLE or self.packed:
            raise InvalidParameter(
                "least squares needs the clip dual, l2 or normalize, the unit sample and no packed rows"
            )
        self.problem = LeastSquares.of(model)
        self._clipped = partial(self._moments, clip=clip)

    @property
    def dimension(self) -> int:
        """Coordinates of what a sample adds."""
        return self.problem.dimension

    def check(self, data: Any) -> None:
        """Look at the form of `data`; its values are not read.

        Raises:
            InvalidParameter: it is not a pair of as many features as the model takes, and a class.
        """
        if self.forward is not None or not self._takes(data):
            raise InvalidParameter(
                f"least squares takes pairs of {self.problem.features} features, float32 or float64, and one class as "
                "a whole number, with no forward of your own"
            )

    def _moments(self, data: Any, *, subset: None, autocast: Autocast, clip: L2) -> ClippedGradients:
        self.check(data)
        return clipped_moments(data, classes=self.problem.classes, clip=clip, batch_size=self._divisor)

    def _takes(self, data: Any) -> bool:
        """Whether these are pairs of as many features as the model takes, and a class."""
        if not (isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)):
            return False
        inputs, classes = data
        whole = classes.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        floating = inputs.dtype in (torch.float32, torch.float64)
        rows = inputs.dim() > 1 and classes.dim() == 1
        return whole and floating and rows and inputs.shape[1:].numel() == self.problem.features
