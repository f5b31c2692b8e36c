"""The threads of the compiled loops: every item once, errors come out, and a forked process has threads of its own."""

import os
import threading

import numpy as np
import pytest
import torch

from bqsgd._src.runtime import threads
from bqsgd._src.runtime.threads import (
    FEW,
    MAPPED,
    MOST_BLOCKS,
    in_threads,
    recycled,
    recycled_zeros,
)


@pytest.fixture(autouse=True)
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("items", [0, 1, 2, 3, 15, 16, 17, 1000])
@pytest.mark.parametrize("each", [1, FEW])
def test_every_item_is_done_once(items, each):
    times = np.zeros(items, np.int64)

    def work(start, stop):
        times[start:stop] += 1

    in_threads(work, items, each=each)
    assert (times == 1).all()


def test_few_numbers_stay_with_the_thread_that_asks():
    seen = set()
    in_threads(lambda start, stop: seen.add(threading.get_ident()), 1000, each=FEW // 1001)
    assert seen == {threading.get_ident()}


def test_the_same_threads_do_the_next_work():
    everybody, found = threading.Barrier(4, timeout=60), []

    def work(start, stop):
        everybody.wait()  # so that each of four threads has one of four pieces
        found.append(threading.get_ident())

    for _ in range(8):
        in_threads(work, 4)
    assert len(found) == 32
    assert len(set(found)) <= 5  # the calling thread and four that stay


@pytest.mark.parametrize("failing", range(4))
def test_an_error_of_any_thread_is_raised(failing):
    everybody = threading.Barrier(4, timeout=60)

    def work(start, stop):
        everybody.wait()
        if start == failing:
            raise ZeroDivisionError("one of them")

    with pytest.raises(ZeroDivisionError, match="one of them"):
        in_threads(work, 4)


def test_callers_in_many_threads_do_not_wait_for_one_another():
    sums = np.zeros((8, 100), np.int64)

    def caller(row):
        for _ in range(20):
            in_threads(lambda start, stop: np.add(sums[row, start:stop], 1, out=sums[row, start:stop]), 100)

    callers = [threading.Thread(target=caller, args=(row,)) for row in range(8)]
    for each in callers:
        each.start()
    for each in callers:
        each.join(timeout=60)
    assert (sums == 20).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_makes_threads_of_its_own():
    done = np.zeros(64, np.int64)

    def work(start, stop):
        done[start:stop] += 1

    in_threads(work, 64)
    child = os.fork()
    if child == 0:
        in_threads(work, 64)
        os._exit(0 if (done == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_memory_is_used_again_once_nothing_refers_to_it():
    size = MAPPED // 4
    first = recycled_zeros(size, np.float64)
    held = torch.from_numpy(first[5:9])
    place = first.ctypes.data
    del first
    second = recycled_zeros(size, np.float64)
    assert second.ctypes.data != place  # the tensor still looks at it
    second += 1
    held += 1
    assert (second[5:9] == 1).all()
    del held
    third = recycled_zeros(size - 100, np.float64)
    assert third.ctypes.data == place
    assert not third.any()
    small = recycled((3, 4), np.int32)
    assert small.shape == (3, 4)
    assert small.dtype == np.int32


def test_little_memory_is_kept_for_later():
    for extra in range(3 * MOST_BLOCKS):
        recycled((MAPPED * (1 + extra),), np.uint8)
    sizes = [block.size for block in threads._kept.blocks]
    assert len(sizes) <= MOST_BLOCKS
    threads._kept.blocks.clear()
