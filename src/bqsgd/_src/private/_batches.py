"""Poisson batches of a loader's data set: drawn in secret, each for one step."""

from __future__ import annotations

import logging
import math
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Sampler
from torch.utils.data._utils import signal_handling

from bqsgd._src.client.draws import Purpose, Sources, draw_batch, torch_generator
from bqsgd._src.client.samples import Part, Reader, check_loader
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.release import Scheme
from bqsgd._src.runtime.interrupts import interrupts_deferred
from bqsgd._src.runtime.modes import full_precision

_log = logging.getLogger("bqsgd.samples")


class Batch:
    """One Poisson batch, for one step. Its first samples are in memory; the step reads the others."""

    def __init__(self, drawn: int, reading: Iterator[Part]) -> None:
        self._drawn, self._reading = drawn, reading

    def __len__(self) -> int:
        """How many samples were drawn. It depends on a secret draw: keep it private."""
        return self._drawn

    def __reduce__(self) -> str:
        # A copy could be used for a second step, which would be accounted as a new draw.
        raise TypeError("a batch cannot be copied or pickled: it is for one step of the process that drew it")


class PoissonLoader:
    """Poisson batches of a loader's data set: iterate over it once per epoch, as over the loader itself.

    Every sample is drawn independently with probability L / n from the cryptographic generator; a batch may be empty or
    larger than L. Which samples are drawn is secret. The guarantee covers `step` only: it does not cover a training
    loss that the program prints, or batches that it skips because of what they contain.
    """

    def __init__(self, loader: DataLoader[Any], *, micro_batch: int, sources: Sources, sample: Any = None) -> None:
        self._batch_size = check_loader(loader)
        self.reader = Reader(loader.dataset, cast(Any, loader.collate_fn), sample)
        self._samples = len(self.reader)
        if self.batch_size > self.samples:
            raise InvalidParameter(
                f"batch_size={self.batch_size} exceeds the {self.samples} samples of the data set; lower it"
            )
        self.steps = math.ceil(self.samples / self.batch_size)
        self.next_draw = 0
        self._most, self._sources = micro_batch, sources
        self._fresh: Batch | None = None
        """The batch that may be used for a step."""
        self._drawn: deque[tuple[int, int, int]] = deque()
        """(number of the draw, samples, pieces) of the batches that the workers are reading ahead, in order."""
        self.asked: Iterator[list[int]] = iter(())
        """The numbers of an epoch's samples, piece by piece, for the workers."""
        self._how = _workers_of(loader) | {
            "collate_fn": self.reader.collate,
            "generator": torch_generator(sources.at(Purpose.READ, 0)),  # it seeds the workers
        }
        self._pieces = self._loader()

    @property
    def batch_size(self) -> int:
        """L, the public batch size; the plan is made for it."""
        return self._batch_size

    @property
    def samples(self) -> int:
        """How many samples the data set had when training was planned."""
        return self._samples

    @property
    def dataset(self) -> Any:
        """The data set of the loader."""
        return self.reader.dataset

    def form(self) -> Any:
        """Zeros in the form of one sample; see `Reader.form`."""
        return self.reader.form()

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        """One epoch of batches."""
        drawn: deque[tuple[int, int, int]] = deque()
        self._drawn, self._fresh = drawn, None
        pieces = self._read(self._draw(drawn))
        for _ in range(self.steps):
            if drawn is not self._drawn:
                raise InvalidParameter(
                    "a second iteration over the loader has begun, and its workers now read for that one: go through "
                    "one epoch at a time"
                )
            # Autocast is off and put back: a record whose code turned it on would change how all others are computed.
            with interrupts_deferred(), self._sources.lent(Purpose.READ, self.next_draw), full_precision():
                first = next(pieces, None)
                if first is None:
                    # An interrupt has ended the reading. Drop what was drawn ahead too: nobody knows how much of it the
                    # workers have read, and a draw must not be used twice.
                    drawn.clear()
                    pieces = self._read(self._draw(drawn))
                    first = next(pieces)
            number, size, count = drawn.popleft()
            reading = _reading(first, pieces, count - 1)
            self._fresh = Batch(size, reading)
            yield self._fresh
            if drawn is self._drawn:
                self._fresh = None
                with interrupts_deferred(), self._sources.lent(Purpose.READ, number), full_precision():
                    # Read a batch that was not used to its end: what is left must not become part of the next one.
                    for _ in reading:
                        pass

    def _read(self, drawing: Iterator[list[int]]) -> Generator[list[Part]]:
        """The samples of an epoch, piece by piece.

        When a worker dies or takes too long, a new worker reads each sample of its piece alone. Only the sample that
        causes the failure then counts as zero; all others are read as usual.
        """
        waited_for: deque[list[int]] = deque()
        while True:
            outstanding = tuple(waited_for)
            waited_for.clear()
            self.asked = _noted(chain(outstanding, drawing), waited_for)
            try:
                for parts in _without_alarm(iter(self._pieces)):
                    waited_for.popleft()
                    yield parts
                return
            except InvalidParameter:
                raise
            except Exception:
                if not self._how["num_workers"] or not waited_for:
                    raise
                _log.debug("a worker process failed (keep this line private)", exc_info=True)
            self._pieces = self._loader()
            yield [part for number in waited_for.popleft() for part in self._alone(number)]

    def _loader(self, **settings: Any) -> DataLoader[list[Part]]:
        return DataLoader(cast(Any, self.reader), **({"batch_sampler": _Draws(self)} | self._how | settings))

    def _alone(self, number: int) -> list[Part]:
        """One sample, read by a new worker."""
        try:
            alone = self._loader(batch_sampler=[[number]], num_workers=1, persistent_workers=False)
            return next(_without_alarm(iter(alone)))
        except Exception:
            # No data: the sample counts as zero. An error would tell the program something about this sample.
            return [Part(numbers=np.asarray([number], np.int64), data=None)]

    def _draw(self, queue: deque[tuple[int, int, int]]) -> Iterator[list[int]]:
        """The numbers of the samples of an epoch's steps, in pieces of at most `micro_batch`.

        An empty batch is one empty piece, so that every step has at least one.
        """
        for _ in range(self.steps):
            self.check_size()
            rng = self._sources.at(Purpose.BATCH, self.next_draw)
            drawn = draw_batch(Scheme.POISSON, batch_size=self.batch_size, dataset_size=self.samples, rng=rng)
            pieces = [drawn[start : start + self._most] for start in range(0, len(drawn), self._most)] or [drawn]
            queue.append((self.next_draw, len(drawn), len(pieces)))
            self.next_draw += 1
            for piece in pieces:
                yield piece.tolist()

    def take(self, batch: Batch) -> Iterator[Part]:
        """The samples of a batch, once.

        Raises:
            InvalidParameter: the batch is not the last one of this loader, or it was used already.
        """
        if not isinstance(batch, Batch):
            raise InvalidParameter(f"step takes a batch of private.loader, got {type(batch).__name__}")
        if batch is not self._fresh:
            raise InvalidParameter(
                "this batch was used already, or the loader has given another one since: use each batch once, before "
                "asking for the next, because every step is accounted with its own draw; nothing was spent"
            )
        self._fresh = None
        return batch._reading

    def check_size(self) -> None:
        """Raise InvalidParameter if the size of the data set has changed since training was planned."""
        if len(self.reader) != self.samples:
            raise InvalidParameter(
                f"the data set has {len(self.reader)} samples now, but had {self.samples} when training was planned; "
                "this changes the sampling rate, so call make_private again"
            )


class _Draws(Sampler[list[int]]):
    """Gives torch's loader the numbers of the samples. It always runs in the process that trains.

    Workers that persist keep this object for all epochs, so it looks up the numbers of the current one.
    """

    def __init__(self, loader: PoissonLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.asked


def _without_alarm(workers: Any) -> Iterator[list[Part]]:
    """The same workers, without torch's alarm."""
    # When a worker dies, torch's handler of SIGCHLD raises an error in whatever code runs then, also after a spend. We
    # do not need it: whoever waits for the worker's piece gets an error as well.
    if getattr(workers, "_worker_pids_set", False):
        cast(Any, signal_handling)._remove_worker_pids(id(workers))
        workers._worker_pids_set = False
    return cast(Iterator[list[Part]], workers)


def _noted(pieces: Iterator[list[int]], note: deque[list[int]]) -> Iterator[list[int]]:
    for piece in pieces:
        note.append(piece)
        yield piece


def _reading(first: list[Part], pieces: Generator[list[Part]], more: int) -> Iterator[Part]:
    """The samples of a batch: those of its first piece, then those of `more` pieces."""
    try:
        yield from first
        for _ in range(more):
            yield from next(pieces)
    except BaseException:
        # Nobody knows how many pieces of this batch are left, and they must not become part of the next one.
        pieces.close()
        raise


def _workers_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings with which a loader reads its samples. Its sampler and pinned memory are not used."""
    how: dict[str, Any] = {"num_workers": loader.num_workers}
    if loader.num_workers:
        names = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
        how |= {name: getattr(loader, name) for name in names}
        how["worker_init_fn"] = partial(_begin, loader.worker_init_fn)
    return how


def _begin(users_own: Callable[[int], Any] | None, worker: int) -> None:
    """The first thing that a worker process runs. `users_own` is the loader's own worker_init_fn."""
    # A terminal sends Ctrl-C to all processes, and the one that trains decides what it stops. With the signal ignored
    # here, a KeyboardInterrupt in a worker can only come from a record's own code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if users_own is not None:
        users_own(worker)
