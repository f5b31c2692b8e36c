"""Denormal numbers are kept: a run in which a thread flushes them is refused, and the loops' own threads never do."""

import ctypes
import sys
import threading
import time

import numpy as np
import pytest
import torch

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.runtime.threads import check_ieee, in_threads
from forked import in_fork

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="torch cannot flush denormals here")


@pytest.fixture
def flushing():
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_ieee_arithmetic_passes(threads):
    check_ieee()


def test_a_caller_that_flushes_denormals_is_refused(threads, flushing):
    for also in (True, False):
        with pytest.raises(InvalidParameter, match=r"this thread.*set_flush_denormal\(False\)"):
            check_ieee(torch_threads=also)


def test_the_mode_is_the_callers_again_after_it_is_set_back(threads):
    torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)
    check_ieee()


@pytest.mark.parametrize(("name", "mode"), [("FE_DOWNWARD", 0x400), ("FE_UPWARD", 0x800), ("FE_TOWARDZERO", 0xC00)])
@pytest.mark.skipif(sys.platform != "linux" or "x86" not in __import__("platform").machine(), reason="modes of x86")
def test_a_caller_that_does_not_round_to_the_nearest_is_refused(name, mode):
    library = ctypes.CDLL("libm.so.6")
    assert library.fesetround(mode) == 0
    try:
        with pytest.raises(InvalidParameter, match="this thread"):
            check_ieee()
    finally:
        library.fesetround(0)
    check_ieee()


def started_flushing(threads):
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.ones(1 << 20).add_(1)  # torch's threads start here, and keep the mode
    torch.set_flush_denormal(False)
    check_ieee(torch_threads=False)
    check_ieee()


def test_torchs_threads_that_flush_denormals_are_refused():
    for threads in (2, 3, 5):
        code, printed = in_fork(started_flushing, threads)
        assert code == 1
        assert "InvalidParameter: the arithmetic of torch's threads is not IEEE's" in printed


def fourth_flushes():
    torch.set_num_threads(3)
    torch.ones(1 << 20).add_(1)
    check_ieee()
    torch.set_flush_denormal(True)
    torch.set_num_threads(4)
    torch.ones(1 << 20).add_(1)  # the fourth starts here
    torch.set_flush_denormal(False)
    with pytest.raises(InvalidParameter):
        check_ieee()
    torch.set_num_threads(1)
    check_ieee()
    print("one thread passes")


def test_one_of_torchs_threads_that_flushes_denormals_is_enough():
    code, printed = in_fork(fourth_flushes)
    assert (code, printed) == (0, "one thread passes\n")


def test_a_thread_inherits_the_mode_and_is_refused_as_well(flushing):
    errors = []

    def caller():
        try:
            check_ieee()
        except InvalidParameter as error:
            errors.append(error)

    other = threading.Thread(target=caller)
    other.start()
    other.join()
    assert len(errors) == 1


TINY = np.full(64, 2.0**-140, np.float32)
TWICE = 1 << 10
"""The bits of 2^-139, written down: a thread that flushes could not compute them."""


def doubled_by_helpers(count):
    """What each of `count` threads makes of twice a denormal number, and whether it is the caller."""
    everybody, found = threading.Barrier(count, timeout=60), []

    def work(start, stop):
        everybody.wait()  # so that each thread has a piece
        found.append((threading.get_ident(), (TINY + TINY).view(np.int32)[0]))

    in_threads(work, count)
    return found


def test_helpers_keep_denormals_whatever_the_caller_does(flushing):
    """Started by a caller that flushes, or before."""
    before = torch.get_num_threads()
    for count in (5, 4, 4):  # another number of threads starts new ones
        torch.set_num_threads(count)
        found = doubled_by_helpers(count)
        torch.set_num_threads(before)
        assert len({thread for thread, _ in found}) == count
        assert all(bits == TWICE for thread, bits in found if thread != threading.get_ident())
        assert [bits for thread, bits in found if thread == threading.get_ident()] == [0]


def test_a_helper_that_was_left_flushing_keeps_denormals_again():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    everybody = threading.Barrier(3, timeout=60)

    def spoil(start, stop):
        everybody.wait()
        if threading.current_thread() is not threading.main_thread():
            torch.set_flush_denormal(True)

    in_threads(spoil, 3)
    found = doubled_by_helpers(3)
    torch.set_num_threads(before)
    assert {bits for _, bits in found} == {TWICE}


def test_the_check_is_cheap():
    check_ieee()
    times = []
    for _ in range(200):
        start = time.thread_time()
        check_ieee(torch_threads=False)
        times.append(time.thread_time() - start)
    assert min(times) < 2e-4


def test_helpers_that_wait_use_no_time():
    """A spinning thread would take most of a second's wait from the other processes of a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    doubled_by_helpers(4)
    torch.set_num_threads(before)
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.1
