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

from bqsgd._src.errors import InvalidParameter

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
    threads = min(torch.get_num_threads(), items) if items * each >= FEW else 1  # 1 in a helper, which never waits
    if threads <= 1:
        work(0, items)
        return
    count = min(items, threads * PIECES)
    edges = [items * i // count for i in range(count + 1)]
    _share(lambda piece: work(edges[piece], edges[piece + 1]), count, helpers=threads - 1, join_in=True)


def in_own_threads(work: Callable[[int], object], items: int, *, in_order: bool = False) -> None:
    """Call work(item) for every item of range(items) in threads of ours, never in the calling one.

    The work runs torch's kernels. In these threads they run on one core each, keep denormal numbers and know nothing of
    the modes that the caller may have set for its thread (autocast, gradients, inference): what they compute does not
    depend on the caller or on the number of threads.

    in_order: one item after another, for work that draws from a common generator.
    """
    if getattr(_kept, "is_helper", False):
        # A helper that waited for the pool would wait for itself: it already is such a thread, so it does the work.
        for item in range(items):
            work(item)
        return
    _share(work, items, helpers=1 if in_order else min(torch.get_num_threads(), items), join_in=False)


def _share(work: Callable[[int], object], pieces: int, *, helpers: int, join_in: bool) -> None:
    """Call work(piece) for every piece, in so many helpers and, if asked, in the calling thread."""
    following = itertools.count()

    def take() -> None:
        while (piece := next(following)) < pieces:
            work(piece)

    def help_out() -> None:
        torch.set_flush_denormal(False)  # a thread starts in the mode of whoever started it
        take()

    pool = _helpers(os.getpid(), torch.get_num_threads()) if helpers else None
    others = [pool.submit(help_out) for _ in range(helpers)] if pool else []
    try:
        if join_in:
            take()
    finally:
        for other in others:
            # Those that have not begun find no piece left; the calling thread sleeps until the others are done.
            if not (join_in and other.cancel()):
                other.result()


@lru_cache(maxsize=1)
def _helpers(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads that stay, with the memory they keep. A forked process has none of its parent's and makes its own."""
    pool, together = ThreadPoolExecutor(threads, thread_name_prefix=f"bqsgd-{process}"), threading.Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # torch sets up a thread when it is first used there, and would set the number again
        torch.set_num_threads(1)
        _kept.is_helper = True
        together.wait()  # so that each of them gets one of these calls

    for started in [pool.submit(begin) for _ in range(threads)]:
        started.result()
    # Setting the number is a matter of the thread, but threads that others start later take the last one that was set.
    torch.set_num_threads(threads)
    return pool


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
_SUMS = (  # the bits of float32: a thread that flushes would turn the numbers themselves into zeros
    (0x00000200, 0x00000200, 0x00000400),  # denormal terms: 2^-140 + 2^-140 = 2^-139
    (0x00C00000, 0x80800000, 0x00400000),  # a denormal result: 1.5 * 2^-126 - 2^-126 = 2^-127
    (0x3F800000, 0x33800000, 0x3F800000),  # ties go to even: 1 + 2^-24 down to 1, ...
    (0x3F800000, 0x34400000, 0x3F800002),  # ... and 1 + 3 * 2^-24 up to 1 + 2^-22
)


@lru_cache(maxsize=8)
def _visible_sums(threads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Terms of so many sums that each of torch's threads gets some that show its mode, and the bits of these sums."""
    terms = np.zeros((2, threads * _GRAIN // _EVERY, _EVERY), np.uint32)
    found = np.empty((terms.shape[1], len(_SUMS)), np.uint32)
    for at, (first, second, total) in enumerate(_SUMS):
        terms[0, :, at], terms[1, :, at], found[:, at] = first, second, total
    left, right = torch.from_numpy(terms.view(np.float32))
    return left, right, torch.from_numpy(found.view(np.int32))


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
