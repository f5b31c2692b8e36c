"""Modes of the process in which a client's data are at work: repeatable kernels, no warnings, no autocast, one thread.

Several clients may be at work in threads of one process, and most of these switches hold for the whole process. So the
first thread in turns a mode on, and the last one out puts it back.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch


class SharedMode:
    """A mode of the process that several threads may be in at once.

    switch: turns the mode on, and returns what turns it off again.
    """

    def __init__(self, switch: Callable[[], Callable[[], None]]) -> None:
        self._switch, self._lock, self._inside = switch, threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._undo = self._switch()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._undo()


def _deterministic() -> Callable[[], None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    return lambda: torch.use_deterministic_algorithms(before[0], warn_only=before[1])


repeatable = SharedMode(_deterministic)
"""The same values give the same bits every time, and no memory is unwritten. Some kernels of torch add in the order in
which threads come, or read memory that nobody has written, where another sample may have left something. In its
deterministic mode torch replaces the first and fills the second."""


def _ignore_warnings() -> Callable[[], None]:
    kept = warnings.catch_warnings()
    kept.__enter__()
    warnings.simplefilter("ignore")
    return lambda: kept.__exit__(None, None, None)


silence = SharedMode(_ignore_warnings)
"""No warnings. Where a program turns warnings into errors, a warning about one sample would cost that sample."""


@dataclass(frozen=True)
class Autocast:
    """The state of torch.autocast for one kind of device: the type to compute in, or None for off.

    It becomes a part of one sample's program, by value: forward and loss are traced in it, so that the casts are
    operations of the program. What changes the mode later (a record that is read, another thread) changes no program.
    """

    device: str
    dtype: torch.dtype | None = None

    @classmethod
    def now(cls, device: str) -> Autocast:
        """The state in this thread."""
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return cls(device)
        return cls(device, torch.get_autocast_dtype(device))

    def entered(self) -> AbstractContextManager[object]:
        """This state in this thread for a block, without torch's store of cast weights, which outlives a sample."""
        if not torch.amp.is_autocast_available(self.device):
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.dtype is not None, cache_enabled=False)


@contextmanager
def full_precision() -> Iterator[None]:
    """Autocast off in this thread on every device, for what is checked before a spend and what is computed after it.

    In half precision a clipped gradient could lie outside its bound, and the check would see another program than runs.
    """
    accelerator = torch.accelerator.current_accelerator()
    with ExitStack() as stack:
        for device in ("cpu", *([] if accelerator is None else [accelerator.type])):
            stack.enter_context(Autocast(device).entered())
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch at one thread, so that no sum depends on how many cores this machine has; then as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
