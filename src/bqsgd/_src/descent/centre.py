"""The centre of the features: a centred run measures it in its first round and trains on features less the centre.

In the first round a client sends the clipped mean of its samples' features, through the same encoder and ledger as a
gradient. All later gradients are those of a linear model on features less the centre that came of it.

The model that travels is an ordinary one, W x + b. A vector added to all rows of W changes no difference of two
outputs, so the mean of the rows is free to hold the centre: messages, checkpoints and kept models need nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_finite
from bqsgd._src.persample.clips import L2
from bqsgd._src.settings.config import Config

_ROOM = 2.0
"""The largest mean of a feature that is not clamped, where features have mean square 1. Few means are larger."""
_Array = npt.NDArray[np.float64]
_Model = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Centre:
    """How the centre is sent, read, and kept in a model of so many classes and features.

    dimension: coordinates of a message. norm: what its clip bounds. range: what a client's mean is clamped to.
    """

    classes: int
    features: int
    dimension: int
    norm: float
    range: float

    @classmethod
    def of(cls, config: Config, *, classes: int, features: int) -> Centre:
        """For a model with these sizes.

        Raises:
            InvalidParameter: a message has fewer coordinates than there are features.
        """
        clip, dimension = config.message_clip, config.kept(classes * (features + 1))
        assert isinstance(clip, L2)  # as `Config` has checked
        if dimension < features:
            raise InvalidParameter(
                f"method = 'centred' sends the mean of all {features} features in one message, but with one_in="
                f"{config.clients.one_in} a message has {dimension} coordinates: set one_in to at most {classes}"
            )
        return cls(classes=classes, features=features, dimension=dimension, norm=clip.norm, range=config.range)

    @staticmethod
    def measured_in(round: int) -> bool:
        """Whether the messages of a round carry features; it depends on nothing but the round."""
        return round == 0

    @property
    def copies(self) -> int:
        """How often a message has each feature."""
        return self.dimension // self.features

    @property
    def _shrink(self) -> float:
        """The factor of each copy: all copies together are no longer than the mean. A power of two, so exact."""
        return 2.0 ** -math.ceil(math.log2(self.copies) / 2)

    @property
    def scale(self) -> float:
        """What a sample's features are multiplied by before the clip.

        Features with mean square 1 then have the norm of the clip, unless their means would be clamped.
        """
        return min(self.norm / math.sqrt(self.features), self.range / (_ROOM * self._shrink))

    def message(self, mean: npt.NDArray[np.floating]) -> _Array:
        """What is encoded: the clipped mean of the scaled features as often as it fits, then zeros."""
        values = np.zeros(self.dimension)
        values[: self.copies * self.features] = np.tile(mean, self.copies) * self._shrink
        return values

    def measured(self, values: _Array, *, variance: float) -> _Array:
        """The centre, from the mean of the clients' messages and the variance of the noise in a coordinate of it.

        The more of its length is noise, the shorter it is made (James and Stein 1961): a centre that is all noise would
        be worse than none.
        """
        check_finite(values, "the mean holds NaN or infinity; the model was not changed")
        copies = values[: self.copies * self.features].reshape(self.copies, self.features)
        mean = copies.mean(axis=0)
        length, noise = float((mean * mean).sum()), self.features * variance / self.copies
        signal = max(0.0, length - noise) / length if length > 0 else 0.0
        return np.asarray(mean * (signal / (self._shrink * self.scale)))

    def first_step(self, model: _Model, values: _Array, *, variance: float) -> _Array:
        """The step after which the mean of the model's rows is the centre."""
        step = np.zeros(model.size)
        centre = self.measured(values, variance=variance)
        self._rows(step)[:] = self._rows(model).mean(axis=0, dtype=np.float64) - centre
        return step

    def step(self, model: _Model, step: _Array) -> _Array:
        """The step of the travelling model, from that of a model on features less the centre.

        W (x - c) + b is W x + (b - W c), and noise may not move the mean of the rows.
        """
        moved = step.copy()
        rows = self._rows(moved)
        rows -= rows.mean(axis=0)
        # Summed row by row rather than by BLAS: clients repeat this step and must have the server's bits.
        moved[rows.size :] -= (rows * self._rows(model).mean(axis=0, dtype=np.float64)).sum(axis=1)
        return moved

    def relative(self, model: _Model) -> tuple[_Model, _Model]:
        """The centre, and the model with the same outputs, up to one number for all, on features less the centre."""
        centre = self._rows(model).mean(axis=0, dtype=np.float64)
        moved = model.astype(np.float64)
        rows = self._rows(moved)
        rows -= centre
        # A server may send any model; the caller refuses what is not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            moved[rows.size :] += (rows * centre).sum(axis=1)
            return centre.astype(np.float32), moved.astype(np.float32)

    def plain(self, model: _Model) -> _Model:
        """The model without the centre in its rows: the same predictions."""
        moved = model.astype(np.float64)
        rows = self._rows(moved)
        rows -= rows.mean(axis=0)
        return moved.astype(np.float32)

    def _rows(self, vector: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """The weights of each class, as a view."""
        return vector[: self.classes * self.features].reshape(self.classes, self.features)
