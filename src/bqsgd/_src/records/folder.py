"""Reading and writing a run folder: config.toml, rounds.jsonl, summary.json; `History` is a folder as it was read.

The writer survives kill -9: each round is one line, appended and flushed; config and summary appear whole or not at
all. The reader does not trust the folder: it reads only regular files (no links, pipes or devices) of bounded size. A
half-written last line is dropped without an error, because a killed process may leave one.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bqsgd._src.errors import InvalidParameter, UnsafeFile
from bqsgd._src.params import Coarsening, Mechanism
from bqsgd._src.privacy.guarantee import Guarantee
from bqsgd._src.records.record import ClientRecord, RoundRecord, RunFolderError, Status, Summary
from bqsgd._src.storage import Appended, Closing, closed_on_error, open_regular, read_regular, write_atomic

CONFIG, ROUNDS, SUMMARY, REPORT = "config.toml", "rounds.jsonl", "summary.json", "report.html"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_SUMMARY_BYTES = 4 << 20
_MAX_ROUNDS_BYTES = 1 << 30
_MAX_LINE_BYTES = 32 << 20
_MAX_ROUNDS = 200_000
SHOWN = 0o644
"""Permissions of the files of a run folder. They hold public figures only, so others may read them."""


class RunWriter(Closing):
    """Writes one run folder.

    If the folder exists, the writer continues it: it cuts off a half-written last line and, with `keep_through=r`,
    every round after r. A run that resumes passes the round of its checkpoint, because later rounds will be run again.
    """

    def __init__(self, folder: str | Path, *, keep_through: int | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rounds = Appended(self.folder / ROUNDS, mode=SHOWN)
        self._summary_is_gone = False
        with closed_on_error(self._rounds):
            # Before the first append: a new line after a half-written one would make both unreadable.
            _trim(self._rounds, keep_through)

    def config(self, settings: Mapping[str, Any]) -> None:
        """Write config.toml, whole or not at all. `settings` must hold TOML's types; TOML has no null."""
        import tomli_w  # imported here: it is in the `train` extra, and reading a folder must work without it

        write_atomic(self.folder / CONFIG, tomli_w.dumps(settings).encode(), mode=SHOWN)

    def append(self, record: RoundRecord) -> None:
        """Append one round. When this returns, the operating system has it: it survives the death of the process.

        A summary that an earlier stop has left is removed: it no longer says what the clients have spent.
        """
        if not self._summary_is_gone:
            (self.folder / SUMMARY).unlink(missing_ok=True)
            self._summary_is_gone = True
        self._rounds.append(json.dumps(record.to_dict(), allow_nan=False).encode() + b"\n")

    def summary(self, summary: Summary) -> None:
        """Write summary.json, whole or not at all."""
        content = json.dumps(summary.to_dict(), indent=2, allow_nan=False).encode() + b"\n"
        write_atomic(self.folder / SUMMARY, content, mode=SHOWN)

    def close(self) -> None:
        """Close rounds.jsonl."""
        self._rounds.close()


def read_rounds(folder: str | Path) -> Iterator[RoundRecord]:
    """Yield the rounds in file order, reading one line at a time. Without a file there are no rounds."""
    path = Path(folder) / ROUNDS
    try:
        file = open_regular(path, limit=_MAX_ROUNDS_BYTES)
    except UnsafeFile as error:
        raise RunFolderError(str(error)) from error
    if file is None:
        return
    with file:
        for index in range(_MAX_ROUNDS + 1):
            # One byte more than allowed, to tell a line that is too long from one that just fits.
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line.endswith(b"\n"):
                if len(line) > _MAX_LINE_BYTES:
                    raise RunFolderError(f"{path}, line {index + 1}: longer than {_MAX_LINE_BYTES} bytes")
                return  # the end of the file, or a line that a killed process left half-written
            try:
                yield RoundRecord.from_dict(_json(line))
            except RunFolderError as error:
                raise RunFolderError(f"{path}, line {index + 1}: {error}") from error
    raise RunFolderError(f"{path} holds more than {_MAX_ROUNDS} rounds, the most that is read")


def read_summary(folder: str | Path) -> Summary | None:
    """The figures in summary.json, or None while the run has not written one."""
    path = Path(folder) / SUMMARY
    content = _content(path, _MAX_SUMMARY_BYTES)
    try:
        return None if content is None else Summary.from_dict(_json(content))
    except RunFolderError as error:
        raise RunFolderError(f"{path}: {error}") from error


def read_config(folder: str | Path) -> dict[str, Any]:
    """The settings in config.toml; an empty table if there is no file."""
    path = Path(folder) / CONFIG
    content = _content(path, _MAX_CONFIG_BYTES)
    try:
        return tomllib.loads((content or b"").decode())
    except (ValueError, RecursionError):
        # tomllib's message may quote the file: a hostile folder could then write into our logs.
        raise RunFolderError(f"{path}: not valid TOML") from None


def _json(content: bytes) -> Any:
    try:
        return json.loads(
            content, parse_constant=lambda name: {"Infinity": "inf", "-Infinity": "-inf"}.get(name, "nan")
        )
    except (ValueError, RecursionError):  # RecursionError: a hostile file can nest thousands of lists
        raise RunFolderError("not valid JSON") from None


def _content(path: Path, limit: int) -> bytes | None:
    try:
        return read_regular(path, limit=limit)
    except UnsafeFile as error:
        raise RunFolderError(str(error)) from error


def _trim(rounds: Appended, keep_through: int | None) -> None:
    """Cut off a half-written last line, and all lines from the first one whose round is after `keep_through`."""
    keep = 0
    with rounds.read() as file:
        while line := file.readline(_MAX_LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                break
            if keep_through is not None and RoundRecord.from_dict(_json(line)).round > keep_through:
                break
            keep += len(line)
    # The file keeps its name and its descriptor: a new file in its place would not be the one that is appended to.
    rounds.cut(keep)


_MAX_REASONS = 8
Parameters = tuple[int, int, int, int]
"""Levels, trials, points and width of a frame (points and width 0: not coarsened)."""


@dataclass
class ClientTally:
    """What one client did over the run. At most 8 different reasons and mechanisms are kept: a client can make up any
    number of them."""

    client: int
    counts: Counter[Status] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    frame_bytes: int = 0
    mechanisms: Counter[Parameters] = field(default_factory=Counter)

    def add(self, record: ClientRecord) -> None:
        """Count one round of this client."""
        self.counts[record.status] += 1
        self.frame_bytes += record.frame_bytes
        # Only frames that the server accepted: a refused frame may state any mechanism.
        if record.status is Status.OK and len(self.mechanisms) < _MAX_REASONS:
            self.mechanisms[record.levels, record.trials, record.points, record.width] += 1
        reason = record.reason
        if reason is not None and (reason in self.reasons or len(self.reasons) < _MAX_REASONS):
            self.reasons[reason] += 1


@dataclass(frozen=True, kw_only=True)
class History:
    """A run folder, read and checked. `summary` is None until the run has ended: before that nothing is claimed."""

    name: str
    rounds: tuple[RoundRecord, ...]
    summary: Summary | None
    config: Mapping[str, Any]
    clients: tuple[ClientTally, ...]
    repeated_rounds: int = 0
    used_bytes: int = 0
    last: RoundRecord | None = None
    """The last round with the records of its clients, which `rounds` leaves out."""

    @property
    def guarantee(self) -> Guarantee | None:
        """What the run claims: its summary's guarantee."""
        return None if self.summary is None else self.summary.guarantee

    @cached_property
    def figures(self) -> Summary:
        """The summary; a figure that it lacks, or all of them before the run has ended, comes from the rounds."""
        stated = self.summary or Summary()
        known: dict[str, Any] = {
            name: getattr(stated, name) or sum(getattr(record, name) for record in self.rounds)
            for name in ("bytes_up", "bytes_down", "bytes_up_float32", "bytes_down_float32")
        }
        # Any record of a seed voids the claim: a summary that does not mention it must not restore it.
        known["seeded"] = stated.seeded or any(record.seeded for record in self.rounds)
        if self.rounds:
            last = self.rounds[-1]
            # Rounds count from 0 in our own folders, but a folder may also count from 1.
            known["rounds"] = stated.rounds or max(len(self.rounds), last.round)
            if stated.seconds is None and math.isfinite(last.time):
                known["seconds"] = last.time
            if stated.accuracy is None:
                measured = [record.test_accuracy for record in self.rounds if record.test_accuracy is not None]
                known["accuracy"] = measured[-1] if measured else None
        return replace(stated, **known)

    @property
    def bits_per_coordinate(self) -> float | None:
        """Bits per coordinate of the frames that were used, headers included: 32 * their bytes / bytes_up_float32."""
        plain = sum(record.bytes_up_float32 for record in self.rounds)
        if self.used_bytes and plain:
            return 32 * self.used_bytes / plain
        return None if self.figures.saving is None else 32 / self.figures.saving

    @property
    def mechanism(self) -> Mechanism | None:
        """The mechanism that most frames were encoded with, or None if no frame was used."""
        used: Counter[Parameters] = Counter()
        for tally in self.clients:
            used.update(tally.mechanisms)
        for (levels, trials, points, width), _ in used.most_common(1):
            try:
                coarsening = Coarsening(points=points, width=width) if points or width else None
                return Mechanism(levels=levels, trials=trials, coarsening=coarsening)
            except InvalidParameter as error:
                raise RunFolderError(f"{ROUNDS}: {error}") from error
        return None


def read_history(folder: str | Path) -> History:
    """Read a run folder, finished or not.

    A round that appears twice was run again after a resume. The later line counts, and the earlier lines from that
    round on are dropped.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder; give the folder of a run (it holds {CONFIG} and {ROUNDS})")
    rounds: list[RoundRecord] = []
    used: list[int] = []
    tallies: dict[int, ClientTally] = {}
    repeated, last = 0, None
    for record in read_rounds(path):
        last = record
        while rounds and rounds[-1].round >= record.round:
            rounds.pop()
            used.pop()
            repeated += 1
        for entry in record.clients:
            if entry.client is None:
                continue  # a refused frame that did not say whose it was
            tallies.setdefault(entry.client, ClientTally(client=entry.client)).add(entry)
        # The tallies have what we need of the clients; keeping their records would fill the memory in a long run.
        rounds.append(replace(record, clients=()))
        used.append(sum(entry.frame_bytes for entry in record.clients if entry.status is Status.OK))
    summary = read_summary(path)
    if not rounds and summary is None:
        raise RunFolderError(f"{path} has neither a round nor a {SUMMARY}, so there is nothing to report")
    return History(
        name=path.resolve().name,
        rounds=tuple(rounds),
        summary=summary,
        config=read_config(path),
        clients=tuple(tallies[client] for client in sorted(tallies)),
        repeated_rounds=repeated,
        used_bytes=sum(used),
        last=last,
    )
