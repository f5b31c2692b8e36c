"""Reading and writing files: durable writes, untrusted files, locks. All other modules go through this one.

Another user may have put a link, a pipe or a device under any name. So readers and writers open regular files only:
they do not follow links, and a pipe or a device does not block them. A write appears whole or not at all. Only the
owner can read the files (0600, in folders of 0700) unless the caller says otherwise.
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
from typing import Any, BinaryIO, Self, TypeVar

from bqsgd._src.errors import FolderInUse, InvalidParameter, NotWritten, UnsafeFile

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Do not follow a link, do not wait for the other end of a pipe, do not pass the file on to child processes."""
_LOCK = ".lock"
_MOST_NUMBER_BYTES = 32
"""The file that the one writer of a folder holds locked; it contains the number of the process."""


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can enter. An existing folder keeps its permissions; a link is refused."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        raise NotWritten(f"the folder {path} cannot be made ({error.strerror})") from error
    # After mkdir, not before: mkdir accepts a name that exists already, even if it is a link to another folder.
    if path.is_symlink() or not path.is_dir():
        raise UnsafeFile(f"{path} must be a folder, not a link or a file")


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace the file at `path`: a reader finds the old content or the new, never a part. Survives a power cut.

    Args:
        mode: permissions of the file; by default only its owner can read it.

    Raises:
        NotWritten: the disk is full or the folder not writable; the previous file is untouched.
    """
    with draft(path) as (handle, name):
        write_all(handle, content)
        os.fchmod(handle, mode)
        os.fsync(handle)  # before the rename: otherwise a power cut could leave the new name on an empty file
        os.replace(name, path)


@contextlib.contextmanager
def draft(path: Path) -> Iterator[tuple[int, Path]]:
    """An empty file beside `path` to write into and then rename: (its descriptor, its name). Private and locked.

    A draft that was not renamed by the end of the block is deleted. Every writer of `path` uses the same name, so the
    next one takes over what a killed process left behind, and drafts never pile up.

    Raises:
        NotWritten: the operating system refused something in the block.
    """
    name = path.with_name(f".{path.name}.draft")
    try:
        handle = _lock(name, wait=True)
        try:
            yield handle, name
        finally:
            _unlock(handle, name)
        # After the rename and the removal: both are changes of the folder, which syncing the file does not cover.
        _sync_folder(path.parent)
    except OSError as error:
        raise NotWritten(f"{path} cannot be written ({error.strerror or error}); it is unchanged") from error


def _lock(name: Path, *, wait: bool) -> int:
    """Open or make the file `name`, lock it and empty it. When this returns, the name still belongs to this file.

    Raises:
        BlockingIOError: another process holds the lock and `wait` is false; `filename` is what that process wrote.
    """
    while True:
        handle = _open(name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Between the open and the lock, the former holder may have renamed or removed this file. A lock on it would
            # exclude nobody, since others lock the file that has the name now: try again with that one.
            if _same(handle, name):
                os.ftruncate(handle, 0)  # only now: before the lock, the content is the holder's
                return handle
        except BlockingIOError as error:
            error.filename = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
            os.close(handle)
            raise
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _unlock(handle: int, name: Path) -> None:
    """Remove a locked file, unless it was renamed meanwhile, and unlock it."""
    if _same(handle, name):
        name.unlink(missing_ok=True)
    os.close(handle)  # last, because this unlocks: nobody may lock a file that is about to be removed


def _same(handle: int, name: Path) -> bool:
    """Whether `name` is still the file that is open as `handle`."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(name))
    except FileNotFoundError:
        return False


def _open(path: Path, flags: int) -> int:
    """Open a regular file with a single name, or make it with permissions 0600."""
    try:
        handle = os.open(path, flags | _SAFE, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise UnsafeFile(f"{path} must be a regular file; links, pipes and folders are refused") from error
        raise
    # On the open descriptor: the name could be exchanged between a check of the name and the open. A second hard link
    # would let whoever made it read what is written here.
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(handle)
        raise UnsafeFile(f"{path} must be a regular file with one name; links, pipes and devices are refused")
    return handle


def write_all(handle: int, content: bytes | memoryview) -> None:
    """Write all of `content`; a single os.write may write only a part of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]


def _sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder durable. Syncing the file alone does not do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Closing:
    """An object that a `with` block closes at its end by calling `close`."""

    def close(self) -> None:
        """Release what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_Open = TypeVar("_Open")


@contextlib.contextmanager
def closed_on_error(opened: _Open) -> Iterator[_Open]:
    """Close what was opened if the block raises; otherwise it stays open, for whoever made it."""
    try:
        yield opened
    except BaseException:
        opened.close()  # type: ignore[attr-defined]
        raise


class Appended(Closing):
    """A file that grows by whole pieces. When `append` returns, the piece survives the end of the process.

    The file is not synced, so a power cut may lose the last pieces. Ledgers must not lose any and are SQLite files.

    Args:
        mode: permissions of the file; by default only its owner can read it.
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
        """The file from its beginning. Call it before the first `append`: both share one position in the file."""
        return os.fdopen(os.dup(self._handle), "rb", closefd=True)

    def append(self, content: bytes) -> None:
        """Add a piece, whole or not at all.

        Raises:
            NotWritten: the disk is full; the file is unchanged.
        """
        size = os.fstat(self._handle).st_size
        try:
            write_all(self._handle, content)
        except OSError as error:
            os.ftruncate(self._handle, size)  # a part of the piece may have been written
            raise NotWritten(f"{self.path} cannot be written ({error.strerror}); it is unchanged") from error

    def cut(self, size: int) -> None:
        """Drop everything after the first `size` bytes."""
        os.ftruncate(self._handle, size)

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Be the only writer of a folder until the end of the block, or of the process.

    Raises:
        FolderInUse: another process, or another part of this one, is writing the folder.
    """
    path = folder / _LOCK
    try:
        handle = _lock(path, wait=False)
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
        _unlock(handle, path)


def has_writer(folder: Path) -> bool:
    """Whether the process that last locked this folder with `one_writer` is still there, on this machine.

    It takes no lock, so that looking on never keeps a writer out; the number of a dead process may be in use again.
    """
    try:
        with open_regular(folder / _LOCK, limit=_MOST_NUMBER_BYTES) or contextlib.nullcontext() as file:
            number = 0 if file is None else int(file.read())
        if number > 0:
            os.kill(number, 0)
    except PermissionError:
        return True  # another user's process
    except (OSError, ValueError, OverflowError, UnsafeFile):
        return False
    return number > 0


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock file `path` until the end of the block, or of the process. Waits for the present holder."""
    try:
        handle = _lock(path, wait=True)
    except OSError as error:
        raise NotWritten(f"{path} cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        _unlock(handle, path)


def open_regular(path: Path, *, limit: int) -> BinaryIO | None:
    """Open a regular file of at most `limit` bytes for reading; None if there is no such file.

    Raises:
        UnsafeFile: a link, a pipe, a device, a folder, an unreadable or an oversized file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | _SAFE)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnsafeFile(f"{path} cannot be read ({reason}); links are not followed") from error
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_size > limit:
        os.close(handle)
        raise UnsafeFile(f"{path} must be a regular file of at most {limit} bytes")
    return os.fdopen(handle, "rb")


def read_regular(path: Path, *, limit: int) -> bytes | None:
    """The content of a regular file of at most `limit` bytes; None if there is no such file."""
    file = open_regular(path, limit=limit)
    if file is None:
        return None
    with file:
        content = file.read(limit + 1)  # the file may have grown since its size was checked
    if len(content) > limit:
        raise UnsafeFile(f"{path} must be a regular file of at most {limit} bytes")
    return content


def read_toml(path: str | Path, *, limit: int = 1 << 20, kind: str = "TOML file") -> dict[str, Any]:
    """The tables of a TOML file of at most `limit` bytes; the caller checks their content.

    Args:
        kind: what the file is called in an error, such as "roster".

    Raises:
        InvalidParameter: the file does not exist, is too long, or is not TOML.
    """
    return parse_toml(toml_bytes(path, limit=limit, kind=kind), path=path, kind=kind)


def toml_bytes(path: str | Path, *, limit: int, kind: str) -> bytes:
    """The bytes of a TOML file, not yet parsed; `kind` as in `read_toml`.

    Raises:
        InvalidParameter: the file does not exist or is longer than `limit`.
    """
    try:
        content = read_regular(Path(path), limit=limit)
    except (OSError, UnsafeFile, ValueError) as error:  # ValueError: a path with a null byte
        raise InvalidParameter(f"{path} is not a readable {kind}: {str(error)[:200]}") from error
    if content is None:
        raise InvalidParameter(f"{path} is not a readable {kind}: there is no such file")
    return content


def parse_toml(content: bytes, *, path: str | Path, kind: str) -> dict[str, Any]:
    """The tables in `content`, the bytes of the file at `path`.

    Raises:
        InvalidParameter: the bytes are not TOML.
    """
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, a number of 5,000 digits, tables in tables
        raise InvalidParameter(f"{path} is not a readable {kind}: {str(error)[:200]}") from error
