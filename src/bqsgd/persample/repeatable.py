"""The mode in which torch runs samples: the same values give the same bits every time, and no memory is unwritten.

Some kernels of torch add in the order in which threads come, or read memory that nobody has written, where another
sample may have left something. In its deterministic mode torch replaces the first and fills the second.
"""

from __future__ import annotations

import threading

import torch


class Repeatable:
    """While anybody is inside, torch takes kernels that give the same bits every time.

    The switch holds for the whole process, so the first one in turns it on and the last one out puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, (False, False)

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                )
                torch.use_deterministic_algorithms(True, warn_only=True)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.use_deterministic_algorithms(self._before[0], warn_only=self._before[1])


repeatable = Repeatable()
