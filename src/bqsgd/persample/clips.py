"""The clips of one sample's gradient, each with the sensitivity it gives the mean: the one truth the accountant reads.

Key: C bound of a coordinate, C2 Euclidean bound, L public batch size, R range of the encoder, g a sample's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter
from bqsgd.params import check_int, check_positive
from bqsgd.release import Relation, Sensitivity

if TYPE_CHECKING:
    from torch import nn

SMALLEST = 1e-12
"""Below this a squared norm would leave the normal float32 numbers, and a norm read too low is a bound not kept."""

_Range = float | Sequence[float] | npt.NDArray[np.float64]
"""The encoder's range: one number, one per parameter tensor, or one per coordinate."""


def _bound(name: str, value: object) -> float:
    number = check_positive(name, value)
    if not SMALLEST <= number <= 1 / SMALLEST:
        raise InvalidParameter(f"{name} must be from {SMALLEST} to {1 / SMALLEST}, got {value!r}; rescale the loss")
    return number


def _ranges(value: _Range) -> tuple[float, ...]:
    if isinstance(value, (Sequence, np.ndarray)):
        if len(value) == 0:
            raise InvalidParameter("range must not be empty")
        return tuple(check_positive("range", entry) for entry in value)
    return (check_positive("range", value),)


def _sensitivity(
    *, linf: float, l2: float | None, range: tuple[float, ...], batch_size: int, relation: Relation
) -> Sensitivity:
    """Of a mean of vectors with max-norm <= linf and norm <= l2, clamped to +-range (1-Lipschitz per coordinate)."""
    moves = (2 if Relation(relation) is Relation.REPLACE else 1) / check_int("batch_size", batch_size, 1, 2**53)
    return Sensitivity(
        linf=min(2.0, moves * linf / min(range)),  # two values in [-R, R] are at most 2R apart
        l2=None if l2 is None else moves * l2 / min(range),
        relation=relation,
    )


@dataclass(frozen=True)
class Scale:
    """Eq. (6): g / max(1, ||g||_inf / C), the max-norm taken over the whole gradient."""

    bound: float

    def __post_init__(self) -> None:
        _bound("bound", self.bound)

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """C / (L R) in every coordinate; R is C unless given. Replace-one doubles it.

        >>> Scale(0.5).sensitivity(batch_size=32).linf
        0.03125
        """
        reach = _ranges(self.bound if range is None else range)
        return _sensitivity(linf=self.bound, l2=None, range=reach, batch_size=batch_size, relation=relation)


@dataclass(frozen=True)
class Clamp:
    """Each coordinate of g clamped to [-C, C]: the guarantee of `Scale`, far more of the signal.

    Args:
        bound: one C, or one per parameter tensor in the order of `model.parameters()` (those that require a gradient).
            Only the shift in quantiser steps counts, so a C of its own for every tensor costs no privacy.
    """

    bound: float | tuple[float, ...]

    def __post_init__(self) -> None:
        if isinstance(self.bound, (Sequence, np.ndarray)):
            if len(self.bound) == 0:
                raise InvalidParameter("bound must not be empty")
            object.__setattr__(self, "bound", tuple(_bound("bound", entry) for entry in self.bound))
        else:
            _bound("bound", self.bound)

    def bounds(self, count: int) -> tuple[float, ...]:
        """One C for each of `count` parameter tensors."""
        if not isinstance(self.bound, tuple):
            return (self.bound,) * count
        if len(self.bound) != count:
            raise InvalidParameter(
                f"bound has {len(self.bound)} entries, the model {count} trainable parameter tensors"
            )
        return self.bound

    def vector(self, model: nn.Module) -> npt.NDArray[np.float64]:
        """One C per coordinate of the flat gradient: the range to give the encoder when C differs between tensors."""
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        return np.repeat(np.asarray(self.bounds(len(sizes)), dtype=np.float64), sizes)

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """max C_j / (L R_j); R is C unless given. A `range` of another length than `bound` is met with max C / min R.

        >>> Clamp((0.5, 2.0)).sensitivity(batch_size=32).linf
        0.03125
        """
        bound = self.bound if isinstance(self.bound, tuple) else (self.bound,)
        reach = bound if range is None else _ranges(range)
        pairs = zip(bound, reach, strict=True) if len(bound) == len(reach) else [(max(bound), min(reach))]
        linf = max(high / low for high, low in pairs)
        return _sensitivity(linf=linf, l2=None, range=(1.0,), batch_size=batch_size, relation=relation)


@dataclass(frozen=True)
class L2:
    """DP-SGD's clip: g / max(1, ||g||_2 / C2)."""

    norm: float

    def __post_init__(self) -> None:
        _bound("norm", self.norm)

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """C2 / (L R) in both norms; R is C2 unless given (a smaller R uses more of the levels)."""
        reach = _ranges(self.norm if range is None else range)
        return _sensitivity(linf=self.norm, l2=self.norm, range=reach, batch_size=batch_size, relation=relation)


@dataclass(frozen=True)
class Dual:
    """Clamp to [-C, C], then scale to the norm C2: both sensitivities are small, and the accountant uses both."""

    norm: float
    bound: float

    def __post_init__(self) -> None:
        _bound("norm", self.norm)
        _bound("bound", self.bound)

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """linf = min(C, C2) / (L R), l2 = C2 / (L R); R is C unless given."""
        reach = _ranges(self.bound if range is None else range)
        linf = min(self.bound, self.norm)
        return _sensitivity(linf=linf, l2=self.norm, range=reach, batch_size=batch_size, relation=relation)


@dataclass(frozen=True)
class BatchMean:
    """The mean of *unclipped* gradients clamped to [-C, C]: what the published accuracy needs, and no per-sample clip.

    One sample can move the mean from one end of the range to the other, so the sensitivity is 2C whatever L is:
    a larger batch buys no privacy.
    """

    bound: float

    def __post_init__(self) -> None:
        _bound("bound", self.bound)

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """linf = 2 min(C, R) / R for every batch size and either relation: 2 when R is C."""
        check_int("batch_size", batch_size, 1, 2**53)
        reach = _ranges(self.bound if range is None else range)
        return Sensitivity(linf=2 * min(1.0, self.bound / min(reach)), relation=relation)


Clip = Scale | Clamp | L2 | Dual | BatchMean
