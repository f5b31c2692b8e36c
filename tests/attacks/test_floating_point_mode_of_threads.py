"""Every thread computes in the same floating-point mode, or nothing is computed.

`torch.set_flush_denormal(True)` holds for the thread that calls it. If the threads of the compiled loops do not follow,
a sample's gradient depends on which thread takes it, and that is a race which other samples can decide.
"""

from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from flushing import REFUSED, apart_in_two_threads, helpers_that_flush, moved_by_a_second_thread

from forked import fork_server

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such mode")


@pytest.fixture
def alone():
    """alone(function, *arguments): call it in a process of its own.

    The processes are forked from one that has imported torch and has never started a thread: importing takes longer
    than all that they do.
    """

    def call(function, *arguments):
        with ProcessPoolExecutor(1, mp_context=fork_server()) as process:
            return process.submit(function, *arguments).result(timeout=300)

    return call


def test_threads_of_the_loops_keep_the_mode_that_all_gradients_are_computed_in(alone):
    """Whether they are started or used by a thread that flushes."""
    assert alone(helpers_that_flush, [True, False, True]) == [[False] * 3] * 3


def test_the_number_of_threads_changes_no_bit_of_the_loops(alone):
    assert alone(moved_by_a_second_thread, False) == 0


def test_a_second_thread_moves_nothing_while_one_flushes(alone):
    moved = alone(moved_by_a_second_thread, True)
    assert moved in (0, REFUSED), f"a second thread moves the mean by {moved:.3g} times the bound"


def test_one_record_moves_its_share_while_one_thread_flushes(alone):
    assert alone(apart_in_two_threads, True) in (None, REFUSED)
