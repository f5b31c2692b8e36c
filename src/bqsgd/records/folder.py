"""Reading and writing a run folder: config.toml, rounds.jsonl, summary.json.

Writing is made for kill -9: a round is one appended line, flushed; config and summary appear whole or not at all.
Reading is made for strangers' folders: only regular files (no links, pipes or devices), bounded sizes, and a
half-written last line is dropped, not an error.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from bqsgd.errors import UnsafeFile
from bqsgd.records.round import RoundRecord, RunFolderError
from bqsgd.records.summary import Summary
from bqsgd.storage import open_regular, write_atomic

CONFIG, ROUNDS, SUMMARY, REPORT = "config.toml", "rounds.jsonl", "summary.json", "report.html"
MAX_CONFIG_BYTES = 1 << 20
MAX_SUMMARY_BYTES = 4 << 20
MAX_ROUNDS_BYTES = 1 << 30
MAX_LINE_BYTES = 32 << 20
MAX_ROUNDS = 200_000
SHOWN = 0o644
"""Permissions of what a run folder holds: it is made to be shown."""


class RunWriter:
    """Writes one run folder.

    Opening an existing folder continues it: a half-written last line is cut off, and with `keep_through=r` every
    round after r is dropped (the checkpoint a run resumes from decides r).
    """

    def __init__(self, folder: str | Path, *, keep_through: int | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ROUNDS
        if path.exists():
            _trim(path, keep_through)
        self._rounds: BinaryIO = path.open("ab")

    def config(self, settings: Mapping[str, Any]) -> None:
        """Write config.toml whole or not at all. TOML has no null: settings that are None are left out."""
        import tomli_w  # in the `train` extra: reading a folder must not need it

        write_atomic(self.folder / CONFIG, tomli_w.dumps(_without_none(settings)).encode(), mode=SHOWN)

    def append(self, record: RoundRecord) -> None:
        """Append one round, flushed to the operating system (survives the death of the process)."""
        self._rounds.write(json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n")
        self._rounds.flush()

    def summary(self, summary: Summary) -> None:
        """Write summary.json whole or not at all."""
        content = json.dumps(summary.to_dict(), indent=2, allow_nan=False).encode() + b"\n"
        write_atomic(self.folder / SUMMARY, content, mode=SHOWN)

    def close(self) -> None:
        """Close rounds.jsonl."""
        self._rounds.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rounds(folder: str | Path) -> Iterator[RoundRecord]:
    """Yield the rounds in file order, one line in memory at a time; no file yields nothing."""
    path = Path(folder) / ROUNDS
    file = _open(path, MAX_ROUNDS_BYTES)
    if file is None:
        return
    with file:
        for index in range(MAX_ROUNDS + 1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line.endswith(b"\n"):
                if len(line) > MAX_LINE_BYTES:
                    raise RunFolderError(f"{path}, line {index + 1}: longer than {MAX_LINE_BYTES} bytes")
                return  # the end, or a line that a killed process left half written
            try:
                yield RoundRecord.from_dict(_json(line))
            except RunFolderError as error:
                raise RunFolderError(f"{path}, line {index + 1}: {error}") from error
    raise RunFolderError(f"{path} holds more than {MAX_ROUNDS} rounds")


def read_summary(folder: str | Path) -> dict[str, Any] | None:
    """summary.json as plain JSON, or None when the run has not written one yet."""
    path = Path(folder) / SUMMARY
    content = _content(path, MAX_SUMMARY_BYTES)
    if content is None:
        return None
    try:
        fields = _json(content)
    except RunFolderError as error:
        raise RunFolderError(f"{path}: {error}") from error
    if not isinstance(fields, dict):
        raise RunFolderError(f"{path}: must hold a JSON object")
    return fields


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.toml as plain values; no file gives an empty table."""
    path = Path(folder) / CONFIG
    content = _content(path, MAX_CONFIG_BYTES)
    try:
        return tomllib.loads((content or b"").decode())
    except (ValueError, RecursionError):  # tomllib's own message may quote the file: not wanted for a stranger's
        raise RunFolderError(f"{path}: not valid TOML") from None


def _json(content: bytes) -> Any:
    try:
        return json.loads(
            content, parse_constant=lambda name: {"Infinity": "inf", "-Infinity": "-inf"}.get(name, "nan")
        )
    except (ValueError, RecursionError):
        raise RunFolderError("not valid JSON") from None


def _open(path: Path, limit: int) -> BinaryIO | None:
    try:
        return open_regular(path, limit=limit)
    except UnsafeFile as error:
        raise RunFolderError(str(error)) from error


def _content(path: Path, limit: int) -> bytes | None:
    file = _open(path, limit)
    if file is None:
        return None
    with file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise RunFolderError(f"{path} must be a regular file of at most {limit} bytes")
    return content


def _trim(path: Path, keep_through: int | None) -> None:
    """Cut a half-written last line, and every line from the first whose round is beyond `keep_through`."""
    keep = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            if keep_through is not None and RoundRecord.from_dict(_json(line)).round > keep_through:
                break
            keep += len(line)
    if keep != path.stat().st_size:
        os.truncate(path, keep)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(entry) for entry in value if entry is not None]
    return str(value) if isinstance(value, (Path, StrEnum)) else value
