"""The clips of one sample's gradient: what each does to a gradient, and the sensitivity that gives the mean.

What a clip does is in its class: the accountant reads `sensitivity`, the sum of clipped gradients reads `layers`,
`clamp` and `weights`, and a client's whole update goes through `clipped`. Settings know a clip by a word, not by its
class, and `BatchMean` is a case of its own in `gradients.py` and `client/objective.py`: docs/architecture.md lists what
a new clip needs besides its class.

Key: C bound of a coordinate, C2 Euclidean bound, L public batch size, R range of the encoder, g a sample's gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

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
"""The encoder's range: one number, a list of one per parameter tensor, or an array of one per coordinate."""

_Vector = npt.NDArray[np.float64]


class Norms(Protocol):
    """Norms of the gradients of some parameters for a batch of samples: (batch,) float64 arrays of NumPy's, or tensors
    on the device of the gradients."""

    def max_norms(self) -> Any:
        """The largest magnitude of each sample's coordinates."""

    def squared_norms(self, bound: float | None = None) -> Any:
        """The sums of squares, of coordinates clamped to +-bound where one is given."""


@dataclass(frozen=True)
class Clip(ABC):
    """How one sample's gradient is bounded: coordinates are clamped, if `clamp` says so, and then scaled by a weight.

    Whole steps of a grid are added up, so what is scaled aims inside its bound: rounding must not carry it beyond
    (claim 9 of `docs/accounting.md`).
    """

    def __post_init__(self) -> None:
        for field in fields(self):
            value = check_positive(field.name, getattr(self, field.name))
            if not SMALLEST <= value <= 1 / SMALLEST:
                raise InvalidParameter(
                    f"{field.name} must be from {SMALLEST} to {1 / SMALLEST}, got {value!r}; rescale the loss"
                )
            object.__setattr__(self, field.name, value)  # NumPy would compute with its numbers in their own precision

    @property
    @abstractmethod
    def largest(self) -> float:
        """What a coordinate is at most after the clip: its grid."""

    @property
    def euclidean(self) -> float | None:
        """What the Euclidean norm of a gradient is at most after the clip; None where only coordinates are bounded."""
        return None

    @property
    def usual_range(self) -> float:
        """R unless one is given."""
        return self.largest

    @property
    def clamp(self) -> float | None:
        """What coordinates are clamped to before they are scaled; None for no clamp."""
        return None

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """How far one sample can move the mean over L, in units of the encoder's range R: bound / (L R) in each norm.

        Replace-one doubles it. A smaller R uses more of the levels.

        >>> Scale(0.5).sensitivity(batch_size=32).linf
        0.03125
        """
        # Of a mean of vectors with max-norm <= largest and norm <= euclidean, clamped to +-R (1-Lipschitz per
        # coordinate).
        reach = min(_ranges(self.usual_range if range is None else range))
        moves = (2 if Relation(relation) is Relation.REPLACE else 1) / check_int("batch_size", batch_size, 1, 2**53)
        return Sensitivity(
            linf=min(2.0, moves * self.largest / reach),  # two values in [-R, R] are at most 2R apart
            l2=None if self.euclidean is None else moves * self.euclidean / reach,
            relation=relation,
        )

    def weights(self, norms: Sequence[Norms], *, rounding: float = 0.0) -> Any:
        """(batch,) factor of each sample from the norms of the parameters that are clipped together; None for all 1.

        rounding: what rounding to the grid may add to a Euclidean norm afterwards.
        """
        return None

    def layers(self, count: int) -> tuple[Clip, ...]:
        """The clip of each of `count` parameter tensors; only `self` if all of them are clipped together."""
        return (self,)

    def of_share(self, share: float) -> Clip:
        """The clip of a random share of the coordinates, where the whole gradient has this clip.

        A clip of single coordinates stays the same. A Euclidean norm shrinks by the root of the share, as the norm of
        the kept part does.
        """
        return self

    def clipped(self, values: _Vector, sizes: Sequence[int] = ()) -> _Vector:
        """One whole vector within the bounds of the clip: a client's update, of parameter tensors of these sizes.

        Raises:
            InvalidParameter: the clip is not one of a single vector, or of another number of tensors.
        """
        held = values if self.clamp is None else values.clip(-self.clamp, self.clamp)
        weights = self.weights([_OneVector(held)])
        return held if weights is None else held * weights


def _ranges(value: _Range) -> tuple[float, ...]:
    if isinstance(value, (Sequence, np.ndarray)):
        if len(value) == 0:
            raise InvalidParameter("range must not be empty")
        return tuple(check_positive("range", entry) for entry in value)
    return (check_positive("range", value),)


@dataclass(frozen=True, eq=False)
class _OneVector:
    """The norms of one vector, as those of a batch of one."""

    values: _Vector

    def max_norms(self) -> _Vector:
        return np.array([np.abs(self.values).max(initial=0)])

    def squared_norms(self, bound: float | None = None) -> _Vector:
        return np.array([self.values.dot(self.values)])  # clamped before


@dataclass(frozen=True)
class Scale(Clip):
    """Eq. (6): g / max(1, ||g||_inf / C), the max-norm taken over the whole gradient."""

    bound: float

    @property
    def largest(self) -> float:
        return self.bound

    def weights(self, norms: Sequence[Norms], *, rounding: float = 0.0) -> Any:
        size, reach = norms[0].max_norms(), self.bound * (1 - SHRINK)
        for norm in norms[1:]:
            size = size.clip(min=norm.max_norms())
        return reach / size.clip(min=reach)


@dataclass(frozen=True)
class Clamp(Clip):
    """Each coordinate of g clamped to [-C, C]: the guarantee of `Scale`, far more of the signal."""

    bound: float

    @property
    def largest(self) -> float:
        return self.bound

    @property
    def clamp(self) -> float:
        return self.bound


@dataclass(frozen=True)
class L2(Clip):
    """DP-SGD's clip: g / max(1, ||g||_2 / C2)."""

    norm: float

    @property
    def largest(self) -> float:
        return self.norm

    @property
    def euclidean(self) -> float:
        return self.norm

    def weights(self, norms: Sequence[Norms], *, rounding: float = 0.0) -> Any:
        # Sums run over the parameters one after another, the same for every sample.
        total = norms[0].squared_norms(self.clamp)
        for norm in norms[1:]:
            total = total + norm.squared_norms(self.clamp)
        size = np.sqrt(total) if isinstance(total, np.ndarray) else total.sqrt()
        return self._weights(size, self.norm * (1 - SHRINK) - rounding)

    def _weights(self, size: Any, reach: float) -> Any:
        return reach / size.clip(min=reach)

    def of_share(self, share: float) -> L2:
        return replace(self, norm=self.norm * math.sqrt(share))


@dataclass(frozen=True)
class Normalize(L2):
    """Automatic clipping (Bu et al., 2023): g C2 / (||g||_2 + gamma), so that samples count by their direction.

    Args:
        norm: C2, which every gradient comes near and none passes. Another C2 is another learning rate.
        gamma: length at which a gradient counts half, so that what is nearly zero is not blown up. Zero stays zero.
    """

    gamma: float = 0.01

    def _weights(self, size: Any, reach: float) -> Any:
        return reach / (size + self.gamma)

    def of_share(self, share: float) -> Normalize:
        return replace(self, norm=self.norm * math.sqrt(share), gamma=self.gamma * math.sqrt(share))


@dataclass(frozen=True)
class Dual(L2):
    """Clamp to [-C, C], then scale to the norm C2: both sensitivities are small, and the accountant uses both."""

    bound: float

    @property
    def largest(self) -> float:
        return min(self.bound, self.norm)

    @property
    def usual_range(self) -> float:
        return self.bound

    @property
    def clamp(self) -> float:
        return self.bound

    def of_share(self, share: float) -> Dual:
        # The clamp shrinks too, so that the two bounds keep their ratio, which the accountant uses.
        return Dual(self.norm * math.sqrt(share), self.bound * math.sqrt(share))


@dataclass(frozen=True)
class PerLayer(Clip):
    """The gradient of each parameter tensor (weight or bias) clipped by itself, so that none takes the room of others.

    Args:
        clip: a clip for the whole gradient, whose norm the tensors share evenly: each of n is clipped to C2 / sqrt(n),
            and the guarantee is that of the clip. Or a clip of its own for each tensor, in the order of
            `model.parameters()` (those that require a gradient): the whole then has the norm sqrt(sum of C2_j^2).

    >>> PerLayer((L2(3.0), L2(4.0))).euclidean
    5.0
    """

    clip: Clip | tuple[Clip, ...]

    def __post_init__(self) -> None:
        if isinstance(self.clip, Sequence):
            object.__setattr__(self, "clip", tuple(self.clip))
        if not self._each or any(not isinstance(c, Clip) or isinstance(c, (PerLayer, BatchMean)) for c in self._each):
            raise InvalidParameter(
                f"PerLayer takes one of L2, Normalize, Dual, Clamp and Scale, or one for each parameter tensor, got "
                f"{self.clip!r}"
            )

    @property
    def _each(self) -> tuple[Clip, ...]:
        return self.clip if isinstance(self.clip, tuple) else (self.clip,)

    @property
    def largest(self) -> float:
        return max(clip.largest for clip in self._each)

    @property
    def euclidean(self) -> float | None:
        norms = [clip.euclidean for clip in self._each]
        return None if None in norms else math.hypot(*norms)  # type: ignore[arg-type]

    def layers(self, count: int) -> tuple[Clip, ...]:
        if isinstance(self.clip, tuple):
            if len(self.clip) != count:
                raise InvalidParameter(
                    f"PerLayer has {len(self.clip)} clips, the model {count} trainable parameter tensors"
                )
            return self.clip
        clip = replace(self.clip, norm=self.clip.norm / math.sqrt(count)) if isinstance(self.clip, L2) else self.clip
        return (clip,) * count

    def of_share(self, share: float) -> PerLayer:
        shares = tuple(clip.of_share(share) for clip in self._each)
        return PerLayer(shares if isinstance(self.clip, tuple) else shares[0])

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """max C_j / (L R_j), and the root of the sum of (C2_j / (L R_j))^2.

        R is the bound of the one clip, or of each tensor's own, unless given. A list has one R for each clip; a list of
        another length, or an array, which has one for each coordinate, is met with its smallest entry.

        >>> PerLayer((Clamp(0.5), Clamp(2.0))).sensitivity(batch_size=32).linf
        0.03125
        """
        reach = _ranges([clip.usual_range for clip in self._each] if range is None else range)
        if len(reach) != len(self._each) or isinstance(range, np.ndarray):
            reach = (min(reach),) * len(self._each)
        each = [
            clip.sensitivity(batch_size=batch_size, range=own, relation=relation)
            for clip, own in zip(self._each, reach, strict=True)
        ]
        l2s = [own.l2 for own in each]
        l2 = None if None in l2s else math.hypot(*l2s)  # type: ignore[arg-type]
        return Sensitivity(linf=max(own.linf for own in each), l2=l2, relation=relation)

    def clipped(self, values: _Vector, sizes: Sequence[int] = ()) -> _Vector:
        parts = np.split(values, np.cumsum(sizes)[:-1])
        return np.concatenate([clip.clipped(own) for clip, own in zip(self.layers(len(sizes)), parts, strict=True)])

    def ranges(self, model: nn.Module) -> _Vector:
        """The R that `sensitivity` takes if none is given, for every coordinate of the flat gradient."""
        sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        count = len(self.layers(len(sizes)))
        each = self._each if isinstance(self.clip, tuple) else self._each * count
        return np.repeat([clip.usual_range for clip in each], sizes)


@dataclass(frozen=True)
class BatchMean(Clip):
    """The mean of *unclipped* gradients clamped to [-C, C]: what the published accuracy needs, and no per-sample clip.

    One sample can move the mean from one end of the range to the other, so the sensitivity is 2C whatever L is:
    a larger batch buys no privacy.
    """

    bound: float

    @property
    def largest(self) -> float:
        return self.bound

    def sensitivity(
        self, *, batch_size: int, range: _Range | None = None, relation: Relation = Relation.ADD_REMOVE
    ) -> Sensitivity:
        """linf = 2 min(C, R) / R for every batch size and either relation: 2 when R is C."""
        check_int("batch_size", batch_size, 1, 2**53)
        reach = _ranges(self.bound if range is None else range)
        return Sensitivity(linf=2 * min(1.0, self.bound / min(reach)), relation=relation)

    def clipped(self, values: _Vector, sizes: Sequence[int] = ()) -> NoReturn:
        raise InvalidParameter(f"a client's whole update is clipped by a clip of one sample, not by {self}")


# Where the parameters of a model are clipped.


@dataclass(frozen=True, eq=False)
class Layer:
    """Parameter tensors that are clipped together, all of a model or one of them. coordinates: in the message."""

    clip: Clip
    coordinates: int

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.clip.largest)

    def weights(self, norms: Sequence[Norms]) -> Any:
        """See `Clip.weights`; norms: of the layer's parameters."""
        return self.clip.weights(norms, rounding=self.grid.rounding(self.coordinates))


class Place(NamedTuple):
    """Where the coordinates of one parameter tensor lie, and what they are clipped with."""

    span: slice
    layer: Layer


def places(clip: Clip, sizes: Sequence[int]) -> list[Place]:
    """The place of each parameter tensor in the flat gradient."""
    clips, starts = clip.layers(len(sizes)), np.cumsum([0, *sizes]).tolist()
    if len(clips) == len(sizes):
        layers = [Layer(own, size) for own, size in zip(clips, sizes, strict=True)]
    else:
        layers = [Layer(clips[0], starts[-1])] * len(sizes)
    return [Place(slice(starts[n], starts[n + 1]), layer) for n, layer in enumerate(layers)]
