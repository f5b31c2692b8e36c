"""The clips of one sample's gradient: what each does to a gradient, and the sensitivity that gives the mean.

What a clip does is in its class: the accountant reads `sensitivity`, the sum of clipped gradients reads `bounds`,
`clamp` and `weights`, and a client's whole update goes through `clipped`. Settings know a clip by a word, not by its
class, and `BatchMean` is a case of its own in `gradients.py` and `client/objective.py`: docs/architecture.md lists what
a new clip needs besides its class.

Key: C bound of a coordinate, C2 Euclidean bound, L public batch size, R range of the encoder, g a sample's gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_int, check_positive
from bqsgd._src.persample._kernels.grid import SHRINK, Grid
from bqsgd._src.release import Relation, Sensitivity

if TYPE_CHECKING:
    from torch import nn

SMALLEST = 1e-12
"""Below this a squared norm would underflow in float32, and a gradient would pass its bound."""

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


_Vector = npt.NDArray[np.float64]


class Norms(Protocol):
    """Norms of the gradients of some parameters for a batch of samples: (batch,) float64 arrays of NumPy's, or tensors
    on the device of the gradients."""

    def max_norms(self) -> Any:
        """The largest magnitude of each sample's coordinates."""

    def squared_norms(self, bound: float | None = None) -> Any:
        """The sums of squares, of coordinates clamped to +-bound where one is given."""


class Clip(ABC):
    """How one sample's gradient is bounded: coordinates are clamped, if `clamp` says so, and then scaled by a weight.

    Whole steps of a grid are added up, so what is scaled aims inside its bound: rounding must not carry it beyond
    (claim 9 of `docs/accounting.md`).
    """

    @abstractmethod
    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """How far one sample can move the mean over L, in units of the encoder's range R."""

    @abstractmethod
    def bounds(self, count: int) -> tuple[float, ...]:
        """What a coordinate of each of `count` parameter tensors can be at most after the clip: its grid."""

    def clamp(self, bound: float) -> float | None:
        """What coordinates of a tensor with this bound are clamped to before they are scaled; None for no clamp."""
        return None

    @property
    def euclidean(self) -> float | None:
        """What the Euclidean norm of a gradient is at most after the clip; None where only coordinates are bounded."""
        return None

    def weights(self, factors: Sequence[Norms], *, grid: Grid, coordinates: int) -> Any:
        """(batch,) factor of each sample from the norms of all its parameters; None where all are 1.

        grid: of the first parameter tensor; a clip that reads it has one bound for all. coordinates: in the message.
        """
        return None

    def of_share(self, share: float) -> Clip:
        """The clip of a random share of the coordinates, where the whole gradient has this clip.

        A clip of single coordinates stays the same. A Euclidean norm shrinks by the root of the share, as the norm of
        the kept part does.
        """
        return self

    def clipped(self, values: _Vector) -> _Vector:
        """One whole vector within the bounds of the clip: a client's update.

        Raises:
            InvalidParameter: the clip is not one of a single vector.
        """
        raise InvalidParameter(f"a client's whole update is clipped by Clamp, Scale, L2 or Dual, not {self}")


def _weights(norms: Any, reach: float) -> Any:
    """reach / norm where the norm is larger, else 1."""
    return reach / norms.clip(min=reach)


def _euclidean(factors: Sequence[Norms], bound: float | None = None) -> Any:
    """Norms over all parameters; sums run over the parameters one after another, the same for every sample."""
    total = factors[0].squared_norms(bound)
    for factor in factors[1:]:
        total = total + factor.squared_norms(bound)
    return np.sqrt(total) if isinstance(total, np.ndarray) else total.sqrt()


def _scaled(values: _Vector, size: float, bound: float) -> _Vector:
    """A vector of this norm scaled to the bound, a little inside because norms are rounded."""
    inside = bound * (1 - SHRINK)
    return values if size <= inside else values * (inside / size)


@dataclass(frozen=True)
class Scale(Clip):
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

    def bounds(self, count: int) -> tuple[float, ...]:
        return (self.bound,) * count

    def weights(self, factors: Sequence[Norms], *, grid: Grid, coordinates: int) -> Any:
        norms = factors[0].max_norms()
        for factor in factors[1:]:
            norms = norms.clip(min=factor.max_norms())
        return _weights(norms, self.bound * (1 - SHRINK))

    def clipped(self, values: _Vector) -> _Vector:
        return _scaled(values, float(np.abs(values).max()), self.bound)


@dataclass(frozen=True)
class Clamp(Clip):
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

    def clamp(self, bound: float) -> float:
        return bound

    def clipped(self, values: _Vector) -> _Vector:
        return super().clipped(values) if isinstance(self.bound, tuple) else values.clip(-self.bound, self.bound)

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
class L2(Clip):
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

    def of_share(self, share: float) -> L2:
        return L2(self.norm * math.sqrt(share))

    @property
    def euclidean(self) -> float:
        return self.norm

    def bounds(self, count: int) -> tuple[float, ...]:
        return (self.norm,) * count

    def weights(self, factors: Sequence[Norms], *, grid: Grid, coordinates: int) -> Any:
        return _weights(_euclidean(factors), grid.norm_reach(self.norm, coordinates))

    def clipped(self, values: _Vector) -> _Vector:
        return _scaled(values, float(np.linalg.norm(values)), self.norm)


@dataclass(frozen=True)
class Dual(Clip):
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

    def of_share(self, share: float) -> Dual:
        # The clamp shrinks too, so that the two bounds keep their ratio, which the accountant uses.
        return Dual(self.norm * math.sqrt(share), self.bound * math.sqrt(share))

    @property
    def euclidean(self) -> float:
        return self.norm

    def bounds(self, count: int) -> tuple[float, ...]:
        return (min(self.bound, self.norm),) * count

    def clamp(self, bound: float) -> float:
        return self.bound

    def weights(self, factors: Sequence[Norms], *, grid: Grid, coordinates: int) -> Any:
        return _weights(_euclidean(factors, self.bound), grid.norm_reach(self.norm, coordinates))

    def clipped(self, values: _Vector) -> _Vector:
        held = values.clip(-self.bound, self.bound)
        return _scaled(held, float(np.linalg.norm(held)), self.norm)


@dataclass(frozen=True)
class BatchMean(Clip):
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

    def bounds(self, count: int) -> tuple[float, ...]:
        return (self.bound,) * count
