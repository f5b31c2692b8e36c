"""Files that survive a crash, files from strangers, and files that nobody else may read: all of it in one place.

Everything here works on a name that may be a trap. Readers and writers open regular files only: a link is not followed,
a pipe or a device does not block. What is written appears whole or not at all. Files are their owner's alone (0600, in
folders 0700) unless the caller says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from bqsgd.errors import FolderInUse, InvalidParameter, NotWritten, UnsafeFile

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = ".lock"
"""The file that the one writer of a folder holds locked; it names the process."""


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter; one that is there keeps its permissions. A link is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise NotWritten(f"the folder {path} cannot be made ({error.strerror})") from error
    if path.is_symlink() or not path.is_dir():
        raise UnsafeFile(f"{path} must be a folder, not a link or a file")


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write beside `path`, make it durable, then rename over it: a reader finds the old file or the new one whole.

    When this returns, the file survives a power cut.

    Args:
        mode: permissions of the file; by default only its owner reads it.

    Raises:
        NotWritten: the disk is full or the folder not writable; what was there before is untouched.
    """
    with draft(path) as (handle, name):
        write_all(handle, content)
        os.fchmod(handle, mode)
        os.fsync(handle)
        os.replace(name, path)


@contextlib.contextmanager
def draft(path: Path) -> Iterator[tuple[int, Path]]:
    """An empty file beside `path` to write into and then rename: (its descriptor, its name). Private, and locked.

    There is one name for it, so what a killed process left there is taken over by the next and never piles up. A draft
    that was not renamed by the end of the block is deleted.

    Raises:
        NotWritten: whatever the operating system refused in the block.
    """
    name = path.with_name(f".{path.name}.draft")
    try:
        handle = _locked(name, wait=True)
        try:
            yield handle, name
        finally:
            if _same(handle, name):
                name.unlink(missing_ok=True)
            os.close(handle)
        _sync_folder(path.parent)
    except OSError as error:
        raise NotWritten(f"{path} cannot be written ({error.strerror or error}); it is as it was") from error


def _locked(name: Path, *, wait: bool) -> int:
    """Open a file, or make it, and lock it; the name is still this file's then.

    Raises:
        BlockingIOError: somebody else holds it and we do not wait; the error's `filename` is what the file says.
    """
    while True:
        handle = _open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _same(handle, name):
                os.ftruncate(handle, 0)
                return handle
        except BlockingIOError as error:
            error.filename = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _same(handle: int, name: Path) -> bool:
    """Whether `name` is the file that `handle` has open."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(name))
    except FileNotFoundError:
        return False


def _open(path: Path, flags: int) -> int:
    """Open a regular file of our own that has one name, or make it."""
    try:
        handle = os.open(path, flags | _SAFE, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise UnsafeFile(f"{path} must be a regular file; links, pipes and folders are refused") from error
        raise
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(handle)
        raise UnsafeFile(f"{path} must be a regular file with one name; links, pipes and devices are refused")
    return handle


def write_all(handle: int, content: bytes | memoryview) -> None:
    """Write all of it, however many calls the operating system needs."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename or a new link is not, until its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appended:
    """A file that grows by whole pieces: each is handed to the operating system before `append` returns.

    Args:
        mode: permissions of a file that is made; by default only its owner reads it.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        self.path = path
        self._handle = -1
        try:
            self._handle = _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            os.fchmod(self._handle, mode)
        except OSError as error:
            self.close()
            raise NotWritten(f"{path} cannot be written ({error.strerror})") from error

    def read(self) -> BinaryIO:
        """The file from its beginning, to read."""
        return os.fdopen(os.dup(self._handle), "rb", closefd=True)

    def append(self, content: bytes) -> None:
        """Add a piece, whole or not at all.

        Raises:
            NotWritten: the disk is full; the file is as it was.
        """
        size = os.fstat(self._handle).st_size
        try:
            write_all(self._handle, content)
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise NotWritten(f"{self.path} cannot be written ({error.strerror}); it is as it was") from error

    def cut(self, size: int) -> None:
        """Drop what lies beyond `size` bytes."""
        os.ftruncate(self._handle, size)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Be the only writer of a folder until the end of the block, or of the process.

    Raises:
        FolderInUse: another process, or another part of this one, writes it.
    """
    path = folder / _LOCK
    try:
        handle = _locked(path, wait=False)
    except BlockingIOError as error:
        who = f"process {error.filename}" if error.filename.isdigit() else "another process"
        raise FolderInUse(
            f"{folder} is being written by {who}; wait until it ends or name another folder. Nothing was spent"
        ) from error
    except OSError as error:
        raise NotWritten(f"{folder} cannot be written ({error.strerror})") from error
    try:
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        if _same(handle, path):
            path.unlink(missing_ok=True)
        os.close(handle)


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until nobody else holds the lock file `path`; hold it until the end of the block, or of the process."""
    try:
        handle = _locked(path, wait=True)
    except OSError as error:
        raise NotWritten(f"{path} cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        if _same(handle, path):
            path.unlink(missing_ok=True)
        os.close(handle)


def open_regular(path: Path, *, limit: int) -> BinaryIO | None:
    """A regular file of at most `limit` bytes opened for reading, or None when there is none.

    Links are refused, and pipes and devices do not block.

    Raises:
        UnsafeFile: a link, a pipe, a device, a folder, an unreadable or an oversized file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _SAFE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a name with a null in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnsafeFile(f"{path} cannot be read ({reason}); links are not followed") from error
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_size > limit:
        os.close(handle)
        raise UnsafeFile(f"{path} must be a regular file of at most {limit} bytes")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, *, limit: int) -> bytes | None:
    """All of a regular file of at most `limit` bytes, even one that grows meanwhile; None when there is none."""
    file = open_regular(path, limit=limit)
    if file is None:
        return None
    with file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UnsafeFile(f"{path} must be a regular file of at most {limit} bytes")
    return content


def read_toml(path: str | Path, *, limit: int = 1 << 20, kind: str = "TOML file") -> dict[str, Any]:
    """The tables of a TOML file of at most `limit` bytes, not yet checked; `kind` names it in the error.

    Raises:
        InvalidParameter: there is no such file, or it is not TOML.
    """
    return parse_toml(toml_bytes(path, limit=limit, kind=kind), path=path, kind=kind)


def toml_bytes(path: str | Path, *, limit: int, kind: str) -> bytes:
    """The bytes of such a file, not yet parsed.

    Raises:
        InvalidParameter: there is no such file, or it is longer.
    """
    try:
        content = read_regular(Path(path), limit=limit)
    except (OSError, UnsafeFile, ValueError) as error:  # ValueError: a path with a null byte
        raise InvalidParameter(f"{path} is not a readable {kind}: {str(error)[:200]}") from error
    if content is None:
        raise InvalidParameter(f"{path} is not a readable {kind}: there is no such file")
    return content


def parse_toml(content: bytes, *, path: str | Path, kind: str) -> dict[str, Any]:
    """The tables in the bytes of the file at `path`.

    Raises:
        InvalidParameter: they are not TOML.
    """
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, 5,000 digits
        raise InvalidParameter(f"{path} is not a readable {kind}: {str(error)[:200]}") from error
