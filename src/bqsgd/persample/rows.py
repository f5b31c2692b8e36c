"""Batches of one fixed shape, in which a sample has a row of its own that follows from its number in the data.

What a kernel does to a row may depend on the shape of the batch, on the row's place in it and on its alignment in
memory. So none of the three may depend on the other samples of the batch: all passes over the model have the same
number of rows in an aligned buffer, and a sample stands in row (its number modulo the rows), in the first pass where
that row is free. Empty rows are zeros. Only where every row is treated alike (`rowwise`) are rows taken as they come.
`docs/accounting.md`, claim 8, says what follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bqsgd.errors import InvalidParameter

FEWEST, MOST, MOST_PACKED = 16, 64, 256
LOSS_FLOATS, MOST_LOSSES = 1 << 16, 1024
_ALIGNMENT = 64
"""Bytes; torch's own allocator promises as much for the tensors a pass makes."""

Numbers = Tensor | npt.NDArray[np.int64]


def rows_for(batch_size: int) -> int:
    """Rows of every pass: about a quarter of the *public* batch size, a power of two from 16 to 64.

    Fewer rows fill up more evenly, more rows have less overhead a pass.
    """
    return min(MOST, max(FEWEST, 1 << (max(1, batch_size // 4).bit_length() - 1)))


def packed_rows_for(batch_size: int) -> int:
    """Rows of every pass where any sample may stand in any row, also from the *public* batch size alone.

    From the power of two below it, as `rows_for`: what is divided by another batch size with the same power has the
    same rows. A batch of up to 256 with two standard deviations of a Poisson batch: most go through in one pass. Whole
    vectors of 16; not a multiple of 128, where the entries of a sample would share a few lines of a core's nearest
    cache.
    """
    power = 1 << (batch_size.bit_length() - 1)
    parts = -(-power // MOST_PACKED)
    rows = -(-math.ceil(power + 2 * math.sqrt(power)) // (16 * parts)) * 16
    return rows + 16 if rows % 128 == 0 else rows


def pass_rows_for(batch_size: int, *, packed: bool) -> int:
    """Rows of every pass of a model that is not made of row-wise operations."""
    return packed_rows_for(batch_size) if packed else rows_for(batch_size)


def loss_rows_for(outputs: int) -> int:
    """Rows in which losses are computed, from the size of one sample's outputs: they are small, so rows are cheap."""
    return min(MOST_LOSSES, max(FEWEST, 1 << (max(1, LOSS_FLOATS // max(1, outputs)).bit_length() - 1)))


@dataclass(frozen=True)
class Chunk:
    """One pass: member m of the batch stands in row `rows[m]`."""

    rows: Tensor
    members: Tensor


def plan_chunks(count: int, numbers: Numbers | None, rows: int) -> list[Chunk]:
    """Which samples of a batch go through the model together.

    With `numbers` every sample gets its own row; without them rows are taken as they come.
    """
    given = np.arange(count) if numbers is None else check_numbers(numbers, count)
    row = given % rows
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], row[order])  # where the samples of the same row begin
    turn = np.arange(count) - first
    return [
        Chunk(torch.from_numpy(row[order][turn == n]), torch.from_numpy(order[turn == n]))
        for n in range(int(turn.max(initial=-1)) + 1)
    ]


def check_numbers(numbers: Numbers, count: int) -> npt.NDArray[np.int64]:
    """The numbers of `count` samples in their data."""
    found = np.asarray(numbers)
    if found.shape != (count,) or found.dtype.kind not in "iu" or (count and int(found.min()) < 0):
        raise InvalidParameter(
            f"indices must be {count} non-negative integers, the number of each sample in the data, "
            f"got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)


def passes(inputs: Tensor, targets: Tensor, chunks: list[Chunk], rows: int) -> Iterator[tuple[Chunk, Tensor, Tensor]]:
    """Each chunk with its inputs and targets laid out in rows, in memory of their own: gradients are made from it."""
    for chunk in chunks:
        x, y = (aligned_zeros(rows, like) for like in (inputs, targets))
        for buffer, values in ((x, inputs), (y, targets)):
            buffer[chunk.rows.to(buffer.device)] = values[chunk.members.to(values.device)]
        yield chunk, x, y


def aligned_zeros(rows: int, like: Tensor) -> Tensor:
    """(rows, ...) zeros shaped as the samples of `like`, on a multiple of 64 bytes."""
    found = like.new_zeros(rows, *like.shape[1:])
    if found.data_ptr() % _ALIGNMENT:
        raise InvalidParameter("torch returned memory off its 64-byte alignment: samples cannot be kept apart")
    return found
