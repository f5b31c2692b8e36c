"""Files that survive a crash, and files from strangers: the one atomic write and the one careful open."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from bqsgd.errors import UnsafeFile


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Write beside `path`, make it durable, then rename over it: a reader finds the old file or the new one whole.

    When this returns, the file survives a power cut.

    Args:
        mode: permissions of the file; by default only its owner reads it.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename or a new link is not, until its folder is synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, *, limit: int) -> BinaryIO | None:
    """A regular file of at most `limit` bytes opened for reading, or None when there is none.

    Links are refused, and pipes and devices do not block.

    Raises:
        UnsafeFile: a link, a pipe, a device, a folder, an unreadable or an oversized file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnsafeFile(f"{path} cannot be read ({error.strerror}); links are not followed") from error
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or state.st_size > limit:
        os.close(handle)
        raise UnsafeFile(f"{path} must be a regular file of at most {limit} bytes")
    return os.fdopen(handle, "rb")
