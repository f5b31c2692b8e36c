"""What the encoder is given with and without the record: the accountant's worst case, or a client's own doing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter
from bqsgd.release import Release

Values = npt.NDArray[np.float64]
CANARY_SIZE = 1e3
"""A canary's gradient in every coordinate, in clip ranges: so large that only a clip can stop it."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The encoder's input without and with the record, in fractions of its range (clip 1)."""

    without: Values
    with_record: Values

    def __post_init__(self) -> None:
        for name in ("without", "with_record"):
            values = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or not bool(np.all(np.isfinite(values))):
                raise InvalidParameter(f"{name} must be a finite vector, got shape {values.shape}")
            object.__setattr__(self, name, values)
        if self.without.shape != self.with_record.shape:
            raise InvalidParameter(f"inputs differ in shape: {self.without.shape} and {self.with_record.shape}")


def worst_case_inputs(release: Release) -> Inputs:
    """The pair on which the accountant's bound is attained: inputs at a whole step against `shift` steps above it.

    Every coordinate moves by linf; with an L2 bound only as many as it allows. A move of more than half the range
    starts from the range's lower end.
    """
    linf = min(release.sensitivity.linf, 2.0)
    moved = release.dimension
    if release.sensitivity.l2 is not None:
        moved = min(moved, max(1, math.floor((release.sensitivity.l2 / release.sensitivity.linf) ** 2 * (1 + 1e-12))))
    without = np.full(release.dimension, 0.0 if linf <= 1 else -1.0)
    with_record = without.copy()
    with_record[:moved] += linf
    return Inputs(without=without, with_record=with_record)


def canary_inputs(
    mean: Callable[[Values], npt.ArrayLike], *, dimension: int, background: Values | None = None
) -> Inputs:
    """What a client's own step from per-sample gradients (records, dimension) to values does with a canary record.

    mean is the client's code up to the encoder: clip, sum, division. The canary's gradient is CANARY_SIZE in every
    coordinate; `background` holds the gradients of the records that are there either way (none by default).
    """
    records = np.empty((0, dimension)) if background is None else np.asarray(background, dtype=np.float64)
    canary = np.full((1, dimension), CANARY_SIZE)
    return Inputs(
        without=np.asarray(mean(records), dtype=np.float64),
        with_record=np.asarray(mean(np.concatenate([records, canary])), dtype=np.float64),
    )
