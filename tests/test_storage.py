"""Durable writes, careful reads, private files and one writer per folder, on a real file system."""

import contextlib
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bqsgd._src.errors import FolderInUse, NotWritten, UnsafeFile
from bqsgd._src.storage import Appended, one_writer, open_regular, private_folder, read_regular, write_atomic

TRAPS = {
    "a link to a file": lambda path, other: path.symlink_to(other),
    "a link to nothing": lambda path, other: path.symlink_to(other.with_name("nothing")),
    "a second name": lambda path, other: path.hardlink_to(other),
    "a pipe": lambda path, other: os.mkfifo(path),
    "a folder": lambda path, other: path.mkdir(),
}


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def other(tmp_path):
    """A file that nobody may touch."""
    path = tmp_path / "other" / "file"
    path.parent.mkdir()
    path.write_bytes(b"untouched")
    return path


@contextlib.contextmanager
def full_disk():
    """Files may grow to 64 bytes: the operating system refuses the rest, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_written_file_has_its_content_and_its_mode_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    for mode in (0o600, 0o644):
        write_atomic(tmp_path / "state", b"old", mode=mode)
        write_atomic(tmp_path / "state", b"new", mode=mode)
        assert (tmp_path / "state").read_bytes() == b"new"
        assert mode_of(tmp_path / "state") == mode
    write_atomic(tmp_path / "secret", b"")
    assert mode_of(tmp_path / "secret") == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "state"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "state", b"old")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "state", None)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"old"


def test_a_full_disk_is_a_documented_error_and_leaves_no_half_file(tmp_path) -> None:
    write_atomic(tmp_path / "state", b"old")
    with full_disk(), pytest.raises(NotWritten, match="state cannot be written"):
        write_atomic(tmp_path / "state", b"x" * 65)
    assert (tmp_path / "state").read_bytes() == b"old"
    with full_disk(), Appended(tmp_path / "lines") as lines:
        lines.append(b"a" * 39 + b"\n")
        with pytest.raises(NotWritten, match="it is unchanged"):
            lines.append(b"b" * 39 + b"\n")
        lines.append(b"c\n")
    assert (tmp_path / "lines").read_bytes() == b"a" * 39 + b"\nc\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "state"]


def test_a_folder_that_cannot_be_written_is_a_documented_error(tmp_path) -> None:
    for write in (lambda path: write_atomic(path, b""), Appended):
        with pytest.raises(NotWritten):
            write(tmp_path / "absent" / "file")
    with pytest.raises(NotWritten), one_writer(tmp_path / "absent"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(NotWritten):
        private_folder(tmp_path / "file" / "below")


@pytest.mark.parametrize("trap", TRAPS)
def test_writers_refuse_traps(tmp_path, other, trap) -> None:
    (tmp_path / ".state.draft").touch()
    for name, write in {
        ".state.draft": lambda path: write_atomic(tmp_path / "state", b"new"),
        "lines": Appended,
        ".lock": lambda path: one_writer(tmp_path).__enter__(),
    }.items():
        (tmp_path / name).unlink(missing_ok=True)
        TRAPS[trap](tmp_path / name, other)
        with pytest.raises(UnsafeFile, match=name):
            write(tmp_path / name)
    assert other.read_bytes() == b"untouched"
    assert os.listdir(other.parent) == ["file"]


def test_a_link_in_the_place_of_a_file_is_replaced_not_followed(tmp_path, other) -> None:
    (tmp_path / "state").symlink_to(other)
    write_atomic(tmp_path / "state", b"new")
    assert not (tmp_path / "state").is_symlink()
    assert (tmp_path / "state").read_bytes() == b"new"
    assert other.read_bytes() == b"untouched"


def test_what_a_killed_writer_left_is_taken_over_by_the_next(tmp_path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom bqsgd._src import storage\n"
        "storage.os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)\n"
        "storage.write_atomic(Path(sys.argv[1]), b'half')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "state")])
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".state.draft"]
    write_atomic(tmp_path / "state", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"new"


def test_writers_of_one_file_at_once_leave_one_whole_file(tmp_path) -> None:
    writers = []
    for letter in b"abcd":
        writers.append(os.fork())
        if writers[-1] == 0:
            try:
                for _ in range(30):
                    write_atomic(tmp_path / "state", bytes([letter]) * 10_000)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(number, 0)[1] for number in writers] == [0] * 4
    content = (tmp_path / "state").read_bytes()
    assert len(content) == 10_000
    assert len(set(content)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_folder_has_one_writer(tmp_path) -> None:
    refused = pytest.raises(FolderInUse, match=rf"written by process {os.getpid()}; wait .* Nothing was spent")
    with one_writer(tmp_path), refused:
        one_writer(tmp_path).__enter__()
    with one_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_killed_process_is_no_lock(tmp_path) -> None:
    waiting, ready = os.pipe()
    number = os.fork()
    if number == 0:
        with one_writer(tmp_path):
            os.write(ready, b"!")
            signal.pause()
    assert os.read(waiting, 1) == b"!"
    with pytest.raises(FolderInUse, match=f"process {number}"):
        one_writer(tmp_path).__enter__()
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    with one_writer(tmp_path):
        pass


def test_private_folders(tmp_path, other) -> None:
    private_folder(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "a" / "b") == 0o700
    private_folder(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to(other.parent)
    for path in (tmp_path / "link", other):
        with pytest.raises(UnsafeFile, match="must be a folder"):
            private_folder(path)


def test_only_regular_files_within_the_limit_are_opened(tmp_path: Path) -> None:
    regular = tmp_path / "regular"
    regular.write_bytes(b"12345")
    assert open_regular(tmp_path / "absent", limit=5) is None
    assert read_regular(tmp_path / "absent", limit=5) is None
    assert read_regular(regular, limit=5) == b"12345"
    with pytest.raises(UnsafeFile, match="at most 4 bytes"):
        open_regular(regular, limit=4)
    with pytest.raises(UnsafeFile, match="null"):
        open_regular(Path("a\0b"), limit=4)
    trapped = tmp_path / "trapped"
    for make in (lambda: trapped.symlink_to(regular), lambda: os.mkfifo(trapped), trapped.mkdir):
        make()
        with pytest.raises(UnsafeFile):
            open_regular(trapped, limit=5)
        trapped.rmdir() if trapped.is_dir() and not trapped.is_symlink() else trapped.unlink()
