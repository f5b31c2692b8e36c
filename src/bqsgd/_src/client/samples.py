"""Samples of any form: arrays, a Dataset or a DataLoader; pairs, tuples and dicts of tensors.

A sample is read and collated by itself, whatever else is in its batch: a `collate_fn` that pads to the longest sample
of a batch, or mixes samples, sees one sample. Samples whose tensors have the same shapes then go through the model
together, and what each adds to the sum is exact, so nothing depends on how they were put together.

Shapes and types of a sample are public, so they never come from a record: tensors in memory have them, and for any
other data set the user gives a made-up record (`Reader.form`).

A data set must keep one promise: reading sample i depends on i, on the data set and on random numbers, not on which
other samples are read. Random augmentation is fine; a data set that remembers what it has read is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from bqsgd._src.errors import InvalidParameter
from bqsgd._src.runtime.interrupts import errors_dropped, interrupts_deferred

_Collate = Callable[[list[Any]], Any]
_STRUCTURE = "give tuples, lists or dicts of tensors whose first dimension is the sample"


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Samples of one shape, collated together.

    numbers: the number of each sample in the data; it decides the row in which the sample goes through the model.
    data: as the collate_fn made it, the samples along the first dimension of every tensor; None if they could not be
        read, and then they count as zero.
    """

    numbers: npt.NDArray[np.int64]
    data: Any

    def __len__(self) -> int:
        return len(self.numbers)

    def singly(self) -> list[Part]:
        """The same samples, each in a part of its own."""

        def one(row: int) -> Part:
            span = slice(row, row + 1)
            return Part(numbers=self.numbers[span], data=tree_map(lambda leaf: leaf[span], self.data))

        return [one(row) for row in range(len(self))]


def _unreadable(numbers: Sequence[int]) -> Part:
    return Part(numbers=np.asarray(numbers, np.int64), data=None)


class Reader:
    """Samples of a map-style data set by number, each read and collated by itself. Worker processes get a copy.

    A sample that cannot be read counts as zero: an error in mid-training would tell a peer that it was drawn. Whatever
    its code raises costs that sample alone, SystemExit and KeyboardInterrupt included; whoever reads in the main thread
    defers the user's own Ctrl-C meanwhile (`read` does).

    Args:
        dataset: anything with `len` and `[number]`.
        collate: makes a batch of a list of samples; it gets only lists of one sample, unless it is torch's own
            `default_collate`, which is known to keep samples apart.
        sample: a made-up record as the data set returns one, for its shapes and types. Not needed for tensors in
            memory (TensorDataset, and Subset, random_split or ConcatDataset of such).
    """

    draws = True
    """Whether reading may draw random numbers."""

    def __init__(self, dataset: Any, collate: _Collate = default_collate, sample: Any = None) -> None:
        self.dataset, self.collate_fn, self.sample = dataset, collate, sample

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[int, Any]:
        with errors_dropped("a sample could not be read and counts as zero"):
            return number, (self.dataset[number],)
        return number, None

    def collate(self, read: Sequence[tuple[int, Any]]) -> list[Part]:
        """The samples that were read, in as few parts as their shapes allow; the lost ones are a part without data."""
        groups: dict[object, tuple[list[int], list[Any]]] = {}
        lost = []
        is_default = self.collate_fn is default_collate
        for number, record in read:
            group = None
            if record is not None:
                with errors_dropped("a sample could not be collated and counts as zero"):
                    collated = record[0] if is_default else self.collate_fn([record[0]])
                    group = groups.setdefault(_key(collated), ([], []))
            if group is None:
                lost.append(number)
            else:
                group[0].append(number)
                group[1].append(collated)
        join = default_collate if is_default else _joined
        parts = [part for numbers, members in groups.values() for part in _parts(numbers, members, join)]
        return parts + ([_unreadable(lost)] if lost else [])

    def read(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[Part]:
        """The samples of these numbers."""
        with interrupts_deferred():
            return self.collate([self[int(number)] for number in numbers])

    def rest(self) -> None:
        """Free the memory of data that can be fetched again."""

    def in_memory(self) -> tuple[Tensor, ...] | None:
        """All samples as tensors with a row each, if that needs no reading; None otherwise."""
        plain = type(self.dataset) is TensorDataset and self.collate_fn is default_collate
        return tuple(self.dataset.tensors) if plain else None

    def form(self) -> Any:
        """Zeros in the form of one collated sample; no record of the data set is read.

        Raises:
            InvalidParameter: the form is unknown, or the made-up record is not of tensors with a row per sample.
        """
        record = _made_up_record(self.dataset) if self.sample is None else self.sample
        if record is None:
            raise InvalidParameter(
                f"the form of a sample of {type(self.dataset).__name__} is unknown, and no record is read to find out, "
                "so that nothing of the data decides what is refused: add a made-up record as your data set gives "
                "one, for example sample=(torch.zeros(3, 32, 32), 0)"
            )
        try:
            data = self.collate_fn([record])
        except Exception as error:
            raise InvalidParameter(
                f"collate_fn fails on a list of one made-up record: {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; give a record that it takes with sample=..."
            ) from error
        return tree_map(torch.zeros_like, _with_a_row_each(data, 1))


def _made_up_record(dataset: Any) -> Any:
    """A record of zeros in the shapes and types of tensors in memory; None for a data set of another kind."""
    if type(dataset) is TensorDataset:
        return tuple(tensor.new_zeros(tensor.shape[1:]) for tensor in dataset.tensors)
    if type(dataset) is Subset:
        return _made_up_record(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return _made_up_record(dataset.datasets[0])
    return None


def _parts(numbers: list[int], members: list[Any], join: Callable[[list[Any]], Any]) -> list[Part]:
    """The samples in one part; each by itself if that fails, so that only the one that cannot be joined is lost."""
    with errors_dropped("samples could not be joined; one that fails by itself counts as zero"):
        data = _with_a_row_each(join(members), len(numbers))
        return [Part(numbers=np.asarray(numbers, np.int64), data=data)]
    if len(members) == 1:
        return [_unreadable(numbers)]
    pairs = zip(numbers, members, strict=True)
    return [part for number, member in pairs for part in _parts([number], [member], join)]


def _with_a_row_each(data: Any, samples: int) -> Any:
    """`data` as plain tensors, each with one row per sample: a sample with several rows would count several times.

    Raises:
        InvalidParameter: a tensor has no batch dimension or another number of rows, or there are no tensors.
    """
    leaves, spec = tree_flatten(data)
    if not leaves:
        raise InvalidParameter(f"the data set gives {type(data).__name__} without tensors; {_STRUCTURE}")
    for leaf in leaves:
        if not _is_dense(leaf) or leaf.dim() == 0 or len(leaf) != samples:
            tensor = isinstance(leaf, Tensor)
            got = f"{tuple(leaf.shape)} ({leaf.layout}, {leaf.device})" if tensor else type(leaf).__name__
            raise InvalidParameter(f"collate_fn gives {got} and not one row per sample; {_STRUCTURE}")
    # Detached: one sample's tensor that belongs to an autograd graph would make the whole batch part of that graph, and
    # would keep it alive in a worker process.
    return tree_unflatten([leaf.detach().as_subclass(Tensor) for leaf in leaves], spec)


def _is_dense(leaf: Any) -> bool:
    """Whether it is a tensor with its values in memory. A subclass may add to torch's operators, not replace them."""
    ordinary = isinstance(leaf, Tensor) and type(leaf).__torch_dispatch__ is Tensor.__torch_dispatch__
    return ordinary and leaf.layout is torch.strided and not leaf.is_meta


def _key(collated: Any) -> object:
    """What samples must have in common to be joined: structure, kinds, shapes and types.

    Torch also collates containers that are unknown here. Such a sample stays by itself (`object()` equals nothing
    else): joined with others, a sample of another type would change their type.
    """
    if isinstance(collated, (tuple, list)):
        return type(collated), tuple(map(_key, collated))
    if isinstance(collated, dict):
        return type(collated), tuple((name, _key(value)) for name, value in collated.items())
    if isinstance(collated, (Tensor, np.ndarray, np.generic, int, float)):
        return type(collated), getattr(collated, "dtype", None), getattr(collated, "shape", None)
    return object()


def _joined(members: list[Any]) -> Any:
    leaves, specs = zip(*map(tree_flatten, members), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise InvalidParameter("samples of different structures cannot be joined")
    return tree_unflatten([torch.cat(column) for column in zip(*leaves, strict=True)], specs[0])


class _Arrays(Reader):
    """Inputs and targets in memory, a row per sample: read by indexing, without collating sample by sample."""

    draws = False

    def __init__(self, inputs: Tensor | npt.NDArray[Any], targets: Tensor | npt.NDArray[Any]) -> None:
        with warnings.catch_warnings():  # features mapped from a file are read-only, and nothing here writes to them
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self.inputs, self.targets = torch.as_tensor(inputs), torch.as_tensor(targets)
        if len(self.inputs) != len(self.targets):
            raise InvalidParameter(f"{len(self.inputs)} inputs and {len(self.targets)} targets do not pair up")

    def __len__(self) -> int:
        return len(self.inputs)

    def read(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[Part]:
        """The rows of these numbers."""
        rows = np.asarray(numbers, np.int64)
        return [Part(numbers=rows, data=(self.inputs[rows], self.targets[rows]))] if len(rows) else []

    def in_memory(self) -> tuple[Tensor, ...] | None:
        """Inputs and targets."""
        return self.inputs, self.targets

    def form(self) -> Any:
        """A row of zeros of each."""
        return tuple(rows.new_zeros(1, *rows.shape[1:]) for rows in (self.inputs, self.targets))


class Fetched(Reader):
    """A data share that is fetched when it is read, and freed by `rest`.

    With thousands of clients in one process, only those at work have their data in memory.
    """

    def __init__(self, fetch: Callable[[], Any], *, size: int, sample: Any = None) -> None:
        self._fetch, self._size, self.sample = fetch, size, sample
        self._held: Reader | None = None

    def _reader(self) -> Reader:
        if self._held is None:
            self._held = reader_of(self._fetch(), self.sample)
            if len(self._held) != self._size:
                raise InvalidParameter(f"a share of {self._size} samples now holds {len(self._held)}")
        return self._held

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> tuple[int, Any]:
        return self._reader()[number]

    def read(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> list[Part]:
        """The samples of these numbers."""
        return self._reader().read(numbers)

    def in_memory(self) -> tuple[Tensor, ...] | None:
        """None: one of many clients is not checked, so that its data need not be fetched."""
        return None

    def form(self) -> Any:
        """Zeros in the form of one collated sample."""
        return self._reader().form()

    def rest(self) -> None:
        """Free the data."""
        self._held = None


def reader_of(share: Any, sample: Any = None) -> Reader:
    """What reads a data share: inputs and targets as arrays or tensors, a map-style Dataset, or a DataLoader of one.

    Only the data set and the collate_fn of a loader are used. A loader with a sampler of its own is refused, because
    batches are drawn here.

    sample: a made-up record as the data set returns one; see `Reader`.
    """
    if isinstance(share, Reader):
        return share
    if isinstance(share, (tuple, list)) and share and all(_is_array(part) for part in share):
        if len(share) != 2:
            raise InvalidParameter(
                f"a share of {len(share)} arrays: give (inputs, targets), or torch.utils.data.TensorDataset(...) for "
                "more"
            )
        return _Arrays(share[0], share[1])
    if isinstance(share, DataLoader):
        check_loader(share)
        return Reader(share.dataset, cast(_Collate, share.collate_fn), sample)
    if isinstance(share, IterableDataset) or not (hasattr(share, "__len__") and hasattr(share, "__getitem__")):
        raise InvalidParameter(
            f"{type(share).__name__} cannot be read by sample number: give (inputs, targets), a map-style Dataset or "
            "its DataLoader; Poisson sampling draws every sample independently"
        )
    return Reader(share, sample=sample)


def _is_array(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray))


def check_loader(loader: DataLoader[Any]) -> int:
    """The batch size of a loader whose batches may be replaced by Poisson batches of the same mean size.

    Raises:
        InvalidParameter: it has no sample numbers, or a sampler or batch size that Poisson sampling would ignore.
    """
    dataset, batches = loader.dataset, loader.batch_sampler
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise InvalidParameter(
            f"{type(dataset).__name__} has no sample numbers, so no sample can be drawn independently with a known "
            "probability; give a map-style Dataset (with __len__ and __getitem__)"
        )
    if type(batches) is not BatchSampler:
        what = "no batch_size" if batches is None else f"a batch_sampler of its own ({type(batches).__name__})"
        raise InvalidParameter(
            f"the loader has {what}: the guarantee holds for Poisson batches alone; give the loader "
            "batch_size=... and leave out batch_sampler"
        )
    sampler = batches.sampler
    size = len(cast(Any, dataset))
    if isinstance(sampler, DistributedSampler):
        raise InvalidParameter(
            "the loader has a DistributedSampler: here each rank is a client with samples of its own; give rank r of "
            "n Subset(dataset, range(r, len(dataset), n)) and leave out the sampler"
        )
    plain = type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and not sampler.replacement)
    if not plain or len(cast(Any, sampler)) != size:
        raise InvalidParameter(
            f"the loader draws with {type(sampler).__name__}: the guarantee holds only where every sample is drawn "
            "with the same probability; use shuffle=True (replaced by Poisson batches), and Subset(dataset, indices) "
            "to train on some of the samples"
        )
    return int(batches.batch_size)
