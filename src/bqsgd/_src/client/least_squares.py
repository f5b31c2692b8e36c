"""A client's side of least squares: one message with moments instead of rounds of gradients.

Every client sends the mean of its samples' second moments and class sums (`persample.moments`) once, through the same
encoder, ledger and secure sums as a gradient. The server solves for the model: `server.least_squares`.

A sample counts by the direction of its features, and the model has no offset: which class comes out on top does not
depend on the length of the features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bqsgd._src.client.objective import Objective
from bqsgd._src.client.samples import Part
from bqsgd._src.client.values import Values
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.models import dimension_of
from bqsgd._src.persample.clips import L2, Clip, Dual
from bqsgd._src.persample.moments import MOST_FEATURES, clipped_moments, moments_dimension
from bqsgd._src.persample.program import Forward, LossFunction
from bqsgd._src.release import Unit
from bqsgd._src.settings.config import LEAST_SQUARES, Config


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
            InvalidParameter: it is not, or the moments of its inputs are too many.
        """
        layers = [layer for layer in model.modules() if not isinstance(layer, (nn.Sequential, nn.Flatten, nn.Identity))]
        own = isinstance(model, (nn.Sequential, nn.Linear))
        if not own or len(layers) != 1 or not isinstance(layers[0], nn.Linear) or layers[0].out_features < 2:
            raise InvalidParameter(
                "least squares fits a linear model of the inputs to the classes: the model must be one nn.Linear with "
                f"an output per class, after nn.Flatten if need be, got {type(model).__name__}; fixed features "
                "(--features) go into the inputs"
            )
        layer = layers[0]
        if layer.in_features > MOST_FEATURES:
            raise InvalidParameter(
                f"{layer.in_features} features have {layer.in_features * (layer.in_features + 1) // 2} second moments; "
                f"least squares takes at most {MOST_FEATURES} features"
            )
        found = cls(features=layer.in_features, classes=layer.out_features, offset=layer.bias is not None)
        if dimension_of(model) != found.classes * (found.features + found.offset):
            raise InvalidParameter("least squares needs every parameter of the linear layer to be trainable")
        return found

    @property
    def dimension(self) -> int:
        """Coordinates of a client's message."""
        return moments_dimension(self.features, self.classes)


def message_dimension(method: str, model: nn.Module) -> int:
    """Coordinates of what a client sends: those of the model, or the moments of its inputs."""
    return LeastSquares.of(model).dimension if method == LEAST_SQUARES else dimension_of(model)


class Moments(Objective):
    """A client's side of least squares: what a sample adds are its moments, whatever the model stands at."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, forward: Forward | None = None) -> None:
        super().__init__(model, loss_fn, forward)
        self.problem = LeastSquares.of(model)

    @property
    def dimension(self) -> int:
        """Coordinates of what a sample adds."""
        return self.problem.dimension

    def check(self, data: Any, *, clip: Clip, batch_size: int, unit: Unit = Unit.SAMPLE, packed: bool = False) -> None:
        """Look at the form of `data`, whose values are not read.

        Raises:
            InvalidParameter: it is not a pair of as many features as the model takes, and a class.
        """
        if not isinstance(clip, (L2, Dual)) or unit is not Unit.SAMPLE or packed:
            raise InvalidParameter("least squares has the clip dual or l2, the unit sample and no packed rows")
        if self.forward is not None or not _is_pair(data) or not _fits(data, self.problem):
            raise InvalidParameter(
                f"least squares takes pairs of {self.problem.features} features, float32 or float64, and one class as "
                "a whole number, with no forward of your own"
            )

    def mean(self, parts: Iterable[Part], *, clip: Clip, batch_size: int, packed: bool = False) -> tuple[Values, int]:
        """The clipped moments of all parts over the public batch size, and how many samples count as zero."""
        assert isinstance(clip, (L2, Dual))
        power = 1 << (batch_size.bit_length() - 1)  # divides without rounding, so that parts add up exactly
        total, lost = np.zeros(self.dimension), 0
        for part in parts:
            if part.data is None or not _is_pair(part.data) or not _fits(part.data, self.problem):
                lost += len(part)
                continue
            found = clipped_moments(part.data, classes=self.problem.classes, clip=clip, batch_size=power)
            total += found.mean.numpy() * power
            lost += found.dropped
        return total / batch_size, lost


def _is_pair(data: Any) -> bool:
    return isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)


def _fits(data: tuple[Tensor, Tensor], problem: LeastSquares) -> bool:
    inputs, classes = data
    whole = classes.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    values = inputs.dtype in (torch.float32, torch.float64)
    row_each = inputs.dim() > 1 and classes.dim() == 1
    return whole and values and row_each and inputs.shape[1:].numel() == problem.features


def objective_of(config: Config, model: nn.Module, loss_fn: LossFunction, forward: Forward | None = None) -> Objective:
    """What a sample adds to a client's message: its clipped gradient, or its moments."""
    return (Moments if config.run.method == LEAST_SQUARES else Objective)(model, loss_fn, forward)
