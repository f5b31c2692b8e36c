"""The threads of the compiled loops, the memory they keep, and the arithmetic they must run in.

The threads wait for work on a lock, without spinning: on a busy machine a waiting thread costs nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from bqsgd.errors import InvalidParameter

PIECES = 4
"""Parts a thread's work is cut into; any thread may take any part."""
FEW = 1 << 19
"""Numbers that one thread has gone through by the time that another has begun."""


def in_threads(work: Callable[[int, int], None], items: int, *, each: int = FEW) -> None:
    """Call work(start, stop) over disjoint parts of range(items), on as many threads as torch has.

    Each thread takes the next of several pieces when it is done, so that a core kept busy by torch's own waiting
    threads holds nobody up.

    each: how many numbers an item is made of, where little is done to each: a few are not worth a second thread.
    """
    threads = max(1, min(torch.get_num_threads(), items)) if items * each >= FEW else 1
    count = min(items, threads * PIECES if threads > 1 else 1)
    edges = [items * i // count for i in range(count + 1)] if items else [0, 0]
    following = itertools.count()

    def take() -> None:
        while (piece := next(following)) < count:
            work(edges[piece], edges[piece + 1])

    def help_out() -> None:
        torch.set_flush_denormal(False)  # a thread starts in the mode of whoever started it
        take()

    if threads == 1:
        take()
        return
    others = [_helpers(os.getpid(), torch.get_num_threads()).submit(help_out) for _ in range(1, threads)]
    try:
        take()
    finally:
        for other in others:
            if not other.cancel():  # one that has not begun finds no piece left
                other.result()


@lru_cache(maxsize=1)
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay, with the memory they keep. A forked process has none of its parent's and makes its own."""
    return ThreadPoolExecutor(threads - 1, thread_name_prefix=f"bqsgd-{process}")


_kept = threading.local()


MAPPED = 32 << 20
"""Bytes from which on the C library takes memory from the system and gives it back at once, page by page."""
MOST_BLOCKS, LARGEST_BLOCK = 4, 1 << 30
"""Blocks of memory that a thread keeps for later at most, and their bytes; more would be missed elsewhere."""


def recycled(shape: tuple[int, ...], dtype: type[np.generic] = np.float32) -> np.ndarray:
    """An array with arbitrary contents, as `np.empty`, in memory that an earlier one has used if nothing refers to it.

    Fresh pages take the system several times as long as filling them takes. Small and huge ones are new.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if not MAPPED <= size <= LARGEST_BLOCK:
        return np.empty(shape, dtype)
    blocks: list[np.ndarray] = _kept.__dict__.setdefault("blocks", [])
    free = [n for n in range(len(blocks)) if sys.getrefcount(blocks[n]) == 2]  # the list's own, and the call's
    fitting = [n for n in free if size <= blocks[n].size <= 2 * size]
    if not fitting:
        if len(blocks) >= MOST_BLOCKS and free:
            del blocks[free[0]]
        blocks.append(np.empty(size, np.uint8))
        fitting = [len(blocks) - 1]
    chosen = min(fitting, key=lambda n: blocks[n].size)
    return blocks[chosen][:size].view(dtype).reshape(shape)


def recycled_zeros(size: int, dtype: type[np.generic]) -> np.ndarray:
    """(size,) zeros, in memory that an earlier array has used if nothing refers to it."""
    if size * np.dtype(dtype).itemsize < MAPPED:
        return np.zeros(size, dtype)  # pages that nobody writes to cost nothing
    found = recycled((size,), dtype)
    found[:] = 0
    return found


_GRAIN = 32768
"""Entries of an element-wise operation that torch gives to a thread at least (`at::internal::GRAIN_SIZE`)."""
_EVERY = 1024
"""Sums that show the mode stand at the start of every so many entries: few, because some processors add denormal
numbers slowly."""
_SUMS = (
    (2.0**-140, 2.0**-140, 2.0**-139),  # denormal terms
    (1.5 * 2.0**-126, -(2.0**-126), 2.0**-127),  # a denormal result
    (1.0, 2.0**-24, 1.0),  # ties go to even: down, ...
    (1.0, 3 * 2.0**-24, 1 + 2.0**-22),  # ... and up
)


@lru_cache(maxsize=8)
def _visible_sums(threads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of so many sums that each of torch's threads gets some that show its mode, and the bits of these sums."""
    terms = np.zeros((2, threads * _GRAIN // _EVERY, _EVERY), np.float32)
    found = np.empty((terms.shape[1], len(_SUMS)), np.float32)
    for at, (first, second, total) in enumerate(_SUMS):
        terms[0, :, at], terms[1, :, at], found[:, at] = first, second, total
    left, right = torch.from_numpy(terms)
    return left, right, torch.from_numpy(found).view(torch.int32)


def check_ieee(*, torch_threads: bool = True) -> None:
    """Check that the calling thread, and the threads torch runs its loops on for it, keep IEEE arithmetic.

    The helpers of `in_threads` need no check: they set their mode themselves.

    Args:
        torch_threads: False for work that torch's threads have no part in. The check takes some 10 microseconds for the
            calling thread and 30 with torch's threads, which it wakes: they then spin for some milliseconds, as after
            every parallel operation of torch.

    Raises:
        InvalidParameter: a thread flushes denormal numbers to zero or does not round to the nearest.
    """
    left, right, expected = _visible_sums(torch.get_num_threads())
    # Bits are compared, not numbers: a thread that flushes denormal numbers also takes them for zeros to compare them.
    alone = torch.add(left[0], right[0]).view(torch.int32)[: len(_SUMS)]
    if not torch.equal(alone, expected[0]):
        _refuse("this thread")
    if not torch_threads:
        return
    spread = torch.add(left, right).view(torch.int32)[:, : len(_SUMS)]
    if not torch.equal(spread, expected):
        _refuse("torch's threads")


def _refuse(who: str) -> NoReturn:
    raise InvalidParameter(
        f"the arithmetic of {who} is not IEEE's: denormal numbers are flushed to zero, or sums are not rounded to the "
        "nearest. What a sample adds would depend on the thread that computes it, and the privacy guarantee would not "
        "hold. Call torch.set_flush_denormal(False) at the start of the program. Threads keep the mode in which they "
        "were started, so where torch's already flush, start the process again or call torch.set_num_threads(1)."
    )
