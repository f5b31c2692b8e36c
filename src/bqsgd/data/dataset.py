"""A data set as plain arrays: inputs and integer labels, a training and a test split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bqsgd.errors import InvalidParameter, NonFiniteInput


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Inputs (n, ...) in float32 and labels (n,) in int64, one row a sample."""

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or self.inputs.dtype != np.float32:
            raise InvalidParameter(
                f"inputs must be float32 with a row a sample, got {self.inputs.dtype} {self.inputs.shape}"
            )
        if self.labels.ndim != 1 or self.labels.dtype != np.int64:
            raise InvalidParameter(f"labels must be one int64 a sample, got {self.labels.dtype} {self.labels.shape}")
        if len(self.inputs) != len(self.labels) or len(self.labels) == 0:
            raise InvalidParameter(f"{len(self.inputs)} inputs and {len(self.labels)} labels do not pair up")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> Split:
        """The samples at `rows`, copied, so that a client holds its own data only."""
        return Split(inputs=self.inputs[rows], labels=self.labels[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A named data set. `source` says where the bytes came from; `classes` is the number of labels.

    mean, deviation: public constants that the inputs were normalised with, pixel = mean + deviation * input in [0, 1].
    """

    name: str
    train: Split
    test: Split
    classes: int
    source: str
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            if split.labels.min() < 0 or split.labels.max() >= self.classes:
                raise InvalidParameter(f"labels of {self.name} must lie in 0..{self.classes - 1}")
            if not bool(np.isfinite(split.inputs).all()):
                raise NonFiniteInput(f"inputs of {self.name} hold NaN or infinity; clean them before training")
            if split.inputs.shape[1:] != self.train.inputs.shape[1:]:
                raise InvalidParameter(f"training and test inputs of {self.name} differ in shape")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(int(n) for n in self.train.inputs.shape[1:])
