"""Log a run's public figures for TensorBoard (`--tensorboard`). Needs the `train` extra, but not torch."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bqsgd._src.errors import UnsafeFile
from bqsgd._src.records.record import RoundRecord, Status
from bqsgd._src.storage import Closing

_PUBLIC = {
    "test_accuracy": "test/accuracy",
    "test_metric": "test/metric",
    "test_loss": "test/loss",
    "epsilon_max": "privacy/epsilon_max",
    "bytes_up": "bytes/up",
    "bytes_down": "bytes/down",
    "bytes_up_float32": "bytes/up_as_float32",
    "bytes_down_float32": "bytes/down_as_float32",
}


class TensorBoardLog(Closing):
    """Appends the scalars of each round to an event file.

    Only fields of `RoundRecord` are logged; all of them are public. A figure that was not measured, or is not finite,
    is left out, because TensorBoard would draw it as a point.
    """

    def __init__(self, folder: str | Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # imported here because it is slow

        # The writer follows links, so a link here could make us write outside the run folder.
        if Path(folder).is_symlink():
            raise UnsafeFile(f"{folder} is a link; remove it, or log into another folder")
        self._events = EventFileWriter(str(folder))

    def append(self, record: RoundRecord) -> None:
        """Log one round."""
        self.add(record.round, scalars(record))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures by their tags. An epsilon is rounded up to the next float32, which is what is stored."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        stored = {tag: _float32_up(figure) if "epsilon" in tag else figure for tag, figure in figures.items()}
        values = [Summary.Value(tag=tag, simple_value=figure) for tag, figure in stored.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._events.close()


def scalars(record: RoundRecord) -> dict[str, float]:
    """Tag -> figure, for everything in `record` that can be drawn."""
    figures = {tag: getattr(record, name) for name, tag in _PUBLIC.items()}
    figures |= {f"seconds/{stage}": seconds for stage, seconds in record.seconds.items()}
    if record.clients:
        figures |= {f"clients/{status}": sum(entry.status is status for entry in record.clients) for status in Status}
    known = {tag: float(figure) for tag, figure in figures.items() if figure is not None and math.isfinite(figure)}
    return {tag: _float32_up(figure) if "epsilon" in tag else figure for tag, figure in known.items()}


def _float32_up(value: float) -> float:
    """The least float32 not below `value`. TensorBoard stores float32, and an epsilon may only be rounded up."""
    nearest = np.float32(value)
    return float(nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf)))
