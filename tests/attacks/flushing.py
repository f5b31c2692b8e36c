"""What threads compute when one of them flushes denormal numbers to zero.

Each function is for a process of its own: torch's threads keep the mode in which they were started, so a process in
which one was ever set cannot be trusted afterwards.
"""

import threading

import numpy as np
import torch
from neighbours import LOSS, assert_apart
from torch import nn

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.persample import L2, clipped_gradients
from bqsgd._src.persample._kernels.loops import in_threads

REFUSED = "refused"
SAMPLES = 128


class Tiny(nn.Module):
    """Frozen weights make numbers below the smallest normal one, and then large ones of them again."""

    def __init__(self, activation):
        super().__init__()
        self.body = nn.Linear(64, 512, bias=False).requires_grad_(False)
        self.register_buffer("back", torch.tensor(1e20))
        self.activation, self.head = getattr(nn, activation)(), nn.Linear(512, 10)
        with torch.no_grad():
            self.body.weight.mul_(1e-20)

    def forward(self, x):
        return self.head(self.activation(self.body(x) * self.back * self.back))


def tiny(activation):
    torch.manual_seed(0)
    return Tiny(activation), torch.randn(SAMPLES, 64) * 1e-20, torch.arange(SAMPLES) % 10


def flushes():
    """Whether this thread takes numbers below the smallest normal one for zero."""
    return bool((np.full(64, 1e-40, np.float32) * np.float32(1)).max() == 0)


def helpers_that_flush(modes):
    """For each mode of the calling thread in turn, which of the other three threads of the loops flush."""
    torch.set_num_threads(4)
    found = []
    for mode in modes:
        torch.set_flush_denormal(mode)
        everybody, own, seen = threading.Barrier(4, timeout=60), threading.get_ident(), []

        def work(start, stop, everybody=everybody, own=own, seen=seen):
            everybody.wait()  # so that each of four threads has one of four pieces
            if threading.get_ident() != own:
                seen.append(flushes())

        in_threads(work, 4)
        found.append(seen)
    return found


def moved_by_a_second_thread(flush):
    """How far two threads move the mean from that of one thread, in units of the bound; or REFUSED."""
    worst = 0.0
    for activation in ("Identity", "Tanh"):
        model, x, y = tiny(activation)

        def mean(model=model, x=x, y=y):
            return clipped_gradients(model, LOSS, (x, y), clip=L2(1.0), batch_size=SAMPLES).mean

        torch.set_num_threads(2)
        torch.set_flush_denormal(False)
        mean()  # the threads are there before the mode is set
        torch.set_flush_denormal(flush)
        try:
            several = [mean() for _ in range(5)]
            torch.set_num_threads(1)
            alone = mean()
        except InvalidParameter:
            return REFUSED
        worst = max(worst, *(float((each - alone).norm()) * SAMPLES for each in several))
    return worst


def apart_in_two_threads(flush):
    """Fail unless one record adds its own clipped gradient and nothing else; REFUSED where nothing is computed."""
    torch.set_num_threads(2)
    for activation in ("Identity", "GELU"):
        model, x, y = tiny(activation)
        torch.set_flush_denormal(False)
        assert_apart(model, x, y, record=SAMPLES - 1, batch_size=SAMPLES)
        torch.set_flush_denormal(flush)
        try:
            for _ in range(5):
                assert_apart(model, x, y, record=SAMPLES - 1, batch_size=SAMPLES)
        except InvalidParameter:
            return REFUSED
    return None
