"""One run as the report sees it: its rounds, its headline, and a tally of its clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bqsgd.errors import InvalidParameter
from bqsgd.params import Coarsening, Mechanism
from bqsgd.records.folder import CONFIG, ROUNDS, SUMMARY, read_config, read_rounds, read_summary
from bqsgd.records.round import ClientRecord, RoundRecord, RunFolderError, Status
from bqsgd.records.summary import Summary

MAX_REASONS = 8
Parameters = tuple[int, int, int, int]
"""Levels, trials, points and width of a frame (points and width 0: not coarsened)."""


@dataclass
class ClientTally:
    """What one client did over the run; at most 8 different reasons are kept."""

    client: int
    counts: Counter[Status] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    frame_bytes: int = 0
    mechanisms: Counter[Parameters] = field(default_factory=Counter)

    def add(self, record: ClientRecord) -> None:
        """Count one round of this client."""
        self.counts[record.status] += 1
        self.frame_bytes += record.frame_bytes
        if record.status is Status.OK and len(self.mechanisms) < MAX_REASONS:
            self.mechanisms[record.levels, record.trials, record.points, record.width] += 1
        reason = record.reason
        if reason is not None and (reason in self.reasons or len(self.reasons) < MAX_REASONS):
            self.reasons[reason] += 1


@dataclass(frozen=True, kw_only=True)
class History:
    """A run folder, read and checked. `summary` is None while the run has not ended: then nothing is claimed."""

    name: str
    rounds: tuple[RoundRecord, ...]
    summary: Summary | None
    config: Mapping[str, Any]
    clients: tuple[ClientTally, ...]
    repeated_rounds: int = 0
    used_bytes: int = 0

    @property
    def accuracy(self) -> float | None:
        """Test accuracy: the summary's, else the last one measured."""
        if self.summary is not None and self.summary.accuracy is not None:
            return self.summary.accuracy
        measured = [record.test_accuracy for record in self.rounds if record.test_accuracy is not None]
        return measured[-1] if measured else None

    @property
    def round_count(self) -> int:
        """Rounds run: the summary's figure, else those on record (which may count from 0 or from 1)."""
        if self.summary is not None and self.summary.rounds:
            return self.summary.rounds
        return max(len(self.rounds), self.rounds[-1].round) if self.rounds else 0

    def total(self, name: str) -> int:
        """Total of bytes_up, bytes_down or bytes_up_float32: the summary's, else summed from the rounds."""
        stated: int = getattr(self.summary, name) if self.summary is not None else 0
        return stated or sum(getattr(record, name) for record in self.rounds)

    @property
    def saving(self) -> float | None:
        """How many times fewer bytes went up than as 32-bit floats."""
        up, plain = self.total("bytes_up"), self.total("bytes_up_float32")
        return plain / up if up and plain else None

    @property
    def bits_per_coordinate(self) -> float | None:
        """Measured over the frames that were used, headers included: 32 * their bytes / bytes_up_float32."""
        plain = sum(record.bytes_up_float32 for record in self.rounds)
        if self.used_bytes and plain:
            return 32 * self.used_bytes / plain
        return None if self.saving is None else 32 / self.saving

    @property
    def seeded(self) -> bool:
        """Whether any noise of the run can be recomputed from a seed: then nothing is claimed."""
        stated = self.summary is not None and self.summary.seeded
        return stated or any(record.seeded for record in self.rounds)

    @property
    def seconds(self) -> float | None:
        """Wall time: the summary's, else the time of the last round on record."""
        if self.summary is not None and self.summary.seconds is not None:
            return self.summary.seconds
        return self.rounds[-1].time if self.rounds and math.isfinite(self.rounds[-1].time) else None

    @property
    def mechanism(self) -> Mechanism | None:
        """The mechanism most frames were encoded with, or None when no frame says."""
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

    A round that appears again was run again after a resume: the later line stands, and those after it are dropped.
    """
    path = Path(folder)
    if not path.is_dir():
        raise RunFolderError(f"{path} is not a folder; give the folder of a run (it holds {CONFIG} and {ROUNDS})")
    rounds: list[RoundRecord] = []
    used: list[int] = []
    tallies: dict[int, ClientTally] = {}
    repeated = 0
    for record in read_rounds(path):
        while rounds and rounds[-1].round >= record.round:
            rounds.pop()
            used.pop()
            repeated += 1
        for entry in record.clients:
            if entry.client is None:
                continue  # a frame of nobody known
            tallies.setdefault(entry.client, ClientTally(client=entry.client)).add(entry)
        rounds.append(replace(record, clients=()))
        used.append(sum(entry.frame_bytes for entry in record.clients if entry.status is Status.OK))
    fields = read_summary(path)
    try:
        summary = None if fields is None else Summary.from_dict(fields)
    except RunFolderError as error:
        raise RunFolderError(f"{path / SUMMARY}: {error}") from error
    if not rounds and summary is None:
        raise RunFolderError(f"{path} holds no round and no {SUMMARY}: nothing to report")
    return History(
        name=path.resolve().name,
        rounds=tuple(rounds),
        summary=summary,
        config=read_config(path),
        clients=tuple(tallies[client] for client in sorted(tallies)),
        repeated_rounds=repeated,
        used_bytes=sum(used),
    )
