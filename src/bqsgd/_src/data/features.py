"""What a model sees of the inputs: the inputs themselves, or a fixed transform that costs no privacy.

The features of a whole data set of the catalogue are computed once and then read from a file in the cache. A transform
takes one image at a time: its features depend on that image alone.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from rich.progress import MofNCompleteColumn

from bqsgd._src.data._sources import cache_folder, progress_bar
from bqsgd._src.data.dataset import CATALOGUE, Dataset, Split
from bqsgd._src.errors import InvalidParameter, NonFiniteInput, NotWritten, UnsafeFile
from bqsgd._src.params import check_choice, check_int
from bqsgd._src.runtime.modes import one_thread
from bqsgd._src.storage import draft, open_regular, write_all

FEATURES = ("none", "scattering", "whitened", "imagenet", "imagenet-pair")
PUBLIC_DATA = {"imagenet": "ImageNet", "imagenet-pair": "ImageNet"}
"""Data that the transform was trained on. A guarantee assumes that they are public."""
_FILES = {
    "scattering": "scattering-3",
    "whitened": "whitened-1",
    "imagenet": "imagenet-2",
    "imagenet-pair": "imagenet-pair-1",
}
"""Names of the cache files. Raise the number whenever the values change, or old files would be read."""
_WORTH_SHOWING = 2000
"""Fewer samples are done before anybody reads a progress bar."""
_SUM_BYTES = 16


def compute_features(name: str, split: Split, *, of: Dataset, threads: int = 1) -> Split:
    """The features `name` of `split`, a part of the data set `of`; for "none" the split itself.

    A sample's features depend on that sample only, so a client can transform its share without anybody else's data.

    Raises:
        DataUnavailable: the weights of the network are unavailable.
    """
    if name == "none":
        return split
    transform = _transform(name)
    line = f"computing {name} features of {len(split):,} images of {of.name}; they are kept for later runs"
    with progress_bar(MofNCompleteColumn(), hidden=len(split) < _WORTH_SHOWING, line=line) as bar:
        task = bar.add_task(f"{name} features of {of.name}", total=len(split))
        inputs = transformed(
            transform,
            split.inputs,
            mean=of.mean,
            deviation=of.deviation,
            threads=threads,
            progress=lambda done: bar.update(task, advance=done),
        )
    return Split(inputs=inputs, labels=split.labels)


def whole_features(name: str, part: str, *, of: Dataset, threads: int = 1) -> Split:
    """The features of a whole split of `of`, "train" or "test": from the cache, or computed and then cached.

    The name of the cache file holds a checksum of the inputs, so other inputs never match. The file holds the values
    and their checksum; if its size or checksum is wrong, the features are computed again. If the cache cannot be
    written, the run goes on. Do not write into the returned array: it may be the file, mapped into memory.
    """
    kept = kept_features(name, part, of=of)
    if kept is not None:
        return kept
    split = compute_features(name, getattr(of, part), of=of, threads=threads)
    if name != "none" and of.name in CATALOGUE:
        with contextlib.suppress(OSError, NotWritten, UnsafeFile):
            _keep(_place(name, part, of), split.inputs)
    return split


def kept_features(name: str, part: str, *, of: Dataset) -> Split | None:
    """The features of a whole split from the cache, mapped into memory; None if there is no valid file."""
    split: Split = getattr(of, part)
    if name == "none":
        return split
    if of.name not in CATALOGUE:
        return None
    shape = (len(split), *features_shape(name, of.input_shape))
    size = 4 * math.prod(shape)
    try:
        file = open_regular(_place(name, part, of), limit=size + _SUM_BYTES)
    except UnsafeFile:
        return None
    if file is None:
        return None
    with file:
        # Map nothing of another size: reading past the end of a mapped file kills the process with SIGBUS.
        if os.fstat(file.fileno()).st_size != size + _SUM_BYTES:
            return None
        values = np.memmap(file, dtype="<f4", mode="r", shape=shape)
        file.seek(size)
        if file.read(_SUM_BYTES) != xxhash.xxh3_128_digest(values.data.cast("B")):
            return None
    return Split(inputs=values, labels=split.labels)


def _place(name: str, part: str, of: Dataset) -> Path:
    inputs = np.ascontiguousarray(getattr(of, part).inputs)
    # Mean and deviation too: the same pixels, normalised otherwise, have other features.
    of_inputs = xxhash.xxh3_128(repr((of.mean, of.deviation, inputs.shape, inputs.dtype.str)).encode())
    of_inputs.update(inputs.data.cast("B"))
    return cache_folder() / "features" / f"{of.name}-{part}-{_FILES[name]}-{of_inputs.hexdigest()}.f32"


def _keep(place: Path, values: npt.NDArray[np.float32]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    content = np.ascontiguousarray(values, dtype="<f4").data.cast("B")
    with draft(place) as (handle, name):
        # Not synced to disk: a file that a power failure cuts short fails its checksum, and is computed again.
        write_all(handle, content)
        write_all(handle, xxhash.xxh3_128_digest(content))
        os.replace(name, place)


def features_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one sample's features.

    >>> features_shape("scattering", (1, 28, 28)), features_shape("imagenet", (3, 32, 32))
    ((81, 7, 7), (1280,))
    """
    return input_shape if name == "none" else _transform(name).output_shape(input_shape)


def _transform(name: str) -> Transform:
    """The transform of this name. Imported here because it loads torch and compiled loops."""
    if check_choice("features", name, FEATURES) in PUBLIC_DATA:
        from bqsgd._src.data.pretrained import TRANSFORMS

        return TRANSFORMS[name]
    from bqsgd._src.data.scattering import SCATTERING, WHITENED

    return WHITENED if name == "whitened" else SCATTERING


_SLACK = 1e-4
"""Normalising the pixels and undoing it may round by this much."""
_CHUNK = 32
"""Images that a thread takes at a time."""
_Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Transform:
    """What computes features of images. Both functions are called with the shape of an image.

    output_shape: returns the shape of its features, or raises InvalidParameter if it does not take such images.
    chunk_transform: returns the function from pixels in [0, 1], a few images at a time, to their features.
    """

    output_shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    chunk_transform: Callable[[tuple[int, ...]], Callable[[_Floats], _Floats]]


def transformed(
    transform: Transform,
    images: _Floats,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    threads: int = 1,
    progress: Callable[[int], Any] = lambda done: None,
) -> _Floats:
    """The features of images (n, channels, height, width) whose pixels are mean + deviation * value, in [0, 1].

    threads: number of chunks worked on at once. Neither it nor the other images change a bit of an image's features.
    progress: called with the number of images that were just finished, from any thread.

    Raises:
        DataUnavailable: the weights of the network are unavailable.
        NonFiniteInput, InvalidParameter: the images or a setting are invalid; nothing has been computed.
    """
    check_int("threads", threads, 1, 1024)
    input_shape = images.shape[1:]
    features = np.empty((len(images), *transform.output_shape(input_shape)), dtype=np.float32)
    if len(images):
        _check_pixels(float(images.min()) * deviation + mean, float(images.max()) * deviation + mean)
    of_chunk = transform.chunk_transform(input_shape)

    def work(start: int) -> None:
        pixels = images[start : start + _CHUNK] * np.float32(deviation) + np.float32(mean)
        features[start : start + len(pixels)] = of_chunk(pixels)
        progress(len(pixels))

    # The number of torch's own threads decides the order in which it adds up. With one, a feature has the same bits
    # whatever `threads` is.
    with one_thread(), ThreadPoolExecutor(threads, thread_name_prefix="features") as pool:
        for _ in pool.map(work, range(0, len(images), _CHUNK)):
            pass  # an error of a thread is raised here
    return features


def _check_pixels(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise NonFiniteInput("images hold NaN or infinity; clean them before the transform")
    if low < -_SLACK or high > 1 + _SLACK:
        raise InvalidParameter(
            f"pixels must lie in [0, 1], these range from {low:.4g} to {high:.4g}; "
            "scale them, or give the mean and deviation they were normalised with"
        )
