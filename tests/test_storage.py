"""Durable writes and careful reads, on a real file system."""

import os
from pathlib import Path

import pytest

from bqsgd.errors import UnsafeFile
from bqsgd.storage import open_regular, write_atomic


def test_a_written_file_has_its_content_and_its_mode_and_nothing_lies_beside_it(tmp_path: Path) -> None:
    for mode in (0o600, 0o644):
        write_atomic(tmp_path / "state", b"old", mode=mode)
        write_atomic(tmp_path / "state", b"new", mode=mode)
        assert (tmp_path / "state").read_bytes() == b"new"
        assert (tmp_path / "state").stat().st_mode & 0o777 == mode
    write_atomic(tmp_path / "secret", b"")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "state"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "state", b"old")
    with pytest.raises(TypeError):
        write_atomic(tmp_path / "state", None)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert (tmp_path / "state").read_bytes() == b"old"


def test_only_regular_files_within_the_limit_are_opened(tmp_path: Path) -> None:
    regular = tmp_path / "regular"
    regular.write_bytes(b"12345")
    assert open_regular(tmp_path / "absent", limit=5) is None
    with open_regular(regular, limit=5) as file:  # type: ignore[union-attr]
        assert file.read() == b"12345"
    with pytest.raises(UnsafeFile, match="at most 4 bytes"):
        open_regular(regular, limit=4)
    other = tmp_path / "other"
    for make in (lambda: other.symlink_to(regular), lambda: os.mkfifo(other), other.mkdir):
        make()
        with pytest.raises(UnsafeFile):
            open_regular(other, limit=5)
        other.rmdir() if other.is_dir() else other.unlink()
