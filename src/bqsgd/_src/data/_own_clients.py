"""What a parser makes of data whose samples belong to clients from the start: the roles of plays, sites of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""Inputs (n, ...) and labels (n,)."""


class Parts(NamedTuple):
    """Both splits, the number of classes, and for each training sample the client that holds it, from 0 up."""

    train: Rows
    test: Rows
    classes: int
    owners: npt.NDArray[np.int64]


def of_clients(train: Sequence[Rows], test: Sequence[Rows], *, classes: int) -> Parts:
    """Join the rows of every client, in the order of clients."""
    owners = np.repeat(np.arange(len(train), dtype=np.int64), [len(labels) for _, labels in train])
    return Parts(train=_joined(train), test=_joined(test), classes=classes, owners=owners)


def _joined(each: Sequence[Rows]) -> Rows:
    inputs, labels = zip(*each, strict=True)
    return np.concatenate(inputs), np.concatenate(labels)
