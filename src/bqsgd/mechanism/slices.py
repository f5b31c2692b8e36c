"""Work on a long vector, shared out over threads slice by slice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bqsgd.params import check_int

MAX_THREADS = 256


def for_slices(dimension: int, step: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Call work(start, stop) so that [0, dimension) is covered once: a slice a thread, cut at multiples of `step`.

    The first error of a slice, in the order of the slices, is raised after all have ended.
    """
    check_int("threads", threads, 1, MAX_THREADS)
    share = -(-dimension // (threads * step)) * step
    starts = range(0, dimension, share)
    if len(starts) == 1:
        work(0, dimension)
        return
    with ThreadPoolExecutor(max_workers=len(starts)) as pool:
        pending = [pool.submit(work, start, min(start + share, dimension)) for start in starts]
    for slice_done in pending:
        slice_done.result()
